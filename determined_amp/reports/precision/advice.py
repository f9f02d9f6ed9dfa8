"""Which precision to use here."""

from __future__ import annotations

from dataclasses import dataclass

from determined_amp.config.amp import Precision
from determined_amp.reports.precision.comparison import LEAST_EFFECT, Comparison
from determined_amp.reports.precision.findings import Findings
from determined_amp.reports.precision.interval import Verdict

RULE = (
    "the fastest of those that are not worse, lost no run and are faster than the baseline in "
    f"every pair of runs, and by {LEAST_EFFECT - 1:.0%} or more; else the baseline"
)


@dataclass(frozen=True)
class Advice:
    """What to use, and why.

    Args:
        precision: The one to use.
        why: In words.
    """

    precision: Precision
    why: str


def advise(findings: Findings) -> Advice:
    """Apply `RULE`. One of which the metric cannot be told passes if its mean is no worse."""
    good = [c for c in findings.with_baseline if c.is_not_worse and not c.ours.failed]
    faster = [(c.speed.middle, c) for c in good if c.speed and c.speed.is_larger]
    if not faster:
        return Advice(findings.baseline, "; ".join(_against(findings)))
    times, best = max(faster, key=lambda pair: pair[0])
    why = f"it is {times:.2f} times as fast as {best.base.name}"
    if best.verdict is Verdict.UNKNOWN:
        seeds = best.difference.seeds
        why += (
            f", but whether its {best.metric} is the same cannot be told with {seeds} "
            f"seed{'s' * (seeds != 1)}: train more before you rely on it"
        )
    elif best.verdict is Verdict.EQUAL:
        why += f" with equal {best.metric}"
    else:
        why += f" with better {best.metric}"
    return Advice(best.ours.precision, why)


def _against(findings: Findings) -> list[str]:
    """Of each other precision, why it is not the one."""
    reasons = [f"{s.name} has no finished run" for s in findings.summaries if not s.runs]
    return reasons + [f"{c.ours.name} {_fault(c)}" for c in findings.with_baseline]


def _fault(comparison: Comparison) -> str:
    if comparison.ours.failed:
        return "lost a run"
    if not comparison.is_not_worse:
        if comparison.verdict is Verdict.DIFFERENT:
            return f"has a worse {comparison.metric}"
        return f"has a worse mean {comparison.metric}, though more cannot be told"
    if comparison.speed is None:
        return "has no measured speed"
    if comparison.speed.is_smaller:
        return f"is slower ({comparison.speed.middle:.2f} times the speed)"
    return "is not faster by more than the spread"
