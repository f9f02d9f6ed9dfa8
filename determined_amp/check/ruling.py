"""What all rules share: how they are listed, what they ask, and how they say it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import correlation, stdev

from determined_amp.check.advice import ADVICE
from determined_amp.check.finding import Finding, Level, Where
from determined_amp.check.record import Event, Record

Rule = Callable[[Record], Iterator[Finding]]
Lines = Iterable[Event | Where | None]

FAULT, SUSPICION, COST = Level.FAULT, Level.SUSPICION, Level.COST
RULES: list[Rule] = []

# So many norms, at scales so far apart, tell whether norms follow the scale.
_LEAST_NORMS, _LEAST_OCTAVES = 6, 3.9


def found(key: str, at: Lines, effect: str, level: Level = FAULT) -> Finding:
    """A finding at these lines, or at those of these events."""
    lines = dict.fromkeys(each.where if isinstance(each, Event) else each for each in at)
    where = tuple(line for line in lines if line is not None)
    return Finding(key, level, ADVICE[key].sentence, where, effect, ADVICE[key].in_a_trial)


def rule(judges: Rule) -> Rule:
    """Let a function be one of the rules; equal levels are told in the order of the rules."""
    RULES.append(judges)
    return judges


def usual_steps(record: Record) -> list[Event]:
    """Steps whose gradients are finite and were not touched by the doctor."""
    return [
        step
        for window in record.windows
        if not window.forced
        for step in window.steps
        if math.isfinite(step.norm) and step.norm > 0 and math.isfinite(step.factor)
    ]


def count_of(part: int, whole: int, what: str) -> str:
    """Such as `1 of 12 steps`."""
    return f"{part} of {whole} {what}{'' if whole == 1 else 's'}"


def share_of(record: Record, events: Sequence[Event]) -> str:
    kind = events[0].kind
    return count_of(len(events), len(record.of(kind)), kind)


def number(value: float) -> str:
    """Three digits, or all of a large whole number."""
    if value >= 1000 and value == int(value):
        return str(int(value))
    return f"{value:.3g}"


@dataclass(frozen=True)
class Power:
    """How norms follow the loss scale: they are proportional to its power of `exponent`.

    A norm that the scale does not change has 0, one of scaled gradients 1.
    """

    exponent: float
    besides_time: float  # correlation of the logarithms that the order of the norms leaves
    octaves: float  # between the smallest scale and the largest
    measured: int  # norms

    @property
    def factor(self) -> float:
        """By which norms differ between the largest scale and the smallest."""
        return float(2.0 ** abs(self.exponent * self.octaves))


def power_of(scales_and_norms: Iterable[tuple[float | None, float]]) -> Power | None:
    """How norms follow the scale; None where the scale has not changed enough to tell."""
    points = [
        (math.log2(scale), math.log2(norm))
        for scale, norm in scales_and_norms
        if scale and 0 < norm < math.inf
    ]
    scales, norms = [x for x, _ in points], [y for _, y in points]
    octaves = max(scales, default=0.0) - min(scales, default=0.0)
    if len(points) < _LEAST_NORMS or octaves < _LEAST_OCTAVES:
        return None
    spread = stdev(norms)
    if not spread:
        return Power(0.0, 0.0, octaves, len(points))
    both = correlation(scales, norms)
    times = list(range(len(points)))
    early, late = correlation(scales, times), correlation(norms, times)
    unexplained = math.sqrt((1 - early**2) * (1 - late**2))
    besides = abs(both - early * late) / unexplained if unexplained > 0.1 else 0.0
    return Power(both * spread / stdev(scales), besides, octaves, len(points))
