"""A run outside of the cluster that a master shows; `test_cluster.py` has a real master."""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from determined_amp import __main__ as door
from determined_amp.local import master as logins
from determined_amp.local import outbox
from determined_amp.local.master import MasterError, log_in
from tests import training
from tests.fake_master import PASSWORD, TOKEN, FakeMaster

LENGTH = 12


@pytest.fixture(scope="module", autouse=True)
def _own_login(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A user of the fake master, and no trace in the developer's own token store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DET_DEBUG_CONFIG_PATH", str(tmp_path_factory.mktemp("login")))
        patch.setenv("DET_USER", "tester")
        patch.setenv("DET_PASS", PASSWORD)
        patch.setattr(outbox, "RETRY", 0.05)
        yield


@pytest.fixture
def master() -> Iterator[FakeMaster]:
    with FakeMaster().serving() as master:
        yield master


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeMaster, Path]]:
    """A master, and the folder of a whole run that it shows."""
    folder = tmp_path_factory.mktemp("shown") / "run"
    with FakeMaster().serving() as master:
        assert report_to(master, folder) == 0
        yield master, folder


def report_to(master: FakeMaster, folder: Path, *overrides: str) -> int:
    arguments = training.arguments("mlp/amp.yaml", *overrides)
    options = ["--run-folder", str(folder), "--report-to", master.address]
    return door.main(["train", *arguments, *options])


def lines(folder: Path) -> list[tuple[str, int, dict[str, Any]]]:
    """The reports in a run folder as a master lists them."""
    reports = training.metrics(folder)
    return [(line.pop("group"), line["batches"], line) for line in reports]


def listed(master: FakeMaster) -> list[tuple[str, int, dict[str, Any]]]:
    return [(group, batches, metrics) for _, group, batches, metrics in master.listed()]


class TestDetachedRun:
    def test_master_has_every_report_of_the_folder(self, shown: tuple[FakeMaster, Path]) -> None:
        master, folder = shown
        assert listed(master) == lines(folder)
        assert {group for group, _, _ in listed(master)} == {"training", "validation"}
        assert master.states == ["STATE_COMPLETED"]

    def test_experiment_shows_the_whole_configuration(self, shown: tuple[FakeMaster, Path]) -> None:
        master, folder = shown
        config = yaml.safe_load(master.config)
        storage = config.pop("checkpoint_storage")
        assert config == yaml.safe_load((folder / "config.yaml").read_text())
        assert storage == {"type": "directory", "container_path": str(folder / "checkpoints")}

    def test_checkpoints_are_listed_and_found_by_their_id(
        self, shown: tuple[FakeMaster, Path]
    ) -> None:
        """Of all that were saved, the folder and so the master keep the last, which is the best."""
        master, folder = shown
        states = {c["metadata"]["steps_completed"]: c["state"] for c in master.checkpoints.values()}
        assert {4, 8, LENGTH} <= states.keys()
        assert states.pop(LENGTH) == "STATE_COMPLETED"
        assert set(states.values()) == {"STATE_DELETED"}
        (kept,) = (c for c in master.checkpoints.values() if c["state"] == "STATE_COMPLETED")
        found = folder / "checkpoints" / kept["uuid"]
        assert found.resolve().name == "batch-00000012"
        for name, size in kept["resources"].items():
            assert (found / name).stat().st_size == int(size)
        assert [path.name for path in found.parent.iterdir() if path.is_symlink()] == [kept["uuid"]]

    def test_folder_is_that_of_any_run_and_holds_no_secret(
        self, shown: tuple[FakeMaster, Path], tmp_path: Path
    ) -> None:
        _, folder = shown
        alone = training.run_small("mlp/amp.yaml", tmp_path / "alone")
        extra = {path.name for path in folder.iterdir()} - {path.name for path in alone.iterdir()}
        assert extra == {"detached.json"}
        assert training.digest(training.checkpoint(folder, LENGTH)) == training.digest(
            training.checkpoint(alone, LENGTH)
        )
        for path in (path for path in folder.rglob("*") if path.is_file()):
            content = path.read_bytes()
            assert TOKEN.encode() not in content
            assert PASSWORD.encode() not in content


