"""Runs the command line: `det-amp COMMAND`, or `python -m determined_amp COMMAND`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

from determined_amp import __version__
from determined_amp.amp.errors import UserError
from determined_amp.cli import (
    audit_batch,
    check,
    compare,
    find,
    report,
    score_scale,
    search,
    train,
)
from determined_amp.cli.options import Parser
from determined_amp.experiment.failures import OF_A_DISK, is_task, print_failure

# The commands. A module has `TEXT`, `add_options` and `run`. It imports the code of its
# command, and torch, only when that runs.
COMMANDS = {
    "train": train,
    "audit": audit_batch,
    "find": find,
    "score": score_scale,
    "compare": compare,
    "check": check,
    "search": search,
    "report": report,
}

# The commands that a task cannot run: they read a YAML, which no entrypoint names.
_NOT_IN_A_TASK = ("audit", "search")

# Packages that we need and an installation or an image may lack: their module, and
# their name for pip.
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status: 2 for a `UserError`."""
    try:
        try:
            return run(sys.argv[1:] if arguments is None else arguments)
        finally:
            _flush()
    except UserError as error:
        print_failure(error)
        if is_task():
            _note(error)
        return 2
    except KeyboardInterrupt as stopped:
        print(str(stopped) or "interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1
    except OSError as error:
        if error.errno not in OF_A_DISK:
            raise
        file = error.filename or "standard output"
        print_failure(UserError(f"{file} cannot be written: {error.strerror}"))
        return 2


def _flush() -> None:
    """Flush standard output.

    Raises:
        OSError: if the reader is gone, or the disk is full.
    """
    try:
        sys.stdout.flush()
    except OSError:
        # Python's documentation advises this. Python then writes nothing more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def run(words: Sequence[str]) -> int:
    """Run the command that some words name, and return its exit status.

    Raises:
        UserError: for an error that a user can fix.
    """
    own, of_a_script = _parted(words)
    if any(not word or re.fullmatch(r"--[\w-]+=", word) for word in own):
        raise UserError(  # often from a variable of the shell that is not set
            f"got an empty argument in {shlex.join(words)}; allowed: a value"
        )
    options, unknown = _parser().parse_known_args(own)
    if unknown:
        options.parser.refuse(unknown)
    options.words, options.arguments = words, of_a_script
    # `python -m` puts the working directory on the path; an installed script does not.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    return _status(options)


def _parted(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Part the words of a command from the arguments of the script that it checks."""
    for at, (before, word) in enumerate(pairwise(words), 2):
        is_script = word.endswith(".py") and word[0] != "-"
        is_value = before.startswith("--c")  # of `--config`
        if words[0] == "check" and is_script and not is_value:
            return words[:at], words[at:]
    return words, []


def _parser() -> Parser:
    parser = Parser(
        prog="det-amp",
        description="Mixed precision for Determined AI, and for any loop of PyTorch.",
        epilog="det-amp COMMAND --help lists the arguments of a command.",
    )
    parser.add_argument(
        "--version", action="version", version=f"determined_amp {__version__}"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        if is_task() and name in _NOT_IN_A_TASK:
            continue
        description = f"{command.TEXT[0].upper()}{command.TEXT[1:]}."
        added = commands.add_parser(name, help=command.TEXT, description=description)
        added.set_defaults(run=command.run, parser=added)
        command.add_options(added)
    return parser


def _status(options: Namespace) -> int:
    """Run a command and return its exit status. A missing package is a `UserError`."""
    try:
        return int(options.run(options))
    except ModuleNotFoundError as error:
        package = _PACKAGES.get(str(error.name).partition(".")[0])
        if package is None:
            raise
        program, lacks = options.parser.prog, _how_to_add(package)
        raise UserError(f"{program} needs {package}, which is not {lacks}") from error


def _how_to_add(package: str) -> str:
    if is_task():
        return (
            "in the image; allowed: an image with it, or python3 -m pip install "
            f"{package} in startup-hook.sh, with a package index that the task can "
            "reach"
        )
    return "installed; pip install '.[all]' in a checkout of determined_amp adds it"


def _note(error: UserError) -> None:
    """Write why a task ends to the overview and the metadata of its run."""
    # These imports need torch, as the task does.
    import determined as det  # noqa: PLC0415

    from determined_amp.trial.notes import failure_noted  # noqa: PLC0415

    info = det.get_cluster_info()
    if info is not None:
        with suppress(UserError), failure_noted(info):
            raise error


if __name__ == "__main__":
    sys.exit(main())
