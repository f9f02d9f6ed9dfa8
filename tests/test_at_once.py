"""A mistake of the user is named before torch and the trial are imported, by every
command.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.overrides import with_overrides
from tests import training
from tests.precisions import write_run
from tests.training import ROOT

MLP = ROOT / "experiment_configs" / "mlp" / "amp.yaml"
COMMANDS = ("train", "audit", "find", "compare")

# Runs one command after the other in a fresh interpreter, since to start one takes
# seconds. There torch and the trial cannot be imported, so a command that tries to
# import them ends by that.
PROGRAM = """
import contextlib, io, json, sys
from determined_amp.__main__ import main
class Refused:
    def find_spec(name, *where):
        if name in ("torch", "determined.pytorch", "trials.mlp"):
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Refused)
ended = {}
for arguments in json.load(sys.stdin):
    printed, early = io.StringIO(), None
    with contextlib.redirect_stderr(printed):
        try:
            status = main(arguments)
        except ModuleNotFoundError as error:
            status, early = 1, error.name
    ended[" ".join(arguments)] = status, printed.getvalue(), early
json.dump(ended, open("ended.json", "w"))
"""

WRONG = (
    "hyperparameters.amp.precission=amp_fp16",
    "hyperparameters.global_batch_size=63",
    "resources.slots_per_trial=2",
)
# Of each file with mistakes: the sound one that it comes from, and what makes it wrong.
CHANGES = {
    "wrong.yaml": (
        MLP,
        (*WRONG, "hyperparameters.training.max_length={batch: 3}", "searchr={}"),
    ),
    "search.yaml": (
        ROOT / "hp_search" / "loss_scale_grid.yaml",
        (*WRONG, "entrypoint=python3 train.py", "searcher.max_trials=3"),
    ),
}

# What a YAML with four mistakes is told, in one go.
WRONG_KEYS = (
    "hyperparameters.amp.precission: ",
    "hyperparameters.global_batch_size: ",
    "hyperparameters.training.max_length.batch: ",
    "searchr: ",
)

# The same for a search, whose searcher, ranges and trials are wrong.
WRONG_SEARCH = (
    "searcher.max_trials: unknown key",
    "entrypoint: got 'python3 train.py'; ",
    "hyperparameters.amp.precission: ",
    "hyperparameters.global_batch_size: ",
)

# By command: what it says.
MISTAKES = {
    **{
        f"{name} no/such.yaml": ["no/such.yaml: cannot be read"]
        for name in (*COMMANDS, "search")
    },
    **{f"{name} wrong.yaml": WRONG_KEYS for name in COMMANDS},
    "search search.yaml": WRONG_SEARCH,
    **{
        f"{name} {MLP} --trial trials.mpl:X": [
            "--trial: got 'trials.mpl:X', which cannot be imported: 'trials' has no 'm"
        ]
        for name in COMMANDS
    },
    **{
        f"{name} {MLP} --trial trials.mlp:MLPTrail": ["did you mean 'MLPTrial'?"]
        for name in COMMANDS
    },
    f"check {MLP} --trial trials.mlp:MLPTrail": ["did you mean 'MLPTrial'?"],
    "check nofile.py": ["nofile.py: no such file"],
    "check": ["give an experiment YAML, or a SCRIPT.py that trains"],
    "check --explain clip_scald": ["did you mean 'clip_scaled'?"],
    "check nofile.yaml": ["nofile.yaml: cannot be read"],
    "report nofolder": ["nofolder: there is no such folder"],
    "find a.yaml --batchs 3": ["did you mean '--batches'?"],
    "trian": ["invalid choice: 'trian'"],
    "compare plain.yaml": ["hyperparameters.global_batch_size: missing; "],
}
REPORT = "report precision fp32 amp_fp16"
EXPLAIN = "check --explain clip_scaled"
Ended = dict[str, tuple[int, str, str | None]]
SOUND = f"audit {MLP} --config data.classes=1"


def write_files(folder: Path) -> None:
    plain = {
        "name": "plain",
        "entrypoint": "trials.mlp:MLPTrial",
        "hyperparameters": {},
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 3}},
    }
    (folder / "plain.yaml").write_text(yaml.safe_dump(plain))
    for name, (sound, mistakes) in CHANGES.items():
        config = with_overrides(read_yaml(str(sound)), mistakes)
        config.pop("reproducibility")  # which no command needs
        (folder / name).write_text(yaml.safe_dump(config))
    for name in ("fp32", "amp_fp16"):
        write_run(folder / name, name, 1)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Exit status and standard error of every command, and what it has imported too
    early.
    """
    folder = tmp_path_factory.mktemp("at_once")
    write_files(folder)
    commands = json.dumps(
        [command.split(" ") for command in (*MISTAKES, REPORT, EXPLAIN, SOUND)]
    )
    training.outcome("-c", PROGRAM, input=commands, cwd=folder, timeout=120, check=True)
    assert (folder / "fp32" / "precision.md").exists()
    results: Any = json.loads((folder / "ended.json").read_text())
    return {command: tuple(result) for command, result in results.items()}


@pytest.mark.parametrize("command", MISTAKES)
def test_command_names_every_mistake_before_it_imports_torch_or_the_trial(
    command: str, ended: Ended
) -> None:
    status, printed, early = ended[command]
    assert (status, early) == (2, None), printed
    assert all(text in printed for text in MISTAKES[command]), printed


@pytest.mark.parametrize("command", [REPORT, EXPLAIN])
def test_report_and_explanation_import_no_torch(command: str, ended: Ended) -> None:
    status, printed, early = ended[command]
    assert (status, early) == (0, None), printed


def test_command_on_a_sound_yaml_imports_torch(ended: Ended) -> None:
    """Negative control: what is imported is seen."""
    assert ended[SOUND][2] == "torch"