class TestResume:
    def test_goes_on_in_the_same_experiment(self, master: FakeMaster, tmp_path: Path) -> None:
        """Killed in batch 11, after the report of 10 and the checkpoint of 8: 10 comes anew."""
        folder = tmp_path / "run"
        with training.killed_in_batch(10):
            report_to(master, folder)
        assert master.states == ["STATE_ERROR"]
        assert "KilledError: the machine burns" in master.log
        sent = len(master.reports)
        training.resume(folder, "--report-to", master.address)
        assert len(set(master.external_ids)) == 1
        assert master.states == ["STATE_ERROR", "STATE_COMPLETED"]
        assert listed(master) == lines(folder)
        assert {batches for _, _, batches, _ in master.reports[sent:]} == {10, 12}

    def test_sends_what_the_master_lacks(self, master: FakeMaster, tmp_path: Path) -> None:
        """A run that was trained without a master is shown with all that it has."""
        folder = training.run_small("mlp/amp.yaml", tmp_path / "run")
        training.resume(folder, "--report-to", master.address)
        assert listed(master) == lines(folder)
        (checkpoint,) = master.checkpoints.values()
        assert checkpoint["metadata"]["steps_completed"] == LENGTH

    def test_damaged_checkpoint_is_not_listed_and_costs_nothing_else(
        self, master: FakeMaster, tmp_path: Path
    ) -> None:
        folder = training.run_small("mlp/amp.yaml", tmp_path / "run")
        saved = folder / "checkpoints"
        shutil.copytree(saved / "batch-00000012", saved / "batch-00000008")
        (saved / "batch-00000008" / "metadata.json").write_text("{")
        training.resume(folder, "--report-to", master.address)
        (listed,) = master.checkpoints.values()
        assert listed["metadata"]["steps_completed"] == LENGTH
        assert "the master does not list it" in (folder / "log.txt").read_text()


