"""A run folder is never made worse: what is refused, damaged or taken leaves it as it was."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import tempfile
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from determined_amp import __main__ as door
from determined_amp.experiment.files import write_together
from determined_amp.local.checkpoint_storage import (
    LocalCheckpoints,
    Resume,
    complete_checkpoints,
    is_of_the_machine,
)
from determined_amp.local.run import _are_finite
from determined_amp.runs.folder import (
    FolderError,
    FolderInUseError,
    RunFolder,
    fresh_folder,
)
from determined_amp.trial.checkpoint import CheckpointError
from tests import training


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints after 8 (the best) or 12 batches; copied by `run`."""
    return training.run_small("mlp/bf16.yaml", tmp_path_factory.mktemp("finished"))


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a run folder but its log and its lock."""
    files = (path for path in folder.rglob("*") if path.is_file())
    kept = (path for path in files if path.name not in ("log.txt", ".lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept}


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


class TestRefusedResume:
    @pytest.mark.parametrize(
        "change",
        [
            "hyperparameters.hidden_features=24",  # the checkpoint does not fit
            "hyperparameters.global_batch_size=0",
            "searcher.name=singel",
            "hyperparameters.training.max_length.batches=4",  # 12 are trained
        ],
    )
    def test_refused_resume_changes_nothing(
        self, run: Path, change: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = content(run)
        assert door.main(["train", "--resume", str(run), "--config", change]) == 2
        assert change.partition("=")[0].rpartition(".")[2] in capsys.readouterr().err + change
        assert content(run) == before

    def test_resume_with_a_damaged_record_changes_nothing(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (run / "run.json").write_text("5")
        with (run / "metrics.jsonl").open("a") as file:
            file.write("{]\n")  # a resume that trains drops it
        before = content(run)
        assert door.main(["train", "--resume", str(run)]) == 2
        assert "run.json: " in capsys.readouterr().err
        assert content(run) == before

    def test_run_can_be_resumed_after_a_refused_resume(self, run: Path) -> None:
        wrong = ["--config", "hyperparameters.hidden_features=24"]
        assert door.main(["train", "--resume", str(run), *wrong]) == 2
        longer = ["--config", "hyperparameters.training.max_length.batches=14"]
        assert door.main(["train", "--resume", str(run), *longer]) == 0
        assert training.metrics(run)[-1]["batches"] == 14


class TestDamagedCheckpoint:
    def test_resume_falls_back_to_the_checkpoint_before_a_damaged_one(
        self, run: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (newest,) = complete_checkpoints(run / "checkpoints")[-1:]
        older = newest.with_name("batch-00000004")
        shutil.copytree(newest, older)
        metadata = json.loads((older / "metadata.json").read_text())
        counts = pickle.dumps({"trial_id": 0, "batches_trained": 4})
        (older / "trial_state.pkl").write_bytes(counts)
        of_four = {"steps_completed": 4, "trial_state_crc32": zlib.crc32(counts)}
        (older / "metadata.json").write_text(json.dumps({**metadata, **of_four}))
        flip_a_bit(newest / "state_dict.pth")
        assert Resume.latest(run) == Resume(older.name, 4)
        assert "has changed; trying the checkpoint before it" in caplog.text

    def test_damaged_checkpoint_displaces_no_good_one_after_a_resume_passed_over_it(
        self, run: Path
    ) -> None:
        """It says that it is the newest, and finite."""
        good = complete_checkpoints(run / "checkpoints")[-1]
        damaged = good.with_name("batch-00000099")
        shutil.copytree(good, damaged)
        metadata = json.loads((damaged / "metadata.json").read_text())
        (damaged / "metadata.json").write_text(json.dumps({**metadata, "steps_completed": 99}))
        flip_a_bit(damaged / "state_dict.pth")
        with training.killed_in_batch(18):
            training.resume(run, "--config", "hyperparameters.training.max_length.batches=24")
        assert Resume.latest(run) == Resume("batch-00000018", 18)

    def test_checkpoint_without_metadata_is_named(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        checkpoints = complete_checkpoints(run / "checkpoints")
        for checkpoint in checkpoints:
            (checkpoint / "metadata.json").unlink()
        assert door.main(["train", "--resume", str(run)]) == 2
        assert f"{checkpoints[-1]}: metadata.json cannot be read" in capsys.readouterr().err

    def test_damaged_checkpoint_alone_is_an_error(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for checkpoint in complete_checkpoints(run / "checkpoints"):
            flip_a_bit(checkpoint / "state_dict.pth")
        before = content(run)
        assert door.main(["train", "--resume", str(run)]) == 2
        assert "no checkpoint to resume from" in capsys.readouterr().err
        assert content(run) == before


class TestDamagedState:
    """The only checkpoint is damaged: the resume is refused, and nothing is changed."""

    @pytest.mark.parametrize(
        ("file", "text", "words"),
        [
            ("metadata.json", b"5", "does not say that it is of these batches"),
            ("metadata.json", b"null", "does not say that it is of these batches"),
            ("metadata.json", b'{"steps_completed": 13}', "does not say that it is of these"),
            ("metadata.json", b"\xff", "metadata.json cannot be read"),
            ("trial_state.pkl", b"", "trial_state.pkl is damaged: a byte has changed"),
        ],
    )
    def test_damaged_state_is_refused(
        self, run: Path, file: str, text: bytes, words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for checkpoint in complete_checkpoints(run / "checkpoints"):
            (checkpoint / file).write_bytes(text)
        before = content(run)
        assert door.main(["train", "--resume", str(run)]) == 2
        assert words in capsys.readouterr().err
        assert content(run) == before

    def test_checkpoint_without_its_counts_is_refused(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for checkpoint in complete_checkpoints(run / "checkpoints"):
            (checkpoint / "trial_state.pkl").unlink()
        assert door.main(["train", "--resume", str(run)]) == 2
        assert "trial_state.pkl cannot be read" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("name", "state", "words"),
        [
            ("state_dict.pth", [1], "state_dict.pth holds a list"),
            ("state_dict.pth", {"models_state_dict": 5}, "cannot be restored into this trial"),
            ("trial_state.pkl", [1], "trial_state.pkl holds a list"),
            *(
                (
                    "trial_state.pkl",
                    {"trial_id": 0, "batches_trained": n},
                    "is not of these batches",
                )
                for n in (8, 10**30, "12", None)
            ),
        ],
    )
    def test_state_of_another_type_is_refused(
        self, run: Path, name: str, state: object, words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Determined takes weights that are no dict for a start from the beginning."""
        for checkpoint in complete_checkpoints(run / "checkpoints"):
            if name == "state_dict.pth":
                torch.save(state, checkpoint / name)
            else:
                (checkpoint / name).write_bytes(pickle.dumps(state))
            metadata = json.loads((checkpoint / "metadata.json").read_text())
            del metadata["trial_state_crc32"]  # as of a checkpoint before there was one
            (checkpoint / "metadata.json").write_text(json.dumps(metadata))
        assert door.main(["train", "--resume", str(run)]) == 2
        assert words in capsys.readouterr().err

    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
    def test_state_of_another_kind_of_optimizer_is_refused(
        self,
        run: Path,
        kind: Any,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Torch loads it; some kinds then fail in their first step."""
        monkeypatch.setattr(torch.optim, "Adam", lambda groups, **_: kind(groups, lr=0.1))
        before = content(run)
        assert door.main(["train", "--resume", str(run)]) == 2
        words = capsys.readouterr().err
        assert "cannot be restored into this trial: its optimizer has amsgrad, betas, " in words
        assert f"and {kind.__name__} has " in words
        assert content(run) == before

    def test_checkpoint_with_damaged_metadata_stays_when_others_are_deleted(
        self, tmp_path: Path
    ) -> None:
        """Nobody knows what it was, and the run goes on."""
        reports: Any = SimpleNamespace(is_best=lambda batches: False, saved=lambda saved: None)
        storage = LocalCheckpoints(SimpleNamespace(rank=0, size=1), tmp_path, reports)  # type: ignore[arg-type]
        for batches in (1, 2, 3):
            with storage.store_path({"steps_completed": batches}) as (folder, _):
                torch.save({}, folder / "state_dict.pth")
            if batches == 1:
                (tmp_path / "batch-00000001" / "metadata.json").write_text("[]")
        saved = [path.name for path in complete_checkpoints(tmp_path)]
        assert saved == ["batch-00000001", "batch-00000003"]


class TestDamagedMetrics:
    def test_damaged_metrics_lose_the_damaged_lines_alone_with_one_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = RunFolder(tmp_path)
        for batches in range(1, 9):
            folder.append_metrics({"group": "training", "batches": batches})
        lines = folder.metrics.read_bytes().splitlines()
        damaged = [b"{]", b"5", b"[]", b"{}", b"\xff", b'{"group": "training"}', b'{"batches": 6}']
        lines[1:7] = [*damaged, lines[6]]
        folder.metrics.write_bytes(b"\n".join([*lines, b'{"cut o']))
        assert [line["batches"] for line in folder.read_metrics()] == [1, 7, 8]
        (warning,) = caplog.messages
        assert warning.endswith("left out what is no report, in line 2, 3, 4, 5, 6, ...")


class TestFolderThatCannotBeWritten:
    @pytest.mark.parametrize("name", ["metrics.jsonl", "resolved.yaml", "log.txt"])
    def test_file_that_cannot_be_written_is_one_sentence(
        self, run: Path, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A folder in the place of a file: root may write everywhere."""
        (run / name).unlink()
        (run / name).mkdir()
        longer = ["--config", "hyperparameters.training.max_length.batches=14"]
        assert door.main(["train", "--resume", str(run), *longer]) == 2
        shown = capsys.readouterr().err
        assert f"{run}: the run cannot go on" in shown
        assert name.partition(".")[0] in shown

    def test_new_run_that_cannot_be_written_promises_no_checkpoint(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "log.txt").mkdir()
        arguments = ["train", *training.arguments("mlp/bf16.yaml"), "--run-folder", str(tmp_path)]
        assert door.main(arguments) == 2
        said = capsys.readouterr().err
        assert f"{tmp_path}: the run cannot go on: [Errno 21] Is a directory" in said
        assert said.endswith("; there is no checkpoint of it\n")

    def test_file_in_place_of_a_folder_is_one_sentence(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").touch()
        arguments = training.arguments("mlp/bf16.yaml")
        for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
            assert door.main(["train", *arguments, "--run-folder", str(path)]) == 2
            assert f"cannot make the folder {path}" in capsys.readouterr().err


class TestFolderOfSomebodyElse:
    @pytest.mark.parametrize("name", ["config.yaml", "resolved.yaml", "metrics.jsonl"])
    def test_is_not_replaced(
        self, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """`--run-folder .` beside an experiment of the name that a run has, too."""
        (tmp_path / name).write_text("mine")
        arguments = ["train", *training.arguments("mlp/bf16.yaml"), "--run-folder", str(tmp_path)]
        assert door.main(arguments) == 2
        assert f"{tmp_path} holds no run, and {name}; allowed: " in capsys.readouterr().err
        assert (tmp_path / name).read_text() == "mine"

    def test_with_other_files_is_a_run_folder(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        training.run_small("mlp/bf16.yaml", tmp_path)
        assert (tmp_path / "notes.txt").read_text() == "mine"

    def test_of_a_run_that_was_killed_before_its_first_checkpoint_is_taken(
        self, tmp_path: Path
    ) -> None:
        with training.killed_in_batch(2):
            training.run_small("mlp/bf16.yaml", tmp_path)
        training.run_small("mlp/bf16.yaml", tmp_path)
        assert training.end(tmp_path) == ("completed", "", 12)


def test_name_that_is_not_utf_8_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard writes into no such folder, and raises in the middle of the run."""
    folder = tmp_path / os.fsdecode(b"\xff")
    arguments = ["train", *training.arguments("mlp/bf16.yaml"), "--run-folder", str(folder)]
    assert door.main(arguments) == 2
    assert "is no name in UTF-8; allowed: one that is" in capsys.readouterr().err
    assert not folder.exists()


def test_link_to_nowhere_above_a_new_run_is_a_sentence(tmp_path: Path) -> None:
    """A folder of another run of this second has the same error, and the next name is tried."""
    (tmp_path / "runs").symlink_to("nowhere")
    with pytest.raises(FolderError, match=r"cannot make the folder .*: File exists"):
        fresh_folder(tmp_path / "runs", "a")


@pytest.mark.parametrize(
    "command", ["train", "audit", "find", "score", "compare", "check", "search", "report"]
)
def test_machine_without_a_temporary_folder_is_a_sentence(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    assert door.main([command, str(training.ROOT / "experiment_configs/mlp/amp.yaml")]) == 2
    said = capsys.readouterr().err
    assert "'/nowhere/" in said
    assert "; allowed: TMPDIR with the path of a folder" in said


# What no check of the YAML finds, and no machine has.
TOO_LARGE = (f"hyperparameters.hidden_features={10**15}",)


class TestRefusedRun:
    def test_refused_run_leaves_no_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        arguments = ["train", *training.arguments("mlp/bf16.yaml", *TOO_LARGE)]
        assert door.main(arguments) == 2
        assert door.main([*arguments, "--run-folder", "a/b/c"]) == 2
        assert "not enough memory" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_refused_run_leaves_what_was_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "runs" / "mlp-bf16" / "other").mkdir(parents=True)
        (tmp_path / "mine").mkdir()
        arguments = ["train", *training.arguments("mlp/bf16.yaml", *TOO_LARGE)]
        assert door.main(arguments) == 2
        assert door.main([*arguments, "--run-folder", "mine"]) == 2
        assert [path.name for path in (tmp_path / "runs" / "mlp-bf16").iterdir()] == ["other"]
        assert (tmp_path / "mine").is_dir()


class TestWeightsThatAreNotFinite:
    def test_weights_that_are_not_finite_are_found_in_parameters_and_buffers(self) -> None:
        model = torch.nn.BatchNorm1d(2)
        assert _are_finite([model])
        assert model.running_mean is not None
        model.running_mean[1] = float("nan")
        assert not _are_finite([torch.nn.Linear(1, 1), model])
        assert _are_finite([torch.nn.Flatten()])

    def test_weights_that_are_not_finite_displace_no_finite_ones(self, tmp_path: Path) -> None:
        reports: Any = SimpleNamespace(is_best=lambda batches: False, saved=lambda saved: None)
        processes: Any = SimpleNamespace(rank=0, size=1)
        storage = LocalCheckpoints(processes, tmp_path, reports)
        for batches in (1, 2, 3, 4, 5):
            with storage.store_path({"steps_completed": batches}) as (folder, _):
                storage.finite = batches < 3  # as the loop does
                torch.save({}, folder / "state_dict.pth")
        saved = [path.name for path in complete_checkpoints(tmp_path)]
        assert saved == ["batch-00000002", "batch-00000005"]

    def test_weights_that_are_not_finite_are_passed_over_by_a_resume(self, run: Path) -> None:
        checkpoints = complete_checkpoints(run / "checkpoints")
        for checkpoint in checkpoints:
            metadata = json.loads((checkpoint / "metadata.json").read_text())
            assert metadata["finite"] is True
            text = json.dumps({**metadata, "finite": False})
            (checkpoint / "metadata.json").write_text(text)
        with pytest.raises(CheckpointError, match="its weights are not finite"):
            Resume.latest(run)


class TestReplaced:
    def test_checkpoint_that_was_being_replaced_comes_back(self, tmp_path: Path) -> None:
        (tmp_path / ".batch-00000002.replaced").mkdir()
        (tmp_path / ".batch-00000003.partial").mkdir()
        LocalCheckpoints(SimpleNamespace(), tmp_path, SimpleNamespace())  # type: ignore[arg-type]
        assert [path.name for path in tmp_path.iterdir()] == ["batch-00000002"]


class TestFilesTogether:
    """What a command writes is whole, or as it was before."""

    def test_files_are_all_as_before_if_one_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "a.md").write_text("before")
        (tmp_path / "b.png").mkdir()
        with pytest.raises(IsADirectoryError):
            write_together({tmp_path / "a.md": [b"after"], tmp_path / "b.png": [b"x"]})
        assert (tmp_path / "a.md").read_text() == "before"
        assert {path.name for path in tmp_path.iterdir()} == {"a.md", "b.png"}

    def test_files_on_a_full_disk_leave_nothing(self, tmp_path: Path) -> None:
        named = pytest.raises(OSError, match=r"too large.*\.a\.partial")
        with training.no_file_larger_than(1000), named:
            write_together({tmp_path / "a": [b"x" * 10_000]})
        assert not list(tmp_path.iterdir())

    def test_file_replaces_a_link_and_not_what_it_points_to(self, tmp_path: Path) -> None:
        (tmp_path / "theirs").write_text("theirs")
        (tmp_path / "ours").symlink_to("theirs")
        write_together({tmp_path / "ours": [b"ours"]})
        assert (tmp_path / "theirs").read_text() == "theirs"
        assert (tmp_path / "ours").read_text() == "ours"

    def test_file_goes_into_a_device_as_it_is(self) -> None:
        write_together({Path(os.devnull): [b"x"]})
        assert Path(os.devnull).is_char_device()


class TestErrorOfAFile:
    """It is the machine's in the run folder, and the trial's elsewhere."""

    def test_error_of_a_file_is_known_by_its_path(self, tmp_path: Path) -> None:
        for file, of_the_machine in (("run/a", True), ("other", False), ("runs", False)):
            error = OSError(errno.ENOSPC, "no space", str(tmp_path / file))
            assert is_of_the_machine(error, tmp_path / "run") is of_the_machine

    def test_error_without_a_path_is_known_by_who_wrote(self, tmp_path: Path) -> None:
        folder = RunFolder(tmp_path / "run")
        folder.metrics.symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left") as ours:
            folder.append_metrics({"a": "x" * 100_000})
        with (
            pytest.raises(OSError, match="No space left") as theirs,
            open("/dev/full", "w") as file,
        ):
            file.write("x" * 100_000)
        assert is_of_the_machine(ours.value, tmp_path)
        assert not is_of_the_machine(theirs.value, tmp_path)


class TestLock:
    def test_lock_that_is_a_link_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "theirs").write_text("theirs")
        (tmp_path / ".lock").symlink_to("theirs")
        with (
            pytest.raises(FolderError, match=r"\.lock: cannot be written"),
            RunFolder(tmp_path).locked(),
        ):
            pass
        assert (tmp_path / "theirs").read_text() == "theirs"

    def test_on_a_full_disk_is_held_without_a_number(self, tmp_path: Path) -> None:
        with training.no_file_larger_than(0), RunFolder(tmp_path).locked():
            assert (tmp_path / ".lock").read_bytes() == b""

    def test_second_process_is_told_which_one_writes(self, tmp_path: Path) -> None:
        with training.locked_by_another_process(tmp_path) as number:
            refused = pytest.raises(FolderInUseError, match=f"process {number} is running this")
            with refused, RunFolder(tmp_path).locked():
                pass
        with RunFolder(tmp_path).locked():  # it ends with the process
            pass


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("../../escape", "-..-escape"),
        ("/absolute", "-absolute"),
        ("lr? [/b]\0", "lr- -b-"),
        ("..", "unnamed"),
        ("x" * 300, "x" * 100),
        ("größe 1.5", "größe 1.5"),
    ],
)
def test_name_is_one_folder_inside_the_root(tmp_path: Path, name: str, folder: str) -> None:
    made = fresh_folder(tmp_path, name)
    assert made.parent.parent == tmp_path
    assert made.parent.name == folder
