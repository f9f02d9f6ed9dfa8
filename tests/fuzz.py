"""Whatever is done to a YAML, a run folder or a process: one clear sentence, or a whole training.

    python -m tests.fuzz --minutes 60 [--failures FOLDER]
    python -m tests.fuzz --repeat EXAMPLE.json

Every example is one or more commands in one folder. Each runs in a fork of a process that has
imported everything: a fresh process in all that the command could notice, with real signals and
exit statuses. It may end in two ways. Either it says what is wrong, in which key or file, has
status 2 after a second of work at most, and has changed nothing. Or it does what was asked, and a
run ends where an undisturbed run ends.

A command may also find a changed YAML, damaged files, its standard output closed, a file where it
is to write, or a master that lies. Signals end some commands.

The long run prints how often each kind of end came, and writes every example of a kind that is not
in `RIGHT` to a folder.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache, partial, partialmethod
from pathlib import Path
from typing import Any, NamedTuple

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


def _words(text: str) -> list[str]:
    return text.split()


# What commands import when they need it.
_IMPORTED = _words("""
sklearn.datasets torch.utils.tensorboard torch._dynamo trials.mlp determined_amp.cli.train
determined_amp.cli.find determined_amp.search.engine determined_amp.cli.report
determined_amp.report.loss_scale_report determined.experimental.client
""")

# Seconds until an example counts as one that hangs; a report takes 25 on a slow machine.
PATIENCE = 90.0
# Seconds of work, after the imports, in which a mistake is told.
AT_ONCE = 1.0

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Kinds of end that are no fault.
RIGHT = {"clear", "trained", "done", "stopped", "diverged", "long"}


@dataclass(frozen=True)
class Step:
    """A command, and the signals that it is sent, each after another `delay` seconds."""

    command: Sequence[str]
    signals: Sequence[int] = ()
    delay: float = 0.0


@dataclass(frozen=True)
class Fault:
    """What is done to a key of the YAML, to a file, or to the master's answers to a request.

    Args:
        how: A name in `written`, `spoil` or `lied`.
        where: The dotted key, the file, or the end of the request's path.
        value: Instead of that of the key.
        at: Where in the file or the answer, as a share of its length, in [0, 1].
    """

    how: str
    where: str
    value: str = ""
    at: float = 0.5


@dataclass(frozen=True)
class Example:
    """Commands that follow each other in a copy of the folder `bases()`, and what is done to it.

    Args:
        steps: The commands.
        goes_on: Whether a user resumes the run at the end, until it has completed.
        changes: Of the YAML of the first command.
        damages: Of any file.
        lies: Of the master.
        stream: What is wrong with the standard output, see `broken_stream`.
    """

    steps: Sequence[Step]
    goes_on: bool = False
    changes: Sequence[Fault] = ()
    damages: Sequence[Fault] = ()
    lies: Sequence[Fault] = ()
    stream: str = ""

    @staticmethod
    def read(text: str) -> Example:
        """The opposite of `json.dumps(astuple(example))`."""
        steps, goes_on, *faults, stream = json.loads(text)
        changes, damages, lies = ([Fault(*fault) for fault in kind] for kind in faults)
        return Example([Step(*step) for step in steps], goes_on, changes, damages, lies, stream)


class Ending(NamedTuple):
    """How a command ended.

    Args:
        status: Its exit status, or minus the signal that ended it; None if it did not end.
        output: What it printed.
        seconds: The work of its processor.
    """

    status: int | None
    output: str
    seconds: float


LENGTH_KEY = "hyperparameters.training.max_length.batches"
TINY = with_overrides(
    read_yaml(str(training.ROOT / "experiment_configs/mlp/amp.yaml")),
    [
        *training.SMALL[:3],
        "hyperparameters.training={max_length: {batches: 4}, validation_period: {batches: 2}, "
        "checkpoint_period: {batches: 2}, reporting_period: {batches: 1}}",
    ],
)
SEARCH = with_overrides(
    read_yaml(str(training.ROOT / "hp_search/loss_scale_grid.yaml")),
    [*searching.SMALL_MODEL, *searching.THREE_SCALES],
)


def dotted(config: object, path: str = "") -> Iterator[str]:
    """The dotted path of every key."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield f"{path}{key}"
            yield from dotted(value, f"{path}{key}.")


