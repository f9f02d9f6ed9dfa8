"""What all rules share: how they are listed, what they ask, and how they say it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from statistics import median

from determined_amp.check.finding import CheckFinding, Level, Where
from determined_amp.check.record import Event, Record
from determined_amp.check.remedies import REMEDIES

Found = Iterator[CheckFinding]
Rule = Callable[[Record], Found]

FAULT, SUSPICION, COST = Level.FAULT, Level.SUSPICION, Level.COST
RULES: list[Rule] = []

# Scales so far apart, with so many norms at each, tell whether norms follow the scale.
_LEAST_RATIO, _LEAST_NORMS = 15.0, 3
# In this share of the pairs of a low and a high scale the norm differs in the same
# direction.
_SEPARATED = 0.8


def rule(judges: Rule) -> Rule:
    """Let a function be one of the rules; equal levels are told in the order of the
    rules.
    """
    RULES.append(judges)
    return judges


def found(
    key: str, at: Iterable[Event | Where | None], effect: str, level: Level = FAULT
) -> CheckFinding:
    """A finding at these lines, or at those of these events."""
    lines = [each.where if isinstance(each, Event) else each for each in at]
    where = tuple(dict.fromkeys(line for line in lines if line is not None))
    return CheckFinding(
        key, level, REMEDIES[key].sentence, where, effect, REMEDIES[key].in_a_trial
    )


def count_of(part: Sized, whole: Sized, what: str) -> str:
    """Such as `1 of 12 steps`."""
    return f"{len(part)} of {len(whole)} {what}{'' if len(whole) == 1 else 's'}"


def share_of(record: Record, events: Sequence[Event]) -> str:
    """How many events of their kind these are."""
    kind = events[0].kind
    return count_of(events, record.of(kind), kind)


def number(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


@dataclass(frozen=True)
class Dependence:
    """How norms follow the loss scale."""

    factor: float  # by which medians of norms differ, between high scales and low ones
    ratio: float  # of the medians of those scales
    norms: int  # that were measured at least at each of the two
    is_clear: (
        bool  # nearly all norms at the one are larger than nearly all at the other
    )

    @property
    def exponent(self) -> float:
        """The power of the scale that norms are proportional to.

        A norm that the scale does not change has 0, one of scaled gradients 1.
        """
        return math.log(self.factor) / math.log(self.ratio)


def dependence(
    scales_and_norms: Iterable[tuple[float | None, float]],
) -> Dependence | None:
    """How norms follow the scale; None where the scale has not changed enough to
    tell.
    """
    points = [
        (scale, norm)
        for scale, norm in scales_and_norms
        if scale and 0 < norm < math.inf
    ]
    scales = [scale for scale, _ in points] or [1.0]
    middle = math.sqrt(min(scales) * max(scales))
    low = [norm for scale, norm in points if scale < middle]
    high = [norm for scale, norm in points if scale >= middle]
    norms = min(len(low), len(high))
    if max(scales) < _LEAST_RATIO * min(scales) or norms < _LEAST_NORMS:
        return None
    scales.sort()
    ratio = median(scales[len(low) :]) / median(scales[: len(low)])
    larger = sum(above > below for above in high for below in low)
    share = larger / (len(high) * len(low))
    is_clear = max(share, 1 - share) >= _SEPARATED
    return Dependence(median(high) / median(low), ratio, norms, is_clear)
