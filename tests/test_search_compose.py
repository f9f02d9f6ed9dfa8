"""A search is laid over its experiment, and a mistake in either is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from determined_amp.amp.fields import ConfigError
from determined_amp.experiment import experiment
from determined_amp.search.compose import compose
from determined_amp.search.run_trial import check_trial
from determined_amp.search.scale_metrics import batches_to_score
from tests import searching
from tests.test_configs import TRIALS, flat
from tests.training import ROOT

SEARCHES = sorted((ROOT / "hp_search").glob("loss_scale_*.yaml"))
COMPARISON = ROOT / "hp_search" / "compare_precisions.yaml"
SCORED = {"experiment": "experiment.yaml", "amp": {"init_scale": 3000.0}}


def composed(directory: Path, sampled: Any, *overrides: str) -> dict[str, Any]:
    config = searching.load(directory, "loss_scale_random.yaml", *overrides)
    return compose(config, sampled, directory)


class TestCompose:
    def test_changes_what_the_search_says_and_nothing_else(self, tmp_path: Path) -> None:
        found = composed(tmp_path, {**SCORED, "training": {"max_length": {"batches": 3}}})
        base = yaml.safe_load((tmp_path / "experiment.yaml").read_text())
        assert found["name"] == "loss-scale-random"
        assert found["searcher"]["name"] == "random"
        assert found["data"] == base["data"]
        ours, theirs = flat(found["hyperparameters"]), flat(base["hyperparameters"])
        assert ours.keys() == theirs.keys()
        assert {key for key in ours if ours[key] != theirs[key]} == {
            "amp.init_scale",
            "training.max_length.batches",
        }

    def test_data_of_the_search_is_laid_over_too(self, tmp_path: Path) -> None:
        found = composed(tmp_path, SCORED, "data={channels: 3}")
        assert found["data"]["channels"] == 3
        assert found["data"]["dataset"] == "digits"

    def test_a_length_is_replaced_whatever_its_unit(self, tmp_path: Path) -> None:
        found = composed(tmp_path, {**SCORED, "training": {"max_length": {"epochs": 1}}})
        assert found["hyperparameters"]["training"]["max_length"] == {"epochs": 1}

    @pytest.mark.parametrize(
        ("sampled", "used"), [(3000.0, 4096.0), (2896.0, 2048.0), (2897.0, 4096.0), (1, 1.0)]
    )
    def test_sampled_scale_becomes_the_nearest_power_of_two(
        self, sampled: float, used: float, tmp_path: Path
    ) -> None:
        found = composed(tmp_path, {**SCORED, "amp": {"init_scale": sampled}})
        assert found["hyperparameters"]["amp"]["init_scale"] == used

    @pytest.mark.parametrize("space", ["3000.0", "{type: categorical, vals: [3000.0]}"])
    def test_a_scale_that_is_written_down_is_left_alone(self, space: str, tmp_path: Path) -> None:
        found = composed(tmp_path, SCORED, f"hyperparameters.amp.init_scale={space}")
        assert found["hyperparameters"]["amp"]["init_scale"] == 3000.0

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            (None, "hyperparameters.experiment: missing; allowed: the path of an experiment"),
            (3, "got 3"),
            ("nowhere.yaml", "nowhere.yaml is not a file in"),
            ("../outside.yaml", "not a path inside"),
            ("/etc/hostname", "not a path inside"),
            ("search.yaml", "is itself a search"),
            ("empty.yaml", "has no hyperparameters"),
        ],
    )
    def test_experiment_that_cannot_be_used_is_named(
        self, name: object, words: str, tmp_path: Path
    ) -> None:
        (tmp_path / "context").mkdir()
        (tmp_path / "outside.yaml").write_text("hyperparameters: {}")
        (tmp_path / "context" / "empty.yaml").write_text("name: x")
        with pytest.raises(ConfigError) as refused:
            composed(tmp_path / "context", {**SCORED, "experiment": name})
        assert words in str(refused.value)

    def test_seed_of_the_search_is_that_of_the_experiment(self, tmp_path: Path) -> None:
        found = composed(tmp_path, {**SCORED, "seed": 7})
        assert found["reproducibility"]["experiment_seed"] == 7
        assert "seed" not in found["hyperparameters"]
        assert composed(tmp_path, SCORED)["reproducibility"]["experiment_seed"] == 20261121

    @pytest.mark.parametrize("seed", [-1, 2**32, 1.0, True, "1"])
    def test_seed_that_is_none_is_named(self, seed: object, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"hyperparameters\.seed: got .*; allowed: an integer"
        ):
            composed(tmp_path, {**SCORED, "seed": seed})


@pytest.mark.parametrize("path", SEARCHES, ids=lambda path: path.stem)
class TestEverySearch:
    @pytest.mark.parametrize("trial", TRIALS)
    def test_works_for_every_trial_by_one_key(
        self, trial: str, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(ROOT)
        config = yaml.safe_load(path.read_text())
        config["hyperparameters"]["experiment"] = f"experiment_configs/{trial}/amp.yaml"
        plan = searching.plan(config)
        probes = list(plan.space.probes())
        assert len(probes) >= 2
        for probe in probes:
            found = check_trial(config, plan.space.nested(probe))
            assert found.hparams.trial.startswith(f"trials.{trial}:")

    def test_header_gives_the_commands_of_this_file(self, path: Path) -> None:
        header = path.read_text().split("\nname:")[0]
        assert f"det experiment create hp_search/{path.name} ." in header
        assert f"-m determined_amp search hp_search/{path.name}" in header
        assert "--config hyperparameters.experiment=" in header

    def test_name_says_which_file_it_is(self, path: Path) -> None:
        assert yaml.safe_load(path.read_text())["name"] == path.stem.replace("_", "-")

    def test_range_holds_the_default_scale(self, path: Path) -> None:
        """So that a search can say that the default was right."""
        space = yaml.safe_load(path.read_text())["hyperparameters"]["amp"]["init_scale"]
        assert (space["type"], space["base"]) == ("log", 2.0)
        assert space["minval"] <= 16 <= space["maxval"]

    def test_user_errors_are_not_retried(self, path: Path) -> None:
        (policy,) = yaml.safe_load(path.read_text())["log_policies"]
        assert policy["action"] == "cancel_retries"
        assert "no retry can help: " in policy["pattern"]


@pytest.mark.parametrize("trial", TRIALS)
class TestComparison:
    """Its trials are the experiments of the YAMLs that lie beside each other."""

    @pytest.fixture
    def config(self, trial: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        monkeypatch.chdir(ROOT)
        found: dict[str, Any] = yaml.safe_load(COMPARISON.read_text())
        found["hyperparameters"]["experiment"] = f"experiment_configs/{trial}/amp.yaml"
        return found

    def test_each_precision_is_the_sibling_of_that_name(
        self, trial: str, config: dict[str, Any]
    ) -> None:
        plan = searching.plan(config)
        points = [plan.space.nested(point) for point in plan.grid]
        assert len(points) == 20
        for point in points:
            name = {"amp_fp16": "amp", "amp_bf16": "bf16"}.get(
                point["amp"]["precision"], point["amp"]["precision"]
            )
            path = ROOT / f"experiment_configs/{trial}/{name}.yaml"
            sibling = experiment.parse(yaml.safe_load(path.read_text()), str(path))
            found = check_trial(config, point)
            assert (found.hparams, found.data) == (sibling.hparams, sibling.data)
            assert found.seed == point["seed"]


def test_header_of_the_comparison_gives_its_commands() -> None:
    header = COMPARISON.read_text().split("\nname:")[0]
    assert "det experiment create hp_search/compare_precisions.yaml ." in header
    assert "-m determined_amp search hp_search/compare_precisions.yaml" in header
    assert "-m determined_amp report precision" in header


def test_grid_has_every_power_of_two_of_its_range() -> None:
    config = yaml.safe_load((ROOT / "hp_search/loss_scale_grid.yaml").read_text())
    scales = [point["amp.init_scale"] for point in searching.plan(config).grid]
    assert scales == [2.0**k for k in reversed(range(25))]


def test_scored_batches_are_the_length_of_the_trial(tmp_path: Path) -> None:
    found = composed(tmp_path, {**SCORED, "training": {"max_length": {"batches": 3}}})
    assert batches_to_score(experiment.parse(found, "search")) == 3
