"""What all rules share: how they are listed, what they ask, and how they say it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from determined_amp.check.finding import CheckFinding, Level, Where
from determined_amp.check.record import Event, Record

Found = Iterator[CheckFinding]
Rule = Callable[[Record], Found]

FAULT, SUSPICION, COST = Level.FAULT, Level.SUSPICION, Level.COST
RULES: list[Rule] = []
# Of each key: the `sentence` of its finding, and the lines to `write` or to `look` at,
# which may be others `in_a_loop`.
REMEDIES: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("remedies.json").read_text()
)

# Scales so far apart, with so many norms at each, tell whether norms follow the scale.
_LEAST_RATIO, _LEAST_NORMS = 15.0, 3
# Scaled gradients below this norm are not told: float16 may have lost most of them.
_TINY = 1e-3
# In this share of the pairs of a low and a high scale the norm differs in the same
# direction.
_SEPARATED = 0.8


def rule(judges: Rule) -> Rule:
    """Let a function be one of the rules, in whose order equal levels are told."""
    RULES.append(judges)
    return judges


def found(
    key: str,
    at: Iterable[Event | Where | None],
    effect: str,
    level: Level = FAULT,
    advice: tuple[str, str] | None = None,
    *,
    holds: bool = True,
) -> CheckFinding:
    """A finding at these lines, or at those of these events.

    Args:
        key: Its name, which is one of `REMEDIES`.
        at: The lines or events.
        effect: What was measured.
        level: How sure it is.
        advice: What was tried, in place of the advice of the key: `write` or `look`,
            and the lines.
        holds: Whether the lines to write are right in this training: else it gets those
            to look at.
    """
    lines = [each.where if isinstance(each, Event) else each for each in at]
    where = tuple(dict.fromkeys(line for line in lines if line is not None))
    remedy = REMEDIES[key]
    kind = "write" if "write" in remedy and holds else "look"
    kind, text = advice or (kind, "\n".join(remedy[kind]))
    orders = kind == "write" and level is not SUSPICION
    return CheckFinding(key, level, remedy["sentence"], where, effect, text, orders)


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
    """How norms follow the scale; None where it has not changed enough to tell.

    An infinite norm is that of a step that was skipped at a scale that was right.
    """
    points = [
        (scale, norm)
        for scale, norm in scales_and_norms
        if scale and norm * scale > _TINY
    ]
    measured = [scale for scale, norm in points if norm < math.inf] or [1.0]
    middle = math.sqrt(min(measured) * max(measured))
    low = [point for point in points if point[0] < middle]
    high = [point for point in points if point[0] >= middle]
    (low_scales, low_norms), (high_scales, high_norms) = map(_finite, (low, high))
    norms = min(len(low_norms), len(high_norms))
    if max(measured) < _LEAST_RATIO * min(measured) or norms < _LEAST_NORMS:
        return None
    ratio = median(high_scales) / median(low_scales)
    larger = sum(above > below for _, above in high for _, below in low)
    share = larger / (len(high) * len(low))
    is_clear = max(share, 1 - share) >= _SEPARATED
    return Dependence(median(high_norms) / median(low_norms), ratio, norms, is_clear)


def _finite(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The scales and the norms of the points that have one."""
    finite = [(scale, norm) for scale, norm in points if norm < math.inf]
    return [scale for scale, _ in finite], [norm for _, norm in finite]