class TestMasterThatFails:
    def test_being_away_costs_nothing(self, master: FakeMaster, tmp_path: Path) -> None:
        def leave(batch_idx: int) -> None:
            master.away = 2 <= batch_idx < LENGTH - 1

        folder = tmp_path / "run"
        with training.before_each_batch(leave):
            assert report_to(master, folder) == 0
        assert listed(master) == lines(folder)
        assert (folder / "log.txt").read_text().count("is away, the run goes on") == 1

    def test_staying_away_ends_in_a_warning_and_a_resume_mends_it(
        self, master: FakeMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def leave(batch_idx: int) -> None:
            master.away = batch_idx >= 2

        folder = tmp_path / "run"
        monkeypatch.setattr(outbox, "PATIENCE", 0.2)
        with training.before_each_batch(leave):
            assert report_to(master, folder) == 0
        assert len(listed(master)) < len(lines(folder))
        assert "lacks a part of this run" in (folder / "log.txt").read_text()
        master.away = False
        training.resume(folder, "--report-to", master.address)
        assert listed(master) == lines(folder)

    def test_refusing_a_report_does_not_end_the_run(
        self, master: FakeMaster, tmp_path: Path
    ) -> None:
        master.refused.add("/trials/8/metrics")
        folder = tmp_path / "run"
        assert report_to(master, folder) == 0
        assert not master.reports
        log = (folder / "log.txt").read_text()
        assert log.count("refuses what it is sent, the run goes on: refused for a test") == 1
        assert "lacks a part of this run" in log
        assert master.states == ["STATE_COMPLETED"]

    @pytest.mark.parametrize("fault", ["silent", "failing"])
    def test_one_request_that_always_fails_loses_no_other(
        self, fault: str, master: FakeMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(logins, "ANSWER", 0.2)
        path = "/trials/8/progress"
        if fault == "silent":
            master.silent.add(path)
        else:
            master.failing[path] = math.inf
        folder = tmp_path / "run"
        assert report_to(master, folder) == 0
        assert listed(master) == lines(folder)
        assert master.states == ["STATE_COMPLETED"]
        log = (folder / "log.txt").read_text()
        assert log.count("fails at what it is sent, the run goes on") == 1
        assert "lacks a part of this run" in log

    def test_error_of_the_server_is_tried_again(self, master: FakeMaster, tmp_path: Path) -> None:
        master.failing |= {"/trials/8/metrics": 2, "/checkpoints": 1}
        folder = tmp_path / "run"
        assert report_to(master, folder) == 0
        assert listed(master) == lines(folder)
        log = (folder / "log.txt").read_text()
        assert "lacks a part" not in log
        assert "the run goes on" not in log

    def test_resume_does_not_wait_for_a_master_that_is_away(
        self, master: FakeMaster, tmp_path: Path
    ) -> None:
        folder = training.run_small(
            "mlp/amp.yaml", tmp_path / "run", "hyperparameters.training.max_length.batches=4"
        )
        master.away = True

        def come_back(batch_idx: int) -> None:
            master.away = batch_idx < LENGTH - 2

        config = training.arguments("mlp/amp.yaml")
        with training.before_each_batch(come_back):
            options = ["--resume", str(folder), "--report-to", master.address]
            assert door.main(["train", *config, *options]) == 0
        assert listed(master) == lines(folder)
        assert "is away, the run goes on" in (folder / "log.txt").read_text()

    def test_being_away_at_the_start_of_a_new_run_is_one_sentence(
        self, master: FakeMaster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        master.failing["/master"] = math.inf
        assert report_to(master, tmp_path / "run") == 2
        said = f"{master.address}: the master answers with error 500; try again when it works"
        assert said in capfd.readouterr().err

    @pytest.mark.parametrize("path", ["/master", "/auth/login", "/trials", "/runs/start"])
    def test_answers_that_are_none_of_a_master_are_one_sentence(
        self, path: str, master: FakeMaster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        master.nonsense.add(path)
        assert report_to(master, tmp_path / "run") == 2
        shown = capfd.readouterr().err
        assert f"{master.address}: what answers there is not a Determined master" in shown
        assert "Traceback" not in shown

    @pytest.mark.parametrize("path", ["/master", "/auth/login", "/trials", "/trials/8/metrics"])
    def test_silence_ends_within_seconds_of_one_signal(
        self, path: str, master: FakeMaster, tmp_path: Path
    ) -> None:
        master.silent.add(path)
        signalled = []

        def interrupt() -> None:
            assert wait_until(lambda: path in master.asked)
            signalled.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        with in_thread(interrupt):
            status = report_to(
                master, tmp_path / "run", "hyperparameters.training.max_length.batches=100000"
            )
        assert time.monotonic() - signalled[0] < 5
        # A run that has begun to train is stopped as always, with a checkpoint.
        assert status == (0 if path == "/trials/8/metrics" else 130)

    def test_refusing_the_experiment_ends_it_before_training(
        self, master: FakeMaster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        master.refused.add("/trials")
        assert report_to(master, tmp_path / "run") == 2
        assert "the experiment was refused: refused for a test" in capfd.readouterr().err
        assert not lines(tmp_path / "run")

    def test_damaged_id_is_one_message(
        self, master: FakeMaster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        folder = training.run_small("mlp/amp.yaml", tmp_path / "run")
        (folder / "detached.json").write_text('{"external')
        assert door.main(["train", "--resume", str(folder), "--report-to", master.address]) == 2
        shown = capfd.readouterr().err
        assert "detached.json: cannot be read" in shown
        assert "Traceback" not in shown


class TestLogIn:
    def test_wrong_address_is_one_sentence_and_no_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        arguments = training.arguments("mlp/amp.yaml")
        assert door.main(["train", *arguments, "--report-to", f"127.0.0.1:{free_port()}"]) == 2
        shown = capfd.readouterr().err
        assert "no master answers there" in shown
        assert "Traceback" not in shown
        assert not (tmp_path / "runs").exists()

    @pytest.mark.parametrize("address", ["http://me:hush@host:80", "http://", "http://host:eighty"])
    def test_address_that_is_none_is_refused_and_not_repeated(self, address: str) -> None:
        with pytest.raises(MasterError, match="http://HOST:PORT") as refused:
            log_in(address)
        assert "hush" not in str(refused.value)

    def test_server_that_is_no_master_is_named_so(self, master: FakeMaster) -> None:
        with pytest.raises(MasterError, match="is not a Determined master"):
            log_in(f"{master.address}/elsewhere")

    def test_refused_login_says_how_to_log_in(self, master: FakeMaster) -> None:
        master.forbidden.add("/auth/login")
        with pytest.raises(MasterError, match="user login USER"):
            log_in(master.address)

    def test_good_login_gives_a_session(self, master: FakeMaster) -> None:
        assert log_in(master.address).master == master.address


class TestOutbox:
    def test_keeps_the_order_over_failures(self, caplog: pytest.LogCaptureFixture) -> None:
        done: list[str] = []
        # The call and the look for the server, by turns, and more often than a call may fail.
        failures = iter([ConnectionError("gone")] * 4 * outbox.TRIES)

        def look() -> None:
            for failure in failures:
                raise failure

        def second() -> None:
            look()
            done.append("second")

        box = outbox.Outbox("server", idle=look)
        with caplog.at_level(logging.WARNING), box.sending():
            for call in (lambda: done.append("first"), second, lambda: done.append("third")):
                box.put(call)
        assert done == ["first", "second", "third"]
        assert box.all_delivered
        assert [record.message for record in caplog.records] == [
            "server is away, the run goes on: gone"
        ]

    def test_calls_idle_while_nothing_else_happens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(outbox, "IDLE", 0.01)
        called = threading.Event()
        with outbox.Outbox("server", idle=called.set).sending():
            assert called.wait(10)


@contextmanager
def in_thread(work: Callable[[], object]) -> Iterator[None]:
    """Do it beside the block, and to its end."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        yield
    done.result()


def wait_until(happened: Callable[[], bool]) -> bool:
    """Whether it happens within a while."""
    end = time.monotonic() + 30
    while not happened() and time.monotonic() < end:
        time.sleep(0.01)
    return happened()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
