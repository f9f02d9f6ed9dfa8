"""`experiment.factory`: which classes and functions make a trial, and how."""

import pytest

from determined_amp.amp.errors import ConfigError
from determined_amp.experiment.experiment import experiment_in, parse
from determined_amp.experiment.factory import load_factory
from determined_amp.local.open_trial import open_trial
from tests import strangers
from tests.run_here import STRANGE, problems_of


def made(name):
    with open_trial(
        experiment_in(STRANGE, "test", trial=f"tests.strangers:{name}")
    ) as found:
        assert found.context.get_hparams() == {"lr": 0.1}
        return found.trial


@pytest.mark.parametrize("name", ["Stranger", "make", "WithDefaults"])
def test_class_or_function_makes_a_trial_of_the_context_alone(name):
    assert type(made(name)) in (strangers.Stranger, strangers.WithDefaults)


def test_second_required_argument_is_the_hyperparameters():
    assert made("WithHparams").given == {"lr": 0.1}


def test_trial_that_pops_its_hyperparameters_leaves_those_of_the_experiment():
    with open_trial(
        experiment_in(STRANGE, "test", trial="tests.strangers:Greedy")
    ) as found:
        assert found.context.get_hparams() == {}
        assert found.experiment.hyperparameters == {"lr": 0.1}
    assert STRANGE["hyperparameters"] == {"lr": 0.1}


def test_hparams_of_a_trial_that_are_no_settings_class_are_left_alone():
    made = parse(STRANGE, "test", trial="tests.strangers:WithMarkers")
    assert made.hparams is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("WithTokenizer", ", which takes (context, hparams, tokenizer); "),
        (
            "make_without",
            "which takes (); allowed: (context) or (context, hparams)",
        ),
        ("SAMPLES", "is not a PyTorchTrial"),
    ],
)
def test_trial_that_cannot_be_made_is_refused_before_anything_starts(name, words):
    (problem,) = problems_of(STRANGE, trial=f"tests.strangers:{name}")
    assert problem.startswith(f"--trial: got 'tests.strangers:{name}', which ")
    assert words in problem


def test_function_that_makes_no_trial_is_named():
    with pytest.raises(ConfigError, match="make_nothing: made NoneType"):
        made("make_nothing")


def test_name_with_a_dot_is_looked_up_in_the_class():
    with pytest.raises(ValueError, match="which is not a PyTorchTrial"):
        load_factory("tests.strangers:WithMarkers.Hparams")
    with pytest.raises(ValueError, match="'Stranger' has no attribute 'Nope'"):
        load_factory("tests.strangers:Stranger.Nope")
