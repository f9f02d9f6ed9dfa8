"""What holds for every right training, whatever its lines are: each is measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

from determined_amp.amp.rehearse.backward_graph import OUTSIDE
from determined_amp.check.finding import CheckFinding, Level, Where
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

# Skipped steps that are no outliers: so many, and such a share.
_MANY, _SHARE = 3, 0.25

# Relative change of a validation metric by 16 bits that is no rounding, and one that
# may be some.
_CHANGED, _MAYBE_CHANGED = 0.05, 0.01

# Norms that follow the scale differ by more than this factor over so many steps at each
# scale, or over a few steps where they are nearly proportional to it.
_FACTOR, _STEPS, _EXPONENT = 2.0, 8, 0.7


# Steps are made, with all that was computed for them.


@rule
def _steps_are_made(record: Record) -> Found:
    steps = record.of("step", scaled=True, again=False, disturbed=False)
    if all(step.skipped for step in steps):
        if len(steps) >= _SETTLED // 2:
            level = FAULT if len(steps) >= _SETTLED else SUSPICION
            effect = (
                f"0 of {len(steps)} steps were made: the scaler skipped all of them"
            )
            yield _no_steps(record, steps[-1:], effect, level)
        return
    late = _late(steps)
    skipped = [step for step in late if step.skipped]
    if len(skipped) >= _MANY:
        level = FAULT if len(skipped) >= _SHARE * len(late) else SUSPICION
        many = count_of(skipped, late, "step")
        effect = f"{many} skipped at scales that were right before"
        yield _no_steps(record, skipped[:1], effect, level)


def _late(steps: Sequence[Event]) -> list[Event]:
    """Steps at a scale at which one was made before: it does not explain a skip."""
    made_at = (0.0 if step.skipped else step.scale or 0.0 for step in steps)
    largest = accumulate(made_at, max, initial=0.0)
    pairs = zip(steps, largest, strict=False)
    return [step for step, scale in pairs if (step.scale or 0.0) <= scale]


@rule
def _all_kinds_of_batches_are_trained(record: Record) -> Found:
    """What begins at one line is skipped again where the scale is high again."""
    kinds: dict[object, list[Event]] = defaultdict(list)
    for window in record.complete:
        step = window.steps[0]
        if window.used and step.scaled and not (step.disturbed or step.moved):
            kinds[window.used[-1].where].append(step)
    for line, steps in kinds.items():
        scales = [step.scale for step in steps]
        lowest = accumulate(scales, min)
        pairs = zip(scales[1:], lowest, strict=False)
        again = [scale for scale, least in pairs if scale >= least]
        if len(again) >= _MANY and all(step.skipped for step in steps):
            effect = f"0 of {len(steps)} steps after the backward at {line} were made"
            yield _no_steps(record, steps, effect, FAULT)


@rule
def _training_goes_on(record: Record) -> Found:
    steps = record.of("step")
    last = steps[-1].number if steps else math.inf
    unused = [each for each in record.of("backward") if each.number > last]
    longest = max((len(window.backwards) for window in record.complete), default=0)
    if len(unused) > _SETTLED // 2 + 2 * longest:
        effect = f"no step follows the last {len(unused)} backwards"
        yield _no_steps(record, unused, effect, FAULT)


@rule
def _batches_are_used(record: Record) -> Found:
    """A script may leave out by itself what is not finite."""
    without = record.of("left_out")
    for window in record.windows:
        lost = [] if window.forced else window.backwards[: window.lost]
        bad = (each for each in lost if not (each.finite and math.isfinite(each.added)))
        without += bad
    if without:
        total = max(record.batches, len(without))
        effect = f"{len(without)} of {total} batches were left out{_cause_of(record)}"
        is_often = len(without) >= _MANY and len(without) >= _SHARE * total
        level = FAULT if is_often else SUSPICION
        at = [*_line_of_cause(record), *without]
        yield found("left_out", at, effect, level, _advice_of(record))


def _no_steps(
    record: Record, steps: Sequence[Event], effect: str, level: Level
) -> CheckFinding:
    at = [*_line_of_cause(record), *steps]
    advice = _advice_of(record)
    return found("no_steps", at, effect + _cause_of(record), level, advice)


def _cause_of(record: Record) -> str:
    """What is known of why losses or gradients are not finite."""
    bad = record.of("backward", finite=False)
    losses = (
        f"; {share_of(record, bad)} began at a loss that is not finite" if bad else ""
    )
    return losses + (f"; first: {record.cause.text}" if record.cause else "")


def _line_of_cause(record: Record) -> list[Event | Where | None]:
    return [record.cause.where] if record.cause else []


def _advice_of(record: Record) -> tuple[str, str] | None:
    """What was tried, or where to look."""
    cause = record.cause
    if cause is None:
        return None
    if f"with {cause.module} in float32" in cause.helps:
        if cause.module == OUTSIDE:  # all of it was tried, from any line
            return "look", (
                "all that is computed outside of modules: in float32 the loss is finite"
            )
        lines = (
            "# tried: the loss of this batch is finite then\n"
            "with torch.autocast(device_type, enabled=False):"
            f"  # around {cause.module}\n"
            "    output = module(inputs.float())"
        )
        return "write", lines
    if "in bfloat16" in cause.helps:
        return (
            "write",
            "dtype=torch.bfloat16  # tried: the loss is finite, without a scale",
        )
    if cause.helps:
        return "look", "float32 from there to the loss: the loss is finite in float32"
    return "look", f"{cause.text}"


@rule
def _gradients_are_stepped_with(record: Record) -> Found:
    losses, steps = record.of("backward"), record.of("step")
    used = [step for step in steps if step.norm]
    used += [each for each in losses if each.reached]
    if losses and steps and not (used or record.error):
        key = "other_parameters" if losses[-1].loss.trains else "loss_cut_off"
        effect = f"0 of {len(losses)} backwards reached what the optimizer steps"
        yield found(key, steps, effect)
    elif record.cut_off and len(steps) >= _MANY:
        names = ", ".join(dict.fromkeys(record.cut_off))
        effect = (
            f"{len(record.cut_off)} weights have none after {len(steps)} steps: {names}"
        )
        yield found("cut_off", [], effect, SUSPICION)
    zeroed = [event for window in record.windows for event in window.zeroed]
    if record.scales and len(zeroed) > _SETTLED // 2 and not (steps or record.error):
        many = f"gradients were zeroed {len(zeroed)} times"
        effect = f"{many}, and 0 steps were made with them"
        yield found("step_missing", zeroed, effect)


@rule
def _all_is_finite(record: Record) -> Found:
    bad = list(record.not_finite)
    last = [backward.finite for backward in record.of("backward")[-3:]]
    if last == [False] * 3:
        bad.append("the loss")
    if bad:
        more = f", and {len(bad) - 4} more" if len(bad) > 4 else ""
        effect = f"not finite at the end: {', '.join(bad[:4])}{more}{_cause_of(record)}"
        at = _line_of_cause(record)
        yield found("not_finite", at, effect, advice=_advice_of(record))


# The scale changes nothing.


@rule
def _scale_changes_no_update(record: Record) -> Found:
    for optimizer in range(record.optimizers):
        calm = record.of("step", optimizer=optimizer, disturbed=False)
        steps = [step for step in calm if not step.skipped]
        spared = [(step.scale, math.inf) for step in _late(calm) if step.skipped]
        # A clip may hide what its gradients depend on.
        for norm in ("norm", "unclipped"):
            points = [(step.scale, vars(step)[norm]) for step in steps]
            seen = dependence([*points, *spared])
            if seen is None or not seen.is_clear:
                continue
            times = max(seen.factor, 1 / seen.factor)
            is_proportional = abs(seen.exponent) >= _EXPONENT
            if times > _FACTOR and (seen.norms >= _STEPS or is_proportional):
                effect = (
                    f"the gradients of a step differ {number(times)} times between "
                    f"scales that differ {number(seen.ratio)} times, measured in "
                    f"{seen.norms} steps at each"
                )
                yield found("depends_on_scale", steps[:1], effect)
                break
        else:
            yield from _added_while_scaled(steps)


def _added_while_scaled(steps: Sequence[Event]) -> Found:
    """What is added to scaled gradients must be proportional to the scale."""
    seen = dependence((step.scale, step.added) for step in steps)
    if seen is not None and seen.is_clear and seen.exponent <= -_EXPONENT:
        effect = (
            "what is added to gradients while they are scaled does not follow the "
            f"scale: after unscale_ it differs {number(1 / seen.factor)} times between "
            f"scales that differ {number(seen.ratio)} times, in {seen.norms} steps at "
            "each"
        )
        yield found("depends_on_scale", steps[:1], effect)


@rule
def _gradients_have_one_scale(record: Record) -> Found:
    """All of a step are multiplied by one scale, and are divided by it."""
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
            first = scaled[0].number
            since = [each for each in record.of("update") if each.number > first]
            lines += [each for each in since if each.number < step.number] or scaled
    if len(mixed) > 1:
        ratio, scale = max(mixed)
        many = count_of(mixed, record.complete, "step")
        both = f"{number(scale)} and {number(scale * ratio)}"
        effect = f"{many} used gradients of the scales {both}"
        yield found("scales_mixed", lines, effect)


@rule
def _overflow_is_skipped(record: Record) -> Found:
    forced = [window for window in record.complete if window.forced]
    steps = [step for window in forced for step in window.steps]
    wrong = [step for step in steps if step.overflows and step.scaled]
    if wrong:
        effect = f"{count_of(wrong, forced, 'forced overflow')} did not skip the step"
        yield found(
            "overflow_hidden", [*record.of("hide", scalar=False)[:1], *wrong], effect
        )


# Forwards and gradients are new.


@rule
def _forward_sees_newest_weights(record: Record) -> Found:
    stale = record.of("stale")
    if stale:
        many = count_of(stale, range(sum(record.forwards.values())), "forward")
        effect = f"{many} of modules used weights of an earlier step"
        yield found("stale_casts", record.of("autocast")[:1] or stale[:1], effect)


@rule
def _gradients_are_used_once(record: Record) -> Found:
    windows = [window for window in record.complete if window.stale]
    if len(windows) >= 2:
        many = count_of(windows, record.complete, "step")
        effect = f"{many} used gradients that an earlier step had used"
        yield found("not_zeroed", [window.backwards[0] for window in windows], effect)


@rule
def _updates_are_kept(record: Record) -> Found:
    """Weights that are rounded to 16 bits lose small updates."""
    steps = record.of("step", skipped=False)
    rounded = [step for step in steps if step.rounded]
    if rounded:
        many = count_of(rounded, steps, "step")
        effect = f"float32 weights were rounded to 16 bits before {many}"
        level = FAULT if len(rounded) >= _MANY else SUSPICION
        yield found("half_weights", [*record.of("cast"), *rounded[:1]], effect, level)


# Validation.


@rule
def _metrics(record: Record) -> Found:
    for name, (as_is, exact) in record.metrics.items():
        change = abs(as_is - exact) / max(abs(exact), 1e-12) if as_is != exact else 0.0
        if math.isfinite(exact) and not change <= _MAYBE_CHANGED:
            level = SUSPICION if change <= _CHANGED else FAULT
            effect = f"{name} of the same weights: {as_is:.4g}, in float32 {exact:.4g}"
            yield found("eval_16_bits", record.regions_of_validation, effect, level)
    if record.validation is not None and not record.metrics:
        name, where = record.validation
        effect = f"{name} is not finite without gradients, and in float32 it is, 1 of 1"
        yield found("eval_16_bits", [where], effect)
