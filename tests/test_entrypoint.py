"""`experiment.entrypoint`: what an entrypoint runs, and which trial it names."""

import pytest

from determined_amp.experiment.entrypoint import Task, named_trial, with_trial
from determined_amp.experiment.experiment import experiment_in, parse
from determined_amp.experiment.overrides import with_overrides
from tests.run_here import STRANGE


@pytest.mark.parametrize(
    "entrypoint",
    [
        "python3 -m determined_amp train --trial tests.strangers:make",
        ["python3", "-m", "determined_amp", "find", "--trial=tests.strangers:make"],
    ],
    ids=["text", "list"],
)
def test_trial_is_the_one_that_the_command_of_the_entrypoint_names(entrypoint):
    """It counts on a cluster, too, and though the hyperparameters name another."""
    config = with_overrides(STRANGE, ["hyperparameters.trial=tests.strangers:Greedy"])
    parsed = parse({**config, "entrypoint": entrypoint}, "test")
    again = parse(parsed.config, "test")
    assert parsed.trial == again.trial == "tests.strangers:make"


@pytest.mark.parametrize("runs", ["train", "train --trial trials.mlp:MLPTrial"])
def test_trial_of_the_option_is_that_of_the_configuration_read_again(runs):
    config = with_overrides(STRANGE, ["hyperparameters.trial=trials.mlp:MLPTrial"])
    given = {**config, "entrypoint": f"python3 -m determined_amp {runs}"}
    option = "tests.strangers:Greedy"
    made = experiment_in(given, "x", trial=option)
    again = experiment_in(made.config, "x")
    assert again.trial == made.trial == option
    assert again.config == made.config


LAUNCH = "python3 -m determined.launch"


@pytest.mark.parametrize(
    ("entrypoint", "verb", "trial"),
    [
        (f"{LAUNCH}.torch_distributed --trial a:B", "train", "a:B"),
        (f"{LAUNCH}.horovod --fused 1 --trial a:B", "train", "a:B"),
        ("python3 -m determined.exec.harness --trial a:B", "train", "a:B"),
        ("python3 train.py --trial a:B", "", ""),
        (f"{LAUNCH}.torch_distributed python3 train.py", "", ""),
        (f"{LAUNCH}.torch_distributed python3 -m determined_amp find", "find", ""),
    ],
)
def test_launcher_of_determined_trains_its_trial_or_runs_its_program(
    entrypoint, verb, trial
):
    for written in (entrypoint, entrypoint.split()):
        assert Task.of(written, []) == Task(verb)
        named = (trial, "entrypoint" if trial else "")
        assert named_trial({"entrypoint": written}) == named


def test_entrypoint_with_an_unclosed_quotation_names_no_trial():
    unclosed = "python3 -m determined_amp train --trial 'a"
    assert Task.of(unclosed, []).trial is None


@pytest.mark.parametrize(
    ("entrypoint", "runs"),
    [
        ("python3 train.py", "train --trial a:B"),
        ("old:Trial", "train --trial a:B"),
        (
            ["python3", "-m", "determined_amp", "train", "--trial", "old:Trial"],
            "train --trial old:Trial --trial a:B",
        ),
        (None, "train --trial a:B"),
        (
            "python3 -m determined_amp score --batches 8",
            "score --batches 8 --trial a:B",
        ),
    ],
)
def test_option_names_the_trial_of_any_entrypoint(entrypoint, runs):
    config = with_trial({"entrypoint": entrypoint}, "a:B")
    assert config["entrypoint"] == f"python3 -m determined_amp {runs}"
    assert Task.of(config["entrypoint"], []).trial == "a:B"
    assert with_trial(config, None) is config


def test_batches_of_a_score_that_are_no_number_are_a_mistake():
    problems = []
    for batches in ("0", "x"):
        entrypoint = f"python3 -m determined_amp score --batches {batches}"
        Task.of(entrypoint, problems)
    assert problems == [
        f"--batches: got {batches!r}; allowed: an integer from 1 to 1000"
        for batches in ("0", "x")
    ]
