"""The command line: `python -m determined_amp COMMAND`, installed as `det-amp
COMMAND`.
"""

from __future__ import annotations

import errno
import importlib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress

from determined_amp import __version__
from determined_amp.amp.errors import UserError
from determined_amp.experiment.failures import is_task, print_failure

# By command: the module of its `main(arguments)`, and its help text. `main` returns the
# exit status, and raises a `UserError` for an error that a user can fix.
_COMMANDS = {
    "train": ("train", "train an experiment, here or as a task of a cluster"),
    "audit": ("audit_batch", "show what one training batch is computed in"),
    "find": ("find", "find the initial loss scale in one pass"),
    "score": ("score_scale", "measure the steps that a loss scale loses"),
    "compare": ("compare", "train in every precision, and say which to use"),
    "check": ("check", "say what is wrong with the AMP of a trial"),
    "search": ("search", "run a search without a cluster"),
    "report": ("report", "write the report that fits the source"),
    "report precision": ("report", "compare precisions, with a verdict"),
    "report loss-scale": ("report", "draw the loss scale, predicted and observed"),
}

# Commands that write their result into a folder. The others print it.
_KEEP_THEIR_RESULT = ("train", "compare", "search", "report")

# Packages of ours that an installation or an image may lack: their module, and their
# name for pip.
_PACKAGES = {
    "rich": "rich",
    "tensorboard": "tensorboard",
    "torchvision": "torchvision",
    "diffusers": "diffusers",
    "optuna": "optuna",
    "sqlalchemy": "sqlalchemy",
    "matplotlib": "matplotlib",
    "scipy": "scipy",
    "yaml": "pyyaml",
    "sklearn": "scikit-learn",
}


def usage() -> str:
    """The text of `--help`."""
    width = max(map(len, _COMMANDS))
    commands = [
        f"  {command:{width}}  {text}" for command, (_, text) in _COMMANDS.items()
    ]
    lines = "\n".join(commands)
    return (
        f"usage: python -m determined_amp COMMAND [ARGUMENTS]\n\n{lines}\n\n"
        "python -m determined_amp COMMAND --help lists the arguments of a command;\n"
        "python -m determined_amp --version prints the version."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status, 2 for an unknown command or a
    `UserError`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in (["--help"], ["-h"]):
        print(usage())
        return 0
    if words[:1] == ["--version"]:
        print(f"determined_amp {__version__}")
        return 0
    try:
        return _run(words)
    except UserError as error:
        print_failure(error)
        if is_task():
            _note(error)
        return 2
    except KeyboardInterrupt as stopped:
        print(str(stopped) or "interrupted", file=sys.stderr)
        return 130


def _run(words: Sequence[str]) -> int:
    """Import a command and run it; its exit status."""
    command = " ".join(words[: 2 if " ".join(words[:2]) in _COMMANDS else 1])
    if command not in _COMMANDS:
        problem = f"got {command!r}" if words else "no command given"
        raise UserError(f"{problem}; allowed: {', '.join(_COMMANDS)}")
    _refuse_empty(words)
    # `python -m` puts the working directory on the path; an installed script does not.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        # Imports take seconds, and a package may be missing: here both end in a
        # sentence.
        from determined_amp.local.logs import surviving_closed_output  # noqa: PLC0415

        module = importlib.import_module(f"determined_amp.cli.{_COMMANDS[command][0]}")
        with surviving_closed_output() as output:
            status = int(module.main(words[1:]))
    except ModuleNotFoundError as error:
        package = _PACKAGES.get(str(error.name).partition(".")[0])
        if package is None:
            raise
        raise UserError(
            f"{command} needs {package}, which is not {_how_to_add(package)}"
        ) from error
    lost = output.error
    if (
        status
        or lost is None
        or lost.errno == errno.EPIPE
        or words[0] in _KEEP_THEIR_RESULT
    ):
        return status
    raise UserError(f"{command}: standard output cannot be written: {lost.strerror}")


def _how_to_add(package: str) -> str:
    if is_task():
        return (
            "in the image; allowed: an image with it, or python3 -m pip install "
            f"{package} in startup-hook.sh, with a package index that the task can "
            "reach"
        )
    return "installed; pip install '.[all]' in a checkout of determined_amp adds it"


def _note(error: UserError) -> None:
    """Note why a task ends in the metadata of its run."""
    # They need torch, as the task does.
    import determined as det  # noqa: PLC0415

    from determined_amp.trial.notes import failure_noted  # noqa: PLC0415

    info = det.get_cluster_info()
    if info is not None:
        with suppress(UserError), failure_noted(info):
            raise error


def _refuse_empty(words: Sequence[str]) -> None:
    """Raise for an empty argument, which is often a variable of the shell that is not
    set.

    What stands behind a script belongs to the script.
    """
    own = itertools.takewhile(lambda word: not word.endswith(".py"), words)
    if any(not word or re.fullmatch(r"--[\w-]+=", word) for word in own):
        raise UserError(
            f"got an empty argument in {shlex.join(words)}; allowed: a value"
        )


if __name__ == "__main__":
    sys.exit(main())
