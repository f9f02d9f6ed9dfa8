"""Each YAML of `hp_search` is an experiment of its own, and differs where it says so alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from determined_amp.experiment import experiment
from determined_amp.search.search_plan import SearchPlan
from determined_amp.search.task import Task, Verb
from tests.test_configs import CONFIGS, NAMES, ROOT, difference, flat, load

SEARCHES = ROOT / "hp_search"
SEARCHER = {f"searcher.{key}" for key in ("name", "max_concurrent_trials")}
SCORE = {"entrypoint", "searcher.metric"}


def _range(name: str, *keys: str) -> set[str]:
    """The dotted keys of a range in place of a value."""
    return {f"hyperparameters.{name}"} | {f"hyperparameters.{name}.{key}" for key in keys}


LOG = ("type", "base", "minval", "maxval")
# What each file changes of experiment_configs/mlp/amp.yaml.
DIFFERS = {
    "loss_scale_grid": SCORE | SEARCHER | _range("amp.init_scale", *LOG, "count"),
    "loss_scale_random": (
        SCORE | SEARCHER | {"searcher.max_trials"} | _range("amp.init_scale", *LOG)
    ),
    "loss_scale_asha": (
        SEARCHER
        | {f"searcher.{key}" for key in ("max_trials", "time_metric", "max_time")}
        | {f"searcher.{key}" for key in ("divisor", "mode")}
        | _range("learning_rate", *LOG)
        | _range("amp.init_scale", *LOG)
        | _range("amp.growth_interval", "type", "vals")
        | {f"hyperparameters.training.{p}_period.batches" for p in ("validation", "reporting")}
    ),
    "compare_precisions": (
        SEARCHER
        | {f"hyperparameters.trial_seed.{key}" for key in ("type", "vals")}
        | _range("amp.precision", "type", "vals")
    ),
    "find_loss_scale": {"entrypoint", "searcher.metric", "searcher.smaller_is_better"},
    "compare": {"entrypoint", "max_restarts"},
    "check": {"entrypoint", "max_restarts"},
}
VERBS = {
    "loss_scale_grid": Verb.SCORE,
    "loss_scale_random": Verb.SCORE,
    "loss_scale_asha": Verb.TRAIN,
    "compare_precisions": Verb.TRAIN,
    "find_loss_scale": Verb.FIND,
    "compare": Verb.COMPARE,
    "check": Verb.CHECK,
}


def test_files_are_exactly_those_declared() -> None:
    assert {path.stem for path in SEARCHES.glob("*")} == {*DIFFERS}


@pytest.mark.parametrize("name", DIFFERS)
class TestEveryFile:
    def test_search_differs_from_its_sibling_in_exactly_the_declared_keys(self, name: str) -> None:
        base = load(CONFIGS / "mlp" / "amp.yaml")
        assert difference(load(_path(name)), base) == NAMES | DIFFERS[name]

    def test_experiment_parses_and_its_entrypoint_is_a_command(self, name: str) -> None:
        config = load(_path(name))
        task = Task.of(config)
        assert task is not None
        assert task.verb is VERBS[name]
        if config["searcher"]["name"] == "single":
            experiment.parse(config, name)
        else:
            plan = SearchPlan(config)
            for probe in plan.space.probes():
                plan.experiment(0, plan.space.nested(probe))

    def test_comments_name_the_commands_of_this_file(self, name: str) -> None:
        text = _path(name).read_text()
        header = text.split("\nname:")[0]
        assert f"det experiment create hp_search/{name}.yaml ." in header
        assert "#   no cluster:     python -m determined_amp " in header
        assert "#   another trial:  " in header
        assert load(_path(name))["name"] == name.replace("_", "-")
        searched = {key for key in flat(load(_path(name))) if key.endswith(".type")}
        assert text.count("# searched") == len(searched)


def _path(name: str) -> Path:
    return SEARCHES / f"{name}.yaml"
