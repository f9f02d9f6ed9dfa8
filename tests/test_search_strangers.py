"""Searches and comparisons over a stranger's YAML in Determined's own form."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from determined_amp import __main__ as door
from determined_amp.amp.plain_data import Values
from determined_amp.experiment.overrides import with_overrides
from determined_amp.experiment.training import Length
from determined_amp.runs.run import RunState
from determined_amp.search.search_folder import read_search
from determined_amp.search.search_plan import SearchPlan
from tests import searching
from tests.training import write_yaml

STRANGER: Values = {
    "entrypoint": "tests.strangers:WithHparams",
    "hyperparameters": {"lr": 0.1},
    "searcher": {"name": "single", "metric": "val_loss", "max_length": {"batches": 8}},
    "reproducibility": {"experiment_seed": 7},
    "min_validation_period": {"batches": 4},
    "scheduling_unit": 2,
    "optimizations": {
        "aggregation_frequency": 2,
        "average_aggregated_gradients": False,
    },
}


pytestmark = pytest.mark.usefixtures("_workers_import_once", "_in_tmp_path")


SEEDS = "hyperparameters.trial_seed={type: categorical, vals: [1, 2]}"
PRECISIONS = "hyperparameters.amp.precision={type: categorical, vals: [fp32, amp_bf16]}"


def plan(*overrides: str) -> SearchPlan:
    """The search that the documentation's `--config` makes of a stranger's YAML."""
    return SearchPlan(with_overrides(STRANGER, ("searcher.name=grid", *overrides)))


def test_two_ranges_make_a_comparison_of_any_experiment() -> None:
    search = plan(SEEDS, PRECISIONS)
    assert len(search.points) == 4
    trial = search.experiment(
        0, {"lr": 0.1, "trial_seed": 3, "amp": {"precision": "amp_bf16"}}
    )
    assert trial.trial == "tests.strangers:WithHparams"
    assert trial.hyperparameters == {"lr": 0.1, "amp": {"precision": "amp_bf16"}}
    assert trial.max_length == Length(batches=8)
    assert trial.training.validation_period == Length(batches=4)
    assert trial.training.reporting_period == Length(batches=2)
    assert trial.aggregation_frequency == 2
    assert not trial.platform.optimizations.average_aggregated_gradients
    assert trial.seed == 3


def test_seed_of_the_trial_itself_is_an_ordinary_hyperparameter() -> None:
    search = plan("hyperparameters.seed={type: categorical, vals: [1, 2]}")
    trial = search.experiment(0, {"lr": 0.1, "seed": 2})
    assert trial.hyperparameters == {"lr": 0.1, "seed": 2}
    assert trial.seed == search.drawn_seed(0)


def test_scale_from_a_range_is_a_power_of_two_and_a_listed_one_is_not_changed() -> None:
    drawn = {"lr": 0.1, "amp": {"precision": "amp_fp16", "init_scale": 3000.0}}
    precision = "hyperparameters.amp.precision=amp_fp16"
    for space, used in (
        ("{type: log, base: 2.0, minval: 0, maxval: 24, count: 25}", 4096.0),
        ("{type: double, minval: 1, maxval: 9000, count: 3}", 4096.0),
        ("{type: categorical, vals: [3000.0]}", 3000.0),
        ("3000.0", 3000.0),
    ):
        search = plan(precision, f"hyperparameters.amp.init_scale={space}")
        trial = search.experiment(0, drawn)
        assert trial.amp is not None
        assert trial.amp.init_scale == used
        assert trial.config["hyperparameters"]["amp"]["init_scale"] == used


def test_trial_is_named_in_the_entrypoint() -> None:
    search = plan(
        "entrypoint=python3 -m determined_amp train --trial tests.strangers:WithHparams"
    )
    trial = search.experiment(0, {"lr": 0.1})
    assert trial.trial == "tests.strangers:WithHparams"
    assert trial.config["entrypoint"] == "tests.strangers:WithHparams"


def test_comparison_trains_a_stranger_with_each_seed() -> None:
    """Its loader processes are forks, as in a training: they need no data that can be
    pickled.
    """
    loading = {"entrypoint": "tests.strangers:WithLoaderProcesses", "optimizations": {}}
    overrides = ("searcher.name=grid", SEEDS)
    config = with_overrides({**STRANGER, **loading}, overrides)
    assert door.run(["search", write_yaml(Path(), config)]) == 0
    runs = read_search(searching.only_folder(Path.cwd())).runs
    assert [run.state for run in runs] == [RunState.COMPLETED, RunState.COMPLETED]
    assert [[batches for batches, _ in run.curve("val_loss")] for run in runs] == [
        [4, 8]
    ] * 2
    one, two = (run.metrics["val_loss"] for run in runs)
    assert one != two
    recorded = yaml.safe_load((Path(runs[0].name) / "config.yaml").read_text())
    assert recorded["entrypoint"] == "tests.strangers:WithLoaderProcesses"
