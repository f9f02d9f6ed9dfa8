"""What the literature claims of AMP for ResNet-50, held against these runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from determined_amp.reports.precision.comparison import Comparison, difference
from determined_amp.reports.precision.interval import Verdict
from determined_amp.reports.precision.settings import ACCURACY

SPEED, MEMORY, POINTS = 2.0, 0.5, 0.3


class Judgement(Enum):
    """Whether a claim is true here."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNKNOWN = "cannot be told"
    UNMEASURED = "not measured"


@dataclass(frozen=True)
class Claim:
    """One claim and what became of it.

    Args:
        words: The claim.
        judgement: Whether it holds.
        figure: What was measured, in words.
    """

    words: str
    judgement: Judgement
    figure: str


def claims(comparison: Comparison) -> tuple[Claim, ...]:
    """The three claims for one AMP precision against a baseline."""
    return _speed(comparison), _memory(comparison), _accuracy(comparison)


def _speed(comparison: Comparison) -> Claim:
    words, ratio = f"{SPEED:.1f}x the speed", comparison.speed
    if ratio is None:
        shared = any(r.shares_device for r in (*comparison.ours.runs, *comparison.base.runs))
        why = "several ran at a time" if shared else "no report but the first has a speed"
        return Claim(words, Judgement.UNMEASURED, why)
    judgement = _judged(ratio.low >= SPEED, ratio.high < SPEED)
    return Claim(words, judgement, f"{ratio.middle:.2f}x, {ratio.low:.2f} to {ratio.high:.2f}")


def _memory(comparison: Comparison) -> Claim:
    words, ratio = "half the memory", comparison.memory
    if ratio is None:
        on_gpu = comparison.ours.machine.on_gpu
        why = "no report has it" if on_gpu else "a CPU's is that of the process and its libraries"
        return Claim(words, Judgement.UNMEASURED, why)
    judgement = _judged(ratio.high <= MEMORY, ratio.low > MEMORY)
    return Claim(words, judgement, f"{ratio.middle:.2f}x, {ratio.low:.2f} to {ratio.high:.2f}")


def _accuracy(comparison: Comparison) -> Claim:
    words = f"within {POINTS} points of accuracy"
    ours, base = comparison.ours, comparison.base
    everything = len(ours.runs) + len(base.runs)
    if len(ours.values(ACCURACY)) + len(base.values(ACCURACY)) < everything:
        return Claim(words, Judgement.UNMEASURED, f"the runs do not report {ACCURACY}")
    if max(*ours.values(ACCURACY), *base.values(ACCURACY)) > 1.0:
        return Claim(words, Judgement.UNMEASURED, f"{ACCURACY} is not a share of 1")
    found = difference(ours, base, ACCURACY)
    within = found.verdict(POINTS / 100) is Verdict.EQUAL
    different = found.verdict(POINTS / 100) is Verdict.DIFFERENT
    outside = different and (found.low > POINTS / 100 or found.high < -POINTS / 100)
    figure = f"{100 * found.mean:+.2f} points"
    if found.deviation and found.half_width is not None:
        figure += f", 95 % interval {100 * found.low:+.2f} to {100 * found.high:+.2f}"
    return Claim(words, _judged(within, outside), figure)


def _judged(holds: bool, fails: bool) -> Judgement:
    if holds:
        return Judgement.HOLDS
    return Judgement.FAILS if fails else Judgement.UNKNOWN
