"""One door for all commands: `python -m determined_amp VERB`, installed as `det-amp VERB`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

# Each verb: the module whose `main(arguments)` it calls, and what it does.
_VERBS = {
    "train": ("determined_amp.train", "train an experiment: here, or as a task of a cluster"),
    "audit": ("determined_amp.commands.audit", "what is one training batch really computed in?"),
    "find": ("determined_amp.commands.find", "find the initial loss scale in one pass"),
    "search": ("determined_amp.search.command", "run a search or a comparison without a cluster"),
    "report": ("determined_amp.commands.report", "draw and judge runs, searches and comparisons"),
}


def usage() -> str:
    """What `--help` prints."""
    width = max(map(len, _VERBS))
    lines = [f"  {verb:{width}}  {text}" for verb, (_, text) in _VERBS.items()]
    return "\n".join(
        [
            "usage: python -m determined_amp VERB [ARGUMENTS]",
            "",
            *lines,
            "",
            "python -m determined_amp VERB --help lists the arguments of a verb.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status of the verb; 2 if there is no such verb."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] in (["--help"], ["-h"]):
        print(usage())
        return 0
    if not given or given[0] not in _VERBS:
        said = f"got {given[0]!r}" if given else "no verb given"
        print(f"{said}; allowed: {', '.join(_VERBS)}\n\n{usage()}", file=sys.stderr)
        return 2
    # `python -m` puts this folder on the path; an installed script does not.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = importlib.import_module(_VERBS[given[0]][0])
    status: int = module.main(given[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
