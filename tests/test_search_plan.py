"""The `searcher` section: what is read from it, and when `adaptive_asha` first
compares.
"""

from __future__ import annotations

import json

import pytest

from determined_amp.amp.errors import ConfigError
from determined_amp.experiment.experiment import experiment_in
from determined_amp.experiment.overrides import with_overrides
from determined_amp.search.search_folder import Search
from determined_amp.search.search_plan import (
    AshaSearcher,
    SearchPlan,
    read_searcher,
)
from tests import searching
from tests.run_here import STRANGE

ASHA = {
    "name": "adaptive_asha",
    "metric": "validation_loss",
    "smaller_is_better": True,
    "max_trials": 16,
    "time_metric": "batches",
    "max_time": 800,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 50),  # 50, 200, 800
        ({"max_time": 937}, 58),
        ({"max_trials": 3}, 800),  # too few for a second rung
        ({"max_rungs": 2}, 200),
        ({"max_trials": 1000, "divisor": 10, "max_time": 1000}, 1),
        ({"max_time": 2}, 2),
    ],
)
def test_asha_first_compares_after_its_lowest_rung(changes, expected):
    searcher = read_searcher({**ASHA, **changes}, [])
    assert isinstance(searcher, AshaSearcher)
    assert searcher.first_rung() == expected


def test_random_points_depend_on_the_seed_of_the_search_alone():
    def drawn(seed):
        changes = ("searcher.max_trials=3", f"reproducibility.experiment_seed={seed}")
        return SearchPlan(searching.load("loss_scale_random.yaml", *changes)).points

    one, again, other = drawn(1), drawn(1), drawn(2)
    assert one == again != other
    assert len({point["amp.init_scale"] for point in one}) == 3


def test_precisions_of_a_comparison_take_turns_seed_by_seed():
    ranges = ("amp.precision.vals=[fp32, amp_fp16]", "trial_seed.vals=[1, 2, 3]")
    changes = [f"hyperparameters.{values}" for values in ranges]
    points = SearchPlan(searching.load("compare_precisions.yaml", *changes)).points
    values = [
        (json.loads(p["trial_seed"]), json.loads(p["amp.precision"])) for p in points
    ]
    assert values == [
        (3, "amp_fp16"),
        (3, "fp32"),
        (2, "fp32"),
        (2, "amp_fp16"),
        (1, "amp_fp16"),
        (1, "fp32"),
    ]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"name": "bayes"}, "name"),
        ({"max_trails": 3}, "max_trails"),
        ({"max_time": None}, "max_time"),
        ({"time_metric": "records"}, "time_metric"),
    ],
)
def test_mistake_in_the_searcher_names_its_key(changes, key):
    search = searching.load("loss_scale_asha.yaml")
    with pytest.raises(ConfigError) as caught:
        SearchPlan({**search, "searcher": {**ASHA, **changes}})
    assert f"searcher.{key}" in {problem.key for problem in caught.value.problems}


def test_missing_length_is_named_once_with_its_key():
    with pytest.raises(ConfigError) as caught:
        SearchPlan({**STRANGE, "searcher": ASHA})
    assert [p.key for p in caught.value.problems] == ["searcher.max_length"]


RANGE = {"type": "double"}


@pytest.mark.parametrize(
    ("searcher", "ranges", "searched", "compares"),
    [
        ("single", {}, [], False),
        ("grid", {"learning_rate": RANGE}, ["learning_rate"], False),
        # of weights
        ("grid", {"decoder": {"init_scale": RANGE}}, ["decoder.init_scale"], False),
        ("grid", {"amp": {"init_scale": RANGE}}, ["amp.init_scale"], False),
        ("grid", {"amp": {"precision": RANGE}}, ["amp.precision"], True),
    ],
)
def test_report_on_a_search_is_decided_by_its_searcher_and_its_ranges(
    searcher, ranges, searched, *, compares
):
    config = {"hyperparameters": ranges, "searcher": {"name": searcher}}
    search = Search("", (), config)
    assert (search.searched, search.compares) == (searched, compares)
    assert search.is_single is (searcher == "single")
    assert Search("", ()).is_single


def test_scale_from_a_range_is_a_power_of_two_and_a_listed_one_is_not_changed():
    drawn = {"lr": 0.1, "amp": {"precision": "amp_fp16", "init_scale": 3000.0}}
    changes = ["searcher.name=grid", "hyperparameters.amp.precision=amp_fp16"]
    for space, used in (
        ("{type: log, base: 2.0, minval: 0, maxval: 24, count: 25}", 4096.0),
        ("{type: double, minval: 1, maxval: 9000, count: 3}", 4096.0),
        ("{type: categorical, vals: [3000.0]}", 3000.0),
        ("3000.0", 3000.0),
    ):
        override = f"hyperparameters.amp.init_scale={space}"
        search = SearchPlan(with_overrides(STRANGE, [*changes, override]))
        trial = experiment_in(search.search, "x", hyperparameters=drawn)
        assert trial.amp is not None
        assert trial.amp.init_scale == used
        assert trial.config["hyperparameters"]["amp"]["init_scale"] == used


def test_seed_of_a_range_replaces_that_of_the_search():
    """A hyperparameter `seed` is the trial's own."""
    ranges = "{type: categorical, vals: [1, 2]}"
    for name, own in (("trial_seed", {}), ("seed", {"seed": 2})):
        override = f"hyperparameters.{name}={ranges}"
        search = SearchPlan(with_overrides(STRANGE, ["searcher.name=grid", override]))
        trial, _ = search.trials[0]
        assert trial.hyperparameters == {"lr": 0.1, **own}
        assert trial.seed == (search.drawn_seed(0) if own else 2)


def test_length_of_older_versions_is_refused_with_the_keys_that_a_master_takes():
    older = with_overrides(
        STRANGE,
        [
            "hyperparameters.lr={type: double, minval: 0.01, maxval: 0.1}",
            "searcher.name=adaptive_asha",
            "searcher.max_trials=4",
        ],
    )
    with pytest.raises(ConfigError) as caught:
        SearchPlan(older)
    assert [*caught.value.problems] == [
        "searcher.time_metric: missing; allowed: a string",
        "searcher.max_time: missing; allowed: an integer >= 1",
    ]
    times = ["searcher.time_metric=batches", "searcher.max_time=16"]
    assert len(SearchPlan(with_overrides(older, times)).trials) == 4