def written(config: Mapping[str, Any], changes: Sequence[Fault] = ()) -> str:
    """The configuration as YAML with the changes, some of which no YAML library would write."""
    by_path = {change.where: change for change in changes}

    def lines(section: Mapping[str, Any], path: str, depth: int) -> Iterator[str]:
        for key, value in section.items():
            place = f"{path}{key}"
            change = by_path.get(place, Fault("keep", place))
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


def spoil(folder: Path, damage: Fault) -> None:
    """Damage a file of a folder; one that is not there stays away."""
    (path, *_) = [*sorted(folder.glob(damage.where)), folder / damage.where]
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


def fork(arguments: Sequence[str], folder: Path, output: Path, stream: str) -> int:
    """Start a command in `folder` in a child of this process; its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # none in the middle of the fork
        child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
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
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if stream:
            broken_stream(stream)
        status = door.main(arguments)
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for written_to in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                written_to.flush()
        os._exit(status)


def run(step: Step, folder: Path, stream: str = "") -> Ending:
    """Run a command, and send it its signals."""
    output = folder.parent / "output.txt"
    output.touch()
    child = fork(step.command, folder, output, stream)
    began = time.monotonic()
    due = [(began + step.delay * i, number) for i, number in enumerate(step.signals, start=1)]
    status, seconds = None, 0.0
    while time.monotonic() < began + PATIENCE:
        done, code, usage = os.wait4(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
            seconds = usage.ru_utime + usage.ru_stime
            break
        if due and time.monotonic() > due[0][0]:
            os.kill(child, due.pop(0)[1])
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


TRAIN = ("train", "config.yaml", "--run-folder", "run")
RESUME, RESUME_HALF = ("train", "--resume", "run"), ("train", "--resume", "half")
FIND = ("find", "config.yaml", "--batches", "1")
FIND_HALF = ("find", "half/config.yaml", "--checkpoint", "half", "--batches", "1")
SEARCH_NEW, SEARCH_ON = ("search", "search.yaml"), ("search", "--resume", "searched")


@cache
def bases() -> Path:
    """A folder that has `here`, what the examples start from, and `whole`, an undisturbed run."""
    for name in _IMPORTED:
        importlib.import_module(name)  # here, and not in every fork
    root = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    here = root / "here"
    here.mkdir()
    (here / "config.yaml").write_text(written(TINY))
    searching.write(here, "loss_scale_grid.yaml", *searching.THREE_SCALES)
    half = ("train", "config.yaml", "--run-folder", "half", "--config", f"{LENGTH_KEY}=2")
    whole = ("train", "config.yaml", "--run-folder", "../whole")
    for command in (
        *(half, whole, SEARCH_NEW),
        *((*FIND, "--json", "answer.json"), (*FIND, "--plot", "answer.png")),
    ):
        ending = run(Step(command), here)
        assert ending.status == 0, ending.output
    # As if the process had been killed after two of four batches.
    (here / "half" / "config.yaml").write_text(written(TINY))
    record = here / "half" / "run.json"
    record.write_text(record.read_text().replace('"completed"', '"running"'))
    (searched,) = (here / "runs").glob("*/*")
    searched.rename(here / "searched")
    shutil.rmtree(here / "runs")
    with sqlite3.connect(here / "searched" / "study.db") as database:
        database.execute("UPDATE trials SET state = 'RUNNING' WHERE number = 2")
    _fill(here)
    return root


def _fill(folder: Path) -> None:
    """Make a file of each kind where a command may be told to write."""
    for name in ("notes.txt", "notes.json", "notes.png"):
        (folder / name).write_text('{"mine": 1}')
    for name in ("folder.json", "folder.png", "out", "out/loss_scale.html", "kept"):
        (folder / name).mkdir()
    for name, target in LINKS.items():
        (folder / name).symlink_to(target)
    shutil.copy(folder / "answer.json", folder / "kept" / "loss_scale.json")


LINKS = {"link.json": "config.yaml", "other.json": "notes.json", "nowhere.json": "gone.json"}

# What a command may replace: an earlier answer, and a link in place of one.
_REPLACEABLE = ("answer.json", "answer.png", "nowhere.json")


def reached(run_folder: Path) -> str:
    """The hash of the last checkpoint of a run."""
    return training.digest(training.checkpoint(run_folder, 4))


def try_out(example: Example) -> tuple[str, str]:
    """What an example came to, in a folder that is gone afterwards, and the output.

    It is one of `RIGHT`, or a fault: `traceback`, `hang`, `slow`, `unclear`, `changed` (what was
    refused has left something), `wrong` (did something else than was asked).
    """
    with tempfile.TemporaryDirectory(prefix="fuzz-") as work:
        folder = Path(work) / "here"
        shutil.copytree(bases() / "here", folder, symlinks=True)
        if example.changes:
            of_a_search = example.steps[0].command[0] == "search"
            file, config = ("search.yaml", SEARCH) if of_a_search else ("config.yaml", TINY)
            (folder / file).write_text(written(config, example.changes))
        for damage in example.damages:
            spoil(folder, damage)
        said, kind, differs = "", "", False
        for planned in (*example.steps, *[None] * example.goes_on):
            saved = any((folder / "run" / "checkpoints").glob("batch-*"))
            step = planned or Step(RESUME if saved else TRAIN)
            with lying(example.lies) if example.lies else contextlib.nullcontext():
                kind, output = judged(example, step, folder, differs=differs)
            said += output
            if planned is None and kind in RIGHT - {"trained"} and not differs:
                kind = "wrong: the run does not come to its end"
            differs = differs or (bool(_asked(step)) and kind != "clear")
            if kind not in RIGHT:
                break
    return kind.partition(":")[0], f"{kind}\n{said}"


def judged(example: Example, step: Step, folder: Path, *, differs: bool) -> tuple[str, str]:
    """Run a command: what it came to, see `try_out`, with `: ` before what is wrong; its output.

    Args:
        example: What is done to its folder and streams.
        step: The command.
        folder: Where it works.
        differs: Whether an earlier command has trained something else than `whole`.
    """
    before, command, words = content(folder), step.command[0], step.command
    ending = run(step, folder, example.stream)
    after = content(folder)
    touched = {n for n in {*before, *after} if before.get(n) != after.get(n)}
    replaced = touched & before.keys() & content(bases() / "here").keys() - {*_REPLACEABLE}
    if "--resume" in words:  # its own folder
        replaced = {name for name in replaced if not name.startswith(f"{words[2]}/")}
    # A search some of whose trials failed has told which, and has status 1.
    of_signals = (130, *(-number for number in step.signals)) if step.signals else ()
    statuses = {0, 2, *([1] if command == "search" else []), *of_signals}
    trains = command == "train" and not step.signals
    if ending.status is None:
        # A run that reports is only longer than anybody waits here.
        kind = "long" if any("metrics.jsonl" in name for name in touched) else "hang"
    elif "Traceback (most recent call last)" in ending.output or ending.status not in statuses:
        kind = "traceback"
    elif ending.status == 2:
        kind = _refused(example, step, ending, [folder / name for name in touched])
    elif "\x1b" in ending.output:
        kind = "unclear"
    elif replaced:
        kind = f"wrong: it has replaced {replaced}"
    elif example.stream == "full" and command == "find":
        kind = "wrong: nobody has its answer"
    elif trains and (fault := _not_as_asked(example, step, folder, differs=differs)):
        kind = f"wrong: {fault}"
    else:
        kind = "stopped" if step.signals else "trained" if trains else "done"
    said = f"{' '.join(words)} {[*step.signals]}: exit {ending.status}, {ending.seconds:.2f} s\n"
    return kind, f"{said}{ending.output}\n"


def _refused(example: Example, step: Step, ending: Ending, touched: Sequence[Path]) -> str:
    paths = [fault.where for fault in (*example.changes, *example.damages)]
    words = [*re.split(r"[./*]", " ".join(paths)), *step.command, "runs", "master"]
    named = any(word.strip() and word.strip() in ending.output for word in words)
    if not ending.output.strip() or not named or len(ending.output) > 6000:
        return "unclear"
    if touched:
        # Only training could show what is wrong with what was asked.
        failed = any(_failed(path) for path in touched if path.name == "run.json")
        return "diverged" if failed else f"changed: {touched}"
    may_be_late = example.lies or example.stream or example.goes_on or step.command[-2] in _OUTPUTS
    return "slow" if ending.seconds > AT_ONCE and not may_be_late else "clear"


def _failed(record: Path) -> bool:
    """Whether a run, whose record may be damaged, has begun and failed."""
    try:
        return read_record(record.parent).state is RunState.FAILED
    except RunError:
        return False


def _asked(step: Step) -> dict[str, str]:
    pairs = (word.partition("=") for word in step.command if "=" in word)
    return {key: value for key, _, value in pairs}


def _not_as_asked(example: Example, step: Step, folder: Path, *, differs: bool) -> str:
    """What a run that has ended well is, and should not be; empty if all is as it was asked.

    The YAML says what was asked, as Determined's reader understands it.
    """
    resumed = "half" if "half" in step.command else "run"
    source = folder / resumed if "--resume" in step.command else folder
    asked = util.yaml_safe_load((source / "config.yaml").read_text(encoding="utf-8-sig"))
    made = folder / resumed
    resolved = util.yaml_safe_load((made / "resolved.yaml").read_text(encoding="utf-8"))
    for name, value in flat(asked).items():
        is_there = flat(resolved).get(name)
        if isinstance(value, dict) and isinstance(is_there, dict):  # with what is added by default
            is_there = {key: is_there[key] for key in value.keys() & is_there.keys()}
        same = value == is_there and isinstance(value, bool) == isinstance(is_there, bool)
        same = same or repr(value) == repr(is_there) == "nan"  # which equals nothing
        if value not in (None, {}) and not same:
            return f"{name}: asked for {value!r}, trained {is_there!r}"
    found = read_run(made)
    for key, text in _asked(step).items():
        if str(found.settings[key]) != text:
            return f"{key}: asked for {text}, trained {found.settings[key]}"
    first = [part.first_batch for part in found.parts]
    if found.state is not RunState.COMPLETED or first != sorted({*first}):
        return f"its state is {found.state}, its parts begin at {first}"
    length = value_at(resolved, LENGTH_KEY)
    last = max((line["batches"] for line in read_metrics(made / "metrics.jsonl")), default=0)
    if length not in (None, last):
        return f"{length} batches are asked for, {last} trained"
    # By their text: a checkpoint with -0.0 is another one than that with 0.0.
    sound = str(flat(resolved)) == str(flat(read_yaml(str(bases() / "whole" / "resolved.yaml"))))
    is_whole = sound or not (example.changes or example.damages)
    if (
        is_whole
        and not differs
        and not _asked(step)
        and reached(made) != reached(bases() / "whole")
    ):
        return "another end than that of an undisturbed run"
    return ""


@contextlib.contextmanager
def lying(lies: Sequence[Fault]) -> Iterator[None]:
    """Be the master of DET_MASTER for the forks meanwhile, which has less time than others."""
    truth = Master(SEARCH, [])
    numbers = (4, 16, 24)
    truth.trials = [{**TRIAL, "id": n, "hparams": {"amp": {"init_scale": 2.0**n}}} for n in numbers]
    truth.reports["validation"] = [report(n, 4, "validation", scored(n)) for n in numbers]
    truth.reports["training"] = [report(16, 4, "training", {"skipped_steps": 2})]
    truth.metadata = {n: {"seed": 3} for n in numbers}

    def answer(method: str, url: str, sent: bytes) -> tuple[int, str]:
        path, _, query = url.partition("?")
        status, said = truth.answer(path, query)
        for lie in lies:
            if path.endswith(lie.where):
                status, said = lied(lie, status, said)
        return status, said

    limits = patched(master, "ALL_ANSWERS", 6), patched(master, "ANSWER", 3)
    with answering(answer) as address, tempfile.TemporaryDirectory() as kept, limits[0], limits[1]:
        known = {"DET_MASTER": address, "DET_DEBUG_CONFIG_PATH": kept, "DET_USER": "someone"}
        with patched(os, "environ", {**os.environ, **known, "DET_PASS": "Correct-horse-1"}):
            yield


def lied(lie: Fault, status: int, said: str) -> tuple[int, str]:
    """An answer with one lie."""
    if lie.how == "slow":
        time.sleep(8)
    others = {
        "html": "<html>\x1b[31m</html>",
        "cut": said[: int(len(said) * lie.at)],
        "endless": said * (_ENDLESS // max(len(said), 1) + 1),
    }
    if lie.how not in SAID:
        return int(lie.how) if lie.how.isdecimal() else status, others.get(lie.how, said)
    try:
        tree = json.loads(said)
    except ValueError:  # another lie has made it something else
        return status, said
    places = [
        (section, key)
        for section in _sections(tree)
        for key in (section if isinstance(section, dict) else range(len(section)))
    ]
    section, key = places[int(lie.at * (len(places) - 1))]
    section[key] = "THE LIE"
    if lie.how == "delete":
        del section[key]
    return status, json.dumps(tree).replace('"THE LIE"', lie.how)


def _sections(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (dict, list)) and tree:
        yield tree
        for inner in tree.values() if isinstance(tree, dict) else tree:
            yield from _sections(inner)


# Values as YAML, wrong in most places, with two spaces between.
VALUES = r"""
null  true  'true'  []  {}  [null]  {a: 1}  x  ''  '5'  5  0.5  0  -1  1  2  0x10  032  0o17  1:30
1e3  1e39  1e300  1e-300  yes  .nan  .inf  -.inf  9223372036854775808  4294967296  1e9  100000000  ~
2001-01-01  2001-99-99  &a [*a]  &a {b: *a}  *a  !!int x  !!binary aGk=  !x y  "\0"  "\ud800"  1_000
'[/b]'  '[red]'  größe  ../../up  /etc/passwd  'a/b'  '%20'  '{}'  [[[[[[[[[[[[]]]]]]]]]]]]  +1
-0.0  {2001-01-01: 1}  {type: const, val: 5}  {type: double, minval: 0, maxval: 1}  {batches: 1}
{epochs: 1}  LONG"""
# What a master says instead: a status, something else than JSON, and values of JSON.
STATUSES = _words("302 401 403 404 429 500 502 503 slow html cut endless")
SAID = _words(r"""
null 5 -1 0.5 "NaN" "Infinity" -1e308 1e308 1e400 "x" "" [] {} [[1]] true "16" delete
"\u001b]0;x\u0007" "<script>x</script>" 9007199254740993 "STATE_UNKNOWN"
""")
SAID += ["1" + "0" * 400, "[" * 300 + "]" * 300]
_ENDLESS = 10_000_000  # characters of an answer that nobody waits for
REQUESTS = ("/master", "/login", *("/experiments/7", "/trials", "/trial_metrics", "/runs") * 2)

DAMAGES = _words("cut flip latin line bom number list null empty delete folder link")
FILES = (
    *("config.yaml", "resolved.yaml", "run.json", "metrics.jsonl"),
    *("checkpoints/*/state_dict.pth", "checkpoints/*/trial_state.pkl"),
    *("checkpoints/*/metadata.json", "checkpoints/*/load_data.json"),
)

TARGETS = _words("""
config.yaml answer.json notes.json notes.txt folder.json link.json other.json nowhere.json
missing/a.json new.json /dev/full /dev/null answer.png notes.png folder.png new.png
searched/search.yaml searched/study.db
""")
_OUTPUTS = ("--json", "--plot", "--output")

STOPS = (
    *((), (), (), (signal.SIGKILL,), (signal.SIGINT,), (signal.SIGTERM,), (signal.SIGHUP,)),
    *((signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGKILL)),
)
CHANGED = _words(f"""
{LENGTH_KEY}=1 {LENGTH_KEY}=2 {LENGTH_KEY}=4 {LENGTH_KEY}=6 hyperparameters.amp.precision=fp32
hyperparameters.amp.precision=amp_bf16 reproducibility.experiment_seed=7 data.image_size=12
hyperparameters.global_batch_size=32 hyperparameters.learning_rate=0.5 searcher.name=grid
hyperparameters.hidden_features=24 hyperparameters.aggregation_frequency=2
""")

ANY = st.sampled_from
HOW = ANY(["drop", "misspell", "twice", "tab", *["value"] * 12])
VALUE = ANY(VALUES.replace("LONG", "x" * 5000).strip().replace("\n", "  ").split("  "))
SHARES = st.integers(0, 1000).map(lambda thousandths: thousandths / 1000)
SOME = partial(st.lists, min_size=1, max_size=2)


def changes_of(config: object) -> st.SearchStrategy[Fault]:
    """Changes of any key of a configuration."""
    return st.builds(Fault, HOW, ANY([*dotted(config)]), VALUE)


def damages_of(folder: str, files: Sequence[str], how: Sequence[str]) -> st.SearchStrategy[Fault]:
    """Damages of these files of a folder."""
    places = ANY([os.path.join(folder, file) for file in files])
    return st.builds(Fault, ANY(how), places, at=SHARES)


def only(commands: st.SearchStrategy[tuple[str, ...]]) -> st.SearchStrategy[list[Step]]:
    """One of these commands."""
    return commands.map(lambda command: [Step(command)])


RESUME_CHANGED = SOME(ANY(CHANGED), unique_by=lambda change: change.partition("=")[0]).map(
    lambda changes: (*RESUME, *(word for change in changes for word in ("--config", change)))
)
OTHERS = ANY([("report", "run"), ("report", "precision", "run", "run"), ("report", "searched")])
STEPS = st.builds(
    Step,
    ANY([TRAIN, RESUME, SEARCH_NEW, SEARCH_ON]) | OTHERS | RESUME_CHANGED,
    ANY(STOPS),
    st.integers(0, 150).map(lambda hundredths: hundredths / 100),
)
OUTPUTS = st.one_of(
    st.tuples(*map(st.just, FIND), ANY(["--json", "--plot"]), ANY([*TARGETS, ""])),
    st.tuples(
        *map(st.just, ("report", "loss-scale", "searched", "--finding")),
        ANY(["answer.json", "kept/loss_scale.json", "notes.json", "config.yaml", ""]),
        st.just("--output"),
        ANY(["out", "kept", "searched", "notes.txt", "missing", ".", "/dev/null", ""]),
    ),
)
STREAMS = ANY(["closed", "full", "gone"])
LIES = st.builds(Fault, ANY([*STATUSES, *SAID * 3]), ANY(REQUESTS), at=SHARES)
OF_YAML = damages_of("", ["config.yaml"], ["cut", "flip", "latin", "bom"])
OF_STUDY = damages_of("searched", ["study.db"], ["cut", "number", "empty", "delete", "folder"])
OF_SEARCH = OF_STUDY | damages_of("searched", ["search.yaml"], DAMAGES)
OF_RUN = SOME(damages_of("half", FILES, DAMAGES))

made = partial(st.builds, Example)
EXAMPLES = st.one_of(
    made(st.tuples(st.just(Step(TRAIN)), STEPS), st.just(True)),
    made(st.lists(STEPS, min_size=1, max_size=4), st.just(True)),
    made(only(OUTPUTS)),
    made(only(st.just(("report", "7"))), lies=SOME(LIES)),
    made(
        only(ANY([TRAIN, FIND, ("audit", "config.yaml"), ("train", "none.yaml")])), stream=STREAMS
    ),
    made(only(ANY([TRAIN, TRAIN, TRAIN, FIND])), changes=SOME(changes_of(TINY))),
    made(only(st.just(TRAIN)), damages=st.tuples(OF_YAML)),
    made(only(st.just(SEARCH_NEW)), changes=st.tuples(changes_of(SEARCH))),
    made(only(ANY([RESUME_HALF, RESUME_HALF, ("report", "half"), FIND_HALF])), damages=OF_RUN),
    made(only(ANY([SEARCH_ON, ("report", "searched")])), damages=st.tuples(OF_SEARCH)),
)


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


def tried(examples: int, judge: Callable[[Example], None], **how: Any) -> None:
    """Judge that many examples; `how` is for Hypothesis."""
    some = given(example=EXAMPLES)(judge)
    how |= {"database": None, "deadline": None, "suppress_health_check": [*HealthCheck]}
    some = settings(max_examples=examples, **how)(some)
    (some if "derandomize" in how else seed(random.randrange(2**32))(some))()


def main() -> int:
    """Try examples for some time, or one again; returns whether there was a fault."""
    parser = argparse.ArgumentParser(description="Try random examples.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"))
    parser.add_argument("--repeat", type=Path)
    parser.add_argument("--examples", type=int, help="only so many, always the same")
    options = parser.parse_args()
    if options.repeat:
        print(*try_out(Example.read(options.repeat.read_text())), sep="\n")
        return 0
    ends = time.monotonic() + 60 * options.minutes
    counts: collections.Counter[str] = collections.Counter()

    def judge(example: Example) -> None:
        if options.examples or time.monotonic() < ends:
            try:
                kind, output = try_out(example)
            except Exception:  # an hour must not end with what no kind has foreseen
                kind, output = "unjudged", traceback.format_exc()
            counts[kind] += 1
            if kind not in RIGHT:
                text = json.dumps(astuple(example))
                print(f"{kind}: {text}\n{output}", flush=True)
                options.failures.mkdir(exist_ok=True)
                name = f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
                (options.failures / name).write_text(text)

    if options.examples:
        tried(options.examples, judge, derandomize=True, phases=[Phase.generate])
        del counts["slow"]  # a busy machine is no fault
        for expected, command in PLANTED.items():
            with patched(door, "main", command):
                kind, output = try_out(Example([Step(TRAIN)]))
            if kind != expected:
                print(f"a planted fault is {kind} instead of {expected}\n{output}")
                counts["not seen"] += 1
    while not options.examples and time.monotonic() < ends:
        tried(20, judge)
        print(f"{counts.total()} tried: {dict(counts)}", flush=True)
    return int(not RIGHT.issuperset(counts))


if __name__ == "__main__":
    sys.exit(main())
