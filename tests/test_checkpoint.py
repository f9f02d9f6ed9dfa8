"""Checkpoints are whole or absent, readable by every torch, and run nothing when
loaded.
"""

import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from determined import pytorch

from determined_amp import ConfigError
from determined_amp.local.checkpoint_storage import translating_disk_errors
from determined_amp.local.ending import DiskError
from determined_amp.trial.checkpoint import (
    CheckpointError,
    PortableCheckpoint,
    allow_numpy_random_state,
    check_bytes,
)
from determined_amp.trial.fitting import fit as train_trial
from tests.harness import Context, core_context_of, fit
from tests.test_folder import storage_in
from tests.trials import FP16_SECTION, Weights


class RunsCode:
    """Pickles to a call; unpickling it leaves a file behind."""

    def __init__(self, victim):
        self._victim = victim

    def __reduce__(self):
        return Path.touch, (self._victim,)


class TestOwnScript:
    """A stranger's trial in a stranger's script."""

    @pytest.fixture
    def first(self):
        """The run of two batches."""
        return fit(Weights, FP16_SECTION, batches=2)

    def test_numpys_random_state_is_saved_as_plain_numbers(self, first):
        state = first.checkpoint["rng_state"]["np_rng_state"]
        assert [type(part) for part in state] == [str, list, int, int, float]

    def test_each_rank_gets_its_own_random_state(self):
        for rank, state in enumerate((1, 2, 0)):
            checkpoint: dict[str, Any] = {"rng_state": 0, "rng_state_of_ranks": [1, 2]}
            context: Any = Context()
            context.distributed.rank = rank
            PortableCheckpoint(context).on_checkpoint_load_start(checkpoint)
            assert checkpoint == {"rng_state": state}

    def test_resume_without_a_cluster_trains_the_batches_of_an_undisturbed_run(
        self, folder
    ):
        """Determined tells the loop of no earlier batches there, and the script sets
        the seed.
        """
        seen = []

        class Shuffles(Weights):
            def build_training_data_loader(self):
                samples = torch.utils.data.TensorDataset(
                    torch.arange(6.0).reshape(6, 1)
                )
                return pytorch.DataLoader(samples, batch_size=2, shuffle=True)

            def train_batch(self, batch, epoch_idx, batch_idx):
                seen.extend([batch_idx, *batch[0].flatten().tolist()])
                return super().train_batch(batch, epoch_idx, batch_idx)

        def train(batches, checkpoint):
            torch.manual_seed(7)
            with pytorch.init(
                hparams={"amp": {**FP16_SECTION, "audit": False}},
                exp_conf={},
                enable_tensorboard_logging=False,
            ) as context:
                context._core.checkpoint = core_context_of(folder).checkpoint
                train_trial(
                    Shuffles(context),
                    context,
                    max_length=pytorch.Batch(batches),
                    latest_checkpoint=checkpoint,
                )
            return max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns).name

        train(8, None)
        undisturbed = list(seen)
        seen.clear()
        train(8, train(4, None))
        assert seen == undisturbed

    def test_resume_in_determineds_own_loop_without_a_cluster_is_refused(self, first):
        words = (
            r"latest_checkpoint: without a cluster .* determined_amp\.fit\(trial,"
            r" context"
        )
        with pytest.raises(ConfigError, match=words):
            fit(
                Weights,
                FP16_SECTION,
                batches=4,
                resume=first,
                loop=pytorch._PyTorchTrialController,
            )

    @pytest.mark.parametrize("name", ["state_dict.pth", "trial_state.pkl"])
    def test_checkpoint_that_runs_code_is_refused_and_not_run(
        self, first, tmp_path, name
    ):
        victim = tmp_path / "victim"
        planted = {"planted": RunsCode(victim)}
        path = first.saved / name
        if name == "state_dict.pth":
            torch.save(planted, path)
        else:
            path.write_bytes(pickle.dumps(planted))
        with pytest.raises(CheckpointError, match="cannot be restored into this trial"):
            fit(Weights, FP16_SECTION, batches=4, resume=first)
        assert not victim.exists()
        pickle.loads(pickle.dumps(planted))  # the control: it does what it says
        assert victim.exists()


@pytest.mark.skipif(
    not hasattr(torch.serialization, "add_safe_globals"),
    reason="this torch has no allowlist: there such a checkpoint is refused",
)
@pytest.mark.skipif(
    not hasattr(torch.serialization, "set_crc32_options"),
    reason="this torch always writes checksums",
)
def test_checkpoint_has_checksums_although_the_trial_wants_none(tmp_path):
    weights = {"a": torch.ones(64)}
    serialization: Any = torch.serialization
    serialization.set_crc32_options(False)
    try:
        torch.save(weights, tmp_path / "state_dict.pth")
        with pytest.raises(CheckpointError, match="is damaged"):  # the control
            check_bytes(tmp_path)
        made = fit(Weights, FP16_SECTION, batches=2)
        assert not serialization.get_crc32_options()
    finally:
        serialization.set_crc32_options(True)
    check_bytes(made.saved)


@pytest.mark.skipif(
    not hasattr(torch.serialization, "add_safe_globals"),
    reason="torch before 2.5 has no list of allowed types",
)
def test_checkpoint_with_an_array_of_numpy_can_be_loaded(tmp_path):
    allow_numpy_random_state()
    state = cast("tuple[Any, ...]", np.random.get_state())
    torch.save({"np_rng_state": state}, tmp_path / "foreign.pth")
    loaded = torch.load(tmp_path / "foreign.pth", weights_only=True)
    assert (loaded["np_rng_state"][1] == state[1]).all()


