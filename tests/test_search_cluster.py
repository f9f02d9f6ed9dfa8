"""Entrypoints on a cluster whose master is a stub: they use the values that were sampled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import determined as det
import pytest
import torch
from determined import core, pytorch
from determined.common import storage
from determined.common.api import bindings

from determined_amp import __main__ as door
from determined_amp import cluster
from determined_amp.finder.advice import FoundScale
from determined_amp.local import open_trial
from determined_amp.search.search_plan import SearchPlan
from determined_amp.trial import determined_0_38, notes
from tests import searching


class Master(core.DummyTrainContext):
    """Takes the place of what reports to a master."""

    _trial_id = 1

    def __init__(self, tensorboard: Path) -> None:
        super().__init__(tensorboard)
        self.validations: list[tuple[int, dict[str, Any]]] = []
        self.others: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        self.early_exits: list[core.EarlyExitReason] = []
        self.metadata: dict[str, Any] = {}
        self.status = ""

    def _report_trial_metrics(
        self,
        group: str,
        steps_completed: int,
        metrics: dict[str, Any],
        batch_metrics: list[dict[str, Any]] | None = None,
    ) -> None:
        if group == "validation":
            self.validations.append((steps_completed, metrics))
        else:
            self.others.setdefault(group, []).append((steps_completed, metrics))

    def report_validation_metrics(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        self._report_trial_metrics("validation", steps_completed, metrics)

    def set_status(self, status: str) -> None:
        self.status = status

    def report_early_exit(self, reason: core.EarlyExitReason) -> None:
        self.early_exits.append(reason)


Task = Callable[..., Master]


@pytest.fixture
def masters() -> list[Master]:
    """The masters of all tasks so far."""
    return []


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masters: list[Master]) -> Task:
    """Runs one trial of a search as a task of a cluster; what its master was told."""
    monkeypatch.chdir(tmp_path)

    def note(context: pytorch.PyTorchTrialContext, **values: Any) -> None:
        masters[-1].metadata.update(values)

    for module in (cluster, notes):
        monkeypatch.setattr(module, "note_on_master", note)

    def run(search: str, *overrides: str, seed: int = 1) -> Master:
        config = searching.load(tmp_path, search, *overrides, "checkpoint_policy=none")
        sampled = config["hyperparameters"]
        if config["searcher"]["name"] != "single":
            plan = SearchPlan(config)
            sampled = plan.space.nested(next(plan.space.probes()))
        trial = SimpleNamespace(
            _config=config, _steps_completed=0, hparams=sampled, trial_seed=seed
        )
        info = SimpleNamespace(
            task_type="TRIAL",
            latest_checkpoint=None,
            trial=trial,
            slot_ids=[0],
            container_addrs=["localhost"],
        )
        master = Master(tmp_path / "tensorboard")
        masters.append(master)

        @contextmanager
        def init(
            hparams: dict[str, Any], aggregation_frequency: int
        ) -> Iterator[pytorch.PyTorchTrialContext]:
            torch.manual_seed(trial.trial_seed)
            with open_trial.throwaway_core_context() as core_context:
                core_context.train = master
                core_context.checkpoint = core.DummyCheckpointContext(
                    core_context.distributed,
                    storage.SharedFSStorageManager(str(tmp_path / "checkpoints")),
                )
                yield pytorch.PyTorchTrialContext(
                    core_context=core_context,
                    trial_seed=trial.trial_seed,
                    hparams=hparams,
                    slots_per_trial=1,
                    num_gpus=0,
                    exp_conf=trial._config,
                    aggregation_frequency=aggregation_frequency,
                    steps_completed=0,
                    managed_training=True,
                    debug_enabled=False,
                )

        monkeypatch.setenv("DET_TASK_TYPE", "TRIAL")
        monkeypatch.setattr(det, "get_cluster_info", lambda: info)
        monkeypatch.setattr(pytorch, "init", init)
        monkeypatch.setattr(pytorch._PyTorchTrialController, "_checkpoint", lambda *a, **k: None)
        command = config["entrypoint"].split()
        assert door.main(command[command.index("determined_amp") + 1 :]) == 0
        return master

    return run


def test_score_does_not_depend_on_the_seed_of_the_trial(task: Task, masters: list[Master]) -> None:
    (one,), (two,) = (
        task("loss_scale_grid.yaml", *searching.THREE_SCALES, seed=seed).validations
        for seed in (1, 2)
    )
    batches, metrics = one
    assert batches == 2
    assert metrics["init_scale_log2"] == 4.0
    assert {"loss_scale_score", "steps_lost", "backward_headroom_bits", "flushed_share"} <= {
        *metrics
    }
    assert one == two
    noted = {"precision": "amp_fp16", "init_scale": 16.0, "seed": 20261121, "failure": None}
    assert all(master.metadata.items() >= noted.items() for master in masters)


def test_finder_reports_window_choice_and_curves(
    task: Task, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    master = task("find_loss_scale.yaml")
    ((batches, metrics),) = master.validations
    assert batches == 4
    assert metrics["init_scale_log2"] == metrics["window_top_log2"] - 6 >= 10
    assert metrics["window_bits"] > 0
    assert master.metadata["init_scale"] == 2.0 ** metrics["init_scale_log2"]
    scales, shares = zip(*master.others["loss_scale"], strict=True)
    assert scales == tuple(range(1, scales[-1] + 1))
    for scale, share in zip(scales, shares, strict=True):
        assert (share["overflow_share"] > 0) == (scale > metrics["window_top_log2"])
    assert "verdict: default is fine" in capsys.readouterr().out
    (file,) = tmp_path.glob("checkpoints/*/loss_scale.json")
    assert FoundScale.read(file).finding.choice_log2 == metrics["init_scale_log2"]
    assert json.loads((file.parent / "metadata.json").read_text())["steps_completed"] == 4


@pytest.mark.parametrize(
    "search",
    [
        ("loss_scale_grid.yaml", *searching.THREE_SCALES),
        # Each skipped step halves the scale, so a training ends after a few.
        ("loss_scale_asha.yaml", *searching.SHORT_ASHA, "hyperparameters.amp.min_scale=0.5"),
    ],
    ids=["score", "train"],
)
def test_trial_that_cannot_train_ends_its_log_with_the_reason(
    search: tuple[str, ...],
    task: Task,
    masters: list[Master],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises((SystemExit, AssertionError)):
        task(*search, "hyperparameters.trial=tests.mortal:OverflowingTrial")
    last = capsys.readouterr().err.splitlines()[-1]
    failure = masters[-1].metadata["failure"]
    assert last in (f"invalid trial: {failure}", f"no retry can help: {failure}")
    assert "overflow" in failure
    assert masters[-1].status
    assert len(masters[-1].status) <= 100


def test_trained_trial_uses_the_sampled_values(task: Task) -> None:
    validations = task("loss_scale_asha.yaml", *searching.SHORT_ASHA).validations
    assert [batches for batches, _ in validations] == [2, 4, 6, 8]


def test_trial_ends_after_the_validation_at_which_its_search_stops_it(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = iter([False, True])
    monkeypatch.setattr(determined_0_38, "is_stopped_by_search", lambda _: next(stops))
    validations = task("loss_scale_asha.yaml", *searching.SHORT_ASHA).validations
    assert [batches for batches, _ in validations] == [2, 4]


@pytest.mark.parametrize(
    ("answer", "stops"),
    [
        (bindings.trialv1State.STOPPING_COMPLETED, True),
        (bindings.trialv1State.RUNNING, False),
        (ConnectionError("the master is away"), False),
    ],
)
def test_master_that_marks_a_trial_stops_it(
    answer: Any, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_trial(session: object, *, trialId: int) -> Any:  # noqa: N803
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(trial=SimpleNamespace(state=answer))

    monkeypatch.setattr(bindings, "get_GetTrial", get_trial)
    train: Any = SimpleNamespace(_session=None, _trial_id=1)
    assert determined_0_38.is_stopped_by_search(train) is stops


def test_trial_seed_replaces_the_seed_of_the_platform(task: Task) -> None:
    def trained(seed_of_platform: int, trial_seed: int) -> list[tuple[int, dict[str, Any]]]:
        return task(
            "compare_precisions.yaml",
            f"hyperparameters.trial_seed={trial_seed}",
            "hyperparameters.amp.precision=amp_fp16",
            *searching.SHORT,
            seed=seed_of_platform,
        ).validations

    one, two, other = trained(1, 5), trained(2, 5), trained(2, 6)
    assert one == two
    assert one != other


def test_mistake_is_said_so_that_it_is_not_retried(
    task: Task, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        task("loss_scale_grid.yaml", "resources.slots_per_trial=2")
    assert "no retry can help: " in capsys.readouterr().err
