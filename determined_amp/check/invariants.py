"""What holds for every right training, whatever its lines are: each is measured, and a
fault.
"""

from __future__ import annotations

import math
from itertools import accumulate

from determined_amp.check.record import Event, Record
from determined_amp.check.ruling import (
    FAULT,
    SUSPICION,
    Found,
    count_of,
    dependence,
    found,
    number,
    rule,
    share_of,
)

# Steps after which a scale has settled: 2^16 is 1 then.
_SETTLED = 16

# Skipped steps after the scale has settled that are no outliers: so many, and such a
# share.
_MANY, _SHARE = 3, 0.25

# Norms that follow the scale differ by more than this factor over so many steps at each
# scale, or over a few steps where they are nearly proportional to it.
_FACTOR, _STEPS, _EXPONENT = 2.0, 8, 0.7


@rule
def _steps_are_made(record: Record) -> Found:
    steps = record.of("step", scaled=True, again=False, disturbed=False)
    if not any(not step.skipped for step in steps):
        if len(steps) >= _SETTLED // 2:
            level = FAULT if len(steps) >= _SETTLED else SUSPICION
            effect = (
                f"0 of {len(steps)} steps were made: the scaler skipped all of them"
            )
            yield found("no_steps", steps[-1:], effect + _first_overflow(record), level)
        return
    # At such a scale a step was made before: the scale does not explain that this one
    # is skipped.
    made_at = (0.0 if step.skipped else step.scale for step in steps)
    largest = accumulate(made_at, max, initial=0.0)
    late = [
        step for step, scale in zip(steps, largest, strict=False) if step.scale <= scale
    ]
    skipped = [step for step in late if step.skipped]
    if len(skipped) >= max(_MANY, _SHARE * len(late)):
        effect = (
            f"{count_of(skipped, late, 'step')} skipped at scales that were right"
            " before"
        )
        yield found("no_steps", skipped[:1], effect + _first_overflow(record))


@rule
def _training_goes_on(record: Record) -> Found:
    steps = record.of("step")
    unused = [
        each
        for each in record.of("backward")
        if steps and each.number > steps[-1].number
    ]
    longest = max((len(window.backwards) for window in record.complete), default=0)
    if len(unused) > _SETTLED // 2 + 2 * longest:
        effect = (
            f"no step follows the last {len(unused)} backwards{_first_overflow(record)}"
        )
        yield found("no_steps", unused, effect)


def _first_overflow(record: Record) -> str:
    """What is known of the cause of steps that are not made."""
    bad = record.of("backward", finite=False)
    losses = (
        f"; {share_of(record, bad)} began at a loss that is not finite" if bad else ""
    )
    return losses + (
        f"; first: {record.first_overflow}" if record.first_overflow else ""
    )


@rule
def _gradients_are_stepped_with(record: Record) -> Found:
    losses, steps = record.of("backward"), record.of("step")
    used = [step for step in steps if step.norm] + [
        each for each in losses if each.reached
    ]
    if losses and steps and not (used or record.error):
        key = "other_parameters" if losses[-1].loss.trains else "loss_cut_off"
        effect = f"0 of {len(losses)} backwards reached what the optimizer steps"
        yield found(key, steps, effect)
    if record.replaced:
        effect = (
            "of its weights are of no module that runs, and no backward reaches them"
        )
        yield found("other_parameters", steps, f"{record.replaced} {effect}", SUSPICION)
    zeroed = [event for window in record.windows for event in window.zeroed]
    if record.scales and len(zeroed) > _SETTLED // 2 and not (steps or record.error):
        effect = (
            f"gradients were zeroed {len(zeroed)} times, and 0 steps were made with"
            " them"
        )
        yield found("step_missing", zeroed, effect)


@rule
def _all_is_finite(record: Record) -> Found:
    bad = list(record.not_finite)
    last = [backward.finite for backward in record.of("backward")[-3:]]
    if last == [False] * 3:
        bad.append("the loss")
    if bad:
        more = f", and {len(bad) - 4} more" if len(bad) > 4 else ""
        effect = (
            "not finite at the end:"
            f" {', '.join(bad[:4])}{more}{_first_overflow(record)}"
        )
        yield found("not_finite", [], effect)


@rule
def _scale_changes_no_update(record: Record) -> Found:
    for optimizer in range(record.optimizers):
        steps = record.of("step", optimizer=optimizer, skipped=False, disturbed=False)
        # A clip may hide what its gradients depend on.
        got = dependence((step.scale, step.norm) for step in steps)
        unclipped = dependence((step.scale, step.unclipped) for step in steps)
        for seen in (got, unclipped):
            if seen is None or not seen.is_clear:
                continue
            times = max(seen.factor, 1 / seen.factor)
            if times > _FACTOR and (
                seen.norms >= _STEPS or abs(seen.exponent) >= _EXPONENT
            ):
                effect = (
                    f"the gradients of a step differ {number(times)} times between "
                    f"scales that differ {number(seen.ratio)} times, measured in "
                    f"{seen.norms} steps at each"
                )
                yield found("depends_on_scale", steps[:1], effect)
                break


@rule
def _forward_sees_newest_weights(record: Record) -> Found:
    stale = record.of("stale")
    if stale:
        forwards = sum(record.forwards.values())
        effect = (
            f"{len(stale)} of {forwards} forwards of modules used weights of an earlier"
            " step"
        )
        yield found("stale_casts", record.of("autocast")[:1] or stale[:1], effect)


@rule
def _gradients_are_used_once(record: Record) -> Found:
    windows = [window for window in record.complete if window.stale]
    if len(windows) >= 2:
        many = count_of(windows, record.complete, "step")
        effect = f"{many} used gradients that an earlier step had used"
        yield found("not_zeroed", [window.backwards[0] for window in windows], effect)


@rule
def _gradients_have_one_scale(record: Record) -> Found:
    """All of a step are multiplied by one scale, which is the one that they are divided
    by.
    """
    mixed: list[tuple[float, float]] = []
    lines: list[Event] = []
    for window in record.complete:
        scaled = [backward for backward in window.used if backward.loss.scale]
        step = window.steps[0]
        scales = {backward.loss.scale for backward in scaled}
        if scaled and step.scaled:
            scales.add(step.scale)
        if len(scales) > 1:
            mixed.append((max(scales) / min(scales), min(scales)))
            since = [
                each for each in record.of("update") if each.number > scaled[0].number
            ]
            lines += [each for each in since if each.number < step.number] or scaled
    if len(mixed) > 1:
        ratio, scale = max(mixed)
        many = count_of(mixed, record.complete, "step")
        effect = (
            f"{many} used gradients of the scales {number(scale)} and"
            f" {number(scale * ratio)}"
        )
        yield found("scales_mixed", lines, effect)


@rule
def _overflow_is_skipped(record: Record) -> Found:
    forced = [
        w for w in record.complete if w.forced and w.steps[0].scaled and not w.zeroed
    ]
    wrong = [window.steps[0] for window in forced if not window.skipped]
    stepped = [step for step in wrong if math.isfinite(step.norm)]
    if stepped:
        effect = f"{count_of(stepped, forced, 'forced overflow')} did not skip the step"
        yield found(
            "overflow_hidden", [*record.of("hide", scalar=False)[:1], *stepped], effect
        )
