"""A mistake of the user is one sentence and exit status 2, in every command.

Most are named before torch and the trial are imported, which takes seconds.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from determined_amp.amp.plain_data import Values
from determined_amp.compare import runs
from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.overrides import with_overrides
from tests import run_here, strangers
from tests.precisions import write_run
from tests.reporting import scored, write_study
from tests.run_here import ROOT

MLP = ROOT / "experiment_configs" / "mlp" / "amp.yaml"
BF16 = MLP.with_name("bf16.yaml")
GRID = ROOT / "hp_search" / "loss_scale_grid.yaml"
TRAINING = ("train", "audit", "find", "compare")

PLAIN: Values = {
    "name": "plain",
    "entrypoint": "trials.mlp:MLPTrial",
    "hyperparameters": {},
    "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 3}},
}
WRONG = (
    "hyperparameters.amp.precission=amp_fp16",
    "hyperparameters.global_batch_size=63",
    "resources.slots_per_trial=2",
)
# Each file with mistakes: the sound one that it comes from, and what makes it wrong.
CHANGES = {
    "wrong.yaml": (
        MLP,
        (*WRONG, "hyperparameters.training.max_length={batch: 3}", "searchr={}"),
    ),
    "search.yaml": (
        GRID,
        (*WRONG, "entrypoint=python3 train.py", "searcher.max_trials=3"),
    ),
}
BATCH_SIZE = "--config hyperparameters.global_batch_size=4"

# Runs in a folder, the newest first.

# What each command says.
SAID_AT_ONCE = {
    **{
        f"{name} no/such.yaml": ["no/such.yaml: cannot be read"]
        for name in (*TRAINING, "search", "check")
    },
    **{
        f"{name} wrong.yaml": [
            "hyperparameters.amp.precission: ",
            "hyperparameters.global_batch_size: ",
            "hyperparameters.training.max_length.batch: ",
            "searchr: ",
        ]
        for name in TRAINING
    },
    "search search.yaml": [
        "searcher.max_trials: unknown key",
        "entrypoint: got 'python3 train.py'; ",
        "hyperparameters.amp.precission: ",
        "hyperparameters.global_batch_size: ",
    ],
    **{
        f"{name} misplaced.yaml": [
            "amp: got {'precision': 'amp_fp16'}, which nothing reads here; write"
        ]
        for name in (*TRAINING, "score", "check")
    },
    **{
        f"{name} tutorial.yaml{options}": [
            "the entrypoint 'python3 train.py' names none; allowed: module:Class"
        ]
        for name, options in (
            ("train", ""),
            ("audit", ""),
            ("check", ""),
            ("find", " --precision amp_fp16"),
            ("score", " --config hyperparameters.amp.precision=amp_fp16"),
        )
    },
    **{
        f"{name} {MLP} --trial trials.mpl:X": [
            "--trial: got 'trials.mpl:X', which cannot be imported: 'trials' has no 'm"
        ]
        for name in TRAINING
    },
    **{
        f"{name} {MLP} --trial trials.mlp:MLPTrail": ["did you mean MLPTrial?"]
        for name in (*TRAINING, "check")
    },
    # With all other mistakes.
    "train wrong.yaml --trial trials.mlp:MLPTrail": ["MLPTrial?", "searchr: "],
    "train plain.yaml --trial nowhere:Trial": ["searched: "],
    # The words of the command.
    "": ["the following arguments are required: COMMAND"],
    "trian": ["invalid choice: 'trian' (choose from "],
    "find a.yaml --batchs 3": ["--batchs 3; did you mean --batches?"],
    "report a --metrc b": ["did you mean --metric?"],
    # An empty argument is a variable that is not set; an empty value is a value.
    "train a.yaml --run-folder ''": ["got an empty argument in train a.yaml --run-fo"],
    "report a --output=": ["got an empty argument in report a --output="],
    "train missing.yaml --config=name=": ["missing.yaml: cannot be read"],
    "check no/such.py --name ''": ["no/such.py: no such file"],
    "train": ["give an experiment YAML"],
    # A folder that is not there, or of another kind.
    "train --resume missing": ["missing: there is no such folder that can be read; "],
    "train plain.yaml --resume missing": ["missing: there is no such folder"],
    "train --resume study": ["study: has study.db; type det-amp search --resume study"],
    "search --resume missing": ["missing: there is no such folder"],
    "search --resume fp32": ["fp32: has run.json; type det-amp train --resume fp32"],
    "report empty": ["empty: has no run.json or study.db; allowed: a run folder"],
    # A file that is not there.
    "train sub.yaml": ["sub.yaml: cannot be read: No such file or directory\n"],
    "check lr=0.1/train.py --epochs 3": ["lr=0.1/train.py: no such file"],
    "check --config a=b.py plain.yaml --minutes 3": ["are for a SCRIPT.py"],
    "check half_writen.py": ["half_writen.py: no such file; allowed: a script"],
    f"train {'a' * 300}.yaml": ["File name too long"],
    f"search {GRID} --config searcher.name=grdi": ["got grdi; did you mean grid?"],
    f"compare {MLP} --precisions fp32 fp16": ["'fp16' (choose from "],
    f"train {MLP} --config hyperparameters.training.max_length=20": [
        "max_length: got 20; allowed: {batches: N}, {epochs: N}, or a text such as"
    ],
    "train list.yaml": ["is not an experiment configuration: its top level has no k"],
    f"find {MLP} --batches 0": ["--batches: got 0; allowed: an integer >= 1 and <= "],
    f"find {MLP} --json no/where.json": ["in a folder that exists"],
    f"find {MLP} --json a.txt": ["--json: got a.txt; allowed: a name in .json"],
    # A script in place of a YAML, and more words than the script.
    **{
        f"{name} sub/train.py": [
            f"sub/train.py: is Python; allowed: det-amp {name} YAML --trial sub.train:",
            "of a script: det-amp check sub/train.py",
        ]
        for name in (*TRAINING, "score", "search")
    },
    **{
        f"check {words}": ["; write det-amp check SCRIPT.py ITS ARGUMENTS, with the "]
        for words in (
            "python train.py",
            "torchrun --nproc-per-node 2 train.py",
            "python -m package",
            "-m package",
        )
    },
    "check a.yaml --minutes 3": ["--minutes and --in-place are for a SCRIPT.py"],
    "check --trial b:C a.py": ["--trial, --config and --precision are for a YAML"],
    "check": ["give an experiment YAML, or a SCRIPT.py that trains"],
    "check --explain clip_scald": ["did you mean clip_scaled?"],
    "search a.yaml --resume b": ["give either a search YAML, or --resume FOLDER"],
    "search --resume b --config a=1": ["leave --config and --trial out"],
    f"search a --workers {'9' * 5000}": ["99; allowed: an integer >= 1 and <= "],
    "report nofolder": ["nofolder: there is no such folder that can be read; allo"],
    "report": ["the following arguments are required: SOURCE"],
    "report a --margin nan": ["--margin: got nan; allowed: a number above 0"],
    "report a --margin 0": ["--margin: got 0; allowed: a number above 0"],
    "check train.py --minutes 0": ["train.py: no such file"],
    "check --minutes 0 train.py": ["--minutes: got 0; allowed: a number above 0"],
    **{
        f"report {source}": ["for a comparison; ", "or more sources to compare it"]
        for source in ("fp32 --metric f1", "study --margin 1")
    },
    # Before the first pilot.
    "compare plain.yaml": ["hyperparameters.global_batch_size: missing; allowed: "],
    f"compare plain.yaml {BATCH_SIZE} --precisions amp_bf16": [
        "--precisions: got amp_bf16; allowed: fp32"
    ],
    f"compare plain.yaml {BATCH_SIZE} --precisions fp32 fp32": [
        "--precisions: got fp32 fp32; allowed:"
    ],
    f"compare plain.yaml {BATCH_SIZE} --batches 21 --config "
    "optimizations.aggregation_frequency=4": [
        "--batches: got 21; allowed: a multiple of aggregation_frequency, such as 24"
    ],
    # A search.
    **{
        f"search {GRID} --config '{override}'": [words]
        for override, words in {
            "hyperparameters.amp.init_scale.minval=-3": "below min_scale",
            "hyperparameters.learning_rate={type: double, minval: 1, maxval: 2, "
            "count: 2000}": "points; allowed: at most 2000, by a smaller count",
            "hyperparameters.amp.precision=amp_bf16": "which does not scale",
            "entrypoint=python3 -m determined_amp score --batches 9999": (
                "--batches: got '9999'; allowed"
            ),
            "searcher.smaller_is_better=false": "smaller_is_better: got false; allowed",
            "resources.slots_per_trial=2": "slots_per_trial: got 2; allowed",
            "searcher.metric=f1": "searcher.metric: got f1, which no score has; allow",
            "reproducibility.experiment_seed=x": "experiment_seed: got 'x'",
            "entrypoint=python3 -m determined_amp find": "allowed in a search: python3",
        }.items()
    },
    f"search {GRID.with_name('compare_precisions.yaml')} "
    "--config 'hyperparameters.trial_seed.vals=[1, -1]'": ["trial_seed: got -1; allow"],
}
_CODE = Path(strangers.__file__).read_text().splitlines()
# The line that has a number beyond float16.
(MASKED,) = (n for n, line in enumerate(_CODE, 1) if "super().forward(points" in line)
THEIRS = "tests.strangers"
OF_A_TRIAL = (
    (f"{THEIRS}:WithoutData", "the training data"),
    (
        f"{THEIRS}:WithBatchSize",
        "hyperparameters.global_batch_size: missing; allowed: ",
    ),
    (f"{THEIRS}:WithMask", f"line {MASKED}); allowed: "),
    ("half_written:Trial", "(half_written.py, line 2)"),
)
# Those whose mistake only the trial knows.
SAID_LATER = {
    f"audit {MLP} --config hyperparameters.amp.precision=bf16": "amp.precision",
    f"audit {MLP} --config data.classes=11": "data.classes",
    f"find {BF16}": "this trial scales no loss: ",
    f"score {MLP} --batches 1 --config hyperparameters.trial=tests.mortal:"
    "OverflowingTrial": "error: every loss scale down to 2^0 overflows: ",
    f"find {MLP} --checkpoint .": "neither a checkpoint",
    f"compare strange.yaml {BATCH_SIZE} --config hyperparameters.optimizer="
    "'{type: adam}'": "hyperparameters.optimizer.type: got 'adam'; allowed: const, ",
    "score strange.yaml --trial tests.strangers:WithBatchSize "
    "--config 'hyperparameters.amp={precision: amp_fp16}'": "batch_size: missing; ",
    **{
        f"{name} strange.yaml --trial {trial} --precision amp_fp16": words
        for name, trial, words in (
            ("train", f"{THEIRS}:WithoutValidationData", "the validation data loader"),
            ("find", f"{THEIRS}:WithoutParameters", "no parameter of this trial"),
            *((name, *mistake) for name in TRAINING[:3] for mistake in OF_A_TRIAL),
        )
    },
}
REPORT = "report fp32 amp_fp16"
EXPLAIN = "check --explain clip_scaled"
SOUND = f"audit {MLP} --config data.classes=1"

# Runs one command after the other in a fresh interpreter, since to start one takes
# seconds. There torch and the trial cannot be imported, so a command that tries to
# import them ends by that.
PROGRAM = """
import contextlib, io, json, shlex, sys
from determined_amp.__main__ import main
class Refused:
    def find_spec(name, *where):
        if name in ("torch", "determined.pytorch", "trials.mlp"):
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Refused)
ended = {}
for line in json.load(sys.stdin):
    printed, early = io.StringIO(), None
    with contextlib.redirect_stderr(printed):
        try:
            status = main(shlex.split(line))
        except SystemExit as left:
            status = left.code
        except ModuleNotFoundError as error:
            status, early = 1, error.name
    ended[line] = status, printed.getvalue(), early
