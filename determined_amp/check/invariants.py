"""What holds for every right training, whatever its lines are: each is measured, and a fault."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from determined_amp.check.finding import CheckFinding
from determined_amp.check.record import Event, Record
from determined_amp.check.ruling import (
    FAULT,
    SUSPICION,
    Dependence,
    count_of,
    dependence,
    found,
    number,
    rule,
)

# Steps after which a scale has settled: 2^16 is 1 then.
_SETTLED = 16

# Skipped steps after the scale has settled that are no outliers: so many, and such a share.
_MANY, _SHARE = 3, 0.25

# Norms that follow the scale differ by more than this factor over so many steps at each scale, or
# over a few steps where they are nearly proportional to it.
_FACTOR, _STEPS, _EXPONENT = 2.0, 8, 0.7


@rule
def _steps_are_made(record: Record) -> Iterator[CheckFinding]:
    steps = record.of("step", scaled=True, again=False, disturbed=False)
    applied = [step for step in steps if not step.skipped]
    losses = record.of("backward")
    bad = sum(not backward.finite for backward in losses)
    cause = f"; {bad} of {len(losses)} losses were not finite" if bad else ""
    cause += _first_overflow(record)
    if len(steps) >= _SETTLED // 2 and not applied:
        still = f"0 of {len(steps)} steps were made: the scaler skipped all of them"
        is_sure = len(steps) >= _SETTLED or bad > len(losses) / 2
        yield found("no_steps", [steps[-1]], still + cause, FAULT if is_sure else SUSPICION)
        return
    # At such a scale a step was made before: the scale does not explain that this one is skipped.
    late, largest = [], 0.0
    for step in steps:
        late += [step] if step.scale <= largest else []
        largest = largest if step.skipped else max(largest, step.scale)
    skipped = [step for step in late if step.skipped]
    if len(skipped) >= max(_MANY, _SHARE * len(late)):
        many = f"{count_of(len(skipped), len(late), 'step')} skipped at scales that were right"
        yield found("no_steps", skipped[:1], f"{many} before{cause}")
    last = max((step.number for step in record.of("step")), default=math.inf)
    unused = [backward for backward in losses if backward.number > last]
    longest = max((len(window.backwards) for window in record.complete), default=0)
    if steps and len(unused) > _SETTLED // 2 + 2 * longest:
        yield found("no_steps", unused, f"no step follows the last {len(unused)} backwards{cause}")


def _first_overflow(record: Record) -> str:
    return f"; first: {record.first_overflow}" if record.first_overflow else ""


@rule
def _all_is_finite(record: Record) -> Iterator[CheckFinding]:
    bad = list(record.not_finite)
    losses = record.of("backward")[-3:]
    if len(losses) == 3 and not any(backward.finite for backward in losses):
        bad.append("the loss")
    if bad:
        more = f", and {len(bad) - 4} more" if len(bad) > 4 else ""
        effect = f"not finite at the end: {', '.join(bad[:4])}{more}{_first_overflow(record)}"
        yield found("not_finite", [], effect)


def dependence_of(record: Record, optimizer: int) -> Dependence | None:
    """How the norms that the steps of an optimizer get follow the loss scale.

    Or those before a clip, which may hide it, if they do more.
    """
    steps = record.of("step", optimizer=optimizer, skipped=False, disturbed=False)
    stepped = dependence((step.scale, step.norm) for step in steps)
    unclipped = dependence((step.scale, step.unclipped) for step in steps)
    known = [each for each in (stepped, unclipped) if each is not None]
    return max(known, key=lambda each: abs(each.exponent), default=None)


@rule
def _scale_changes_no_update(record: Record) -> Iterator[CheckFinding]:
    for optimizer in range(record.optimizers):
        seen = dependence_of(record, optimizer)
        if seen is None or not seen.is_clear:
            continue
        times = max(seen.factor, 1 / seen.factor)
        if times > _FACTOR and (seen.norms >= _STEPS or abs(seen.exponent) >= _EXPONENT):
            steps = record.of("step", optimizer=optimizer, skipped=False)
            effect = (
                f"the gradients that a step gets differ {number(times)} times between scales that "
                f"differ {number(seen.ratio)} times, measured in {seen.norms} steps at each"
            )
            yield found("depends_on_scale", steps[:1], effect)


@rule
def _forward_sees_newest_weights(record: Record) -> Iterator[CheckFinding]:
    stale = record.of("stale")
    if stale:
        forwards = sum(record.forwards.values())
        effect = f"{len(stale)} of {forwards} forwards of modules used weights of an earlier step"
        yield found("stale_casts", record.of("autocast")[:1] or stale[:1], effect)


@rule
def _gradients_are_used_once(record: Record) -> Iterator[CheckFinding]:
    windows = [window for window in record.complete if window.stale]
    if len(windows) >= 2:
        many = count_of(len(windows), len(record.complete), "step")
        effect = f"{many} used gradients that an earlier step had used"
        yield found("not_zeroed", [window.backwards[0] for window in windows], effect)


@rule
def _gradients_have_one_scale(record: Record) -> Iterator[CheckFinding]:
    """All of a step are multiplied by one scale, which is the one that they are divided by."""
    mixed: dict[int, list[tuple[float, float]]] = defaultdict(list)
    lines: dict[int, list[Event]] = defaultdict(list)
    updates = record.of("update")
    for window in record.complete:
        used = [backward for backward in window.used if backward.loss.scale]
        step = window.steps[0]
        scales = {backward.loss.scale for backward in used}
        scales |= {step.scale} if used and step.scaled else set()
        if len(scales) > 1:
            mixed[window.optimizer].append((min(scales), max(scales)))
            between = [e for e in updates if used[0].number < e.number < step.number]
            lines[window.optimizer] += between or used
    for optimizer, scales_of_steps in mixed.items():
        if len(scales_of_steps) > 1:
            low, high = max(scales_of_steps, key=lambda pair: pair[1] / pair[0])
            many = count_of(
                len(scales_of_steps), len(record.of("step", optimizer=optimizer)), "step"
            )
            effect = f"{many} used gradients of the scales {number(low)} and {number(high)}"
            yield found("scales_mixed", lines[optimizer], effect)


@rule
def _overflow_is_skipped(record: Record) -> Iterator[CheckFinding]:
    forced = [w for w in record.complete if w.forced and w.steps[0].scaled and not w.zeroed]
    first = [window.steps[0] for window in forced if not window.skipped]
    stepped = [step for step in first if math.isfinite(step.norm)]
    if stepped:
        many = count_of(len(stepped), len(forced), "forced overflow")
        effect = f"{many} did not skip the step"
        yield found("overflow_hidden", [*record.of("hide", scalar=False)[:1], *stepped], effect)
