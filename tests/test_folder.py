"""A run folder is never made worse: what is refused, damaged or taken leaves it as it
was.
"""

import json
import pickle
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from determined import core

from determined_amp.amp.errors import UserError
from determined_amp.experiment.experiment import parse, read_yaml
from determined_amp.experiment.machine import Machine
from determined_amp.local.checkpoint_storage import (
    LocalCheckpoints,
    Resume,
    read_metadata,
)
from determined_amp.local.trainer import _copy_user_code, _not_finite
from determined_amp.runs.folder import (
    RunFolder,
    complete_checkpoints,
    fresh_folder,
    lock,
)
from determined_amp.trial.checkpoint import CheckpointError
from tests import run_here
from tests.harness import same_bits


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with checkpoints after 8 (the best) or 12 batches; copied by `run`."""
    return run_here.run_small("mlp/bf16.yaml", tmp_path_factory.mktemp("finished"))


@pytest.fixture
def run(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


def content(folder):
    """Every file of a run folder but its log and its lock."""
    files = (path for path in folder.rglob("*") if path.is_file())
    kept = (path for path in files if path.name not in ("log.txt", ".lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept}


def storage_in(folder, *best):
    """The checkpoints of a run of one process; those after so many batches are the best
    so far.
    """
    processes = core.DummyDistributedContext()
    return LocalCheckpoints(processes, folder, lambda batches: batches in best)


def names_in(folder):
    return [path.name for path in complete_checkpoints(folder)]


def say(checkpoint, **changes):
    """Change what the metadata of a checkpoint say."""
    file = checkpoint / "metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


class TestRefusedResume:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ("hidden_features=24", ": size mismatch for .* \\(1 of 3 problems\\)$"),
            ("global_batch_size=0", "global_batch_size: got 0"),
            ("training.max_length.batches=4", "got 4 batches, and 12 are trained"),
        ],
    )
    def test_refused_resume_changes_nothing(self, run, change, words, refusal):
        before = content(run)
        options = ("--config", f"hyperparameters.{change}")
        (line,) = refusal("train", "--resume", str(run), *options).splitlines()
        assert content(run) == before
        assert re.search(words, line)
        assert len(line) < 600

    @pytest.mark.parametrize(
        ("file", "text", "words"),
        [
            (
                "metadata.json",
                b'{"steps_completed": 13}',
                "does not say that it is of these",
            ),
            ("metadata.json", b"\xff", "metadata.json cannot be read"),
            ("metadata.json", None, "metadata.json cannot be read"),
            ("trial_state.pkl", b"", "trial_state.pkl is damaged: a byte has changed"),
            ("trial_state.pkl", None, "trial_state.pkl cannot be read"),
            ("state_dict.pth", b"PK", "no checkpoint to resume from"),
            ("state_dict.pth", None, "no checkpoint to resume from"),
            ("../../run.json", b"5", "run.json: "),
            ("../../metrics.jsonl", b"{}\n", "metrics.jsonl: line 1 is no report"),
        ],
    )
    def test_resume_of_a_damaged_run_is_refused_and_changes_nothing(
        self, run, file, text, words, refusal
    ):
        for checkpoint in complete_checkpoints(run / "checkpoints"):
            (checkpoint / file).unlink(missing_ok=True)
            if text is not None:
                (checkpoint / file).write_bytes(text)
        before = content(run)
        assert words in refusal("train", "--resume", str(run))
        assert content(run) == before

    def test_resume_with_another_kind_of_optimizer_is_refused(
        self, run, monkeypatch, refusal
    ):
        """Torch loads its state; some kinds then fail in their first step."""
        sgd = torch.optim.SGD
        monkeypatch.setattr(
            torch.optim, "Adam", lambda groups, **_: sgd(groups, lr=0.1)
        )
        before = content(run)
        words = refusal("train", "--resume", str(run))
        assert (
            "cannot be restored into this trial: its optimizers are Adam, and those of "
            "the trial are SGD"
        ) in words
        assert content(run) == before

    @pytest.mark.parametrize("states", [0, 2])
    def test_resume_with_more_or_fewer_optimizers_is_refused(
        self, run, monkeypatch, refusal, states
    ):
        """Determined loads the states of the first ones."""
        load = torch.load

        def with_other_states(*args, **kwargs):
            saved = load(*args, **kwargs)
            saved["optimizers_state_dict"] = saved["optimizers_state_dict"] * states
            return saved

        monkeypatch.setattr(torch, "load", with_other_states)
        words = refusal("train", "--resume", str(run))
        assert f"optimizers in the checkpoint: {states}; in the trial: 1" in words


class TestDamagedCheckpoint:
    def test_resume_falls_back_to_the_checkpoint_before_a_damaged_one(
        self, run, caplog
    ):
        (newest,) = complete_checkpoints(run / "checkpoints")[-1:]
        older = newest.with_name("batch-00000004")
        shutil.copytree(newest, older)
        counts = pickle.dumps({"trial_id": 0, "batches_trained": 4})
        (older / "trial_state.pkl").write_bytes(counts)
        say(older, steps_completed=4, trial_state_crc32=zlib.crc32(counts))
        flip_a_bit(newest / "state_dict.pth")
        assert Resume.latest(run) == Resume(older.name, 4)
        assert "has changed; trying the checkpoint before it" in caplog.text

    def test_leftovers_of_a_killed_process_go_when_another_goes_on(self, tmp_path):
        (tmp_path / ".batch-00000002.replaced").mkdir()
        (tmp_path / ".batch-00000003.partial").mkdir()
        storage_in(tmp_path)
        assert not [*tmp_path.iterdir()]

    def test_newest_best_and_newest_finite_weights_are_kept(self, tmp_path):
        storage = storage_in(tmp_path, 2, 4)
        kept_after = ([1], [2], [2, 3], [4], [4, 5], [4, 5, 6], [4, 5, 7])
        # A resume has passed over that after 99 batches.
        for batches, kept in ((99, [99]), *enumerate(kept_after, 1)):
            with storage.store_path({"steps_completed": batches}) as (folder, _):
                storage.finite = batches not in (6, 7)  # as the loop does
                torch.save({}, folder / "state_dict.pth")
                (folder / "trial_state.pkl").touch()
            assert names_in(tmp_path) == [f"batch-{number:08d}" for number in kept]

    def test_weights_that_are_not_finite_are_passed_over_by_a_resume(self, run):
        for checkpoint in complete_checkpoints(run / "checkpoints"):
            assert read_metadata(checkpoint)["finite"] is True
            say(checkpoint, finite=False)
        with pytest.raises(CheckpointError, match="its weights are not finite"):
            Resume.latest(run)


def test_full_disk_during_a_checkpoint_leaves_the_one_before(tmp_path, refusal):
    """Torch's writer, in C++, raises a RuntimeError that says nothing of a disk.

    The weights are the largest file of the run.
    """
    wide = "hyperparameters.hidden_features=512"
    run_here.run_small("mlp/fp32.yaml", tmp_path, wide)
    checkpoints, before = tmp_path / "checkpoints", run_here.checkpoint(tmp_path, 12)
    size = (checkpoints / "batch-00000012" / "state_dict.pth").stat().st_size
    longer = ["--config", "hyperparameters.training.max_length.batches=16"]
    with run_here.no_file_larger_than(size - 10_000):
        message = refusal("train", "--resume", str(tmp_path), *longer)
    assert "could not be saved (is the disk full?)" in message
    assert "batch-00000016" in message
    assert "intact" in message
    assert run_here.end(tmp_path)[0] == "stopped"  # so a search leaves the trial open
    assert names_in(checkpoints)[-1] == "batch-00000012"
    assert not list(checkpoints.glob(".*"))
    assert same_bits(run_here.checkpoint(tmp_path, 12), before)
    run_here.resume(tmp_path)
    assert names_in(checkpoints)[-1] == "batch-00000016"


@pytest.mark.parametrize(
    ("there", "folder", "words"),
    [
        ("file", "file", "cannot make the folder "),
        ("file", "file/below", "cannot make the folder "),
        ("file", "x" * 300, "cannot make the folder "),
        # `--run-folder .` beside an experiment of the name that a run has, too.
        ("config.yaml", ".", "holds config.yaml; allowed: "),
        ("metrics.jsonl", ".", "holds metrics.jsonl; allowed: "),
        (
            "checkpoints/batch-00000012/metadata.json",
            ".",
            "holds batch-00000012; allowed: a new folder",
        ),
    ],
)
def test_folder_that_no_run_can_use_is_a_sentence(
    there, folder, words, tmp_path, refusal
):
    (tmp_path / there).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / there).write_text("mine")
    arguments = run_here.arguments("mlp/bf16.yaml")
    assert words in refusal("train", *arguments, "--run-folder", str(tmp_path / folder))
    assert (tmp_path / there).read_text() == "mine"


def test_folder_of_a_run_that_was_killed_before_its_first_checkpoint_is_taken(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with run_here.killed_in_batch(2):
        run_here.run_small("mlp/bf16.yaml", tmp_path)
    run_here.run_small("mlp/bf16.yaml", tmp_path)
    assert run_here.end(tmp_path) == ("completed", "", 12)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_second_process_is_told_which_one_writes(tmp_path):
    with run_here.locked_by_another_process(tmp_path) as number:
        refused = pytest.raises(UserError, match=f"process {number} is running this")
        with refused, lock(RunFolder(tmp_path).shown, "this run"):
            pass
    with lock(RunFolder(tmp_path).shown, "this run"):  # it ends with the process
        pass


def test_part_whose_batches_are_trained_again_is_forgotten(tmp_path):
    yaml_of_mlp = str(run_here.ROOT / "experiment_configs/mlp/amp.yaml")
    experiment = parse(read_yaml(yaml_of_mlp), yaml_of_mlp)
    for first_batch in (0, 8, 12, 8):
        run = RunFolder(tmp_path).describe(
            experiment, Machine(), first_batch=first_batch
        )
    assert [part.first_batch for part in run.parts] == [0, 8]
    assert read_yaml(str(tmp_path / "config.yaml")) == experiment.config
    assert run.settings == experiment.settings


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("../../escape", "-..-escape"),
        ("/absolute", "-absolute"),
        ("lr? [/b]\0", "lr- -b-"),
        ("..", "unnamed"),
        ("X" * 300, "X" * 100),
        ("größe 1.5", "größe 1.5"),
    ],
)
def test_name_of_a_run_is_one_folder_inside_runs(tmp_path, monkeypatch, name, folder):
    monkeypatch.chdir(tmp_path)
    made = fresh_folder(name)
    assert made.parent == Path("runs") / folder
    assert fresh_folder(name) != made  # in the same second


def test_parameters_and_buffers_that_are_not_finite_are_named():
    model = torch.nn.BatchNorm1d(2)
    assert _not_finite([model]) == set()
    assert model.running_mean is not None
    model.running_mean[1] = float("nan")
    model.weight.data[0] = -torch.inf
    assert _not_finite([torch.nn.Linear(1, 1), model]) == {
        "model 1: running_mean",
        "model 1: weight",
    }


def test_reports_after_a_checkpoint_are_forgotten_unless_the_disk_is_full(tmp_path):
    folder = RunFolder(tmp_path)
    for batches in range(8):
        folder.append_metrics({"group": "training", "batches": batches})
    before = folder.metrics.read_bytes()
    full = run_here.no_file_larger_than(len(before) // 4)
    with full, pytest.raises(OSError, match="large"):
        folder.forget_metrics_after(6)
    assert folder.metrics.read_bytes() == before
    folder.forget_metrics_after(4)
    assert [line["batches"] for line in run_here.metrics(tmp_path)] == [*range(5)]


def test_code_in_a_checkpoint_is_that_of_the_directory_without_packages(
    tmp_path, monkeypatch
):
    here = tmp_path / "here"
    names = ("model.py", "parts/layer.py")
    packages = ("env/lib/site-packages/a.py", "env/dist-packages/b.py")
    for name in (*names, *packages, "../elsewhere.py"):
        file = here / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        monkeypatch.setitem(sys.modules, f"of {name}", Mock(__file__=str(file)))
    _copy_user_code(here, tmp_path / "saved", on_cluster=False)
    code = tmp_path / "saved" / "code"
    copied = [path.relative_to(code) for path in code.rglob("*") if path.is_file()]
    assert {path.as_posix() for path in copied} == {*names}


def test_commit_of_a_run_tells_whether_files_were_changed_since(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Machine.of_this_process().versions["commit"] is None
    (tmp_path / "model.py").touch()
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c")
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "a")):
        subprocess.run([*git, *command], check=True)
    commit = Machine.of_this_process().versions["commit"]
    (tmp_path / "model.py").write_text("import torch")
    assert Machine.of_this_process().versions["commit"] == f"{commit}-dirty"
