"""Rules about what holds for every correct training, whatever its code looks like.

Each rule reads a `Record` and yields what it has seen. It is listed by name in the row
of its finding in `findings.json`, and `judge.py` calls it. Rules about known mistakes
are in `rules.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from linecache import getlines
from statistics import median

from determined_amp.check.finding import Found, Seen, Where
from determined_amp.check.record import Event, Record

# Steps after which a scale has settled: halved in each, 2^16 is 1 by then.
_SETTLED = 16

# Skipped steps are no outliers if there are this many, and if they are this share.
_MANY, _SHARE = 3, 0.25

# The usual growth of a settled scale skips less than this share of the steps.
_OFTEN = 1 / 3

# If a validation metric in 16 bits differs by more than the first share, rounding does
# not explain it. Above the second share it may explain it.
_CHANGED, _MAYBE_CHANGED = 0.05, 0.01

# Norms follow the scale if they differ by more than `_FACTOR` between scales that each
# have `_STEPS` steps. With fewer steps, the exponent must also be at least `_EXPONENT`.
_FACTOR, _STEPS, _EXPONENT = 2.0, 8, 0.7

# If the gradients of some weights shrink at high scales, an exponent of this size is
# enough: rounding in float16 loses gradients at low scales, not at high ones.
_SHRINKS = 0.45

# The least ratio of two scales, and the least number of norms at each, to compare them.
_LEAST_RATIO, _LEAST_NORMS = 15.0, 3
# How many neighbours of a norm, on each side, belong to nearly the same weights.
_AROUND = 2
# Scaled gradients below this norm do not count: float16 may have lost most of them.
_TINY = 1e-3
# Of all pairs of a norm at a low and a norm at a high scale, at least this share must
# differ in the same direction.
_SEPARATED = 0.8


# Skipped steps, batches without a step, and numbers that are not finite.


def skips_every_step(record: Record) -> Found:
    """The scaler skips every step."""
    steps = _steps_of_scalers(record)
    if len(steps) >= _SETTLED // 2 and all(step.skipped for step in steps):
        yield Seen(steps[-1:], part=steps, proven=len(steps) >= _SETTLED)


def skips_at_scales_that_were_right(record: Record) -> Found:
    """Steps are skipped at scales at which a step was made before."""
    at_right = _at_right_scales(_steps_of_scalers(record))
    skipped = [step for step in at_right if step.skipped]
    if len(skipped) >= _MANY:
        is_often = len(skipped) >= _SHARE * len(at_right)
        yield Seen(skipped[:1], part=skipped, of=at_right, proven=is_often)


def skips_often(record: Record) -> Found:
    """Many steps are skipped, as by a scale that grows too soon."""
    steps = _steps_of_scalers(record)[_SETTLED:]
    skipped = [step for step in steps if step.skipped]
    if len(skipped) >= max(_MANY, _OFTEN * len(steps)):
        yield Seen([None], part=skipped, of=steps)


def _steps_of_scalers(record: Record) -> list[Event]:
    """The steps of scalers that the doctor did not disturb."""
    return record.of("step", scaled=True, again=False, disturbed=False)


def _at_right_scales(steps: Sequence[Event]) -> list[Event]:
    """The steps at a scale at which, or above which, a step was made before.

    Such a scale does not explain a skip.
    """
    made_at = (0.0 if step.skipped else step.scale or 0.0 for step in steps)
    largest = accumulate(made_at, max, initial=0.0)
    pairs = zip(steps, largest, strict=False)
    return [step for step, scale in pairs if (step.scale or 0.0) <= scale]


def skips_one_kind_of_batch(record: Record) -> Found:
    """All steps are skipped whose gradients come from the backward of one line.

    Some of them are skipped at scales that were right before.
    """
    calm = _steps_of_scalers(record)
    at_right = _at_right_scales(calm)
    of_lines: dict[Where | None, list[Event]] = defaultdict(list)
    for window in record.stepped_windows:
        if window.used:
            line = window.used[-1].where
            of_lines[line] += [step for step in window.steps if step in calm]
    for line, steps in of_lines.items():
        again = [step for step in steps if step in at_right]
        if len(again) >= _MANY and all(step.skipped for step in steps):
            yield Seen([line], part=steps, line=line)


def leaves_out_batches(record: Record) -> Found:
    """Batches whose loss is not finite have no step: the script leaves them out."""
    without = record.of("left_out")
    for window in record.windows:
        lost = window.backwards if window.left_out else window.backwards[: window.lost]
        # SAM zeroes gradients between two backwards of one batch.
        stepped = {each.batch for each in window.used if window.steps} - {-1}
        without += [
            each
            for each in lost
            if not (each.finite or window.forced or each.batch in stepped)
        ]
    batches = record.batches or len(record.of("backward"))
    total = max(batches, len(without))
    is_often = len(without) >= max(_MANY, _SHARE * total)
    yield Seen(without, of=total, proven=is_often)


def overflows_and_goes_on(record: Record) -> Found:
    """An operation overflows, and the loss is finite again.

    A division by the overflow, or a comparison with it, makes it so.
    """
    if record.hidden_overflow:
        yield Seen(
            [record.hidden_overflow.where], operation=record.hidden_overflow.text
        )


def rounds_whole_numbers(record: Record) -> Found:
    """A cast to 16 bits changes whole numbers."""
    if record.rounded_whole_number:
        largest, where = record.rounded_whole_number
        yield Seen([where], largest=largest)


def begins_at_losses_that_are_not_finite(record: Record) -> Found:
    """A loss is not finite, but its gradients are."""
    losses = record.of("backward", finite=False)
    used = [backward for backward in losses if math.isfinite(backward.added)]
    yield Seen(used, of=record.of("backward"))


def ends_not_finite(record: Record) -> Found:
    """Weights, buffers or the last losses are not finite at the end."""
    bad = list(record.not_finite)
    last = [backward.finite for backward in record.of("backward")[-3:]]
    if last == [False] * 3:
        bad.append("the loss")
    if bad:
        more = [f"and {len(bad) - 4} more"] if len(bad) > 4 else []
        yield Seen([None], names=", ".join(bad[:4] + more))


def steps_other_parameters(record: Record) -> Found:
    """No backward reaches the stepped parameters; the loss depends on others."""
    return _steps_in_vain(record, trains=True)


def steps_for_a_loss_without_parameters(record: Record) -> Found:
    """No backward reaches a parameter: the last loss depends on none."""
    return _steps_in_vain(record, trains=False)


def _steps_in_vain(record: Record, *, trains: bool) -> Found:
    """No backward reaches the parameters that are stepped.

    Args:
        record: The training.
        trains: Whether the last loss depends on parameters.
    """
    steps, losses = record.of("step"), record.of("backward")
    is_used = any(step.norm for step in steps) or any(each.reached for each in losses)
    if losses and losses[-1].loss.trains is trains and not (is_used or record.error):
        yield Seen(steps, backwards=losses)


def leaves_weights_without_gradients(record: Record) -> Found:
    """Weights of modules that run get no gradients."""
    steps = record.of("step")
    if record.cut_off and len(steps) >= _MANY:
        names = ", ".join(dict.fromkeys(record.cut_off))
        yield Seen([None], part=record.cut_off, steps=steps, names=names)


def never_steps(record: Record) -> Found:
    """Gradients are zeroed or left out again and again, and there is no step."""
    zeroed = [event for window in record.windows for event in window.zeroed]
    zeroed += [window.unscales[-1] for window in record.windows if window.left_out]
    is_over = record.of("step") or record.error
    if record.scales_the_loss and len(zeroed) > _SETTLED // 2 and not is_over:
        first = zeroed[0].where
        code = "".join(getlines(first.file)) if first else ""
        yield Seen(zeroed, holds=".step(" not in code)


# The loss scale must change nothing.


Point = tuple[float, float]  # a scale, and a norm at this scale


@dataclass(frozen=True)
class _Dependence:
    """How norms follow the loss scale."""

    factor: float  # the median norm at high scales, divided by the one at low scales
    ratio: float  # the median of high scales, divided by the one of low scales
    norms: int  # how many were measured at high or at low scales, whichever is less

    @property
    def exponent(self) -> float:
        """The power of the scale that norms are proportional to.

        It is 0 for norms that the scale does not change, and 1 for those of scaled
        gradients.
        """
        return math.log(self.factor) / math.log(self.ratio)

    @property
    def is_large(self) -> bool:
        """Whether it is too large for chance."""
        exponent = abs(self.exponent)
        is_sure = self.norms >= _STEPS or exponent >= _EXPONENT
        return is_sure and self.ratio**exponent > _FACTOR

    def seen_in(self, steps: Sequence[Event], what: str = "") -> Seen:
        """What was seen in these steps."""
        times = max(self.factor, 1 / self.factor)
        ratio, norms = self.ratio, self.norms
        return Seen(steps[:1], what=what, times=times, ratio=ratio, norms=norms)


def _dependence(
    scales_and_norms: Iterable[tuple[float | None, float]],
) -> _Dependence | None:
    """How norms follow the scale; None if too few norms, or too close scales, tell.

    Args:
        scales_and_norms: A scale and a norm for each step. The norm is infinite for a
            step that was skipped at a scale that was right before.
    """
    points = [(s, norm) for s, norm in scales_and_norms if s and norm * s > _TINY]
    scales = [scale for scale, _ in _finite(points)] or [1.0]
    if max(scales) < _LEAST_RATIO * min(scales):
        return None
    middle = math.sqrt(min(scales) * max(scales))
    points = _alternating(points, middle)
    low = [point for point in points if point[0] < middle]
    high = [point for point in points if point[0] >= middle]
    if not _are_apart(low, high):
        return None
    low, high = _finite(low), _finite(high)
    norms = min(len(low), len(high))
    if norms < _LEAST_NORMS:
        return None
    low_scale, low_norm = map(median, zip(*low, strict=True))
    high_scale, high_norm = map(median, zip(*high, strict=True))
    return _Dependence(high_norm / low_norm, high_scale / low_scale, norms)


def _finite(points: Iterable[Point]) -> list[Point]:
    """The points whose norm is finite."""
    return [point for point in points if point[1] < math.inf]


def _alternating(points: list[Point], middle: float) -> list[Point]:
    """The points that have a point on the other side of a scale among their neighbours.

    If a scale only grows or only falls, other points would compare early gradients with
    late ones.
    """
    near = []
    for number, point in enumerate(points):
        around = points[max(0, number - _AROUND) : number + _AROUND + 1]
        if len({scale >= middle for scale, _ in around}) == 2:
            near.append(point)
    return near


def _are_apart(low: Sequence[Point], high: Sequence[Point]) -> bool:
    """Whether nearly all norms at high scales are larger, or nearly all smaller."""
    lows = sorted(norm for _, norm in low)
    larger = sum(bisect_left(lows, norm) for _, norm in high)
    share = larger / max(1, len(high) * len(low))
    return max(share, 1 - share) >= _SEPARATED


def gradients_follow_the_scale(record: Record) -> Found:
    """The gradients of a step depend on the loss scale."""
    for calm in _steps_of_each(record):
        made = [step for step in calm if not step.skipped]
        for what, seen in islice(_dependences(calm, made), 1):
            yield seen.seen_in(made, what)


def _dependences(
    calm: list[Event], made: list[Event]
) -> Iterator[tuple[str, _Dependence]]:
    """Yield which gradients depend on the scale, and how."""
    for norm in ("norm", "unclipped"):  # a clip may hide a dependence
        seen = _dependence(_norms_at_scales(calm, norm))
        if seen and seen.is_large:
            yield "gradients", seen
    # The norm of all gradients hides small gradients of a single weight.
    most = max((len(step.norms) for step in made), default=0)
    whole = [step for step in made if len(step.norms) == most]
    for weight in range(most):
        seen = _dependence((step.scale, step.norms[weight]) for step in whole)
        if seen and seen.exponent <= -_SHRINKS and seen.norms >= _STEPS:
            yield "gradients of some weights", seen


def _norms_at_scales(steps: list[Event], norm: str) -> list[Point]:
    """The scale and a norm of each step, in their order.

    The norm is infinite for a step that was skipped at a scale that was right before.
    Other skipped steps are left out.
    """
    at_right = _at_right_scales(steps)
    points = []
    for step in steps:
        if not step.skipped:
            points.append((step.scale, vars(step)[norm]))
        elif step in at_right:
            points.append((step.scale, math.inf))
    return points


def differs_at_two_scales(record: Record) -> Found:
    """Two trainings in float32 differ that should differ in their loss scale alone."""
    compared = record.at_two_scales
    if compared is not None and compared.first is not None:
        first = compared.first
        yield Seen(
            [first.where],
            proven=compared.proven,
            what=first.what,
            step=first.step,
        )


def adds_what_does_not_follow_the_scale(record: Record) -> Found:
    """The user's code adds to scaled gradients what is not scaled."""
    for steps in _steps_of_each(record, skipped=False):
        seen = _dependence((step.scale, step.added) for step in steps)
        if seen and seen.exponent <= -_EXPONENT:
            yield seen.seen_in(steps)


