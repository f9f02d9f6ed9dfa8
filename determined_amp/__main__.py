"""The command line: `python -m determined_amp COMMAND`, installed as `det-amp COMMAND`."""

from __future__ import annotations

import atexit
import errno
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

from determined_amp.amp.errors import UserError
from determined_amp.amp.patched import patched
from determined_amp.experiment.errors import NO_RETRY, exit_status
from determined_amp.experiment.files import temporary_folder
from determined_amp.local.logs import surviving_closed_output

# By command: the module of its `main(arguments)`, and its help text. `main` returns the exit
# status, and raises a `UserError` for an error that a user can fix.
_COMMANDS = {
    "train": ("determined_amp.cli.train", "train an experiment, here or as a task of a cluster"),
    "audit": ("determined_amp.cli.audit", "show what one training batch is computed in"),
    "find": ("determined_amp.cli.find", "find the initial loss scale in one pass"),
    "score": ("determined_amp.cli.score", "measure the steps that a loss scale loses"),
    "compare": ("determined_amp.cli.compare", "train in every precision, and say which to use"),
    "check": ("determined_amp.cli.check", "say what is wrong with the AMP of a trial"),
    "search": ("determined_amp.cli.search", "run a search without a cluster"),
    "report": ("determined_amp.cli.report", "write the report that fits the source"),
    "report precision": ("determined_amp.cli.report", "compare precisions, with a verdict"),
    "report loss-scale": (
        "determined_amp.cli.report",
        "draw the loss scale, predicted and observed",
    ),
}

# Commands that write their result into a folder. The others print it.
_KEEP_THEIR_RESULT = ("train", "compare", "search", "report", "report precision")

# Packages that the extras `search` and `reports` install.
_OF_EXTRAS = ("optuna", "sqlalchemy", "matplotlib", "scipy")


def usage() -> str:
    """The text of `--help`."""
    width = max(map(len, _COMMANDS))
    lines = [f"  {command:{width}}  {text}" for command, (_, text) in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: python -m determined_amp COMMAND [ARGUMENTS]",
            "",
            *lines,
            "",
            "python -m determined_amp COMMAND --help lists the arguments of a command.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status, 2 for an unknown command or a `UserError`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in (["--help"], ["-h"]):
        print(usage())
        return 0
    command = " ".join(words[: 2 if " ".join(words[:2]) in _COMMANDS else 1])
    if command not in _COMMANDS:
        problem = f"got {command!r}" if words else "no command given"
        print(f"{problem}; allowed: {', '.join(_COMMANDS)}\n\n{usage()}", file=sys.stderr)
        return 2
    # A cluster restarts a failed task unless its log has this text.
    in_task = command == "train" or "DET_TASK_TYPE" in os.environ
    before = NO_RETRY if in_task else ""
    hook = partial(_interrupt_again, sys.unraisablehook)
    try:
        with patched(sys, "unraisablehook", hook), surviving_closed_output() as output:
            status = exit_status(partial(_do, command, words), before)
    except (KeyboardInterrupt, Exception) as error:
        if not _comes_of_ctrl_c(error):
            raise
        print("interrupted", file=sys.stderr)
        return 130
    lost = output.error
    if status or lost is None or lost.errno == errno.EPIPE or command in _KEEP_THEIR_RESULT:
        return status
    print(f"{command}: standard output cannot be written: {lost.strerror}", file=sys.stderr)
    return 2


def _do(command: str, words: Sequence[str]) -> int:
    """Import a command and run it; its exit status."""
    _check_surroundings(words)
    try:
        # The import takes seconds. Here, a Ctrl-C during it prints no traceback.
        module = importlib.import_module(_COMMANDS[command][0])
        return int(module.main(words[1:]))
    except ModuleNotFoundError as error:
        if error.name not in _OF_EXTRAS:
            raise
        add = (
            "add python3 -m pip install optuna matplotlib scipy to startup-hook.sh"
            if "DET_TASK_TYPE" in os.environ
            else "pip install '.[search,reports]' in a checkout of determined_amp adds it"
        )
        raise UserError(f"{command} needs {error.name}, which is not installed; {add}") from error


def _comes_of_ctrl_c(error: BaseException | None) -> bool:
    """Whether an error is a Ctrl-C, or was raised because of one.

    An extension that is being loaded raises an ImportError from it, and a clean-up that it
    interrupts may fail while it is handled.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _interrupt_again(
    hook: Callable[[sys.UnraisableHookArgs], object], lost: sys.UnraisableHookArgs
) -> None:
    """Repeat a Ctrl-C that came while Python freed an object, where it has no effect.

    Everything else goes to `hook`, the earlier hook.
    """
    if issubclass(lost.exc_type, KeyboardInterrupt):
        # After what is being freed; a signal also ends what the main thread waits for.
        main_thread = threading.main_thread().ident
        again = threading.Timer(0.1, signal.pthread_kill, (main_thread, signal.SIGINT))
        again.daemon = True
        again.start()
    else:
        hook(lost)


def _check_surroundings(words: Sequence[str]) -> None:
    """Raise for an empty argument, often an unset variable, and for a removed directory."""
    for before, word in zip(["", *words], words, strict=False):
        if not word or re.fullmatch(r"--[\w-]+=", word):
            where = f" after {before}" if before and not word else ""
            raise UserError(f"got an empty argument{where or f': {word}'}; allowed: a value")
    try:
        here = os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the working directory was removed; allowed: one that exists") from error
    # `python -m` puts the working directory on the path; an installed script does not.
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    with temporary_folder():  # torch, Determined and multiprocessing have a traceback instead
        pass


def run() -> NoReturn:
    """Run the program of this process.

    It ends without Python's teardown, which takes seconds once torch is imported. Exit
    handlers, such as the removal of temporary folders, run before.
    """
    statuses: list[int] = []

    def leave() -> None:
        if statuses:  # not an error that Python is to print
            with suppress(OSError):
                sys.stdout.flush()
            with suppress(OSError):
                sys.stderr.flush()
            os._exit(statuses[0])

    atexit.register(leave)  # the first that is registered is the last that runs
    statuses.append(main())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done and said
    sys.exit(statuses[0])


if __name__ == "__main__":
    run()