json.dump(ended, open("ended.json", "w"))
"""


def write_files(folder):
    """What the commands name."""
    single = {**PLAIN["searcher"], "metric": "val_loss"}
    strange = {"entrypoint": "tests.strangers:Stranger", "searcher": single}
    made = {
        "plain.yaml": PLAIN,
        "misplaced.yaml": {**PLAIN, "amp": {"precision": "amp_fp16"}},
        "tutorial.yaml": {**PLAIN, "entrypoint": "python3 train.py"},
        "strange.yaml": {**PLAIN, **strange},
    }
    for name, (sound, mistakes) in CHANGES.items():
        made[name] = with_overrides(read_yaml(str(sound)), mistakes)
        made[name].pop("reproducibility")  # which no command needs
    for name, config in made.items():
        (folder / name).write_text(yaml.safe_dump(config))
    (folder / "list.yaml").write_text("- a\n")
    (folder / "half_written.py").write_text("import torch\ndef f(:\n")
    for name in ("fp32", "amp_fp16"):
        write_run(folder / name, name, 1)
    write_study(folder / "study", [(2.0**16, scored(16))])
    (folder / "empty").mkdir()


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Exit status and standard error of every command, and what it has imported too
    early.
    """
    folder = tmp_path_factory.mktemp("refusals")
    write_files(folder)
    before = {*folder.rglob("*")}
    lines = json.dumps([*SAID_AT_ONCE, REPORT, EXPLAIN, SOUND])
    run_here.outcome("-c", PROGRAM, input=lines, cwd=folder, timeout=120, check=True)
    results = json.loads((folder / "ended.json").read_text())
    made = {path.relative_to(folder).parts[0] for path in {*folder.rglob("*")} - before}
    assert made == {"ended.json", "fp32"}  # the report
    return {line: tuple(result) for line, result in results.items()}


@pytest.mark.parametrize("line", SAID_AT_ONCE)
def test_mistake_is_one_sentence_before_torch_or_the_trial_is_imported(line, ended):
    status, printed, early = ended[line]
    assert (status, early) == (2, None), printed
    assert "Traceback" not in printed
    assert all(words in printed for words in SAID_AT_ONCE[line]), printed


@pytest.mark.parametrize("line", [REPORT, EXPLAIN])
def test_report_and_explanation_import_no_torch(line, ended):
    status, printed, early = ended[line]
    assert (status, early) == (0, None), printed


def test_command_on_a_sound_yaml_imports_torch(ended):
    """Negative control: what is imported is seen."""
    assert ended[SOUND][2] == "torch"


@pytest.mark.parametrize("line", SAID_LATER)
def test_mistake_that_the_trial_knows_is_one_sentence(
    line, tmp_path, monkeypatch, refusal
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(runs, "run_pilots", None)  # which would take long
    write_files(tmp_path)
    assert SAID_LATER[line] in refusal(*shlex.split(line))
