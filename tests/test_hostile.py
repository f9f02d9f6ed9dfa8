"""Settings made of anything, data that breaks, a full disk, and kills at random
moments.
"""

from __future__ import annotations

import copy
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import get_worker_info

from determined_amp.amp.errors import ConfigError
from determined_amp.amp.plain_data import Config, Values
from determined_amp.experiment import dotted as dotted_names
from determined_amp.experiment import experiment
from determined_amp.experiment.overrides import with_overrides
from determined_amp.local.checkpoint_storage import complete_checkpoints
from determined_amp.search.search_plan import SearchPlan
from tests import killed_rounds, training
from tests.harness import same_bits
from trials.data.images import FolderImages
from trials.data.loading import EpochSampler, Sample

# The same examples in every run, and no opinion on how busy the machine is.
BOUNDED = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)

_YAML = training.ROOT / "experiment_configs" / "mlp" / "amp.yaml"
SOUND: Config = yaml.safe_load(_YAML.read_text())
_GRID = training.ROOT / "hp_search" / "loss_scale_grid.yaml"
SEARCH: Config = yaml.safe_load(_GRID.read_text())


def dotted(config: object, path: str = "") -> Iterator[str]:
    """The dotted place of every key in `config`."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            place = f"{path}.{key}" if path else str(key)
            yield place
            yield from dotted(value, place)


def put(path: str, value: object, sound: Config = SOUND) -> Values:
    """The sound configuration with one value replaced."""
    config: Values = copy.deepcopy(dict(sound))
    dotted_names.put(config, path.split("."), value)
    return config


def problems_of(config: Config) -> tuple[str, ...]:
    """What the parser says of it; anything but a ConfigError is the caller's to see."""
    try:
        experiment.parse(config, "mutant")
    except ConfigError as error:
        return error.problems
    return ()


PLACES = sorted(dotted(SOUND))

