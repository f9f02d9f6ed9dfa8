"""Answers which precision to use, or what to type to find out."""

from __future__ import annotations

import re
from dataclasses import dataclass

from determined_amp.amp.settings import Precision
from determined_amp.report.change import MIN_RATIO, RATIO_MARGIN, Judgement
from determined_amp.report.comparison import Comparison
from determined_amp.report.precision_runs import Pair, counted
from determined_amp.search.search_folder import COMPARE

RULE = (
    "the fastest of those that are faster than the baseline beyond chance and by "
    f"{MIN_RATIO - 1:.0%} or more, are not worse, and lost no run; else the baseline"
)

# Suggest this many seeds after runs with fewer seeds, and else twice as many seeds.
_SEEDS = 5


@dataclass(frozen=True)
class Answer:
    """The precision to use."""

    # The baseline if the runs cannot tell yet.
    precision: Precision
    why: str  # the reason, in words
    is_certain: bool = True  # whether the runs settle the question

    @property
    def text(self) -> str:
        """The sentence that names the precision to use, and the reason."""
        if self.is_certain:
            return f"use {self.precision.value} here: {self.why}"
        return f"cannot tell yet: {self.why}; use {self.precision.value} until then"


def answer_of(comparison: Comparison) -> Answer:
    """Apply `RULE` to the runs of a comparison."""
    faults = [
        f"{same.name} has no finished run"
        for same in comparison.precisions
        if not same.runs
    ]
    pairs = comparison.with_baseline
    if not (faults or pairs):
        why = _nothing_to_compare(comparison)
        return Answer(comparison.baseline, why, is_certain=False)
    doubts = []
    usable = []
    for pair in pairs:
        if fault := _fault(pair, comparison.metric):
            faults.append(f"{pair.precision.value} {fault}")
        elif doubt := _doubt(pair, comparison.metric):
            doubts.append(doubt)
        else:
            usable.append(pair)
    if usable:
        best = max(usable, key=lambda pair: pair.times_as_fast)
        return Answer(best.precision, _advantage(best, comparison.metric))
    if doubts:
        return Answer(comparison.baseline, "; ".join(doubts), is_certain=False)
    return Answer(comparison.baseline, "; ".join(faults))


def _nothing_to_compare(comparison: Comparison) -> str:
    """Say which runs exist, which are missing, and what to type."""
    names = " and ".join(same.name for same in comparison.precisions)
    return (
        f"all finished runs are in {names}, and one in another precision is missing: "
        f"ask again when there is one, or type `{comparison.command}`"
    )


def what_to_type(comparison: Comparison) -> str:
    """Say what to type if a pair is open; empty if no pair is."""
    pairs = [pair for pair in comparison.pairs if pair.is_open]
    if not pairs:
        return ""
    if any(pair.speed is None for pair in pairs):
        return (
            "runs that are trained one after the other, of 20 batches or more, tell "
            f"their speed: `{comparison.command}`"
        )
    seeds = max(pair.metric.pairs for pair in pairs)
    wanted = _SEEDS if seeds < _SEEDS else 2 * seeds
    command = re.sub(r" --seeds[ =]\d+", "", comparison.command)
    more = f"more seeds tell what is open: `{command} --seeds {wanted}`"
    in_a_search = f", or {wanted} values of hyperparameters.trial_seed in a search"
    return more + in_a_search if command == COMPARE else more


def _fault(pair: Pair, metric: str) -> str:
    """The strongest reason against a precision; empty if there is none."""
    if pair.lost_runs:
        return "lost a run"
    if pair.metric.judgement is Judgement.WORSE:
        return f"has a worse {metric}"
    speed = pair.speed
    if speed is None or not speed.high < RATIO_MARGIN:
        return ""
    is_slower = speed.judgement is Judgement.WORSE
    reason = (
        "is slower" if is_slower else f"is not faster by {MIN_RATIO - 1:.0%} or more"
    )
    return f"{reason}: {speed}"


def _doubt(pair: Pair, metric: str) -> str:
    """Why a precision without a fault cannot be recommended yet; empty if it can."""
    name = pair.precision.value
    if pair.speed is None:
        return f"the speed of {name} was not measured"
    if pair.speed.judgement is not Judgement.BETTER:
        return f"whether {name} is faster, at {pair.speed}"
    is_known = pair.metric.judgement is not Judgement.UNKNOWN
    if is_known or pair.metric.gain >= -pair.metric.margin:
        return ""
    return (
        f"{name} is {pair.times_as_fast:.2f} times as fast, but whether its worse mean "
        f"{metric} is chance cannot be told with {counted(pair.metric.pairs, 'seed')}"
    )


def _advantage(pair: Pair, metric: str) -> str:
    why = f"it is {pair.times_as_fast:.2f} times as fast as {pair.against.value}"
    judgement = pair.metric.judgement
    if judgement is not Judgement.UNKNOWN:
        return f"{why} with {judgement.value} {metric}"
    return (
        f"{why}, but whether its {metric} is the same cannot be told with "
        f"{counted(pair.metric.pairs, 'seed')}"
    )
