"""Whatever is done to a YAML, a run folder or a process: one clear sentence, or a whole training.

    python -m tests.fuzz --minutes 60 [--failures FOLDER]
    python -m tests.fuzz --repeat EXAMPLE.json

Every example is one command, in a fork of a process that has imported everything: a fresh process
in all that the command could notice, with real signals and exit statuses. It may end in two ways.
Either it says what is wrong, in which key or file, has status 2 after a second of work at most, and
has changed nothing. Or it trains what was asked, and ends where an undisturbed run ends.

A command may also find its standard streams closed, a file where it is to write, or a master that
lies. A story is several commands in one folder, of which signals end some.

The long run prints how often each came, and writes every example of another kind to a folder.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
import dataclasses
import gc
import hashlib
import importlib
import json
import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partialmethod
from pathlib import Path
from typing import Any

import torch
from determined.common import util
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from determined_amp import __main__ as door
from determined_amp.amp.patched import patched
from determined_amp.cli import search as search_command
from determined_amp.experiment.dotted import flat, value_at
from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.runs import master
from determined_amp.runs.folder import RunError, read_metrics, read_record, read_run
from determined_amp.runs.run import RunState
from determined_amp.search import workers
from tests import searching, training
from tests.report_master import TRIAL, Master, answering, report
from tests.reporting import scored

# What commands import when they need it.
_IMPORTED = (
    *("sklearn.datasets", "torch.utils.tensorboard", "torch._dynamo", "trials.mlp"),
    *("determined_amp.cli.train", "determined_amp.cli.find", "determined_amp.search.engine"),
    *("determined_amp.cli.report", "determined_amp.report.loss_scale_report"),
    "determined.experimental.client",
)

# Seconds until an example counts as one that hangs; a report takes 25 on a slow machine.
PATIENCE = 90.0
# Seconds of work, after the imports, in which a mistake is told.
AT_ONCE = 1.0

_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

LENGTH = 4
TINY = with_overrides(
    read_yaml(str(training.ROOT / "experiment_configs/mlp/amp.yaml")),
    [
        *training.SMALL[:3],
        f"hyperparameters.training.max_length.batches={LENGTH}",
        *(f"hyperparameters.training.{period}_period.batches=2" for period in ("validation",)),
        "hyperparameters.training.checkpoint_period.batches=2",
        "hyperparameters.training.reporting_period.batches=1",
    ],
)

# Values as YAML, wrong in most places.
VALUES = (
    *("null", "true", "'true'", "[]", "{}", "[null]", "{a: 1}", "x", "''", "'5'", "5", "0.5"),
    *("0", "-1", "1", "2", "0x10", "032", "0o17", "1:30", "1e3", "1e39", "1e300", "1e-300", "yes"),
    *(".nan", ".inf", "-.inf", "9223372036854775808", "4294967296", "1e9", "100000000", "~"),
    *(
        "2001-01-01",
        "2001-99-99",
        "&a [*a]",
        "&a {b: *a}",
        "*a",
        "!!int x",
        "!!binary aGk=",
        "!x y",
    ),
    *(
        '"\\0"',
        '"\\ud800"',
        "'[/b]'",
        "'[red]'",
        "größe",
        "../../up",
        "/etc/passwd",
        "'a/b'",
        "'%20'",
    ),
    *(
        "'{}'",
        "x" * 5000,
        "[[[[[[[[[[[[]]]]]]]]]]]]",
        "{type: const, val: 5}",
        "1_000",
        "+1",
        "-0.0",
    ),
    *("{type: double, minval: 0, maxval: 1}", "{batches: 1}", "{epochs: 1}", "{2001-01-01: 1}"),
)


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of the YAML: what is done to the key at a dotted path."""

    how: str
    path: str
    value: str = ""


@dataclasses.dataclass(frozen=True)
class Damage:
    """What is done to a file, in place: at a share of its length, in [0, 1]."""

    how: str
    file: str
    at: float = 0.5


@dataclasses.dataclass(frozen=True)
class Lie:
    """What is done to the master's answers to one kind of request.

    Args:
        how: A status, `slow`, `endless`, `html`, `cut`, or the JSON of a value instead of another.
        request: The end of the path.
        at: Which value, as a share of their number, in [0, 1].
    """

    how: str
    request: str
    at: float = 0.5


