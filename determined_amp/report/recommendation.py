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
    "the fastest of those that are not worse, lost no run and are faster than the "
    f"baseline in every pair of runs, beyond chance, and by {MIN_EFFECT - 1:.0%} or "
    "more; else the baseline"
)

# By the effect on the speed: why a precision is not advised.
_NOT_FASTER = {
    Effect.SMALLER: "is slower ({:.2f} times the speed)",
    Effect.PERHAPS_SMALLER: "was slower in every pair of runs ({:.2f} times the speed)",
    Effect.NOT_LARGER: f"is not faster by {MIN_EFFECT - 1:.0%} or more",
}

# By the effect on the speed: what is not known of it.
_UNCERTAIN = {
    Effect.UNKNOWN: "whether {name} is faster, at {speed}",
    Effect.PERHAPS_LARGER: (
        "{name} was faster in every pair of runs, at {speed}, but by how much beyond "
        "chance is not known"
    ),
}

# The number of seeds to try next, for fewer; of more, twice as many.
_SEEDS = 5


@dataclass(frozen=True)
class Recommendation:
    """The precision to use."""

    precision: (
        Precision  # the precision to use; the baseline where none can be told yet
    )
    why: str  # the reason, in words
    is_certain: bool = True  # whether the runs tell it

    @property
    def answer(self) -> str:
        """The sentence that names the precision to use, and the reason."""
        if self.is_certain:
            return f"use {self.precision.value} here: {self.why}"
        return f"cannot tell yet: {self.why}; use {self.precision.value} until then"


def recommend(compared: ComparedRuns) -> Recommendation:
    """Apply `RULE`."""
    faults = [
        f"{same.name} has no finished run"
        for same in compared.precisions
        if not same.runs
    ]
    if not (faults or compared.comparisons):
        return Recommendation(
            compared.baseline, _nothing_to_compare(compared), is_certain=False
        )
    doubts = []
    usable = []
    for comparison in compared.with_baseline:
        if fault := _fault(comparison, compared.metric):
            faults.append(f"{comparison.precision.value} {fault}")
        elif doubt := _doubt(comparison, compared.metric):
            doubts.append(doubt)
        else:
            usable.append(comparison)
    if usable:
        best = max(usable, key=lambda comparison: comparison.times_as_fast)
        return Recommendation(best.precision, _advantage(best, compared.metric))
    if doubts:
        why = "; ".join([*doubts, more_seeds(compared.with_baseline)])
        return Recommendation(compared.baseline, why, is_certain=False)
    return Recommendation(compared.baseline, "; ".join(faults))


def _nothing_to_compare(compared: ComparedRuns) -> str:
    """What is there, what is missing, and what to type."""
    names = " and ".join(same.name for same in compared.precisions)
    return (
        f"all finished runs are in {names}, and one in another precision is missing: "
        "ask again when there is one, or type `python -m determined_amp compare YAML`"
    )


def more_seeds(comparisons: Sequence[Comparison]) -> str:
    """What to type for a verdict that the seeds so far do not allow."""
    seeds = max(comparison.difference.pairs for comparison in comparisons)
    wanted = _SEEDS if seeds < _SEEDS else 2 * seeds
    return (
        f"more seeds tell: `python -m determined_amp compare YAML --seeds {wanted}`, "
        f"or {wanted} values of hyperparameters.trial_seed in a search"
    )


def _fault(comparison: Comparison, metric: str) -> str:
    """The strongest reason against a precision, which no more seeds will change; or
    nothing.
    """
    if comparison.lost_runs:
        return "lost a run"
    if comparison.verdict is Equivalence.DIFFERENT and not comparison.is_better:
        return f"has a worse {metric}"
    if comparison.speed is None:
        return "has no measured speed"
    fault = _NOT_FASTER.get(comparison.speed.effect, "")
    return fault.format(comparison.speed.median)


def _doubt(comparison: Comparison, metric: str) -> str:
    """Why a precision without a fault cannot be recommended yet; or nothing."""
    name = comparison.precision.value
    speed = comparison.speed
    assert speed is not None  # that would be a fault
    if speed.effect in _UNCERTAIN:
        return _UNCERTAIN[speed.effect].format(name=name, speed=in_words(speed))
    is_known = comparison.verdict is not Equivalence.UNKNOWN or comparison.is_better
    if is_known or abs(comparison.difference.mean) <= comparison.margin:
        return ""
    return (
        f"{name} is {speed.median:.2f} times as fast, but whether its worse mean "
        f"{metric} is chance cannot be told with {comparison.difference.seeds}"
    )


def _advantage(comparison: Comparison, metric: str) -> str:
    why = (
        f"it is {comparison.times_as_fast:.2f} times as fast as"
        f" {comparison.against.value}"
    )
    if comparison.speed and comparison.speed.pairs == 1:
        why += " in one pair of runs"
    if comparison.verdict is Equivalence.UNKNOWN:
        return (
            f"{why}, but whether its {metric} is the same cannot be told with "
            f"{comparison.difference.seeds}: train more before you rely on it"
        )
    word = "equal" if comparison.verdict is Equivalence.EQUAL else "better"
    return f"{why} with {word} {metric}"


def in_words(ratio: Ratio) -> str:
    """A ratio and its range."""
    span = f"{ratio.low:.2f} to {ratio.high:.2f} over"
    of = f"{span} {ratio.pairs} pairs of equal seed"
    if ratio.pairs == 1:
        one_value = ratio.low == ratio.high  # as of memory
        of = (
            "in one pair of runs"
            if one_value
            else f"{span} the reports of one pair of runs"
        )
    return f"{ratio.median:.2f}x ({of})"
