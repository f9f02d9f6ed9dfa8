"""Plants faults in a module, one at a time, and lists those that its tests do not
notice.

`make mutants MODULE=determined_amp/amp/scaler.py` starts this. mutmut makes the faults
and runs the tests, in a copy of the checkout: the source stays as it is. A folder has
thousands of faults; with SAMPLE=100 a hundred of them are drawn, the same ones each
time. `ROOMS` has the tests of a folder, and `AFTERWARDS` those that are asked about the
faults that the first leave. What only runs while a module is imported cannot be judged:
it counts as not noticed.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

# The tests that ask a whole room: those written for it, without those that start other
# programs, which mutmut cannot follow, and without test_clips, which reads
# the stack of its calls.
ROOMS = {
    "amp": (
        "amp any_loop audit batches casts compiled counts diagnosis equivalence "
        "fp32_modules guard loading mean_metrics metrics mistakes precision "
        "rehearsal running_statistics scaler schedules settings "
        "several_optimizers tensors users_code window"
    ),
    "check": "amp_examples check scratch step_gradients",
    "cli": "compare finder misplaced precision_report run_report search_report",
    "compare": "compare",
    "determined_amp": "context master_runs",
    "experiment": (
        "any_value configs dotted entrypoint experiment factory failures "
        "misplaced overrides settings training trial_text yaml_text"
    ),
    "finder": (
        "find_loss_scale finder first_overflow flush found_scale gradient_recorder "
        "histogram prediction rehearsal scale_finding scoring"
    ),
    "local": "checkpoint training local trainer folder",
    "report": (
        "search_report master_runs figures precision_report "
        "comparison run_report sources"
    ),
    "runs": "master_runs sources folder run",
    "search": "search_plan space study",
    "trial": (
        "amp audit batches checkpoint contract equivalence fitting loss_scale "
        "fused_optimizers guard metrics misplaced mistakes mixed_precision notes "
        "resumed folder schedules scoring several_optimizers unmodified"
    ),
}

# Those that take long or start other programs: mutmut does not see which faults a
# program reaches.
AFTERWARDS = {
    "check": (
        "advice check_scripts confinement right_scripts two_scales wrong_scripts"
    ),
    "cli": "check main refusals optimize",
    "determined_amp": "imports main refusals search_cluster",
    "experiment": "local processes refusals folder",
    "local": "main processes resume",
    "report": "compare",
    "runs": "local precision_report",
    "search": "compare optimize refusals trial_process",
    "trial": "processes refusals resume search_cluster training",
}

# Tests of the first list that start other programs themselves, or list the functions of
# a module, of which mutmut makes more.
NOT_FOLLOWED = (
    "tests/test_check.py::TestCommand",
    "tests/test_check.py::test_each_rule_stands_in_the_row_of_one_finding",
)

_SETTINGS = """\
[mutmut]
source_paths = determined_amp
only_mutate =
{modules}
# They count the frames of a call, and mutmut adds some.
do_not_mutate =
    determined_amp/check/record.py
    determined_amp/check/recorder.py
pytest_add_cli_args_test_selection =
{tests}
pytest_add_cli_args =
    -x
    -p
    no:cacheprovider
{deselected}
also_copy =
{copied}
use_git_change_detection = 0
track_dependencies = 0
"""


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument(
        "module", help="such as determined_amp/amp/scaler.py, or a folder"
    )
    parser.add_argument(
        "tests",
        nargs="*",
        help="by default test_NAME.py of a file, or ROOMS of a folder",
    )
    options = parser.parse_args(arguments)
    name = Path(options.module).stem
    tests = options.tests or [
        f"tests/test_{part}.py" for part in ROOMS.get(name, name).split()
    ]
    for path in (options.module, *(test.partition("::")[0] for test in tests)):
        if not (ROOT / path).exists():
            print(
                f"{path}: no such file; allowed: make mutants "
                "MODULE=determined_amp/ROOM/NAME.py, with TESTS='tests/test_A.py "
                "tests/test_B.py' where tests/test_NAME.py is missing",
                file=sys.stderr,
            )
            return 2
    with tempfile.TemporaryDirectory() as folder:
        return _plant(Path(folder), options.module, tests)


def _plant(folder, module, tests):
    _copy_checkout(folder)
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir())
    others = [name for name in folders if name not in ("determined_amp", "tests")]
    modules = [module] if module.endswith(".py") else _modules(module)
    deselected = [f"--deselect={test}" for test in NOT_FOLLOWED]
    lists = {
        "deselected": deselected,
        "modules": modules,
        "tests": tests,
        "copied": [*others, ".detignore"],
    }
    indented = {
        name: "\n".join(f"    {item}" for item in items)
        for name, items in lists.items()
    }
    (folder / "setup.cfg").write_text(_SETTINGS.format(**indented))
    planted = _planted(folder)
    workers = os.environ.get("WORKERS", "1")
    status = _mutmut(folder, "run", "--max-children", workers, *planted).returncode
    if status:
        return status
    survivors = 0
    afterwards = [
        f"tests/test_{part}.py"
        for part in AFTERWARDS.get(Path(module).stem, "").split()
    ]
    for line in _said(folder, "results").splitlines():
        name, _, verdict = line.strip().partition(": ")
        left = name in planted and verdict in ("survived", "no tests")
        if left and not _is_noticed(folder, name, afterwards):
            survivors += 1
            print(f"\n{verdict}: {name}\n{_changed(_said(folder, 'show', name))}")
    noticed = f"{len(planted) - survivors} of {len(planted)} faults"
    tests = [*tests, *afterwards]
    print(f"\n{module}: {noticed} are noticed by {' '.join(tests)}")
    return 0


def _is_noticed(folder, name, tests):
    """Whether one of these tests fails with this fault, in whatever process."""
    if not tests:
        return False
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    known = {**os.environ, "MUTANT_UNDER_TEST": name}
    where = folder / "mutants"
    asked = subprocess.run(
        command, check=False, cwd=where, env=known, capture_output=True
    )
    return asked.returncode == 1


def _planted(folder):
    """The names of the faults: all of them, or as many as `SAMPLE` says, drawn at
    random.
    """
    # mutmut makes all faults, and sees which tests reach them, before it looks for this
    # name.
    _mutmut(folder, "run", "no such fault", capture_output=True)
    names = []
    for results in sorted((folder / "mutants" / "determined_amp").rglob("*.meta")):
        names += json.loads(results.read_text())["exit_code_by_key"]
    sample = int(os.environ.get("SAMPLE") or len(names))
    return sorted(random.Random(0).sample(sorted(names), min(sample, len(names))))


def _modules(room):
    """The modules of a folder, without those of the folders in it."""
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / room).glob("*.py"))]


def _copy_checkout(folder):
    """What git knows or does not ignore, as it is now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():  # not one that was deleted
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def _changed(difference):
    lines = difference.splitlines()
    return "\n".join(
        x for x in lines if x[:1] in ("-", "+") and x[:3] not in ("---", "+++")
    )


def _mutmut(folder, *arguments, check=False, **options):
    command = [sys.executable, "-m", "mutmut", *arguments]
    return subprocess.run(command, check=check, cwd=folder, **options)


def _said(folder, *arguments):
    ended = _mutmut(folder, *arguments, check=True, capture_output=True, text=True)
    return ended.stdout


if __name__ == "__main__":
    sys.exit(main())
