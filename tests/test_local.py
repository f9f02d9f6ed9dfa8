"""What a run without a cluster leaves behind, and how it is asked to stop."""

from __future__ import annotations

import errno
import io
import logging
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import determined as det
import pytest
import torch
import yaml
from rich.console import Console

from determined_amp import UserError
from determined_amp import __main__ as door
from determined_amp.experiment.experiment import parse
from determined_amp.local.checkpoint_storage import Resume, complete_checkpoints
from determined_amp.local.display import Display
from determined_amp.local.logs import logging_to
from determined_amp.runs.folder import RunFolder, read_run
from tests import training
from tests.harness import same_bits
from trials.mlp import MLPTrial


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.run_small("mlp/bf16.yaml", tmp_path_factory.mktemp("local"))


def test_warning_that_no_user_can_act_on_is_in_the_log_file_alone(
    tmp_path: Path,
) -> None:
    shown = Console(file=io.StringIO())
    with logging_to(tmp_path / "log.txt", shown):
        logging.getLogger("determined.tensorboard").warning(
            "TensorFlow writer not found"
        )
        logging.getLogger("determined").warning("something else")
    assert "TensorFlow writer not found" in (tmp_path / "log.txt").read_text()
    printed: Any = shown.file
    assert printed.getvalue().split() == ["WARNING", "something", "else"]


def test_warning_of_python_is_in_the_log_and_on_the_terminal(tmp_path: Path) -> None:
    shown = Console(file=io.StringIO())
    with warnings.catch_warnings(), logging_to(tmp_path / "log.txt", shown):
        warnings.simplefilter("always")
        warnings.warn("this will go away", DeprecationWarning, stacklevel=1)
    printed: Any = shown.file
    for text in ((tmp_path / "log.txt").read_text(), printed.getvalue()):
        assert "DeprecationWarning: this will go away" in " ".join(text.split())


