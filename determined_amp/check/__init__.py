"""The doctor: finds mistakes in the mixed precision that a training has of its own.

`det-amp check CONFIG` examines a trial, and `check SCRIPT.py` any script. To examine
any other loop:

    with determined_amp.check.watching() as findings:
        train()
    print(findings)

The recorder notes events while the training runs. Then the rules judge these events,
and the judge turns what they report into findings. Read the modules in this order:

1. finding.py: a finding as it is printed. `findings.json` has a row for each kind of
   finding, with its rules and its text.
2. record.py: what a training did, as plain data: events, windows, scalers, schedules.
3. recorder.py: hooks into torch, which note the events.
4. step_gradients.py: the gradients of one optimizer, from a backward to its step. It
   makes some of them overflow.
5. losses.py: what the autograd graph says about a loss, such as its scale.
6. forwards.py: modules that run, under autocast or not, and overflows in validations.
7. causes.py: the first operation whose result is not finite, and what helps.
8. stand_in.py: lets `"cuda"` mean the CPU on a machine without a GPU.
9. invariants.py: rules about what holds for every correct training.
10. rules.py: rules about known mistakes and their lines.
11. judge.py: asks all rules and merges what they report.
12. advice.py: adapts the lines to write to the user's script.
13. two_scales.py: trains again in float32, at two loss scales that must not matter.
14. any_loop.py: examines a loop or a script.
15. doctor.py: examines a trial, in Determined's loop.
16. scratch.py: redirects what a script or trial writes to a scratch folder.
17. confinement.py: refuses writes that cannot be redirected.

To find out where a finding comes from, look at its row, which names its rules. A rule
reads the events of the record. With `findings` as above, this prints all events:

    for event in findings.record.events:
        print(event)

`record.Event` lists what is known of each kind of event, and `note("KIND", ...)` shows
where the event is noted.

To add a finding, write a row, a rule, and a script in tests/wrong_scripts.py. If no
script can have the mistake, add a trial to `PLANTED` in tests/test_check.py. The table
in docs/check.md and the output of `check --explain` are made from the rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from determined_amp.check.finding import CheckFinding as Finding
from determined_amp.check.finding import CheckFindings as Findings

if TYPE_CHECKING:
    from determined_amp.check.any_loop import watching

__all__ = ["Finding", "Findings", "watching"]


def __getattr__(name: str) -> Any:
    """Import `watching`, and with it torch, on first use."""
    if name == "watching":
        from determined_amp.check.any_loop import watching  # noqa: PLC0415

        return watching
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