def rates_follow_the_scale(record: Record) -> Found:
    """The rate depends on the scale: it may come from the norm of scaled gradients."""
    for steps in _steps_of_each(record, skipped=False):
        seen = _dependence((step.scale, step.rate) for step in steps)
        if seen and abs(seen.exponent) >= _EXPONENT:
            yield seen.seen_in(steps)


def _steps_of_each(record: Record, **known: bool) -> Iterator[list[Event]]:
    """Yield the steps of each optimizer that the doctor did not disturb."""
    for optimizer in range(record.optimizers):
        yield record.of("step", optimizer=optimizer, disturbed=False, **known)


def divides_what_was_not_scaled(record: Record) -> Found:
    """A loss, or a part of it, was not scaled, but its gradients are unscaled."""
    divided = record.of("backward", divided=True)
    unscaled = [b for b in divided if b.loss.unscaled and not b.loss.has_gradient]
    for line in dict.fromkeys(backward.where for backward in unscaled):
        backwards = [backward for backward in unscaled if backward.where == line]
        # If the loss continues from a gradient of a scaled loss, its gradients are
        # scaled although the graph does not show it: they grow with the scale.
        seen = _dependence((each.scale, each.added) for each in backwards)
        is_part = any(backward.loss.scale for backward in backwards)
        if is_part or seen is None or seen.exponent < 0.5:
            yield Seen(backwards, holds=not is_part)


