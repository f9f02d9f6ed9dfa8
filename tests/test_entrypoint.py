"""`experiment.entrypoint`: what an entrypoint runs, and which trial it names."""

import pytest

from determined_amp.experiment.entrypoint import Task, with_trial
from determined_amp.experiment.experiment import experiment_in, parse
from determined_amp.experiment.overrides import with_overrides
from tests.training import STRANGE


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


@pytest.mark.parametrize(
    "program",
    [
        "determined.launch.torch_distributed",
        "determined.launch.horovod --fused 1",
        "determined.exec.harness",
    ],
)
def test_launcher_of_determined_names_its_trial(program):
    entrypoint = f"python3 -m {program} --trial tests.strangers:Stranger"
    for written in (entrypoint, entrypoint.split()):
        config = {"entrypoint": written, "searcher": {"max_length": {"batches": 4}}}
        made = experiment_in({**config, "hyperparameters": {}}, "x")
        assert (made.trial, made.trial_key) == (
            "tests.strangers:Stranger",
            "entrypoint",
        )
        assert Task.of(config["entrypoint"], []) == Task("train")


@pytest.mark.parametrize(
    "words", ["python3 train.py", "python3 -m determined_amp find"]
)
def test_launcher_of_another_program_is_that_program(words):
    entrypoint = f"python3 -m determined.launch.torch_distributed {words}"
    assert Task.of(entrypoint, []).trial is None
    command = "find" if words.endswith("find") else ""
    assert Task.of(entrypoint, []) == Task(command)


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
