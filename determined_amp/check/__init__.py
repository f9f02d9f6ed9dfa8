"""The doctor: says what is wrong with the mixed precision that a training has of its
own.

`det-amp check CONFIG` examines a trial, `check SCRIPT.py` any script.
Around any loop:

    with determined_amp.check.watching() as findings:
        train()
    print(findings)

How an answer is made:

    any_loop.py, doctor.py      run a loop or a script, and a trial in Determined's loop
    scratch.py, confinement.py  keep the files of the user as they are
    recorder.py                 stands between the training and torch: notes events
    step_gradients.py           follows the gradients of an optimizer to its step
    forwards.py, losses.py      look at forwards, and into the graph of a loss
    causes.py                   looks for the first operation that is not finite
    interventions.py            makes overflows, and moves loss scales
    stand_in.py                 lets "cuda" mean the CPU where there is no GPU
    record.py                   what was seen, as plain data
    invariants.py               rules: what holds for every right training
    rules.py                    rules: mistakes that are known
    findings.json               a row for each finding, with its rules and its words
    judge.py                    asks the rules, and leaves out what others explain
    advice.py                   puts what to write in the words of the script
    finding.py                  what is printed

Where a finding comes from: its row names the rules that see it, and a rule reads the
events of the record. With `findings` as above,

    for event in findings.record.events:
        print(event)

prints them all: `record.Event` says what is known of each kind, and `note("KIND", ...)`
in the recorder is where it is noted.

To add a finding, write a row and a rule, and a script into tests/wrong_scripts.py, or a
trial into `PLANTED` of tests/test_check.py where no script can have it. The table in
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
