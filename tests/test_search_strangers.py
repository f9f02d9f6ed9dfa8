"""Searches and comparisons over the experiment of a stranger, in Determined's own form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from determined_amp.amp.fields import ConfigError
from determined_amp.cli import search as command
from determined_amp.experiment import experiment
from determined_amp.experiment.overrides import with_overrides
from determined_amp.experiment.training import Length
from determined_amp.search.compose import compose
from determined_amp.search.run_trial import check_trial
from determined_amp.search.scale_metrics import batches_to_score
from determined_amp.search.study_file import read_study
from tests import searching, training

STRANGER: dict[str, Any] = {
    "entrypoint": "tests.strangers:WithHparams",
    "hyperparameters": {"lr": 0.1},
    "searcher": {"name": "single", "metric": "val_loss", "max_length": {"batches": 8}},
    "min_validation_period": {"batches": 4},
    "scheduling_unit": 2,
    "optimizations": {"aggregation_frequency": 2, "average_aggregated_gradients": False},
}


pytestmark = pytest.mark.usefixtures("_workers_import_once")


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stranger.yaml").write_text(yaml.safe_dump(STRANGER))
    monkeypatch.chdir(tmp_path)


def search(name: str, *overrides: str) -> dict[str, Any]:
    path = training.ROOT / "hp_search" / name
    ours = ("hyperparameters.experiment=stranger.yaml", "searcher.metric=val_loss", *overrides)
    return with_overrides(experiment.read_yaml(str(path)), ours)


def composed(config: dict[str, Any], **sampled: Any) -> experiment.Experiment[Any]:
    given = {"experiment": "stranger.yaml", **sampled}
    return experiment.parse(compose(config, given, Path.cwd()), "composed")


def test_trial_and_training_come_from_the_experiment() -> None:
    found = composed(search("compare_precisions.yaml"), seed=3, amp={"precision": "amp_bf16"})
    assert found.trial == "tests.strangers:WithHparams"
    assert found.hyperparameters == {"lr": 0.1, "amp": {"precision": "amp_bf16"}}
    assert found.max_length == Length(batches=8)
    assert found.training.validation_period == Length(batches=4)
    assert found.training.reporting_period == Length(batches=2)
    assert found.aggregation_frequency == 2
    assert not found.plan.average_aggregated_gradients
    assert found.seed == 3
    assert found.platform.searcher.name == "grid"


def test_defaults_of_the_master_do_not_replace_the_experiments_lengths() -> None:
    completed = {
        **search("compare_precisions.yaml"),
        "min_validation_period": {"batches": 0},
        "scheduling_unit": 100,
        "optimizations": {"aggregation_frequency": 1, "average_aggregated_gradients": True},
    }
    found = composed(completed, seed=3)
    assert found.training.validation_period == Length(batches=4)
    assert found.aggregation_frequency == 2
    own = composed({**completed, "scheduling_unit": 5}, seed=3)
    assert own.training.reporting_period == Length(batches=5)


def test_lengths_of_the_search_go_before_the_experiments() -> None:
    lengths = {
        "max_length": {"epochs": 1},
        "validation_period": {"batches": 3},
        "checkpoint_period": {"batches": 2},
        "reporting_period": {"batches": 1},
    }
    found = composed(search("compare_precisions.yaml"), training=lengths)
    assert found.max_length == Length(epochs=1)
    assert found.training.validation_period == Length(batches=3)
    assert found.training.checkpoint_period == Length(batches=2)
    assert found.training.reporting_period == Length(batches=1)
    assert "training" not in found.hyperparameters  # the trial gets no key that it does not know


@pytest.mark.parametrize(
    "training_section", [{"cudnn_benchmark": True}, {"reporting_period": {"epochs": 1}}]
)
def test_what_determineds_form_has_no_place_for_is_named(training_section: Any) -> None:
    (key,) = training_section
    with pytest.raises(ConfigError, match=rf"hyperparameters\.training\.{key}: got "):
        composed(search("compare_precisions.yaml"), training=training_section)


def test_experiment_of_our_form_keeps_it() -> None:
    ours = {
        "hyperparameters": {
            "trial": "tests.strangers:WithHparams",
            "training": {"max_length": {"batches": 8}},
        }
    }
    Path("stranger.yaml").write_text(yaml.safe_dump(ours))
    found = composed(search("compare_precisions.yaml"), training={"max_length": {"batches": 2}})
    assert found.max_length == Length(batches=2)
    assert found.hyperparameters["training"] == {"max_length": {"batches": 2}}


def test_early_stopping_checks_the_lengths_of_the_experiment() -> None:
    config = search("loss_scale_asha.yaml")
    given = {"experiment": "stranger.yaml", "amp": {"precision": "amp_fp16"}}
    lengths = config["hyperparameters"]["training"]
    check_trial(config, {**given, "training": lengths})
    with pytest.raises(ConfigError, match=r"max_length: is not searcher\.max_time"):
        check_trial(config, given)


def test_scoring_needs_a_section_amp() -> None:
    config = search("loss_scale_grid.yaml", "searcher.metric=loss_scale_score")
    lengths = {"training": config["hyperparameters"]["training"]}
    with pytest.raises(ConfigError, match=r"hyperparameters\.amp: missing"):
        batches_to_score(composed(config, **lengths))
    found = composed(config, amp={"precision": "amp_fp16", "init_scale": 4.0}, **lengths)
    assert batches_to_score(found) == 4


def test_comparison_trains_a_stranger_with_each_seed() -> None:
    """Its loader processes are forks, as in a training: they need no data that can be pickled."""
    loading = {"entrypoint": "tests.strangers:WithLoaderProcesses", "optimizations": {}}
    Path("stranger.yaml").write_text(yaml.safe_dump({**STRANGER, **loading}))
    config = search(
        "compare_precisions.yaml",
        "hyperparameters.seed.vals=[1, 2]",
        "hyperparameters.amp.precision.vals=[fp32]",
    )
    Path("search.yaml").write_text(yaml.safe_dump(config))
    assert command.main(["search.yaml"]) == 0
    study = read_study(searching.only_folder(Path.cwd()))
    assert [trial.state for trial in study.trials] == ["complete", "complete"]
    assert [[batches for batches, _ in trial.history] for trial in study.trials] == [[4, 8]] * 2
    one, two = (trial.value for trial in study.trials)
    assert one != two
    recorded = yaml.safe_load((study.trials[0].folder / "config.yaml").read_text())
    assert recorded["entrypoint"] == "tests.strangers:WithLoaderProcesses"
