"""One precision held against another: speed, memory, and the metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

from determined_amp.config.amp import Precision
from determined_amp.reports.precision.interval import Interval, Verdict, paired, unpaired
from determined_amp.reports.precision.run import Run, Spread
from determined_amp.reports.precision.summary import Summary

# A smaller change of speed or memory is not worth another precision.
LEAST_EFFECT = 1.05


@dataclass(frozen=True)
class Ratio:
    """A quotient of ours and theirs over pairs of runs.

    Args:
        middle: The median of the pairs.
        low: The smallest. Of a single pair, what its reports make of it at worst.
        high: The largest, likewise.
        pairs: How many.
        by_seed: Whether the two of a pair have the same seed; if not, all were paired with all.
    """

    middle: float
    low: float
    high: float
    pairs: int
    by_seed: bool

    @property
    def is_larger(self) -> bool:
        """Whether ours is larger in every pair, and by as much as matters."""
        return self.low > 1.0 and self.middle >= LEAST_EFFECT

    @property
    def is_smaller(self) -> bool:
        return self.high < 1.0 and self.middle <= 1.0 / LEAST_EFFECT


@dataclass(frozen=True)
class Comparison:
    """What changes from one precision to another.

    Args:
        ours: The precision in question.
        base: What it is held against.
        metric: Validation metric.
        smaller_is_better: Its direction.
        margin: Difference of the metric that does not matter.
        speed: Of samples per second; None if not measured.
        memory: Of allocated memory; None if not measured, as on a CPU.
        difference: Of the metric.
    """

    ours: Summary
    base: Summary
    metric: str
    smaller_is_better: bool
    margin: float
    speed: Ratio | None
    memory: Ratio | None
    difference: Interval

    @property
    def verdict(self) -> Verdict:
        """On the metric."""
        return self.difference.verdict(self.margin)

    @property
    def is_better(self) -> bool:
        """Whether the mean of the metric is, whatever the verdict."""
        return (self.difference.mean < 0) is self.smaller_is_better

    @property
    def is_not_worse(self) -> bool:
        """Whether nothing speaks against it: if it cannot be told, its mean may be no worse."""
        if self.verdict is Verdict.UNKNOWN:
            return self.is_better or abs(self.difference.mean) <= self.margin
        return self.verdict is Verdict.EQUAL or self.is_better


def compare(ours: Summary, base: Summary, *, smaller_is_better: bool, margin: float) -> Comparison:
    """Hold one precision against another; both have finished runs."""
    on_gpu = ours.machine.on_gpu
    return Comparison(
        ours=ours,
        base=base,
        metric=ours.metric,
        smaller_is_better=smaller_is_better,
        margin=margin,
        speed=speed_ratio(ours, base),
        memory=_ratio(ours, base, _allocated) if on_gpu else None,
        difference=difference(ours, base, ours.metric),
    )


def comparisons(
    found: Sequence[Summary], base: Precision, *, smaller_is_better: bool, margin: float
) -> list[Comparison]:
    """Everything against the baseline, and AMP against tf32 as well where that is TF32.

    Without AMP an Ampere GPU would run in TF32: there, that is what AMP has to beat.
    """
    finished = {s.precision: s for s in found if s.runs}
    real = {p: s for p, s in finished.items() if not s.is_only_fp32}
    pairs = [(s, finished[base]) for p, s in real.items() if p is not base]
    if base is Precision.FP32 and Precision.TF32 in real:
        pairs += [(s, real[Precision.TF32]) for p, s in real.items() if p.autocast_dtype]
    return [
        compare(ours, theirs, smaller_is_better=smaller_is_better, margin=margin)
        for ours, theirs in pairs
    ]


def speed_ratio(ours: Summary, base: Summary) -> Ratio | None:
    """Of samples per second; None if not measured."""
    return _ratio(ours, base, lambda run: run.speed)


def difference(ours: Summary, base: Summary, metric: str) -> Interval:
    """Of a metric that all finished runs have: paired by seed if two seeds or more are common."""
    pairs = _by_seed(ours, base)
    values = [(_final(a, metric), _final(b, metric)) for a, b in pairs]
    alone = min(len(ours.runs), len(base.runs)) < 2
    if len(pairs) > 1 or (pairs and alone):
        return paired([a - b for a, b in values])
    return unpaired(ours.values(metric), base.values(metric))


def _final(run: Run, metric: str) -> float:
    value = run.final(metric)
    assert value is not None  # the metric was chosen among those that all have
    return value


def _by_seed(ours: Summary, base: Summary) -> list[tuple[Run, Run]]:
    theirs = {run.seed: run for run in base.runs if run.seed is not None}
    return [(run, theirs[run.seed]) for run in ours.runs if run.seed in theirs]


def _ratio(ours: Summary, base: Summary, value: Callable[[Run], Spread | None]) -> Ratio | None:
    by_seed = _by_seed(ours, base)
    pairs = [
        (a, b)
        for run, other in by_seed or product(ours.runs, base.runs)
        if (a := value(run)) and (b := value(other))
    ]
    if not pairs:
        return None
    ratios = [a.middle / b.middle for a, b in pairs]
    low, high = min(ratios), max(ratios)
    if len(pairs) == 1:
        ((a, b),) = pairs
        low, high = a.low / b.high, a.high / b.low
    return Ratio(median(ratios), low, high, len(pairs), bool(by_seed))


def _allocated(run: Run) -> Spread | None:
    # Peaks of a process grow, but for those of its first batches, which are forgotten after them.
    peak = run.last("peak_memory_mib")
    return Spread.of([peak] if peak else [])
