"""What a run without a cluster leaves behind, and how it is asked to stop."""

import errno
import io
import logging
import math
import os
import signal
import warnings
from unittest.mock import Mock

import determined as det
import pytest
import torch
from PIL import Image
from rich.console import Console

from determined_amp import UserError
from determined_amp import __main__ as door
from determined_amp.local.checkpoint_storage import Resume
from determined_amp.local.logs import logging_to
from determined_amp.runs.folder import complete_checkpoints, read_run
from tests import run_here
from trials.mlp import MLPTrial

SMALLEST = "hyperparameters.global_batch_size=2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return run_here.run_small("mlp/bf16.yaml", tmp_path_factory.mktemp("local"))


def test_warnings_that_a_user_can_act_on_are_in_the_log_and_on_the_terminal(tmp_path):
    printed = io.StringIO()
    shown = Console(file=printed)
    with warnings.catch_warnings(), logging_to(tmp_path / "log.txt", shown):
        warnings.simplefilter("always")
        warnings.warn("this will go away", DeprecationWarning, stacklevel=1)
        logging.warning("TensorFlow writer not found")
        logging.warning("something else")
    for text in ((tmp_path / "log.txt").read_text(), printed.getvalue()):
        words = " ".join(text.split())
        assert "DeprecationWarning: this will go away" in words
        assert "something else" in words
        assert "TensorFlow" not in words


def test_run_folder_holds_what_the_documentation_lists(folder):
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "log.txt",
        "run.json",
        ".lock",
    }


def test_record_names_versions_device_and_settings(folder):
    """With defaults: `bf16.yaml` has no loss scale, which has no effect in it."""
    run = read_run(folder)
    (part,) = run.parts
    names = "torchvision determined numpy python platform commit"
    assert run.machine.versions.keys() == {*names.split()}
    assert (run.machine.torch, run.machine.slots) == (torch.__version__, 1)
    assert run.machine.device.startswith("cpu (")
    assert part.date is not None
    assert part.settings["hyperparameters.amp.precision"] == "amp_bf16"
    assert part.settings["hyperparameters.amp.init_scale"] == 65536.0
    assert [report.batches for report in run.validations] == [6, 12]
    assert "1 x cpu; torch " in (folder / "log.txt").read_text()
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))


def interrupt_twice(trial):
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def leave_after_a_signal(trial):
    signal.raise_signal(signal.SIGTERM)
    raise SystemExit(0)


def raising(error):
    def fail(trial):
        raise error

    return fail


def lose_the_weights(trial):
    for parameter in trial.model.parameters():
        parameter.data.fill_(math.nan)


class TestRecordOfTheEnd:
    """The state in `run.json`, by real runs of 12 batches."""

    def test_signal_is_recorded_as_a_stop_until_the_resume(
        self, tmp_path, monkeypatch, capsys
    ):
        """The batch of the signal is trained, and so is the next, which is followed by
        a report.
        """
        arguments = run_here.arguments("mlp/fp32.yaml")
        with run_here.before_batch(
            4, lambda trial: signal.raise_signal(signal.SIGTERM)
        ):
            assert door.run(["train", *arguments, "--run-folder", str(tmp_path)]) == 130
        assert f"go on: det-amp train --resume {tmp_path}\n" in (
            capsys.readouterr().out
        )
        stopped = run_here.end(tmp_path)
        assert stopped == ("stopped", "stopped by SIGTERM", 6)
        with monkeypatch.context() as patch:
            patch.setattr(MLPTrial, "__init__", Mock(side_effect=OSError("no data")))
            with pytest.raises(OSError, match="no data"):
                run_here.resume(tmp_path)
        assert run_here.end(tmp_path) == stopped  # it has trained nothing
        seen = []
        with run_here.before_batch(
            6, lambda trial: seen.append(run_here.end(tmp_path)[0])
        ):
            run_here.resume(tmp_path)
        assert {*seen} == {"running"}  # an audit rehearses the batch
        assert run_here.end(tmp_path) == ("completed", "", 12)

    @pytest.mark.parametrize(
        ("do", "error", "state", "reason"),
        [
            # The second SIGINT ends the run at once, in the middle of its fifth batch.
            (interrupt_twice, KeyboardInterrupt, "stopped", "stopped by SIGINT"),
            (leave_after_a_signal, KeyboardInterrupt, "stopped", "stopped by SIGTERM"),
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
            # Determined ends the process then, by an exception without a word.
            (raising(det.InvalidHP("too wide")), UserError, "invalid", "too wide"),
            (
                raising(SystemExit(0)),
                UserError,
                "failed",
                "the trial called sys.exit(0)",
            ),
        ],
        ids=["interrupt", "exit after a signal", "error", "file", "invalid", "exit 0"],
    )
    def test_error_in_a_batch_is_recorded_and_its_traceback_logged(
        self, tmp_path, capsys, *, do, error, state, reason
    ):
        with run_here.before_batch(4, do), pytest.raises(error):
            run_here.run_small("mlp/fp32.yaml", tmp_path)
        recorded, why, batches = run_here.end(tmp_path)
        assert (recorded, batches) == (state, 4)
        assert why.startswith(reason)
        assert "\n" not in why
        log = (tmp_path / "log.txt").read_text()
        assert "Traceback (most recent call last)" in log
        assert f"in {do.__name__}" in log
        assert ("go on: " in capsys.readouterr().out) is (state == "stopped")

    def test_stop_that_the_trial_asks_for_is_recorded(self, tmp_path):
        with run_here.before_batch(
            4, lambda trial: trial.context.set_stop_requested(True)
        ):
            run_here.run_small("mlp/fp32.yaml", tmp_path)
        assert run_here.end(tmp_path)[:2] == ("stopped", "the trial asked to stop")

    def test_weights_that_are_lost_displace_no_good_checkpoint(self, tmp_path):
        """Lost in batch 5 of 12: the guard looks after 12, a checkpoint is saved after
        every 4.
        """
        period = "hyperparameters.training.{}_period.batches=12".format
        goes_on = "hyperparameters.amp.on_overflow=warn"
        rare = run_here.arguments(
            "mlp/fp32.yaml", period("reporting"), period("validation"), goes_on
        )
        with run_here.before_batch(4, lose_the_weights):
            assert door.main(["train", *rare, "--run-folder", str(tmp_path)]) == 0
        kept = [path.name for path in complete_checkpoints(tmp_path / "checkpoints")]
        assert kept == ["batch-00000004", "batch-00000012"]
        assert Resume.latest(tmp_path) == Resume("batch-00000004", 4)


