"""One door for all commands: `python -m determined_amp VERB`, installed as `det-amp VERB`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from determined_amp.config.errors import NO_RETRY, exit_status

# Each command: the module whose `main(arguments)` it calls, and what it does.
_COMMANDS = {
    "train": ("determined_amp.train", "train an experiment: here, or as a task of a cluster"),
    "audit": ("determined_amp.commands.audit", "what is one training batch really computed in?"),
    "find": ("determined_amp.commands.find", "find the initial loss scale in one pass"),
    "search": ("determined_amp.search.command", "run a search or a comparison without a cluster"),
    "report precision": (
        "determined_amp.reports.precision_report",
        "precisions compared, and a verdict",
    ),
    "report loss-scale": (
        "determined_amp.reports.loss_scale_report",
        "the loss scale, predicted and observed",
    ),
}


def usage() -> str:
    """What `--help` prints."""
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
    """Returns the exit status of the command; 2 if there is no such one, or for a `UserError`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = 2 if given[:1] == ["report"] else 1
    if not {"--help", "-h"}.isdisjoint(given[:words]):
        print(usage())
        return 0
    command = " ".join(given[:words])
    if command not in _COMMANDS:
        said = f"got {command!r}" if given else "no command given"
        print(f"{said}; allowed: {', '.join(_COMMANDS)}\n\n{usage()}", file=sys.stderr)
        return 2
    # `python -m` puts this folder on the path; an installed script does not.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = importlib.import_module(_COMMANDS[command][0])
    # A cluster starts a task that failed again, unless it reads these words.
    before = NO_RETRY if command == "train" else ""
    return exit_status(lambda: module.main(given[words:]), before)


if __name__ == "__main__":
    sys.exit(main())
