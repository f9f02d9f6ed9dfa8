"""The doctor: says what is wrong with the mixed precision that a training has of its
own.

`det-amp check CONFIG` examines a trial, `check SCRIPT.py` any script.
Around any loop:

    with determined_amp.check.watching() as findings:
        train()
    print(findings)

A recorder notes events in a record. `invariants.py` judges what holds for every right
training, and `rules.py` names the lines of known mistakes. To add a finding, write its
words into `REMEDIES` of `remedies.py`, a function with `@rule` into one of the two that
yields `found(key, lines, effect)`, a row into docs/check.md, and a trial into `PLANTED`
of tests/test_check.py. What explains what stands in `EXPLAINED` of `judge.py`: one
cause is one finding.
"""

from determined_amp.check.any_loop import watching
from determined_amp.check.finding import CheckFinding as Finding
from determined_amp.check.finding import CheckFindings as Findings

__all__ = ["Finding", "Findings", "watching"]
