"""Entrypoints on a cluster whose master is a stub: they use the values that were
sampled.
"""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from determined.common.api import bindings
from determined.tensorboard.base import get_metric_writer

from determined_amp import __main__ as door
from determined_amp import cluster
from determined_amp.check.finding import CheckFinding, CheckFindings, Level
from determined_amp.search.space import read_space
from determined_amp.trial import determined_private
from determined_amp.trial.controller import SafeController
from tests import searching
from tests.cluster_task import start_task


@pytest.fixture
def masters():
    """The masters of all tasks so far."""
    return []


@pytest.fixture
def task(tmp_path, monkeypatch, masters):
    """Runs one trial of a search as a task of a cluster; what its master was told."""
    monkeypatch.chdir(tmp_path)

    def run(search, *overrides, seed=1, stops=()):
        config = searching.load(search, *overrides, "checkpoint_policy=none")
        sampled = config["hyperparameters"]
        if config["searcher"]["name"] != "single":
            space = read_space(sampled, [])
            axes = [*space.axes]
            lowest = {
                a.name: (*a.grid, getattr(a.distribution, "low", 0)) for a in axes
            }
            sampled = space.nested({name: values[0] for name, values in lowest.items()})
        masters.append(start_task(monkeypatch, tmp_path, config, sampled, seed=seed))
        masters[-1].stops.extend(stops)
        monkeypatch.setattr(SafeController, "_checkpoint", lambda *a, **k: None)
        command = config["entrypoint"].split()
        assert door.main(command[command.index("determined_amp") + 1 :]) == 0
        return masters[-1]

    return run


def test_score_does_not_depend_on_the_seed_of_the_trial(task, masters):
    for seed in (1, 2):
        task("loss_scale_grid.yaml", *searching.THREE_SCALES, seed=seed)
    (one,), (two,) = (master.reports["validation"] for master in masters)
    assert one == two
    batches, metrics = one
    assert (batches, metrics["init_scale_log2"]) == (2, 4.0)
    for master in masters:
        noted = {"precision": "amp_fp16", "init_scale": 16.0, "seed": 20261121}
        assert master.metadata.items() >= noted.items()
        assert "failure" not in master.metadata
        settings = json.loads("".join(master.metadata["settings"]))
        assert settings["hyperparameters"]["amp"]["init_scale"] == 16.0
        assert settings["reproducibility"] == {"experiment_seed": 20261121}
        assert master.status == f"{metrics['steps_lost']:.3g} steps lost"


def test_finder_reports_its_choice_and_stores_its_finding(task, capsys, tmp_path):
    master = task("find_loss_scale.yaml")
    ((batches, metrics),) = master.reports["validation"]
    choice = metrics["init_scale_log2"]
    assert (batches, choice) == (4, 16)
    assert metrics["range_bits"] > 0
    assert master.metadata["init_scale"] == 2.0**choice
    assert master.status == f"init_scale 2^{choice}"
    assert "verdict: default is fine" in capsys.readouterr().out
    (file,) = tmp_path.glob("checkpoints/*/loss_scale.json")
    assert json.loads(file.read_text())["verdict"] == "default is fine"
    metadata = json.loads((file.parent / "metadata.json").read_text())
    assert metadata["steps_completed"] == 4


def test_check_leaves_the_number_of_faults_and_ends_its_log_with_them(
    task, monkeypatch, capsys, caplog
):
    def examine(*call):
        get_metric_writer()  # as Determined does for a task; it warns
        fault = CheckFinding("scaled", Level.FAULT, "it is scaled", (), "by 2", "x / 2")
        return CheckFindings([fault], seen="12 batches", trained=True)

    monkeypatch.setattr(cluster, "examine", examine)
    master = task("check.yaml")
    assert master.reports["validation"] == [(1, {"faults": 1})]
    assert (master.metadata, master.status) == ({"faults": 1}, "1 fault")
    assert "TensorFlow" not in caplog.text
    assert capsys.readouterr().out.startswith(
        "1 fault: 12 batches\n\nfault: it is scaled\n"
    )


@pytest.mark.parametrize(
    "search",
    [
        ("loss_scale_grid.yaml", *searching.THREE_SCALES),
        # Each skipped step halves the scale, so a training ends after a few.
        (
            "loss_scale_asha.yaml",
            *searching.SHORT_ASHA,
            "hyperparameters.amp.min_scale=0.5",
        ),
    ],
    ids=["score", "train"],
)
def test_trial_that_cannot_train_ends_its_log_with_the_reason(
    search, task, masters, capsys
):
    with pytest.raises((SystemExit, AssertionError)):
        task(*search, "hyperparameters.trial=tests.mortal:OverflowingTrial")
    last = capsys.readouterr().err.splitlines()[-1]
    failure = masters[-1].metadata["failure"]
    assert last in (f"invalid trial: {failure}", f"no retry can help: {failure}")
    assert "overflow" in failure
    assert masters[-1].status
    assert len(masters[-1].status) <= 100


def test_trial_ends_after_the_validation_at_which_its_search_stops_it(task):
    for stops, ends in (([], [2, 4, 6, 8]), ([False, True], [2, 4])):
        master = task("loss_scale_asha.yaml", *searching.SHORT_ASHA, stops=stops)
        assert [batches for batches, _ in master.reports["validation"]] == ends


@pytest.mark.parametrize(
    ("answer", "stops"),
    [
        (bindings.trialv1State.STOPPING_COMPLETED, True),
        (bindings.trialv1State.RUNNING, False),
        (ConnectionError("the master is away"), False),
    ],
    ids=["stopped", "running", "no answer"],
)
def test_trial_stops_where_the_master_has_marked_it(answer, stops, monkeypatch):
    def get_trial(session, *, trialId):  # noqa: N803
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(trial=SimpleNamespace(state=answer))

    monkeypatch.setattr(bindings, "get_GetTrial", get_trial)
    train: Any = SimpleNamespace(_session=None, _trial_id=1)
    assert determined_private.is_stopped_by_search(train) is stops


def test_trial_seed_replaces_the_seed_of_the_platform(task):
    def trained(seed_of_platform, trial_seed):
        return task(
            "compare_precisions.yaml",
            f"hyperparameters.trial_seed={trial_seed}",
            "hyperparameters.amp.precision=amp_fp16",
            *searching.SHORT,
            seed=seed_of_platform,
        ).reports["validation"]

    one, two, other = trained(1, 5), trained(2, 5), trained(2, 6)
    assert one == two
    assert one != other
