"""`python -m determined_amp report KIND ...`: which of the two reports."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

_KINDS = {
    "precision": ("determined_amp.reports.precision_report", "precisions compared, and a verdict"),
    "loss-scale": (
        "determined_amp.reports.loss_scale_report",
        "the loss scale, predicted and observed",
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status of the report; 2 if there is no such kind."""
    if arguments and arguments[0] in _KINDS:
        # matplotlib takes seconds to import, and `--help` needs none of it.
        status: int = importlib.import_module(_KINDS[arguments[0]][0]).main(arguments[1:])
        return status
    usage = "usage: python -m determined_amp report KIND SOURCE [...]\n\n" + "\n".join(
        f"  {kind:10}  {text}" for kind, (_, text) in _KINDS.items()
    )
    if arguments and arguments[0] in ("--help", "-h"):
        print(usage)
        return 0
    said = f"got {arguments[0]!r}" if arguments else "no kind of report given"
    print(f"{said}; allowed: {', '.join(_KINDS)}\n\n{usage}", file=sys.stderr)
    return 2