@dataclasses.dataclass(frozen=True)
class Example:
    """One command, and what is done to it before and meanwhile.

    Args:
        command: The words of the command.
        base: The folder it works in is a copy of this one.
        changes: Of `config.yaml` there.
        damages: Of any file there.
        signals: The numbers of signals, sent one after the other.
        delay: Seconds before each of them.
        stream: What is wrong with its standard output, see `broken_stream`.
        lies: Of the master that it asks.
    """

    command: tuple[str, ...]
    base: str
    changes: tuple[Change, ...] = ()
    damages: tuple[Damage, ...] = ()
    signals: tuple[int, ...] = ()
    delay: float = 0.0
    stream: str = ""
    lies: tuple[Lie, ...] = ()

    @staticmethod
    def read(raw: Mapping[str, Any]) -> Example:
        """The opposite of `dataclasses.asdict(example)`, from JSON."""
        kinds = {"changes": Change, "damages": Damage, "lies": Lie}
        made = {key: tuple(kind(**one) for one in raw[key]) for key, kind in kinds.items()}
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
        return Example(**{**plain, **made})


@dataclasses.dataclass(frozen=True)
class Story:
    """Commands that follow each other in one folder."""

    steps: tuple[Example, ...]


def example_of(text: str) -> Example | Story:
    """The opposite of `json.dumps(dataclasses.asdict(example))`."""
    raw: dict[str, Any] = json.loads(text)
    return Story(tuple(map(Example.read, raw["steps"]))) if "steps" in raw else Example.read(raw)


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a command ended.

    Args:
        status: Its exit status, or minus the signal that ended it; None if it did not end.
        output: What it printed.
        seconds: The work of its processor.
    """

    status: int | None
    output: str
    seconds: float


def dotted(config: object, path: str = "") -> Iterator[str]:
    """The dotted path of every key."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield f"{path}{key}"
            yield from dotted(value, f"{path}{key}.")


PATHS = tuple(dotted(TINY))
SEARCH = with_overrides(
    read_yaml(str(training.ROOT / "hp_search/loss_scale_grid.yaml")),
    [*searching.SMALL_MODEL, *searching.THREE_SCALES],
)


def written(config: Mapping[str, Any], changes: Sequence[Change]) -> str:
    """The configuration as YAML with the changes, some of which no YAML library would write."""
    by_path = {change.path: change for change in changes}

    def lines(section: Mapping[str, Any], path: str, depth: int) -> Iterator[str]:
        for key, value in section.items():
            place = f"{path}{key}"
            change = by_path.get(place, Change("keep", place))
            if change.how == "drop":
                continue
            name = key[:-2] + key[-1] if change.how == "misspell" else key
            indent = ("\t" if change.how == "tab" else "  ") * depth
            for _ in range(2 if change.how == "twice" else 1):
                if change.how == "value":
                    yield f"{indent}{name}: {change.value}"
                elif isinstance(value, Mapping):
                    yield f"{indent}{name}:"
                    yield from lines(value, f"{place}.", depth + 1)
                else:
                    yield f"{indent}{name}: {json.dumps(value)}"

    return "\n".join(lines(config, "", 0)) + "\n"


def spoil(folder: Path, damage: Damage) -> None:
    """Damage a file of a folder; one that is not there stays away."""
    (path, *_) = [*sorted(folder.glob(damage.file)), folder / damage.file]
    if path.is_dir() or not path.exists():
        return
    data = path.read_bytes()
    at = int(damage.at * max(len(data) - 1, 0))
    rows, row = data.split(b"\n"), int(damage.at * data.count(b"\n"))
    made = {
        "cut": data[:at],
        "flip": data[:at] + bytes(byte ^ 0x11 for byte in data[at : at + 1]) + data[at + 1 :],
        "latin": data[:at] + b"\xff\xfe" + data[at:],
        "line": b"\n".join([*rows[:row], b"{]", *rows[row + 1 :]]),
        "bom": b"\xef\xbb\xbf" + data,
        "number": b"5\n",
        "list": b"[]\n",
        "null": b"null\n",
        "empty": b"",
    }
    if damage.how in made:
        path.write_bytes(made[damage.how])
    else:
        path.unlink()
        if damage.how == "folder":
            path.mkdir()
        elif damage.how == "link":
            path.symlink_to("nowhere")


def broken_stream(how: str) -> None:
    """Break the standard output of this process: `closed`, `full` disk, or the reader `gone`."""
    sys.stdout.flush()
    if how == "closed":
        os.close(1)
        sys.stdout = None
        return
    if how == "full":
        target = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, target = os.pipe()
        os.close(reader)
    os.dup2(target, 1)
    sys.stdout = os.fdopen(1, "w", closefd=False)


