"""The command line: `python -m determined_amp COMMAND`, installed as `det-amp COMMAND`."""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from determined_amp import __version__
from determined_amp.amp.errors import UserError
from determined_amp.experiment.errors import exit_status
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

# Modules that an image may lack, and what pip calls the packages that have them.
_COMPARE = "optuna matplotlib scipy"
_MAY_BE_MISSING = {
    **dict.fromkeys(("optuna", "sqlalchemy", "matplotlib", "scipy"), _COMPARE),
    "sklearn": "scikit-learn",
    **{name: name for name in ("rich", "tensorboard", "torchvision", "diffusers")},
}


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
            "python -m determined_amp COMMAND --help lists the arguments of a command;",
            "python -m determined_amp --version prints the version.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status, 2 for an unknown command or a `UserError`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in (["--help"], ["-h"]):
        print(usage())
        return 0
    if words[:1] == ["--version"]:
        print(f"determined_amp {__version__}")
        return 0
    command = " ".join(words[: 2 if " ".join(words[:2]) in _COMMANDS else 1])
    if command not in _COMMANDS:
        problem = f"got {command!r}" if words else "no command given"
        print(f"{problem}; allowed: {', '.join(_COMMANDS)}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        with surviving_closed_output() as output:
            status = exit_status(partial(_do, command, words))
    except KeyboardInterrupt as stopped:
        print(str(stopped) or "interrupted", file=sys.stderr)
        return 130
    lost = output.error
    if status or lost is None or lost.errno == errno.EPIPE or command in _KEEP_THEIR_RESULT:
        return status
    print(f"{command}: standard output cannot be written: {lost.strerror}", file=sys.stderr)
    return 2


def _do(command: str, words: Sequence[str]) -> int:
    """Import a command and run it; its exit status."""
    _refuse_empty(words)
    # `python -m` puts the working directory on the path; an installed script does not.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        # The import takes seconds. Here, a Ctrl-C during it prints no traceback.
        module = importlib.import_module(_COMMANDS[command][0])
        return int(module.main(words[1:]))
    except ModuleNotFoundError as error:
        if error.name not in _MAY_BE_MISSING:
            raise
        lacks = f"{command} needs {error.name}, which is not installed"
        if "DET_TASK_TYPE" not in os.environ:
            remedy = "pip install '.[all]' in a checkout of determined_amp adds it"
            raise UserError(f"{lacks}; {remedy}") from error
        packages = _MAY_BE_MISSING[error.name]
        _fail_in_task(
            f"{lacks}; add python3 -m pip install {packages} to startup-hook.sh, or use an image "
            "that has it where the nodes reach no package index"
        )


def _fail_in_task(reason: str) -> NoReturn:
    """Raise a `UserError`, and note it in the metadata of the run."""
    import determined as det  # noqa: PLC0415  # seconds

    from determined_amp.trial.notes import failure_noted  # noqa: PLC0415

    info = det.get_cluster_info()
    assert info is not None
    with failure_noted(info):
        raise UserError(reason)


def _refuse_empty(words: Sequence[str]) -> None:
    """Raise for an empty argument, which is often a variable of the shell that is not set."""
    for before, word in zip(["", *words], words, strict=False):
        if not word or re.fullmatch(r"--[\w-]+=", word):
            where = f" after {before}" if before and not word else ""
            raise UserError(f"got an empty argument{where or f': {word}'}; allowed: a value")


if __name__ == "__main__":
    sys.exit(main())
