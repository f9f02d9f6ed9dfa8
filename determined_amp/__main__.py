"""The command line: `python -m determined_amp COMMAND`, installed as `det-amp COMMAND`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from determined_amp.experiment.errors import NO_RETRY, UserError, exit_status

# By command: the module that has its `main(arguments)`, and its help text.
_COMMANDS = {
    "train": ("determined_amp.cli.train", "train an experiment: here, or as a task of a cluster"),
    "audit": ("determined_amp.cli.audit", "show what one training batch is computed in"),
    "find": ("determined_amp.cli.find", "find the initial loss scale in one pass"),
    "score": ("determined_amp.cli.score", "measure the steps that a loss scale loses"),
    "compare": (
        "determined_amp.cli.compare",
        "train in every precision, and say which to use",
    ),
    "search": ("determined_amp.cli.search", "run a search without a cluster"),
    "report": ("determined_amp.cli.report", "the one of the next two that fits a source"),
    "report precision": ("determined_amp.cli.report", "compare precisions, with a verdict"),
    "report loss-scale": (
        "determined_amp.cli.report",
        "draw the loss scale, predicted and observed",
    ),
}

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
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not {"--help", "-h"}.isdisjoint(given[: 2 if given[:1] == ["report"] else 1]):
        print(usage())
        return 0
    words = 2 if " ".join(given[:2]) in _COMMANDS else 1
    command = " ".join(given[:words])
    if command not in _COMMANDS:
        problem = f"got {command!r}" if given else "no command given"
        print(f"{problem}; allowed: {', '.join(_COMMANDS)}\n\n{usage()}", file=sys.stderr)
        return 2
    # `python -m` puts the working directory on the path; an installed script does not.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    # A cluster restarts a failed task unless its log has this text.
    in_task = command == "train" or "DET_TASK_TYPE" in os.environ
    before = NO_RETRY if in_task else ""

    def run() -> int:
        # The import takes seconds. Here, Ctrl-C during it prints no traceback.
        try:
            module = importlib.import_module(_COMMANDS[command][0])
            return int(module.main(given[1:]))
        except ModuleNotFoundError as error:
            if error.name not in _OF_EXTRAS:
                raise
            add = (
                "add python3 -m pip install optuna matplotlib scipy to startup-hook.sh"
                if "DET_TASK_TYPE" in os.environ
                else "pip install '.[search,reports]' in a checkout of determined_amp adds it"
            )
            raise UserError(
                f"{command} needs {error.name}, which is not installed; {add}"
            ) from error

    try:
        return exit_status(run, before)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
