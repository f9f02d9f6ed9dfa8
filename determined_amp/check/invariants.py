"""Rules about what holds for every correct training, whatever its code looks like.

Each rule reads a `Record` and yields what it has seen. It is listed by name in the row
of its finding in `findings.json`, and `judge.py` calls it. Rules about known mistakes
are in `rules.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from linecache import getlines

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
    """The steps at a scale at four times which, or above, a step was made before.

    Such a scale does not explain a skip. The largest scale that was right may not be
    right for each batch.
    """
    made_at = (0.0 if step.skipped else step.scale for step in steps)
    largest = accumulate(made_at, max, initial=0.0)
    pairs = zip(steps, largest, strict=False)
    return [step for step, scale in pairs if 4 * step.scale <= scale]


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


def divides_what_was_not_scaled(record: Record) -> Found:
    """A loss, or a part of it, was not scaled, but its gradients are unscaled."""
    divided = record.of("backward", divided=True)
    unscaled = [b for b in divided if b.loss.unscaled and not b.loss.has_gradient]
    # A scaled gradient may be passed on: the loss that is made of it is scaled, too.
    computed = [*record.of("grad"), *record.of("backward", reached=0)]
    is_passed_on = any(each.loss.scale for each in computed)
    for line in dict.fromkeys(backward.where for backward in unscaled):
        backwards = [backward for backward in unscaled if backward.where == line]
        is_part = any(backward.loss.scale for backward in backwards)
        if is_part or not is_passed_on:
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