# Values of the YAML's own kind come up often, so that many examples get past the first
# check.
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["fp32", "amp_fp16", "mnist", "cosine", "batches", "trials.mlp:MLPTrial"]
    )
    | st.sampled_from(["1e-4", "0x10", "nan", "2021-02-03", "type", 10**400, 1, 2, 0.5])
)
KEYS = st.text(max_size=8) | st.sampled_from(
    [place.rpartition(".")[2] for place in PLACES]
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


class TestParser:
    @BOUNDED
    @given(path=st.sampled_from(PLACES), value=ANYTHING)
    @example(path="hyperparameters", value=[])
    @example(path="hyperparameters.trial", value="trials.mlp:" + "\ud800")
    @example(path="hyperparameters.amp", value={"amp": {"amp": {}}})
    @example(path="hyperparameters.learning_rate", value=10**400)
    @example(path="searcher", value={"name": ["single"], "max_length": {"batches": 1}})
    def test_experiment_with_any_value_is_parsed_or_its_wrong_keys_are_named(
        self, path: str, value: object
    ) -> None:
        """Whatever stands in the place of a value: an experiment, or a ConfigError.

        Every problem begins with a key that the sound YAML has or that was put in, with
        one exception: three datasets need `data.directory`, which the digits forbid.
        """
        config = put(path, value)
        known = {*PLACES, *dotted(config), "data.directory"}
        for problem in problems_of(config):
            # without the item of a list
            place = problem.partition(": ")[0].partition("[")[0]
            assert place in known, problem

    @BOUNDED
    @given(path=st.sampled_from(sorted(dotted(SEARCH))), value=ANYTHING)
    def test_search_with_any_value_is_planned_or_is_a_config_error(
        self, path: str, value: object
    ) -> None:
        with suppress(ConfigError):
            SearchPlan(put(path, value, SEARCH))

    @pytest.mark.parametrize("path", PLACES)
    def test_value_that_is_never_right_is_one_problem_of_its_key(
        self, path: str
    ) -> None:
        """No key of ours has a list with null in it. Determined judges its own."""
        theirs = ("description", "entrypoint", "max_restarts", "log_policies")
        named = [p for p in problems_of(put(path, [None])) if p.startswith(f"{path}: ")]
        assert len(named) == (path not in theirs)

    def test_data_section_of_0_is_a_problem(self) -> None:
        assert problems_of(put("data", 0)) == (
            "data: got 0; allowed: a mapping of keys to values",
        )


@BOUNDED
@given(
    overrides=st.lists(
        st.text(max_size=20)
        | st.builds(
            "{}={}".format, st.sampled_from(PLACES) | KEYS, st.text(max_size=20)
        ),
        max_size=3,
    )
)
@example(overrides=["="])
@example(overrides=["name.x=1"])
@example(overrides=["a..b=[", "x={1: 2"])
def test_overrides_of_any_text_change_the_config_or_are_a_config_error(
    overrides: list[str],
) -> None:
    before = copy.deepcopy(SOUND)
    with suppress(ConfigError):
        assert with_overrides(SOUND, overrides).keys() >= SOUND.keys()
    assert before == SOUND


SEED, BATCH = 5, 4
PHOTOS = (
    "data.dataset=image_folder",
    "data.classes=2",
    f"hyperparameters.global_batch_size={BATCH}",
    f"reproducibility.experiment_seed={SEED}",
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random photos: 2 x 24 to train on, which are 12 batches of 4, and 2 x 4 to
    validate on.
    """
    root = tmp_path_factory.mktemp("photos")
    draw = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 4)):
        for name in ("cat", "dog"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = draw.integers(0, 256, (10, 10, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index:02}.png")
    return root


@pytest.fixture(scope="module")
def undisturbed(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The end of a run on the photos, which it loads itself."""
    return final(train_on(photos, tmp_path_factory.mktemp("undisturbed"), workers=0))


def sample_of_the_tenth_batch() -> int:
    """Of the first pass over 48 photos."""
    return list(EpochSampler(48, SEED))[9 * BATCH].image


def photo_of_the_tenth_batch(photos: Path) -> Path:
    """Photos are numbered class by class, in the order of their names."""
    return sorted((photos / "train").glob("*/*.png"))[sample_of_the_tenth_batch()]


def train_on(photos: Path, folder: Path, workers: int) -> Path:
    place = (f"data.directory={photos}", f"data.workers={workers}")
    return training.run_small("mlp/amp.yaml", folder, *PHOTOS, *place)


def final(folder: Path) -> str:
    return training.digest(training.checkpoint(folder, 12))


@contextmanager
def breaking(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]
) -> Iterator[None]:
    """Meanwhile reading that sample of the tenth batch is `act`, in workers too: they
    are forks.
    """
    victim, decode = Sample(0, sample_of_the_tenth_batch()), FolderImages._decode

    def broken(images: FolderImages, sample: Sample) -> tuple[torch.Tensor, int]:
        if sample == victim and len(images) == 48:  # not of the 8 that are validated on
            act()
        return decode(images, sample)

    with monkeypatch.context() as planted:
        planted.setattr(FolderImages, "_decode", broken)
        yield


def newest(folder: Path) -> str:
    return complete_checkpoints(folder / "checkpoints")[-1].name


class DriveError(Exception):
    """The disk with the photos is gone."""


def lose_the_drive() -> None:
    raise DriveError("no such device")


class TestDataThatBreaks:
    def test_lost_drive_ends_the_run_with_the_cause_and_keeps_its_checkpoints(
        self,
        tmp_path: Path,
        photos: Path,
        undisturbed: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The error of a worker is raised when its batch is due: the run ends after 9
        batches.

        The newest checkpoint is after 8; resumed, the run ends as one that nothing
        disturbed.
        """
        run = tmp_path / "run"
        with (
            breaking(monkeypatch, lose_the_drive),
            pytest.raises(DriveError, match="no such device"),
        ):
            train_on(photos, run, workers=1)
        assert newest(run) == "batch-00000008"
        assert training.metrics(run)[-1]["batches"] == 8
        training.resume(run)
        assert final(run) == undisturbed

    def test_killed_worker_ends_the_run_and_keeps_its_checkpoints(
        self,
        tmp_path: Path,
        photos: Path,
        undisturbed: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The kernel kills so when memory is short: here with 8 batches saved, at the
        tenth.

        Torch raises in whatever the loop does then. A second later it waits for the
        tenth batch.
        """
        run = tmp_path / "run"

        def die() -> None:
            assert get_worker_info() is not None
            while not (run / "checkpoints" / "batch-00000008").exists():
                time.sleep(0.01)
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)

        with (
            breaking(monkeypatch, die),
            pytest.raises(RuntimeError, match=r"DataLoader worker .*(Killed|exited)"),
        ):
            train_on(photos, run, workers=1)
        assert newest(run) == "batch-00000008"
        training.resume(run)
        assert final(run) == undisturbed

    def test_photo_that_cannot_be_decoded_is_named(
        self, tmp_path: Path, photos: Path, refusal: Callable[..., str]
    ) -> None:
        """A worker of the loader raises: the text of its error has the whole
        traceback.
        """
        damaged = photo_of_the_tenth_batch(shutil.copytree(photos, tmp_path / "photos"))
        damaged.write_bytes(damaged.read_bytes()[:20])
        place = (f"data.directory={tmp_path / 'photos'}", "data.workers=1")
        arguments = training.arguments("mlp/amp.yaml", *PHOTOS, *place)
        said = refusal("train", *arguments, "--run-folder", str(tmp_path / "run"))
        assert f"{damaged}: cannot be decoded: " in said


# Wide enough that nothing else the run writes is as large as its weights.
WIDE = "hyperparameters.hidden_features=512"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.run_small("mlp/fp32.yaml", tmp_path_factory.mktemp("wide"), WIDE)


@pytest.mark.parametrize("missing", [10_000, 1], ids=["weights", "last byte"])
def test_full_disk_during_a_checkpoint_is_one_clear_error_and_leaves_the_one_before(
    missing: int, wide: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    """Torch's writer, in C++, raises a RuntimeError that says nothing of a disk.

    It flushes the end of a file, without a look, as it closes. What is cut off is the
    table of contents: such a file cannot be loaded.
    """
    folder = shutil.copytree(wide, tmp_path / "run")
    checkpoints, before = folder / "checkpoints", training.checkpoint(folder, 12)
    size = (checkpoints / "batch-00000012" / "state_dict.pth").stat().st_size
    longer = ["--config", "hyperparameters.training.max_length.batches=16"]
    with training.no_file_larger_than(size - missing):
        message = refusal("train", "--resume", str(folder), *longer)
    assert "batch-00000016: could not be saved" in message
    assert "intact" in message
    assert training.end(folder)[0] == "stopped"  # so a search leaves the trial open
    assert newest(folder) == "batch-00000012"
    assert not list(checkpoints.glob(".*"))
    assert same_bits(training.checkpoint(folder, 12), before)
    training.resume(folder)
    assert newest(folder) == "batch-00000016"


def test_twelve_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    """See `tests.killed_rounds`."""
    printed = tmp_path / "printed"
    status = training.wait(
        training.fork(lambda: killed_rounds.main(tmp_path, 0), printed)
    )
    said = printed.read_text()
    assert status == 0, said
    assert said.count("\nround ") == 12
    assert "the end is the same" in said