def test_photo_that_cannot_be_decoded_is_named(tmp_path, refusal):
    """A process of the loader raises: the text of its error has the whole
    traceback.
    """
    for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (10, 10)).save(tmp_path / "photos" / name / "0.png")
    damaged = tmp_path / "photos/train/dog/0.png"
    damaged.write_bytes(damaged.read_bytes()[:20])
    photos = ("dataset=image_folder", f"directory={tmp_path / 'photos'}", "workers=1")
    changes = (*(f"data.{each}" for each in photos), "data.classes=2", SMALLEST)
    words = run_here.arguments("mlp/amp.yaml", *changes)
    said = refusal("train", *words, "--run-folder", str(tmp_path / "run"))
    assert f"{damaged}: cannot be decoded: " in said


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory; a trial leaves it for another."""
    made, elsewhere = MLPTrial.__init__, tmp_path / "elsewhere"

    def make(trial, context):
        made(trial, context)
        os.chdir(elsewhere)

    (elsewhere / "trials").mkdir(parents=True)
    (elsewhere / "trials" / "other.py").touch()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(MLPTrial, "__init__", make)
    return tmp_path / "here"


def test_run_leaves_nothing_but_its_folder_wherever_the_trial_goes(here, capsys):
    """Determined alone leaves `./runs` of its own, and copies the directory into
    itself. The code of a checkpoint is that of the directory where the run began.
    """
    (here / "big").touch()
    words = ["train", *run_here.arguments("mlp/bf16.yaml")]
    with run_here.before_batch(8, interrupt_twice):
        assert door.main(words) == 130
    (run,) = here.glob("runs/*/*")
    assert f"--resume {run.relative_to(here)}\n" in capsys.readouterr().out
    assert run.parent.name == "mlp-bf16"
    assert run_here.end(run) == ("stopped", "stopped by SIGINT", 8)
    assert {path.name for path in here.iterdir()} == {"big", "runs"}
    assert [path.name for path in (here.parent / "elsewhere").iterdir()] == ["trials"]
    assert not [*run.rglob("other.py"), *run.rglob("big")]


def test_finder_writes_where_it_was_called(here):
    arguments = run_here.arguments("mlp/amp.yaml")
    assert door.run(["find", *arguments, "--batches", "2", "--json", "scale.json"]) == 0
    assert (here / "scale.json").is_file()


def test_run_that_has_nothing_left_to_train_says_so(folder, capsys):
    capsys.readouterr()
    run_here.resume(folder)
    said = "12 batches are trained, which is all that it asks for; to go on, give it a"
    key = "hyperparameters.training.max_length"
    shown = capsys.readouterr().out
    assert f": {said} larger {key}\n" in shown
    assert "resumed from" not in shown