def test_flipped_bit_of_the_directory_of_the_weights_is_one_error_or_none(tmp_path):
    """The errors of zipfile are of several kinds."""
    file = tmp_path / "state_dict.pth"
    torch.save({"weights": torch.ones(2)}, file)
    whole = file.read_bytes()
    kinds = set()

    def put(place, byte):
        """In place: a file that is written anew waits for the disk."""
        with file.open("r+b") as written:
            written.seek(place)
            written.write(bytes([byte]))

    for place in range(zipfile.ZipFile(file).start_dir, len(whole)):
        for bit in (1, 8, 128):
            put(place, whole[place] ^ bit)
            try:
                check_bytes(tmp_path)
            except CheckpointError as error:
                kinds.add(type(error.__cause__))
            put(place, whole[place])
    assert {zipfile.BadZipFile, NotImplementedError, RuntimeError} <= kinds


def save(checkpoints, batches, content=""):
    with checkpoints.store_path({"steps_completed": batches}) as (path, _):
        (path / "code").mkdir()
        (path / "code" / "trial.py").write_text("# a trial")
        with zipfile.ZipFile(path / "state_dict.pth", "w") as weights:
            weights.writestr("content", content)
        (path / "trial_state.pkl").touch()


@pytest.fixture
def done(monkeypatch):
    """What the disk is asked for, in order, by name."""
    events = []

    def note(owner, name, say):
        original = getattr(owner, name)

        def noted(*given, **named):
            events.extend(filter(None, [say(*given)]))
            return original(*given, **named)

        monkeypatch.setattr(owner, name, noted)

    note(
        os,
        "fsync",
        lambda file: f"sync {Path(f'/proc/self/fd/{file}').readlink().name}",
    )
    note(Path, "rename", lambda path, to: f"rename {path.name} {to.name}")
    note(shutil, "rmtree", lambda path: f"remove {path.name}" if path.exists() else "")
    return events


class TestDisk:
    def test_checkpoint_is_on_the_disk_before_it_gets_its_name(self, tmp_path, done):
        save(storage_in(tmp_path), 4)
        files = ["trial.py", "state_dict.pth", "trial_state.pkl", "metadata.json"]
        partial = ".batch-00000004.partial"
        assert sorted(done[:6]) == sorted(
            f"sync {name}" for name in [*files, "code", partial]
        )
        assert done[5:] == [
            f"sync {partial}",
            f"rename {partial} batch-00000004",
            f"sync {tmp_path.name}",
        ]

    def test_old_checkpoint_stays_until_the_new_one_is_in_place(self, tmp_path, done):
        checkpoints = storage_in(tmp_path)
        save(checkpoints, 4, "old")
        done.clear()
        save(checkpoints, 4, "new")
        assert [event for event in done if not event.startswith("sync")] == [
            "rename batch-00000004 .batch-00000004.replaced",
            "rename .batch-00000004.partial batch-00000004",
            "remove .batch-00000004.replaced",
        ]
        assert done[-2] == f"sync {tmp_path.name}"
        with zipfile.ZipFile(tmp_path / "batch-00000004" / "state_dict.pth") as weights:
            assert weights.read("content") == b"new"

    def test_checkpoint_loses_its_name_before_it_is_removed(self, tmp_path, done):
        """Half of a removed one must not look like a whole one."""
        checkpoints = storage_in(tmp_path)
        save(checkpoints, 4)
        save(checkpoints, 8)
        assert done[-2:] == [
            "rename batch-00000004 .batch-00000004.deleted",
            "remove .batch-00000004.deleted",
        ]

    @pytest.mark.parametrize(
        "error",
        [
            OSError(28, "No space left on device"),
            RuntimeError("[enforce fail at inline_container.cc:603] . unexpected pos"),
            RuntimeError("basic_ios::clear: iostream error"),
        ],
        ids=["of the system", "of torch", "of its stream"],
    )
    def test_full_disk_is_one_clear_error(self, tmp_path, error):
        checkpoints = storage_in(tmp_path)
        save(checkpoints, 4)
        told = "the run cannot go on.*: the checkpoints it may have are intact"
        with (
            pytest.raises(DiskError, match=told) as raised,
            translating_disk_errors(tmp_path),
            checkpoints.store_path({"steps_completed": 8}),
        ):
            raise error
        is_guessed = "batch-00000008" in str(raised.value)
        assert is_guessed == isinstance(error, RuntimeError)
        assert [path.name for path in tmp_path.iterdir()] == ["batch-00000004"]

    @pytest.mark.parametrize(
        "error",
        [RuntimeError("of the trial"), KeyboardInterrupt()],
        ids=["of the trial", "of the user"],
    )
    def test_disk_is_not_blamed_for_any_other_error(self, tmp_path, error):
        checkpoints = storage_in(tmp_path)
        with (
            pytest.raises(type(error)) as raised,
            checkpoints.store_path({"steps_completed": 8}),
        ):
            raise error
        assert raised.value is error
        assert not list(tmp_path.iterdir())

    def test_lost_end_of_the_weights_is_noticed(self, tmp_path):
        """Of torch, which does not look at whether its last flush fails."""
        checkpoints = storage_in(tmp_path)
        with (
            pytest.raises(OSError, match="could not be saved"),
            checkpoints.store_path({"steps_completed": 8}) as (path, _),
        ):
            (path / "state_dict.pth").write_bytes(b"PK")
        assert not list(tmp_path.iterdir())
