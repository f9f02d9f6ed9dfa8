"""The claims of the literature about AMP for ResNet-50, and the judge of them."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class Judgement(enum.Enum):
    """The judgement of a claim."""

    HOLDS = "yes"
    FAILS = "no"
    UNKNOWN = "cannot be told"
    UNMEASURED = "not measured"


# By text: what is measured, and the range in which the claim holds. Speed and memory are ratios,
# the accuracy is a difference of shares.
CLAIMS = {
    "2.0x the speed": ("speed", 2.0, math.inf),
    "half the memory": ("memory", 0.0, 0.5),
    "within 0.3 points of accuracy": ("accuracy", -0.003, 0.003),
}

Range = tuple[float, float]


@dataclass(frozen=True)
class Claim:
    """One claim and its judgement."""

    text: str  # the claim
    judgement: Judgement  # whether it holds
    measured: Range | None  # the range of the measurement; None if it was not measured


def judge_all(**measured: Range | None) -> list[Claim]:
    """Judge every claim by the ranges of `speed`, `memory` and `accuracy`; None is not measured."""
    return [
        Claim(text, judge(measured[what], low, high), measured[what])
        for text, (what, low, high) in CLAIMS.items()
    ]


def judge(measured: Range | None, low: float, high: float) -> Judgement:
    """Whether a measured range lies inside the range of a claim, outside of it, or across."""
    if measured is None:
        return Judgement.UNMEASURED
    if low <= measured[0] and measured[1] <= high:
        return Judgement.HOLDS
    outside = measured[1] < low or measured[0] > high
    return Judgement.FAILS if outside else Judgement.UNKNOWN
