"""Rules that know a mistake and name its lines."""

from __future__ import annotations

import math
import re
from collections import Counter

from determined_amp.check.record import Event, Record, Schedule, StepWindow
from determined_amp.check.ruling import (
    COST,
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
from determined_amp.experiment.failures import name_in_16_bits

# A schedule that moves in this share of the steps moves by steps, not by epochs.
_BY_STEPS = 0.75

# Relative change of a validation metric by 16 bits that is no rounding, and one that
# may be some.
_CHANGED, _MAYBE_CHANGED = 0.05, 0.01

# Gradients that are multiplied by more than this are still scaled.
_SCALED = 1.5

# A limit that is this share of the scale was multiplied by it.
_LIMIT = 0.01

# What an update must be at least, as a share of a weight in this dtype.
_UPDATES = {"float16": "1/2048", "bfloat16": "1/256"}

# What a loss cannot be in this dtype.
_LOSSES = {
    "float16": (
        "a loss above 65504 is inf, one below 6e-8 is 0, and a scale of 65536 is inf"
        " in it"
    ),
    "bfloat16": "it has 3 digits",
}


# What is raised.

_ERRORS = {
    "step() has already been called since the last update()": "update_missing",
    "unscale_() has already been called on this optimizer": "unscaled_twice",
    "unscale_() is being called after step()": "unscaled_twice",
    "No inf checks were recorded prior to update": "update_in_window",
    "No inf checks were recorded for this optimizer": "no_gradients",
    "Attempting to unscale FP16 gradients": "half_weights",
    "_scale is None": "no_loss_scale",
    "Closure use is not currently supported": "closure",
    "unsafe to autocast": "unsafe_to_autocast",
}

# https://pytorch.org/docs/stable/amp.html, "CUDA Ops that promote to the widest input
# type".
_CAST_ON_CUDA = re.compile(r": (scatter|dot|grid_sampler)\b")


@rule
def _error(record: Record) -> Found:
    if not record.error:
        return
    level = FAULT
    keys = [key for words, key in _ERRORS.items() if words in record.error]
    if keys:
        key = _cause(record, keys[0])
    else:
        key = name_in_16_bits(record.error) or "raised"
        # What one device lacks another may have: CUDA's autocast casts the arguments of
        # some operations for which that of a CPU does not.
        elsewhere = key in ("raised", "no_16_bit_kernel") or _CAST_ON_CUDA.search(
            record.error
        )
        if elsewhere and not record.error.startswith("InvalidExperimentException"):
            level = SUSPICION
    effect = (
        f"the training stops in batch {record.batches}: {record.first_line_of_error}"
    )
    zeroed = record.windows[-1].zeroed if key == "zero_grad_in_window" else []
    yield found(key, [*zeroed, record.raised], effect, level)


def _cause(record: Record, key: str) -> str:
    """The cause of an error of GradScaler that can have several."""
    if record.of("closure"):  # what raises depends on how it is passed
        return "closure"
    losses = record.of("backward")
    kinds = ("backward", "unscale", "step", "update")
    last = [event.kind for event in record.events if event.kind in kinds][-1:]
    causes = {
        "no_gradients": _cause_of_no_gradients(record, losses),
        "unscaled_twice": "update_missing" if last == ["backward"] else key,
        "update_missing": "step_twice" if losses and last == ["step"] else key,
        "update_in_window": key if record.scales else "no_loss_scale",
    }
    return causes.get(key, key)


def _cause_of_no_gradients(record: Record, losses: list[Event]) -> str:
    trained = any(backward.reached for backward in losses)
    if losses and not losses[-1].loss.trains:
        return "constant_loss" if trained else "loss_cut_off"
    if record.windows and record.windows[-1].is_empty:
        return "zero_grad_in_window"
    return "no_gradients" if trained else "other_parameters"


# Scaling, stepping, updating.


@rule
def _scales_of_ranks(record: Record) -> Found:
    scales = sorted(set(record.scales_of_ranks))
    if len(scales) > 1:
        lines = [scaler.where for scaler in record.scalers if scaler.used]
        effect = f"at the end they have the scales {' and '.join(map(number, scales))}"
        yield found("scale_differs_by_rank", lines, effect)


@rule
def _scalers(record: Record) -> Found:
    """One scaler lasts for the whole training."""
    steps = record.of("step", scaled=True)
    made = Counter(scaler.where for scaler in record.scalers if scaler.used)
    for line, times in made.items():
        if times > max(2, len(steps) / 2):
            effect = (
                f"{times} scalers for {len(steps)} steps: each begins at init_scale"
            )
            yield found("scaler_made_anew", [line], effect)


@rule
def _unscaled_early(record: Record) -> Found:
    early = [unscale for window in record.windows for unscale in window.unscaled_early]
    if early:
        effect = (
            f"after {share_of(record, early)} gradients were added that are still"
            " scaled"
        )
        yield found("unscale_in_window", early, effect)


@rule
def _unscaled_loss(record: Record) -> Found:
    """A loss was not scaled, or a part of it, and the scaler divides the gradients of
    all.
    """
    divided = record.of("backward", divided=True)
    unscaled = [b for b in divided if b.loss.unscaled and not b.loss.has_gradient]
    for line in dict.fromkeys(backward.where for backward in unscaled):
        backwards = [backward for backward in unscaled if backward.where == line]
        # A gradient of a scaled loss that is handed on is scaled, whatever the graph
        # says.
        seen = dependence((each.scale, each.added) for each in backwards)
        is_part = any(backward.loss.scale for backward in backwards)
        if is_part or seen is None or seen.exponent < 0.5:
            effect = (
                "added gradients that are divided by the scale and were never"
                " multiplied"
            )
            yield found(
                "unscaled_loss", [line], f"{share_of(record, backwards)} {effect}"
            )


@rule
def _step_without_scaler(record: Record) -> Found:
    steps = record.of("step", scaled=False, again=False)
    scaled = [
        step for step in steps if step.factor > _SCALED and math.isfinite(step.norm)
    ]
    blind = [step for step in steps if step.disturbed and not math.isfinite(step.norm)]
    if scaled:
        times = number(scaled[-1].factor)
        effect = (
            f"{share_of(record, scaled)} got gradients {times} times as large as they"
            " should be"
        )
        yield found("step_without_scaler", scaled, effect)
    elif blind:
        effect = f"{len(blind)} forced overflows reached the weights"
        yield found("step_without_scaler", blind, effect)


@rule
def _step_twice(record: Record) -> Found:
    again = {step.number for step in record.of("step", again=True)}
    windows = [window for window in record.complete if not window.forced]
    twice = [w.steps for w in windows if w.is_scaled and w.steps[-1].number in again]
    if twice:
        many = count_of(twice, record.complete, "window")
        yield found("step_twice", twice[-1], f"{many} had {len(twice[-1])} steps")


@rule
def _unscaled_by_hand(record: Record) -> Found:
    steps = [
        step
        for step in record.of("step", scaled=True, skipped=False)
        if step.scale > _SCALED
    ]
    twice = [
        step
        for step in steps
        if math.isclose(step.by_hand * step.scale, 1, rel_tol=0.01)
    ]
    if len(twice) > len(steps) / 2:
        effect = (
            "the training divided by the scale in"
            f" {count_of(twice, steps, 'step')}, too"
        )
        yield found("unscaled_twice", twice, effect)


@rule
def _clips(record: Record) -> Found:
    for of, key in (("max_norm", "clip_scaled"), ("clip_value", "clip_value_scaled")):
        scaled = [clip for clip in record.of("clip", of=of) if clip.factor > _SCALED]
        wrong = [
            clip for clip in scaled if clip.limit < min(clip.norm, _LIMIT * clip.factor)
        ]
        if wrong:
            last = wrong[-1]
            effect = (
                f"at scale {number(last.factor)} the limit {last.limit:g} clips true "
                f"gradients at {last.limit / last.factor:.3g}, whose norm was "
                f"{last.norm / last.factor:.3g}"
            )
            yield found(key, wrong, effect)


@rule
def _penalty(record: Record) -> Found:
    penalties = [
        backward for backward in record.of("backward") if backward.loss.penalty
    ]
    if penalties:
        times = number(penalties[-1].loss.penalty)
        yield found(
            "penalty_scaled",
            penalties,
            f"the gradients in it are {times} times as large",
        )


# Schedules.


@rule
def _schedules(record: Record) -> Found:
    for schedule in record.schedules:
        windows = [w for w in record.complete if w.optimizer == schedule.optimizer]
        if schedule.ours or len(windows) < 3:
            continue
        if record.of("move", schedule=schedule):
            yield from _moves(record, schedule, windows)
        elif (
            not schedule.wrapped
            and record.is_amp
            and (record.determined or record.epochs)
        ):
            effect = (
                f"{schedule.kind} did not move in {len(windows)} steps, {record.epochs}"
                " epochs"
            )
            # It may move where an epoch ends, and the only one has just ended.
            level = FAULT if record.epochs > 1 else SUSPICION
            yield found("schedule_never", [schedule.where], effect, level)


def _moves(record: Record, schedule: Schedule, windows: list[StepWindow]) -> Found:
    moves = record.of("move", schedule=schedule)
    moving = [window for window in windows if window.movers_of(schedule)]
    skipped = [window for window in windows if window.skipped]
    steps = len(windows)
    by_epochs = record.epochs >= _BY_STEPS * steps  # an epoch is one step
    if by_epochs or len(moving) < _BY_STEPS * (steps - len(skipped)):
        return
    effect = f"the rate moved {len(moves)} times in {steps} steps"
    twice = [window for window in moving if len(window.movers_of(schedule)) > 1]
    if len(twice) > steps / 2:
        effect += f": the schedule ends at {steps / len(moves):.0%} of the training"
        yield found("schedule_twice", moves, effect)
    elif len(moves) > 1.5 * steps and not schedule.wrapped:
        yield found("schedule_per_batch", moves, effect, SUSPICION)
    wrong = [window for window in skipped if window in moving]
    if wrong:
        effect = f"{count_of(wrong, skipped, 'skipped step')} moved the schedule"
        level = SUSPICION if schedule.by_hand else FAULT
        yield found("schedule_on_skipped", moves, effect, level)


# Windows of several batches.


@rule
def _accumulation(record: Record) -> Found:
    windows = [window for window in record.complete if not window.forced]
    several = [
        each for each in windows if each.is_empty or _is_accumulated(record, each)
    ]
    if len(windows) < 2 or len(several) < len(windows) - 1 or not record.is_amp:
        return
    last = several[-1]
    size = len(last.backwards)
    level = FAULT if record.batches or last.is_empty else SUSPICION
    lost = [window for window in several if window.lost]
    if len(lost) >= len(windows) - 1:
        effect = f"{last.lost} of {size} micro-batches of each step are thrown away"
        lines = [line for window in lost for line in window.zeroed or window.used]
        yield found("zero_grad_in_window", lines, effect, level)
        return
    losses = [backward.loss for backward in last.backwards]
    divisor = losses[-1].divisor if all(loss.mean for loss in losses) else math.nan
    by_hand = last.steps[0].by_hand
    if record.aggregation > 1 and record.averages:
        if math.isclose(divisor, record.aggregation, rel_tol=1e-3):
            effect = f"gradients are 1/{record.aggregation} of the mean over the window"
            yield found("loss_divided_twice", last.backwards, effect)
    elif math.isclose(divisor, 1, rel_tol=1e-3) and not math.isclose(
        size * by_hand, 1, rel_tol=0.01
    ):
        effect = (
            f"a step has {size} times the mean gradient of its {size} micro-batches"
        )
        yield found("loss_not_divided", last.backwards, effect, level)


def _is_accumulated(record: Record, window: StepWindow) -> bool:
    """Whether it has the gradients of several batches, of one backward each, from one
    line.

    Where no loader gives batches, each backward may be of another one.
    """
    many = len(window.backwards)
    batches = {backward.batch for backward in window.backwards}
    lines = {backward.where for backward in window.backwards}
    return many > 1 and len(lines) == 1 and (many == len(batches) or not record.batches)


# What is computed in what.


@rule
def _backward_under_autocast(record: Record) -> Found:
    inside = record.of("backward", autocast=True)
    if inside:
        # A library that opens it around all of a step, as Lightning does, leaves no
        # choice.
        level = (
            SUSPICION if all(region.by_library for region in record.regions) else FAULT
        )
        effect = f"{share_of(record, inside)} ran under autocast"
        yield found("autocast_backward", inside, effect, level)


@rule
def _weights_in_16_bits(record: Record) -> Found:
    for dtype, least in _UPDATES.items():
        # Weights in bfloat16 alone are a choice, which saves memory.
        if dtype in record.weights and (record.is_amp or dtype == "float16"):
            effect = (
                f"weights are in {dtype}: an update of less than {least} of one is lost"
            )
            steps = [step for step in record.of("step") if step.where]
            level = FAULT if record.is_amp else SUSPICION
            yield found("half_weights", steps[:1], effect, level)


@rule
def _autocast_of_nothing(record: Record) -> Found:
    is_float32 = record.forwards[False] and not record.forwards[True]
    if record.is_amp and is_float32 and _UPDATES.keys().isdisjoint(record.weights):
        off = record.of("autocast_off")
        # A region that is switched off here may be on with a GPU.
        is_off_here = off and not record.regions and not record.has_cuda
        effect = (
            f"0 of {record.forwards[False]} forwards of modules with weights ran"
            " under it"
        )
        level = SUSPICION if is_off_here else FAULT
        yield found("autocast_covers_nothing", record.regions or off, effect, level)


@rule
def _loss_in_16_bits(record: Record) -> Found:
    losses = [b for b in record.of("backward") if not b.loss.has_gradient]
    for dtype, limit in _LOSSES.items() if record.is_amp else ():
        events = [backward for backward in losses if backward.loss.dtype == dtype]
        bad = [backward for backward in events if not backward.finite]
        if events:
            level = FAULT if len(bad) > len(events) / 2 else SUSPICION
            effect = f"{share_of(record, events)} began at a loss in {dtype}: {limit}"
            yield found("loss_16_bits", events, effect, level)


@rule
def _hidden_nan(record: Record) -> Found:
    hidden = record.of("hide", scalar=True)
    if hidden and record.is_amp:
        effect = (
            f"{len(hidden)} losses whose NaN would be 0, and which the scaler"
            " cannot see"
        )
        yield found("nan_hidden", hidden, effect)


@rule
def _scaler_without_need(record: Record) -> Found:
    steps = record.of("step", scaled=True)
    kinds = {(region.dtype, region.explicit) for region in record.regions}
    if steps and record.scales and kinds == {("bfloat16", True)}:
        effect = (
            f"{share_of(record, steps)} asked the device whether to skip, for nothing"
        )
        yield found("bfloat16_with_scaler", record.lines_of_scalers, effect, COST)


@rule
def _need_of_scaler(record: Record) -> Found:
    losses = [backward.loss for backward in record.of("backward")]
    by_hand = any(loss.scale or loss.divisor < 1 / 8 for loss in losses)
    regions = [region for region in record.regions if region.dtype == "float16"]
    if regions and losses and not (by_hand or record.scales):
        effect = (
            f"{len(losses)} backwards, 0 scaled: gradients of 16-bit products below"
            " 6e-8 are 0"
        )
        unused = record.lines_of_scalers
        level = FAULT if unused else SUSPICION
        yield found("no_loss_scale", unused or regions, effect, level)


@rule
def _metrics(record: Record) -> Found:
    for name, (as_is, exact) in record.metrics.items():
        change = abs(as_is - exact) / max(abs(exact), 1e-12) if as_is != exact else 0.0
        if math.isfinite(exact) and not change <= _MAYBE_CHANGED:
            level = SUSPICION if change <= _CHANGED else FAULT
            effect = f"{name} of the same weights: {as_is:.4g}, in float32 {exact:.4g}"
            yield found("eval_16_bits", record.regions_of_validation, effect, level)


# What is saved, switched and waited for.


@rule
def _checkpoint_of_a_loop(record: Record) -> Found:
    """In a loop of the user's own: the optimizer is saved, and the scaler is not."""
    saves = [] if record.determined else record.of("save", optimizer=True)
    updates = record.of("update") if record.scales else []
    if saves and updates and not record.of("save", scale=True):
        effect = (
            "after a resume it begins at init_scale again, not at"
            f" {number(updates[-1].after)}"
        )
        yield found("scaler_not_saved", saves, effect)


@rule
def _state_of_disabled_scaler(record: Record) -> Found:
    """Without a GPU what is off may be on elsewhere, unless AMP needs no scaler."""
    if record.empty_scaler_state and (record.has_cuda or record.is_amp):
        bfloat16 = any(
            each.explicit and each.dtype == "bfloat16" for each in record.regions
        )
        level = FAULT if record.has_cuda or bfloat16 else SUSPICION
        off = [scaler.where for scaler in record.scalers if not scaler.enabled]
        effect = (
            "a run with AMP that goes on from it ends: 0 of 5 values of its state are"
            " there"
        )
        yield found("empty_scaler_state", off, effect, level)


@rule
def _tf32(record: Record) -> Found:
    for event in record.of("tf32")[:1]:
        effect = (
            f"float32 products became {event.value!r} while batch {event.batch} trained"
        )
        yield found("tf32", [event], effect)


@rule
def _waits(record: Record) -> Found:
    often = {
        read: n for read, n in record.syncs.items() if n >= 0.5 * record.batches > 0
    }
    if often and record.is_amp:
        many = sum(often.values()) / record.batches
        by = ", ".join(sorted({name for _, name in often}))
        effect = f"{many:.3g} in each batch, by {by}"
        yield found("synchronisation", [line for line, _ in often], effect, COST)
