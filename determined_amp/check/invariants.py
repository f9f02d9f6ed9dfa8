"""What holds for every right training, whatever its lines are: each is measured, and a fault."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from determined_amp.check.finding import Finding
from determined_amp.check.record import Event, Record
from determined_amp.check.ruling import (
    FAULT,
    SUSPICION,
    Power,
    count_of,
    found,
    number,
    power_of,
    rule,
    usual_steps,
)

# Steps after which a scale has settled: 2^16 is 1 then.
_SETTLED = 16

# Skipped steps after the scale has settled that are no outliers: so many, and such a share.
_MANY, _SHARE = 3, 0.25

# Norms that follow the scale differ by more than this factor, over so many steps at least, with
# such a correlation; fewer steps are enough where norms are nearly proportional to the scale.
_FACTOR, _STEPS, _CORRELATION = 2.0, 16, 0.75
_EXPONENT, _FEW_STEPS = 0.7, 7


@rule
def _steps_are_made(record: Record) -> Iterator[Finding]:
    scaled = [step for step in record.of("step") if step.scaled and not step.again]
    steps = [step for step in scaled if not step.disturbed]
    applied = [step for step in steps if not step.skipped]
    losses = record.of("backward")
    bad = sum(not backward.finite for backward in losses)
    cause = f"; {bad} of {len(losses)} losses were not finite" if bad else ""
    cause += f"; first: {record.first_overflow}" if record.first_overflow else ""
    if len(steps) >= _SETTLED // 2 and not applied:
        still = f"0 of {len(steps)} steps were made: the scaler skipped all of them"
        is_sure = len(steps) >= _SETTLED or bad > len(losses) / 2
        yield found("no_steps", [steps[-1]], still + cause, FAULT if is_sure else SUSPICION)
        return
    # At such a scale a step was made before: the scale does not explain that this one is skipped.
    late = [
        step
        for step in steps
        if any(each.number < step.number and each.scale >= step.scale for each in applied)
    ]
    skipped = [step for step in late if step.skipped]
    if len(skipped) >= _MANY and len(skipped) >= _SHARE * len(late):
        many = f"{count_of(len(skipped), len(late), 'step')} skipped at scales that were right"
        yield found("no_steps", skipped[:1], f"{many} before{cause}")


@rule
def _all_is_finite(record: Record) -> Iterator[Finding]:
    bad = list(record.not_finite)
    losses = record.of("backward")[-3:]
    if len(losses) == 3 and not any(backward.finite for backward in losses):
        bad.append("the loss")
    if bad:
        effect = f"not finite at the end: {', '.join(bad[:4])}"
        effect += f", and {len(bad) - 4} more" if len(bad) > 4 else ""
        effect += f"; first: {record.first_overflow}" if record.first_overflow else ""
        yield found("not_finite", [], effect)


def power_of_steps(record: Record, optimizer: int) -> Power | None:
    """How the norms that the steps of an optimizer get follow the loss scale.

    Or those before a clip, which may hide it, if they do more.
    """
    usual = [s for s in usual_steps(record) if s.optimizer == optimizer and not s.skipped]
    steps = [step for step in usual if not step.disturbed]
    stepped = power_of((step.scale, step.norm) for step in steps)
    unclipped = power_of((step.scale, step.unscaled) for step in steps)
    powers = [power for power in (stepped, unclipped) if power is not None]
    return max(powers, key=lambda power: abs(power.exponent), default=None)


@rule
def _scale_changes_no_update(record: Record) -> Iterator[Finding]:
    for optimizer in range(record.optimizers):
        power = power_of_steps(record, optimizer)
        if power is None or power.factor <= _FACTOR:
            continue
        enough = power.measured >= _STEPS
        enough |= power.measured >= _FEW_STEPS and abs(power.exponent) >= _EXPONENT
        if enough and power.besides_time >= _CORRELATION:
            steps = [s for s in record.of("step") if s.optimizer == optimizer and not s.skipped]
            low, high = min(s.scale or 1 for s in steps), max(s.scale or 1 for s in steps)
            effect = (
                f"between scale {number(low)} and {number(high)} the gradients that a step gets "
                f"differ {power.factor:.3g} times, measured in {power.measured} steps"
            )
            yield found("depends_on_scale", steps[:1], effect)


@rule
def _forward_sees_newest_weights(record: Record) -> Iterator[Finding]:
    stale = record.of("stale")
    if stale:
        forwards = sum(record.forwards.values())
        effect = f"{len(stale)} of {forwards} forwards of modules used weights of an earlier step"
        lines = record.of("autocast")[:1]
        yield found("stale_casts", lines or stale[:1], effect)


@rule
def _gradients_are_used_once(record: Record) -> Iterator[Finding]:
    windows = [window for window in record.complete if window.stale]
    if len(windows) >= 2:
        many = count_of(len(windows), len(record.complete), "step")
        effect = f"{many} used gradients that an earlier step had used"
        lines: list[Event] = [window.backwards[0] for window in windows if window.backwards]
        yield found("not_zeroed", lines, effect)


@rule
def _gradients_have_one_scale(record: Record) -> Iterator[Finding]:
    mixed: dict[int, list[Event]] = defaultdict(list)
    for window in record.complete:
        if len({b.loss.scaler for b in window.used if b.loss.scale}) > 1:
            mixed[window.optimizer] += [b for b in window.used if b.loss.scale]
    for optimizer, backwards in mixed.items():
        scales = {b.loss.scale for b in backwards}
        steps = [s for s in record.of("step") if s.optimizer == optimizer]
        many = f"{len(steps)} steps used gradients that were multiplied"
        effect = f"{many} by {' and '.join(map(number, sorted(scales)[-2:]))}"
        yield found("scales_mixed", backwards, effect)


@rule
def _overflow_is_skipped(record: Record) -> Iterator[Finding]:
    forced = [w for w in record.complete if w.forced and w.steps[0].scaled and not w.dropped]
    first = [window.steps[0] for window in forced if not window.skipped]
    stepped = [step for step in first if math.isfinite(step.norm)]
    if stepped:
        many = count_of(len(stepped), len(forced), "forced overflow")
        yield found("overflow_hidden", stepped, f"{many} did not skip the step")