def fork(arguments: Sequence[str], folder: Path, output: Path, example: Example) -> int:
    """Start a command in `folder` in a child of this process; its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads
        signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)  # none in the middle of the fork
        child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALL)
        return child
    status = 1
    try:
        os.setpgid(0, 0)  # a search has workers, which end with it
        warnings.resetwarnings()
        warnings.simplefilter("ignore", DeprecationWarning)
        os.chdir(folder)
        file = output.open("w")
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        logging.getLogger().handlers.clear()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.freeze()  # a look at what was imported would copy every page of it
        gc.callbacks.clear()  # Hypothesis has one, in which Python drops an interrupt
        torch.set_num_threads(1)
        # The server of a search would import everything again; its workers can be forks of this
        # process. They hold both ends of their pipe, so that nothing but a kill ends them.
        search_command.start_server = lambda *more: None
        workers._processes = multiprocessing.get_context("fork")  # type: ignore[assignment]
        workers.Worker.close = partialmethod(workers.Worker.close, kill=True)  # type: ignore[assignment,method-assign]
        with contextlib.suppress(KeyboardInterrupt):  # one that was sent before the command began
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALL)
        if example.stream:
            broken_stream(example.stream)
        status = door.main(arguments)
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)


def run(example: Example, arguments: Sequence[str], folder: Path) -> Ending:
    """Run a command, and send it its signals."""
    output = folder.parent / "output.txt"
    output.touch()
    child = fork(arguments, folder, output, example)
    began = time.monotonic()
    due = [began + example.delay * (i + 1) for i in range(len(example.signals))]
    status, seconds = None, 0.0
    while time.monotonic() < began + PATIENCE:
        done, code, usage = os.wait4(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
            seconds = usage.ru_utime + usage.ru_stime
            break
        if due and time.monotonic() > due[0]:
            os.kill(child, example.signals[len(example.signals) - len(due)])
            due.pop(0)
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return Ending(status, output.read_text(errors="replace"), seconds)


def content(folder: Path) -> dict[str, str]:
    """What is in a folder, without what every command may write: the log and the lock."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.name in ("log.txt", ".lock") or path.is_dir():
            continue
        data = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        found[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return found


@cache
def bases() -> Path:
    """A folder with what the examples start from, and the ends that they have to reach."""
    for name in _IMPORTED:
        importlib.import_module(name)  # here, and not in every fork
    root = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    for name in ("yaml", "run", "search"):
        (root / name).mkdir()
    (root / "yaml" / "config.yaml").write_text(written(TINY, []))
    half = "hyperparameters.training.max_length.batches=2"
    for arguments, folder in (
        (["train", "config.yaml", "--run-folder", "run", "--config", half], "yaml"),
        (["train", "config.yaml", "--run-folder", "../whole"], "yaml"),
    ):
        _sound(arguments, root / folder)
    config = root / "yaml" / "run"
    (root / "yaml" / "run").rename(root / "run" / "run")
    # As if the process had been killed after two of four batches.
    config = root / "run" / "run" / "config.yaml"
    config.write_text(written(TINY, []))
    record = root / "run" / "run" / "run.json"
    record.write_text(record.read_text().replace('"completed"', '"running"'))
    searching.write(root / "search", "loss_scale_grid.yaml", *searching.THREE_SCALES)
    _sound(["search", "search.yaml"], root / "search")
    (made,) = (root / "search" / "runs").glob("*/*")
    made.rename(root / "search" / "found")
    shutil.rmtree(root / "search" / "runs")
    with sqlite3.connect(root / "search" / "found" / "study.db") as database:
        database.execute("UPDATE trials SET state = 'RUNNING' WHERE number = 2")
    shutil.copytree(root / "search", root / "outputs")
    shutil.copy(root / "yaml" / "config.yaml", root / "outputs")
    shutil.copytree(root / "outputs", root / "story")
    _fill(root / "outputs")
    return root


def _fill(folder: Path) -> None:
    """Make a file of each kind where a command may be told to write."""
    _sound(["find", "config.yaml", "--batches", "1", "--json", "answer.json"], folder)
    _sound(["find", "config.yaml", "--batches", "1", "--plot", "answer.png"], folder)
    for name in ("notes.txt", "notes.json", "notes.png"):
        (folder / name).write_text('{"mine": 1}')
    for name in ("folder.json", "folder.png", "out", "out/loss_scale.html"):
        (folder / name).mkdir()
    (folder / "link.json").symlink_to("config.yaml")
    (folder / "other.json").symlink_to("notes.json")
    (folder / "nowhere.json").symlink_to("gone.json")
    (folder / "kept").mkdir()
    shutil.copy(folder / "answer.json", folder / "kept" / "loss_scale.json")


def _sound(arguments: Sequence[str], folder: Path) -> None:
    ending = run(Example((), ""), arguments, folder)
    assert ending.status == 0, ending.output


def reached(run_folder: Path) -> str:
    """The hash of the last checkpoint of a run."""
    return training.digest(training.checkpoint(run_folder, LENGTH))


def judged(example: Example, work: Path) -> tuple[str, str]:
    """Run an example: what it came to, and the output.

    `clear` and `trained` are right. So is `killed` by the signal of the example if the run then
    reaches its end. All else is a fault: `traceback`, `hang`, `slow`, `unclear`, `changed` (what
    was refused has left something), `wrong` (trained something else than was asked).
    """
    folder = work / "here"
    shutil.copytree(bases() / example.base, folder, symlinks=True)
    if example.changes:
        file, config = (
            ("search.yaml", SEARCH) if example.base == "search" else ("config.yaml", TINY)
        )
        (folder / file).write_text(written(config, example.changes))
    for damage in example.damages:
        spoil(folder, damage)
    before = content(folder)
    with lying(example.lies) if example.lies else contextlib.nullcontext():
        ending = run(example, example.command, folder)
    after = content(folder)
    unchanged = after == before
    output = f"exit {ending.status}, {ending.seconds:.2f} s\n{ending.output}"
    traced = "Traceback (most recent call last)" in ending.output
    # A search some of whose trials failed has told which, and has status 1.
    statuses = (0, 1, 2) if example.command[0] == "search" else (0, 2)
    if ending.status is None:
        # A run that reports is only longer than anybody waits here.
        kind = "long" if any(folder.glob("run/metrics.jsonl")) else "hang"
    elif traced or (ending.status not in statuses and not example.signals):
        kind = "traceback"
    elif ending.status == 2:
        kind = _refused(example, ending, folder, unchanged)
    elif "\x1b" in ending.output:
        kind = "unclear"
    elif example.base == "outputs" and any(
        after.get(name) != before[name] for name in _kept(before)
    ):
        kind = "wrong"
    elif example.stream == "full" and example.command[0] == "find":
        kind = "wrong"  # nobody has its answer
    elif example.signals:
        kind, output = _continued(example, ending, folder, output)
    elif example.command[0] == "train":
        kind, output = _trained(example, folder, output)
    else:
        kind = "done"
    return kind, output


def _kept(names: Iterable[str]) -> Iterator[str]:
    """Files that no command may replace: all but earlier answers, and a link in place of one."""
    yield from (name for name in names if name not in ("answer.json", "answer.png", "nowhere.json"))


def _refused(example: Example, ending: Ending, folder: Path, unchanged: bool) -> str:
    words = re.split(r"[./]", " ".join([c.path for c in example.changes])) + [
        name for damage in example.damages for name in re.split(r"[/*]", damage.file)
    ]
    said = [line for line in ending.output.splitlines() if line.strip()]
    named = any(word and word.strip(" ") in ending.output for word in [*words, *example.command])
    if not said or not named or len(ending.output) > 6000:
        return "unclear"
    runs = [path.parent for path in folder.rglob("run.json") if path.is_file()]
    if any(_failed(run) and any((run / "metrics.jsonl").open()) for run in runs):
        return "diverged"  # of what was asked, which only training could show
    if not unchanged:
        return "changed"
    late = ending.seconds > AT_ONCE and not (example.lies or example.stream)
    return "slow" if late and example.base != "outputs" else "clear"


def _failed(run_folder: Path) -> bool:
    """Whether the record of a run, which may be damaged, has a failure."""
    try:
        return read_record(run_folder).state is RunState.FAILED
    except RunError:
        return False


def _trained(example: Example, folder: Path, output: str) -> tuple[str, str]:
    """Whether what was trained is what the YAML says, as Determined's reader understands it."""
    (made,) = {path.parent for path in folder.glob("**/resolved.yaml")} - {folder}
    source = made if example.base == "run" else folder
    asked = util.yaml_safe_load((source / "config.yaml").read_text(encoding="utf-8-sig"))
    resolved = util.yaml_safe_load((made / "resolved.yaml").read_text(encoding="utf-8"))
    for name, value in flat(asked).items():
        is_there = value_at(resolved, name)
        same = value == is_there and isinstance(value, bool) == isinstance(is_there, bool)
        if value not in (None, {}) and not same:
            return "wrong", f"{name}: asked for {value!r}, trained {is_there!r}\n{output}"
    length = value_at(resolved, "hyperparameters.training.max_length.batches")
    last = training.metrics(made)[-1]["batches"] if (made / "metrics.jsonl").exists() else 0
    if length is not None and last != length:
        return "wrong", f"{length} batches are asked for, {last} trained\n{output}"
    sound = flat(resolved) == flat(_resolved())
    if sound and reached(made) != reached(bases() / "whole"):
        return "wrong", f"another end than that of an undisturbed run\n{output}"
    return "trained", output


@cache
def _resolved() -> Mapping[str, Any]:
    return read_yaml(str(bases() / "whole" / "resolved.yaml"))


def _continued(example: Example, ending: Ending, folder: Path, output: str) -> tuple[str, str]:
    """Go on after a signal, as a user would: the end is that of an undisturbed run."""
    fatal = [-number for number in example.signals]
    if ending.status not in (0, 130, *fatal):
        return "wrong", output
    saved = any((folder / "run" / "checkpoints").glob("batch-*"))
    again = ["train", *(["--resume", "run"] if saved else ["config.yaml", "--run-folder", "run"])]
    later = run(Example((), ""), again, folder)
    output = f"{output}\n{' '.join(again)}: exit {later.status}\n{later.output}"
    if later.status != 0 or reached(folder / "run") != reached(bases() / "whole"):
        return "wrong", output
    return "stopped", output


def judged_story(story: Story, work: Path) -> tuple[str, str]:
    """Run a story: what its first wrong step came to, else `told`, and the output.

    What is refused changes nothing. What is trained is what was asked, and recorded as that.
    Without changes of what is trained, the end is that of an undisturbed run.
    """
    folder, said, changed = work / "here", "", False
    shutil.copytree(bases() / "story", folder, symlinks=True)
    for planned in (*story.steps, None):
        # At the end as a user would go on.
        saved = any((folder / "run" / "checkpoints").glob("batch-*"))
        step = planned or Example(RESUME if saved else TRAIN, "story")
        before, trained = content(folder), _trained_batches(folder / "run")
        ending = run(step, step.command, folder)
        said += f"{' '.join(step.command)} {step.signals or ''}: exit {ending.status}\n"
        said += f"{ending.output}\n"
        kind = _step_fault(step, ending)
        if not kind and not step.signals and ending.status == 2:
            kind = "" if content(folder) == before or _failed(folder / "run") else "changed"
        if not kind and not step.signals and ending.status == 0 and step.command[0] == "train":
            kind = _not_as_asked(folder / "run", _asked(step), trained)
        if kind:
            return kind.partition(":")[0], f"{kind}\n{said}"
        changed = changed or (bool(_asked(step)) and ending.status != 2)
    if not changed and reached(folder / "run") != reached(bases() / "whole"):
        return "wrong", f"another end than that of an undisturbed run\n{said}"
    return "told", said


def _asked(step: Example) -> dict[str, str]:
    pairs = (word.partition("=") for word in step.command if "=" in word)
    return {key: value for key, _, value in pairs}


def _step_fault(step: Example, ending: Ending) -> str:
    if ending.status is None:
        return "hang"
    of_a_search = step.command[0] == "search" and ending.status == 1
    if "Traceback (most recent call last)" in ending.output:
        return "traceback"
    return "" if ending.status in (0, 2) or of_a_search or step.signals else "traceback"


def _trained_batches(run_folder: Path) -> int:
    if not (run_folder / "metrics.jsonl").is_file():
        return 0
    return max((line["batches"] for line in read_metrics(run_folder / "metrics.jsonl")), default=0)


def _not_as_asked(run_folder: Path, asked: Mapping[str, str], trained: int) -> str:
    """What a run that has ended well is, and should not be; empty if all is as it was asked."""
    found = read_run(run_folder)
    first = [part.first_batch for part in found.parts]
    wrong = {
        "it is shorter than what was trained": int(asked.get(LENGTH_KEY, trained)) < trained
        and found.trained_batches > int(asked[LENGTH_KEY]),
        f"its state is {found.state}": found.state is not RunState.COMPLETED,
        f"its parts begin at {first}": first != sorted({*first}),
        **{
            f"{key} is {found.settings[key]} and not {value}": str(found.settings[key]) != value
            for key, value in asked.items()
        },
    }
    return "".join(f"wrong: {what}" for what, is_so in wrong.items() if is_so)


LENGTH_KEY = "hyperparameters.training.max_length.batches"

# What a master says instead: statuses, and values of JSON.
STATUSES = ("302", "401", "403", "404", "429", "500", "502", "503")
SAID = (
    *("null", "5", "-1", "0.5", '"NaN"', '"Infinity"', "-1e308", "1e308", "1" + "0" * 400, "1e400"),
    *('"x"', '""', "[]", "{}", "[[1]]", "true", '"\\u001b]0;x\\u0007"', '"<script>x</script>"'),
    *('"16"', "9007199254740993", "[" * 300 + "]" * 300, '"STATE_UNKNOWN"', "delete"),
)
REQUESTS = ("/master", "/login", "/experiments/7", "/trials", "/trial_metrics", "/runs")


@contextlib.contextmanager
def lying(lies: Sequence[Lie]) -> Iterator[None]:
    """Be the master of DET_MASTER for the forks meanwhile, which has less time than others."""
    truth = Master(SEARCH, [])
    truth.trials = [
        {**TRIAL, "id": n, "hparams": {"amp": {"init_scale": 2.0**n}}} for n in (4, 16, 24)
    ]
    truth.reports["validation"] = [report(n, 4, "validation", scored(n)) for n in (4, 16, 24)]
    truth.reports["training"] = [report(16, 4, "training", {"skipped_steps": 2})]
    truth.metadata = {n: {"seed": 3} for n in (4, 16, 24)}

    def answer(method: str, url: str, sent: bytes) -> tuple[int, str]:
        path, _, query = url.partition("?")
        status, said = truth.answer(path, query)
        for lie in lies:
            if path.endswith(lie.request):
                status, said = lied(lie, status, said)
        return status, said

    limits = patched(master, "ALL_ANSWERS", 6), patched(master, "ANSWER", 3)
    with answering(answer) as address, tempfile.TemporaryDirectory() as kept, limits[0], limits[1]:
        known = {"DET_MASTER": address, "DET_DEBUG_CONFIG_PATH": kept, "DET_USER": "someone"}
        with patched(os, "environ", {**os.environ, **known, "DET_PASS": "Correct-horse-1"}):
            yield


def lied(lie: Lie, status: int, said: str) -> tuple[int, str]:
    """An answer with one lie."""
    if lie.how == "slow":
        time.sleep(8)
    others = {
        "html": "<html>\x1b[31m</html>",
        "cut": said[: int(len(said) * lie.at)],
        "endless": said * 2000,
    }
    if lie.how not in SAID:
        return int(lie.how) if lie.how in STATUSES else status, others.get(lie.how, said)
    tree = json.loads(said)
    holders = [
        (section, key)
        for section in _sections(tree)
        for key in (section if isinstance(section, dict) else range(len(section)))
    ]
    section, key = holders[int(lie.at * (len(holders) - 1))]
    section[key] = "THE LIE"
    if lie.how == "delete":
        del section[key]
    return status, json.dumps(tree).replace('"THE LIE"', lie.how)


def _sections(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (dict, list)) and tree:
        yield tree
        for inner in tree.values() if isinstance(tree, dict) else tree:
            yield from _sections(inner)


RIGHT = {"told", "clear", "trained", "done", "stopped", "diverged", "long"}

TRAIN = ("train", "config.yaml", "--run-folder", "run")
RESUME = ("train", "--resume", "run")
FILES = (
    *("config.yaml", "resolved.yaml", "run.json", "metrics.jsonl"),
    *("state_dict.pth", "trial_state.pkl", "metadata.json", "load_data.json"),
)
OF_CHECKPOINTS = FILES[4:]
DAMAGES = (
    *("cut", "flip", "latin", "line", "bom", "number", "list", "null", "empty", "delete"),
    *("folder", "link"),
)


def _key(change: str) -> str:
    return change.partition("=")[0]


HOW = st.sampled_from(["drop", "misspell", "twice", "tab", *["value"] * 12])
CHANGES = st.builds(Change, HOW, st.sampled_from(PATHS), st.sampled_from(VALUES))
SHARES = st.integers(0, 1000).map(lambda thousandths: thousandths / 1000)
PLACES = st.sampled_from(
    [f"run/checkpoints/*/{f}" if f in OF_CHECKPOINTS else f"run/{f}" for f in FILES]
)
OF_RUNS = st.builds(Damage, st.sampled_from(DAMAGES), PLACES, SHARES)
OF_YAML = st.builds(
    Damage, st.sampled_from(["cut", "flip", "latin", "bom"]), st.just("config.yaml"), SHARES
)
OF_STUDIES = st.builds(
    Damage,
    st.sampled_from(["cut", "number", "empty", "delete", "folder"]),
    st.just("found/study.db"),
    SHARES,
) | st.builds(Damage, st.sampled_from(DAMAGES), st.just("found/search.yaml"), SHARES)

FIND = ("find", "config.yaml", "--batches", "1")
TARGETS = (
    *("config.yaml", "answer.json", "notes.json", "notes.txt", "folder.json", "link.json"),
    *("other.json", "nowhere.json", "missing/a.json", "new.json", "/dev/full", "/dev/null", ""),
    *("answer.png", "notes.png", "folder.png", "new.png", "found/search.yaml", "found/study.db"),
)
OUTPUTS = st.one_of(
    st.builds(
        lambda option, target: (*FIND, option, target),
        st.sampled_from(["--json", "--plot"]),
        st.sampled_from(TARGETS),
    ),
    st.builds(
        lambda finding, folder: (
            *("report", "loss-scale", "found", "--finding", finding, "--output", folder),
        ),
        st.sampled_from(["answer.json", "kept/loss_scale.json", "notes.json", "config.yaml", ""]),
        st.sampled_from(["out", "kept", "found", "notes.txt", "missing", ".", "/dev/null", ""]),
    ),
)
LIES = st.builds(
    Lie,
    st.sampled_from([*STATUSES, "slow", "html", "cut", "endless", *SAID, *SAID, *SAID]),
    st.sampled_from([*REQUESTS, *REQUESTS[2:], *REQUESTS[2:]]),
    SHARES,
)
STOPS = ((), (), (), (signal.SIGKILL,), (signal.SIGINT,), (signal.SIGTERM,), (signal.SIGINT,) * 2)
CHANGED = (
    *(LENGTH_KEY + "=2", LENGTH_KEY + "=4", LENGTH_KEY + "=6", LENGTH_KEY + "=1"),
    *("hyperparameters.amp.precision=fp32", "hyperparameters.amp.precision=amp_bf16"),
    *("reproducibility.experiment_seed=7", "hyperparameters.global_batch_size=32"),
    *("hyperparameters.learning_rate=0.5", "hyperparameters.hidden_features=24"),
    *("data.image_size=12", "hyperparameters.aggregation_frequency=2", "searcher.name=grid"),
)
STEPS = st.builds(
    lambda command, numbers, delay: Example(command, "story", signals=numbers, delay=delay),
    st.one_of(
        st.sampled_from(
            [
                *(TRAIN, TRAIN, RESUME, ("report", "run"), ("report", "precision", "run", "run")),
                *(("search", "--resume", "found"), ("search", "search.yaml"), ("report", "found")),
                ("find", "run/config.yaml", "--checkpoint", "run", "--batches", "1"),
            ]
        ),
        st.builds(
            lambda changes: (*RESUME, *(w for change in changes for w in ("--config", change))),
            st.lists(st.sampled_from(CHANGED), min_size=1, max_size=2, unique_by=_key),
        ),
    ),
    st.sampled_from(STOPS),
    st.integers(0, 150).map(lambda hundredths: hundredths / 100),
)

EXAMPLES = st.one_of(
    st.builds(
        lambda steps: Story((Example(TRAIN, "story"), *steps)),
        st.lists(STEPS, min_size=1, max_size=4),
    ),
    st.builds(lambda steps: Story((*steps,)), st.lists(STEPS, min_size=1, max_size=3)),
    st.builds(lambda command: Example(command, "outputs"), OUTPUTS),
    st.builds(
        lambda lies: Example(("report", "7"), "yaml", lies=(*lies,)),
        st.lists(LIES, min_size=1, max_size=2),
    ),
    st.builds(
        lambda command, stream: Example(command, "yaml", stream=stream),
        st.sampled_from([TRAIN, FIND, ("audit", "config.yaml"), ("train", "missing.yaml")]),
        st.sampled_from(["closed", "full", "gone"]),
    ),
    st.builds(
        lambda command, changes: Example(command, "yaml", changes=(*changes,)),
        st.sampled_from([TRAIN, TRAIN, TRAIN, ("find", "config.yaml", "--batches", "1")]),
        st.lists(CHANGES, min_size=1, max_size=2, unique_by=lambda change: change.path),
    ),
    st.builds(lambda damage: Example(TRAIN, "yaml", damages=(damage,)), OF_YAML),
    st.builds(
        lambda change: Example(("search", "search.yaml"), "search", changes=(change,)),
        st.builds(Change, HOW, st.sampled_from(tuple(dotted(SEARCH))), st.sampled_from(VALUES)),
    ),
    st.builds(
        lambda command, damages: Example(command, "run", damages=(*damages,)),
        st.sampled_from(
            [
                *(RESUME, RESUME, ("report", "run")),
                ("find", "run/config.yaml", "--checkpoint", "run", "--batches", "1"),
            ]
        ),
        st.lists(OF_RUNS, min_size=1, max_size=2),
    ),
    st.builds(
        lambda command, damage: Example(command, "search", damages=(damage,)),
        st.sampled_from([("search", "--resume", "found"), ("report", "found")]),
        OF_STUDIES,
    ),
    st.builds(
        lambda numbers, delay: Example(TRAIN, "yaml", signals=numbers, delay=delay),
        st.sampled_from(
            [
                *((signal.SIGINT,), (signal.SIGTERM,), (signal.SIGHUP,), (signal.SIGKILL,)),
                *((signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGKILL)),
            ]
        ),
        st.integers(0, 150).map(lambda hundredths: hundredths / 100),
    ),
)


def try_out(example: Example | Story) -> tuple[str, str]:
    """What an example came to, in a folder that is gone afterwards, and the output."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as work:
        if isinstance(example, Story):
            return judged_story(example, Path(work))
        return judged(example, Path(work))


def _careless(arguments: Sequence[str]) -> int:
    return _sound_main([*arguments, "--config", "hyperparameters.learning_rate=0.5"])


def _untidy(arguments: Sequence[str]) -> int:
    Path("left.txt").touch()
    print("config.yaml: is wrong")
    return 2


_sound_main = door.main

# Commands that do something else, and what that is.
PLANTED: dict[str, Callable[[Sequence[str]], int]] = {
    "traceback": lambda arguments: 1 // 0,
    "unclear": lambda arguments: 2,
    "changed": _untidy,
    "wrong": _careless,
}


def check(examples: int) -> int:
    """Try the same few examples every time, and commands that do something else.

    Returns:
        How many of them did not end as they had to.
    """
    faults = 0

    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=examples,
        suppress_health_check=[*HealthCheck],
        phases=[Phase.generate],
    )
    @given(example=EXAMPLES)
    def some(example: Example | Story) -> None:
        nonlocal faults
        kind, output = try_out(example)
        if kind not in RIGHT | {"slow"}:  # a busy machine is no fault
            faults += 1
            print(f"{kind}: {example}\n{output}")

    some()
    for expected, command in PLANTED.items():
        with patched(door, "main", command):
            kind, output = try_out(Example(TRAIN, "yaml"))
        if kind != expected:
            faults += 1
            print(f"a planted fault is {kind} instead of {expected}\n{output}")
    return faults


def main() -> int:
    """Try examples for some time, or one again."""
    parser = argparse.ArgumentParser(description="Try random examples.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"))
    parser.add_argument("--repeat", type=Path)
    parser.add_argument("--examples", type=int, help="only so many, always the same")
    options = parser.parse_args()
    if options.repeat:
        kind, output = try_out(example_of(options.repeat.read_text()))
        print(f"{kind}\n{output}")
        return kind not in RIGHT
    if options.examples:
        return check(options.examples)
    ends = time.monotonic() + 60 * options.minutes
    counts: collections.Counter[str] = collections.Counter()

    @settings(database=None, deadline=None, max_examples=20, suppress_health_check=[*HealthCheck])
    @given(example=EXAMPLES)
    def some(example: Example | Story) -> None:
        if time.monotonic() > ends:
            return
        kind, output = try_out(example)
        counts[kind] += 1
        if kind not in RIGHT:
            options.failures.mkdir(exist_ok=True)
            text = json.dumps(dataclasses.asdict(example))
            file = options.failures / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
            file.with_suffix(".json").write_text(text)
            file.with_suffix(".txt").write_text(output)

    while time.monotonic() < ends:
        seed(random.randrange(2**32))(some)()
        print(f"{counts.total()} tried: {dict(counts)}", flush=True)
    return int(any(kind not in RIGHT for kind in counts))


if __name__ == "__main__":
    sys.exit(main())
