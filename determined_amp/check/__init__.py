"""The doctor: says what is wrong with the mixed precision that a training has of its own.

`python -m determined_amp check CONFIG` examines a trial. Around any other loop:

    with determined_amp.check.watching() as findings:
        train()
    print(findings)

Spies note events in a record, and rules judge it. To add a finding, write its words into `ADVICE`
of `advice.py`, a function with `@rule` into `rules.py` that yields `found(key, lines, effect)`, a
row into docs/check.md, and a trial into `PLANTED` of tests/test_check.py. If none of the events
that `record.py` lists tells what the rule needs, let a spy of `spies.py` note another.
"""

from determined_amp.check.finding import Finding, Findings
from determined_amp.check.watch import watching

__all__ = ["Finding", "Findings", "watching"]
