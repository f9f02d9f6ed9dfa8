"""The doctor: says what is wrong with the mixed precision that a training has of its
own.

`det-amp check CONFIG` examines a trial, `check SCRIPT.py` any script.
Around any loop:

    with determined_amp.check.watching() as findings:
        train()
    print(findings)

A recorder notes events in a record. `findings.json` has a row for each finding, with
its words and the rules that see it: small functions over the record, in `invariants.py`
what holds for every right training, in `rules.py` known mistakes. To add a finding,
write a row and a rule, and a trial into `PLANTED` of tests/test_check.py. The table in
docs/check.md, and what `check --explain` prints, are made of the rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from determined_amp.check.finding import CheckFinding as Finding
from determined_amp.check.finding import CheckFindings as Findings

if TYPE_CHECKING:
    from determined_amp.check.any_loop import watching

__all__ = ["Finding", "Findings", "watching"]


def __getattr__(name: str) -> Any:
    """Import torch on first use, not with this package."""
    if name == "watching":
        from determined_amp.check.any_loop import watching  # noqa: PLC0415

        return watching
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