def mixes_scales(record: Record) -> Found:
    """The gradients of a step were multiplied or divided by different scales."""
    mixed = [window for window in record.stepped_windows if len(window.scales) > 1]
    if len(mixed) > 1:
        last = mixed[-1]
        low, high = min(last.scales), max(last.scales)
        inside = record.events[last.used[0].number : last.steps[0].number]
        updates = [event for event in inside if event.kind == "update"]
        at = updates or last.used
        yield Seen(at, part=mixed, of=record.stepped_windows, low=low, high=high)


def uses_an_overflow(record: Record) -> Found:
    """A scaler's step was about to use a forced overflow."""
    forced = [window for window in record.stepped_windows if window.forced]
    steps = [step for window in forced for step in window.steps]
    wrong = [step for step in steps if step.overflows and step.scaled]
    if wrong:
        hides = record.of("hide")[:1]
        yield Seen([*hides, *wrong], part=wrong, of=forced)


# Stale casts, used gradients and rounded weights.


def uses_stale_weights(record: Record) -> Found:
    """A forward computes with casts of weights that have changed since."""
    stale = record.of("stale")
    at = record.of("autocast") or stale
    forwards = sum(record.forwards.values())
    yield Seen(at[: min(1, len(stale))], part=stale, of=forwards)


def uses_gradients_again(record: Record) -> Found:
    """Backwards add to gradients that a step has already used."""
    at = [window.backwards[0] for window in record.windows if window.stale]
    if len(at) >= 2:
        yield Seen(at, of=record.of("backward"))


def rounds_its_weights(record: Record) -> Found:
    """Float32 weights are rounded to 16 bits, which loses small updates."""
    steps = record.of("step", skipped=False)
    rounded = [step for step in steps if step.rounded]
    if rounded:
        at = [*record.of("cast"), *rounded[:1]]
        yield Seen(at, part=rounded, of=steps, proven=len(rounded) >= _MANY)


# Validation.


def metric_differs_in_float32(record: Record) -> Found:
    """A validation metric differs from that of the same weights in float32."""
    at: list[Event | None] = [*record.regions_of_validation] or [None]
    for name, (was, exact) in record.metrics.items():
        change = abs(was - exact) / max(abs(exact), 1e-12)
        # If only `was` is NaN, so is `change`, and `change <= x` is false.
        differs = was != exact and not change <= _MAYBE_CHANGED
        if differs and math.isfinite(exact):
            is_large = not change <= _CHANGED
            yield Seen(at, name=name, was=was, exact=exact, proven=is_large)


def validation_is_not_finite(record: Record) -> Found:
    """A forward of a validation overflows only in 16 bits."""
    cause = record.validation_cause
    if cause and not record.metrics:
        yield Seen([cause.where], operation=cause.text)
