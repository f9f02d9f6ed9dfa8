"""`trial.fitting`: what `fit` takes from the configuration and from its caller."""

import pytest
import torch
from determined import pytorch

from determined_amp.amp.errors import ConfigError
from determined_amp.amp.plain_data import Values
from determined_amp.experiment.experiment import experiment_in
from determined_amp.experiment.overrides import with_overrides
from determined_amp.local.open_trial import open_trial
from determined_amp.trial.fitting import fit
from determined_amp.trial.mixed_precision import MixedPrecision
from tests.run_here import STRANGE
from tests.strangers import Stranger


@pytest.fixture
def given(monkeypatch):
    """What `fit` gives Determined's `Trainer`."""
    found = {}

    def take(trainer, **named):
        for name, it in named.items():
            found[name] = (type(it), it.value) if hasattr(it, "value") else it

    monkeypatch.setattr(pytorch.Trainer, "fit", take)
    return found


def fit_trial(config, **options):
    with open_trial(experiment_in(config, "test")) as found:
        fit(found.trial, found.context, **options)


def test_fit_takes_what_the_configuration_and_the_caller_say(given):
    changes = ["checkpoint_policy=all", "perform_initial_validation=true"]
    config = with_overrides(STRANGE, changes)
    fit_trial(config)
    expected = {
        "max_length": (pytorch.Batch, 12),
        "validation_period": (pytorch.Batch, 6),
        "checkpoint_period": (pytorch.Batch, 4),
        "reporting_period": (pytorch.Batch, 2),
        "checkpoint_policy": "all",
        "step_zero_validation": True,
        "latest_checkpoint": None,
    }
    assert given.items() >= expected.items()
    fit_trial(config, max_length=pytorch.Epoch(3), checkpoint_policy="none")
    expected |= {"max_length": (pytorch.Epoch, 3), "checkpoint_policy": "none"}
    assert given.items() >= expected.items()


def test_fit_sets_cudnn_benchmark_only_if_it_is_given(given, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    section: Values = {"max_length": {"epochs": 2}}
    hyperparameters = {"trial": STRANGE["entrypoint"], "training": section}
    fit_trial({"hyperparameters": hyperparameters})
    assert given["max_length"] == (pytorch.Epoch, 2)
    assert torch.backends.cudnn.benchmark
    section["cudnn_benchmark"] = False
    fit_trial({"hyperparameters": hyperparameters})
    assert not torch.backends.cudnn.benchmark


def test_fit_refuses_a_context_with_another_aggregation_frequency():
    words = (
        r"^experiment configuration: aggregation_frequency: got \d, .* made with 7;"
        r" allowed: "
    )
    with open_trial(experiment_in(STRANGE, "test")) as found:
        found.context._aggregation_frequency = 7
        with pytest.raises(ConfigError, match=words):
            fit(found.trial, found.context)


def fit_stranger(context):
    fit(Stranger(context), context)


@pytest.mark.parametrize("use", [MixedPrecision, fit_stranger])
def test_script_of_the_users_own_is_told_of_a_misplaced_precision(use):
    hparams = {"precision": "amp_fp16"}
    words = r"hyperparameters\.precision: got 'amp_fp16'"
    with (
        pytorch.init(hparams=hparams, exp_conf=dict(STRANGE)) as context,
        pytest.raises(ConfigError, match=words),
    ):
        use(context)


def test_script_of_the_users_own_is_told_of_a_missing_length():
    with (
        pytest.raises(ConfigError, match=r"training\.max_length: missing"),
        pytorch.init(hparams={}, exp_conf={"name": "own"}) as context,
    ):
        fit_stranger(context)


def test_script_of_the_users_own_trains_one_batch_in_determineds_test_mode(given):
    hparams = {"training": {"max_length": {"batches": 8}}}
    made = {"description": "[test-mode] own", "scheduling_unit": 1}
    with pytorch.init(hparams=hparams, exp_conf=made) as context:
        fit_stranger(context)
    assert given["max_length"] == given["reporting_period"] == (pytorch.Batch, 1)
