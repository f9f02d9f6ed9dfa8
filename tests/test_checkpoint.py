"""Checkpoints are whole or absent, readable by every torch, and run nothing when loaded."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from determined import pytorch

from determined_amp import train
from determined_amp.amp.checkpoint import CheckpointError, allow_numpy_random_state
from determined_amp.local.checkpoints import LocalCheckpoints, complete_checkpoints, read_metadata
from tests import loops, training
from tests.test_mixed_precision import FP16, StrangersTrial


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.run_small("mlp/amp.yaml", tmp_path_factory.mktemp("finished"))


@pytest.fixture
def run_folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, to be damaged."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def own_modules() -> Iterator[None]:
    """Put the modules back that Determined imports anew from a checkpoint's code."""
    before = {name: module for name, module in sys.modules.items() if name.startswith("trials")}
    yield
    sys.modules.update(before)


def newest(folder: Path) -> Path:
    return complete_checkpoints(folder / "checkpoints")[-1]


class RunsCode:
    """Pickles to a call; unpickling it leaves a file behind."""

    def __init__(self, victim: Path) -> None:
        self._victim = victim

    def __reduce__(self) -> Any:
        return Path.touch, (self._victim,)


class TestUnsafeContent:
    @pytest.mark.parametrize("name", ["state_dict.pth", "trial_state.pkl"])
    def test_is_refused_and_not_run(
        self, run_folder: Path, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        victim = tmp_path / "victim"
        content = {"planted": RunsCode(victim)}
        path = newest(run_folder) / name
        if name == "state_dict.pth":
            torch.save(content, path)
        else:
            path.write_bytes(pickle.dumps(content))
        assert train.main(["--resume", str(run_folder)]) == 2
        assert "cannot be restored" in capfd.readouterr().err
        assert not victim.exists()

    def test_would_run_if_it_were_unpickled(self, tmp_path: Path) -> None:
        """Negative control: the planted content does what it says."""
        victim = tmp_path / "victim"
        pickle.loads(pickle.dumps(RunsCode(victim)))
        assert victim.exists()


class TestDeterminedsOwnTrainer:
    """A stranger's trial in a stranger's script: `MixedPrecision` alone sees to its checkpoints."""

    @pytest.fixture
    def saved(self, folder: Path) -> str:
        """The checkpoint of two batches."""
        saved = loops.fit(StrangersTrial, folder, FP16, batches=2).checkpoint
        assert saved is not None
        return saved

    def test_saves_numpys_random_state_as_plain_numbers(self, folder: Path, saved: str) -> None:
        state = loops.content(folder, saved)["rng_state"]["np_rng_state"]
        assert [type(part) for part in state] == [str, list, int, int, float]

    def test_goes_on_from_a_checkpoint(self, folder: Path, saved: str) -> None:
        """Two more steps, counted on from two."""
        fitted = loops.fit(StrangersTrial, folder, FP16, batches=4, first_batch=2, resume=saved)
        assert fitted.reports.training[-1]["applied_steps"] == 4

    @pytest.mark.parametrize("name", ["state_dict.pth", "trial_state.pkl"])
    def test_refuses_a_checkpoint_that_runs_code(
        self, folder: Path, saved: str, tmp_path: Path, name: str
    ) -> None:
        content = {"planted": RunsCode(tmp_path / "victim")}
        path = folder / saved / name
        if name == "state_dict.pth":
            torch.save(content, path)
        else:
            path.write_bytes(pickle.dumps(content))
        with pytest.raises(CheckpointError, match="cannot be restored into this trial"):
            loops.fit(StrangersTrial, folder, FP16, batches=4, first_batch=2, resume=saved)
        assert not (tmp_path / "victim").exists()


class TestDamage:
    @pytest.mark.parametrize("name", ["state_dict.pth", "trial_state.pkl", "metadata.json"])
    def test_of_a_truncated_file_is_one_clear_error(
        self, run_folder: Path, name: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        path = newest(run_folder) / name
        path.write_bytes(path.read_bytes()[:20])
        assert train.main(["--resume", str(run_folder)]) == 2
        message = capfd.readouterr().err
        assert str(newest(run_folder)) in message
        assert "Traceback" not in message

    def test_of_a_missing_file_is_one_clear_error(
        self, run_folder: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        (newest(run_folder) / "state_dict.pth").unlink()
        assert train.main(["--resume", str(run_folder)]) == 2
        assert "has no state_dict.pth" in capfd.readouterr().err

    def test_checkpoint_of_another_model_is_one_clear_error(
        self, run_folder: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        wider = ["--config", "hyperparameters.hidden_features=17"]
        assert train.main(["--resume", str(run_folder), *wider]) == 2
        assert "size mismatch" in capfd.readouterr().err

    def test_folder_without_a_checkpoint_is_one_clear_error(
        self, run_folder: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        shutil.rmtree(run_folder / "checkpoints")
        assert train.main(["--resume", str(run_folder)]) == 2
        assert "no checkpoint to resume from" in capfd.readouterr().err


class TestPortability:
    def test_random_state_of_numpy_is_plain_numbers(self, finished: Path) -> None:
        """An array would be refused by weights-only loading without an allowlist."""
        content = training.checkpoint(finished, 12)  # loads weights only
        state = content["rng_state"]["np_rng_state"]
        assert [type(part) for part in state] == [str, list, int, int, float]
        np.random.set_state(state)
        assert cast("tuple[Any, ...]", np.random.get_state())[2] == state[2]

    @pytest.mark.skipif(
        not hasattr(torch.serialization, "add_safe_globals"),
        reason="this torch has no allowlist: there such a checkpoint is refused",
    )
    def test_array_of_a_foreign_trial_is_allowed(self, tmp_path: Path) -> None:
        allow_numpy_random_state()
        state = cast("tuple[Any, ...]", np.random.get_state())
        torch.save({"np_rng_state": state}, tmp_path / "foreign.pth")
        loaded = torch.load(tmp_path / "foreign.pth", weights_only=True)
        assert (loaded["np_rng_state"][1] == state[1]).all()

    @pytest.mark.usefixtures("own_modules")
    def test_determined_loads_the_trial_from_a_checkpoint(self, finished: Path) -> None:
        """The platform's own reader finds class, code and hyperparameters in the checkpoint."""
        trial: Any = pytorch.load_trial_from_checkpoint_path(str(newest(finished)))
        saved = training.checkpoint(finished, 12)["models_state_dict"][0]
        assert training.digest(trial.model.state_dict()) == training.digest(saved)


class TestSaving:
    def test_keeps_the_newest_and_the_best(self, finished: Path) -> None:
        """Checkpoints come after 4, 6, 8 and 12 batches; the best validation is after 6 or 12."""
        losses = {
            line["batches"]: line["validation_loss"]
            for line in training.metrics(finished)
            if line["group"] == "validation"
        }
        best = min(losses, key=lambda batches: losses[batches])
        saved = complete_checkpoints(finished / "checkpoints")
        assert {read_metadata(path)["steps_completed"] for path in saved} == {best, 12}
        assert {p.name for p in (finished / "checkpoints").iterdir()} == {p.name for p in saved}

    def test_holds_the_trials_and_no_copy_of_anything_else(self, finished: Path) -> None:
        code = newest(finished) / "code"
        assert {path.name for path in code.iterdir()} == {"determined_amp", "trials"}
        assert (code / "trials" / "mlp.py").exists()

    def test_that_fails_leaves_the_one_before(
        self, run_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """A disk that fills up while the metadata of batch 16 is written."""
        before = newest(run_folder)

        def full(*arguments: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(LocalCheckpoints, "_write_metadata_file", full)
        more = ["--config", "hyperparameters.training.max_length.batches=16"]
        assert train.main(["--resume", str(run_folder), *more]) == 2
        message = capfd.readouterr().err
        assert "No space left on device" in message
        assert "intact" in message
        assert newest(run_folder) == before
        assert not list((run_folder / "checkpoints").glob(".*"))

    def test_half_written_one_of_a_killed_process_is_ignored(self, run_folder: Path) -> None:
        leftover = run_folder / "checkpoints" / ".batch-00000014.partial"
        leftover.mkdir()
        (leftover / "metadata.json").write_text(json.dumps({"steps_completed": 14, "best": True}))
        training.resume(run_folder)
        assert newest(run_folder).name == "batch-00000012"
        assert not leftover.exists()