def test_log_on_a_full_disk_ends_without_a_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Python would print a traceback for each line, and raise when the log is
    closed.
    """
    with logging_to(Path("/dev/full"), Console(file=io.StringIO())):
        for _ in range(3):
            logging.getLogger("determined").warning("x")
    assert capsys.readouterr().err == ""


def test_run_folder_holds_what_the_documentation_lists(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "resolved.yaml",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "log.txt",
        "run.json",
        ".lock",
    }


def test_run_folder_is_not_used_for_another_run(
    folder: Path, refusal: Callable[..., str]
) -> None:
    before = training.checkpoint(folder, 12)
    arguments = training.arguments("mlp/bf16.yaml", "hyperparameters.learning_rate=1.0")
    said = refusal("train", *arguments, "--run-folder", str(folder))
    assert "holds batch-00000012; allowed: a new folder" in said
    assert same_bits(training.checkpoint(folder, 12), before)


def test_resolved_config_has_the_defaults_and_the_recorded_one_trains_the_same_again(
    folder: Path, tmp_path: Path
) -> None:
    """`bf16.yaml` has no loss scale, which has no effect in it."""
    resolved = yaml.safe_load((folder / "resolved.yaml").read_text())
    assert resolved["hyperparameters"]["amp"]["init_scale"] == 65536.0
    again = tmp_path / "again"
    assert (
        door.run(["train", str(folder / "config.yaml"), "--run-folder", str(again)])
        == 0
    )
    assert training.same_numbers(again) == training.same_numbers(folder)
    assert same_bits(*(training.checkpoint(path, 12) for path in (folder, again)))
    assert (again / "resolved.yaml").read_text() == (
        folder / "resolved.yaml"
    ).read_text()


def test_record_names_versions_device_and_settings(folder: Path) -> None:
    run = read_run(folder)
    (part,) = run.parts
    assert run.machine.versions["determined"] == "0.38.1"
    assert run.machine.versions.keys() == {
        *("torchvision", "determined", "numpy", "python", "platform", "commit")
    }
    assert (run.machine.torch, run.machine.slots) == (torch.__version__, 1)
    assert run.machine.device.startswith("cpu (")
    assert part.date is not None
    assert part.settings["hyperparameters.amp.precision"] == "amp_bf16"
    assert part.settings["hyperparameters.training.max_length.batches"] == 12
    assert training.end(folder) == ("completed", "", 12)
    lines = training.metrics(folder)
    assert [line["batches"] for line in lines if line["group"] == "validation"] == [
        6,
        12,
    ]
    assert "1 x cpu; torch " in (folder / "log.txt").read_text()
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))


def interrupt_twice(trial: MLPTrial) -> None:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


class SilentError(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise LookupError


def raising(error: BaseException) -> Callable[[MLPTrial], None]:
    def fail(trial: MLPTrial) -> None:
        raise error

    return fail


def lose_the_weights(trial: MLPTrial) -> None:
    for parameter in trial.model.parameters():
        parameter.data.fill_(math.nan)


class TestRecordOfTheEnd:
    """The state in `run.json`, by real runs of 12 batches."""

    def test_signal_is_recorded_as_a_stop_until_the_resume(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """The batch of the signal is trained, and so is the next, which is followed by
        a report.
        """
        arguments = training.arguments("mlp/fp32.yaml")
        with training.before_batch(
            4, lambda trial: signal.raise_signal(signal.SIGTERM)
        ):
            assert door.run(["train", *arguments, "--run-folder", str(tmp_path)]) == 130
        assert f"go on: det-amp train --resume {tmp_path}\n" in (
            capsys.readouterr().out
        )
        stopped = training.end(tmp_path)
        assert stopped == ("stopped", "stopped by SIGTERM", 6)
        with monkeypatch.context() as patch:
            patch.setattr(MLPTrial, "__init__", Mock(side_effect=OSError("no data")))
            with pytest.raises(OSError, match="no data"):
                training.resume(tmp_path)
        assert training.end(tmp_path) == stopped  # it has trained nothing
        seen: list[str] = []
        with training.before_batch(
            6, lambda trial: seen.append(training.end(tmp_path)[0])
        ):
            training.resume(tmp_path)
        assert {*seen} == {"running"}  # an audit rehearses the batch
        assert training.end(tmp_path) == ("completed", "", 12)

    def test_run_whose_terminal_is_gone_is_recorded_as_completed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Display, "end", Mock(side_effect=OSError("terminal")))
        with pytest.raises(OSError, match="terminal"):
            training.run_small("mlp/fp32.yaml", tmp_path)
        assert training.end(tmp_path) == ("completed", "", 12)

    @pytest.mark.parametrize(
        ("do", "error", "state", "reason"),
        [
            # The second SIGINT ends the run at once, in the middle of its fifth batch.
            (interrupt_twice, KeyboardInterrupt, "stopped", "stopped by SIGINT"),
            (
                raising(RuntimeError("no memory left\nand much more to say")),
                RuntimeError,
                "failed",
                "RuntimeError: no memory left",
            ),
            (
                # A file elsewhere is the trial's, and no disk of the run.
                raising(PermissionError(errno.EACCES, "denied", "/my/data.bin")),
                PermissionError,
                "failed",
                "PermissionError: [Errno 13] denied: '/my/data.bin'",
            ),
            (
                raising(SilentError()),
                SilentError,
                "failed",
                "tests.test_local.SilentError: ",
            ),
            # Determined ends the process then, by an exception without a word.
            (raising(det.InvalidHP("too wide")), UserError, "invalid", "too wide"),
            (
                raising(SystemExit(0)),
                UserError,
                "failed",
                "the trial called sys.exit(0)",
            ),
        ],
        ids=["interrupt", "error", "file", "no text", "invalid", "exit 0"],
    )
    def test_error_in_a_batch_is_recorded_and_its_traceback_logged(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        *,
        do: Callable[[MLPTrial], None],
        error: type[BaseException],
        state: str,
        reason: str,
    ) -> None:
        with training.before_batch(4, do), pytest.raises(error):
            training.run_small("mlp/fp32.yaml", tmp_path)
        recorded, why, batches = training.end(tmp_path)
        assert (recorded, batches) == (state, 4)
        assert why.startswith(reason)
        assert "\n" not in why
        log = (tmp_path / "log.txt").read_text()
        assert "Traceback (most recent call last)" in log
        assert f"in {do.__name__}" in log
        assert ("go on: " in capsys.readouterr().out) is (do is interrupt_twice)

    def test_stop_that_the_trial_asks_for_is_recorded(self, tmp_path: Path) -> None:
        with training.before_batch(
            4, lambda trial: trial.context.set_stop_requested(True)
        ):
            training.run_small("mlp/fp32.yaml", tmp_path)
        assert training.end(tmp_path)[:2] == ("stopped", "the trial asked to stop")

    def test_record_that_is_lost_on_a_full_disk_hides_no_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            RunFolder, "end", Mock(side_effect=OSError("no space left"))
        )
        fails = training.before_batch(4, raising(RuntimeError("first")))
        with fails, pytest.raises(RuntimeError, match="first"):
            training.run_small("mlp/fp32.yaml", tmp_path)
        assert training.end(tmp_path)[0] == "running"

    def test_weights_that_are_lost_displace_no_good_checkpoint(
        self, tmp_path: Path
    ) -> None:
        """Lost in batch 5 of 12: the guard looks after 12, a checkpoint is saved after
        every 4.
        """
        period = "hyperparameters.training.{}_period.batches=12".format
        goes_on = "hyperparameters.amp.on_overflow=warn"
        rare = training.arguments(
            "mlp/fp32.yaml", period("reporting"), period("validation"), goes_on
        )
        with training.before_batch(4, lose_the_weights):
            assert door.main(["train", *rare, "--run-folder", str(tmp_path)]) == 0
        kept = [path.name for path in complete_checkpoints(tmp_path / "checkpoints")]
        assert kept == ["batch-00000004", "batch-00000012"]
        assert Resume.latest(tmp_path) == Resume("batch-00000004", 4)

    def test_end_by_the_guard_is_recorded_with_its_sentence(
        self, tmp_path: Path, refusal: Callable[..., str]
    ) -> None:
        """A learning rate that makes the loss NaN; the record has the sentence the user
        sees.
        """
        arguments = training.arguments(
            "mlp/fp32.yaml", "hyperparameters.learning_rate=1.0e+30"
        )
        said = refusal("train", *arguments, "--run-folder", str(tmp_path))
        state, reason, _ = training.end(tmp_path)
        assert state == "failed"
        assert reason in said


def test_run_inside_a_repository_leaves_nothing_but_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Determined alone leaves `./runs` of its own, and copies the directory into
    itself.
    """
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "big").write_bytes(b"0" * 1000)
    monkeypatch.chdir(tmp_path)
    assert door.run(["train", *training.arguments("mlp/bf16.yaml")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"venv", "runs"}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mlp-bf16"]
    assert not list(tmp_path.rglob("checkpoints/**/big"))


def test_run_stays_in_its_folder_when_the_trial_changes_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code of a checkpoint is that of the directory where the run began, too.

    A finder writes where it was called.
    """
    made, elsewhere = MLPTrial.__init__, tmp_path / "elsewhere"

    def make(trial: Any, context: Any) -> None:
        made(trial, context)
        os.chdir(elsewhere)

    (elsewhere / "trials").mkdir(parents=True)
    (elsewhere / "trials" / "other.py").touch()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(MLPTrial, "__init__", make)
    assert (
        door.run(["train", *training.arguments("mlp/bf16.yaml"), "--run-folder", "run"])
        == 0
    )
    assert training.end(tmp_path / "here" / "run")[0] == "completed"
    assert "run folder: run\n" in capsys.readouterr().out
    assert [path.name for path in elsewhere.iterdir()] == ["trials"]
    assert not list(tmp_path.rglob("other.py"))[1:]
    arguments = training.arguments("mlp/amp.yaml")
    assert door.run(["find", *arguments, "--batches", "2", "--json", "scale.json"]) == 0
    assert (tmp_path / "here" / "scale.json").is_file()


def test_command_that_goes_on_is_named_when_the_trial_changed_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def leave(trial: MLPTrial) -> None:
        os.chdir(tmp_path)
        interrupt_twice(trial)

    words = ["train", *training.arguments("mlp/fp32.yaml"), "--run-folder", "run"]
    with training.before_batch(8, leave):
        assert door.main(words) == 130
    shown = capsys.readouterr().out
    assert "go on: det-amp train --resume run\n" in shown


def test_closed_pipe_ends_the_output_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    arguments = training.arguments("mlp/bf16.yaml")
    with os.fdopen(writer, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert door.main(["train", *arguments, "--run-folder", str(tmp_path)]) == 0
    assert training.end(tmp_path) == ("completed", "", 12)


def shown_of(reports: list[tuple[str, dict[str, float]]], total: int = 80) -> str:
    """What a run prints that resumes after 40 batches, named and measured with markup
    of rich.
    """
    config = {
        "name": "x [/b] [red]",
        "entrypoint": "tests.strangers:Stranger",
        "searcher": {"metric": "f1 [/b]"},
    }
    text = io.StringIO()
    console, folder = Console(file=text, width=100), Mock(shown="runs/[/b]")
    display = Display(parse(config, "test"), console, folder, Mock(answer=None))
    display.show_precision("amp_bf16")
    display.begin_training(40, total)
    for group, metrics in reports:
        display.report({"group": group, "batches": 60, **metrics})
    display.end(None, stopped=False)
    return text.getvalue()


def test_name_with_markup_is_shown_as_it_is() -> None:
    """`[/b]` would close a tag of rich that nobody opened: an error after the whole
    training.
    """
    shown = shown_of(
        [("training", {"samples_per_second": 7, "f1 [/b]": 0.25, "other": 1.0})]
    )
    assert shown.startswith("x [/b] [red]: amp_bf16\n")
    assert "\ntrain     60  7 samples/s  f1 [/b] 0.25  other 1\n" in shown
    assert shown.endswith("x [/b] [red]: completed; amp_bf16\nrun folder: runs/[/b]\n")


def test_run_that_has_nothing_left_to_train_says_so() -> None:
    says = (
        "40 batches are trained, which is all that it asks for; to go on, give it a"
        " larger "
    )
    assert says not in shown_of([])  # the control
    assert f": {says}searcher.max_length\n" in shown_of([], total=40)
