"""Which precision to use, by the comparisons of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from determined_amp.amp.settings import Precision
from determined_amp.report.compared_runs import ComparedRuns
from determined_amp.report.precision_comparison import (
    MIN_EFFECT,
    Comparison,
    Effect,
    Equivalence,
    Ratio,
)

RULE = (
    "the fastest of those that are not worse, lost no run and are faster than the baseline in "
    f"every pair of runs, beyond chance, and by {MIN_EFFECT - 1:.0%} or more; else the baseline"
)

# The number of seeds to try next, for fewer; of more, twice as many.
_SEEDS = 5


@dataclass(frozen=True)
class Recommendation:
    """The precision to use."""

    precision: Precision  # the precision to use; the baseline where none can be told yet
    why: str  # the reason, in words
    is_certain: bool = True  # whether the runs tell it

    @property
    def answer(self) -> str:
        """The sentence that names the precision to use, and the reason."""
        if self.is_certain:
            return f"use {self.precision.value} here: {self.why}"
        return f"cannot tell yet: {self.why}; use {self.precision.value} until then"


def recommend(compared: ComparedRuns) -> Recommendation:
    """Apply `RULE`; `Comparison.is_not_worse` says what "not worse" means."""
    comparisons, metric = compared.with_baseline, compared.metric
    faster = [(_gain(c), c) for c in comparisons if _gain(c) and c.is_not_worse and not c.lost_runs]
    if faster:
        _, best = max(faster, key=lambda pair: pair[0])
        return Recommendation(best.precision, _advantage(best, metric))
    open_questions = [_open_question(c, metric) for c in comparisons if _may_pay(c)]
    if open_questions:
        more = f"{'; '.join(open_questions)}; {more_seeds(comparisons)}"
        return Recommendation(compared.baseline, more, is_certain=False)
    reasons = [f"{same.name} has no finished run" for same in compared.precisions if not same.runs]
    reasons += [f"{c.precision.value} {_fault(c, metric)}" for c in comparisons]
    return Recommendation(compared.baseline, "; ".join(reasons))


def more_seeds(comparisons: Sequence[Comparison]) -> str:
    """What to type for a verdict that the seeds so far do not allow."""
    seeds = max(comparison.difference.pairs for comparison in comparisons)
    wanted = _SEEDS if seeds < _SEEDS else 2 * seeds
    return (
        f"more seeds tell: `python -m determined_amp compare YAML --seeds {wanted}`, or "
        f"{wanted} values of hyperparameters.trial_seed in a search"
    )


def _gain(comparison: Comparison) -> float:
    """How many times as fast as the baseline, beyond chance; 0 if that is not known."""
    speed = comparison.speed
    return speed.median if speed is not None and speed.effect is Effect.LARGER else 0.0


def _may_pay(comparison: Comparison) -> bool:
    """Whether more runs may show that it is faster and not worse."""
    if comparison.lost_runs or comparison.is_worse or comparison.speed is None:
        return False
    return comparison.speed.effect in (Effect.LARGER, Effect.UNKNOWN)


def _advantage(comparison: Comparison, metric: str) -> str:
    why = f"it is {_gain(comparison):.2f} times as fast as {comparison.against.value}"
    if comparison.verdict is Equivalence.UNKNOWN:
        return (
            f"{why}, but whether its {metric} is the same cannot be told with "
            f"{_seeds(comparison)}: train more before you rely on it"
        )
    word = "equal" if comparison.verdict is Equivalence.EQUAL else "better"
    return f"{why} with {word} {metric}"


def _open_question(comparison: Comparison, metric: str) -> str:
    """Why a precision is neither recommended nor ruled out."""
    name, speed = comparison.precision.value, comparison.speed
    assert speed is not None  # else it is ruled out
    if speed.effect is Effect.UNKNOWN:
        return f"whether {name} is faster, at {in_words(speed)}"
    return (
        f"{name} is {speed.median:.2f} times as fast, but whether its worse mean {metric} is "
        f"chance cannot be told with {_seeds(comparison)}"
    )


def _fault(comparison: Comparison, metric: str) -> str:
    """The strongest reason against a precision."""
    if comparison.lost_runs:
        return "lost a run"
    if comparison.is_worse:
        return f"has a worse {metric}"
    if comparison.speed is None:
        return "has no measured speed"
    if comparison.speed.effect is Effect.SMALLER:
        return f"is slower ({comparison.speed.median:.2f} times the speed)"
    return f"is not faster by {MIN_EFFECT - 1:.0%} or more"


def _seeds(comparison: Comparison) -> str:
    count = comparison.difference.pairs
    return f"{count} seed{'s' * (count != 1)}"


def in_words(ratio: Ratio) -> str:
    """A ratio and its range."""
    span = f"{ratio.low:.2f} to {ratio.high:.2f} over"
    of = f"{span} {ratio.pairs} pairs of equal seed"
    if ratio.pairs == 1:
        one_value = ratio.low == ratio.high  # as of memory
        of = "in one pair of runs" if one_value else f"{span} the reports of one pair of runs"
    return f"{ratio.median:.2f}x ({of})"
