"""Rules that know a mistake and name its lines."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from determined_amp.check.finding import Level
from determined_amp.check.lines import lines_that_set_rates
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
from determined_amp.check.step_gradients import SCALED
from determined_amp.experiment.failures import name_in_16_bits

# A schedule that moves in this share of the steps moves by steps, not by epochs.
_BY_STEPS = 0.75

# A limit that is this share of the scale was multiplied by it, if it is not the same
# number at scales that differ by the factor.
_LIMIT, _APART = 0.01, 4.0

# In this share of 16-bit weights a lost update is no exception.
_LOST = 0.1

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
    "does not require grad and does not have a grad_fn": "loss_cut_off",
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
    at = [*record.windows[-1].zeroed] if key == "zero_grad_in_window" else []
    if key == "update_in_window" and "unscale_" in record.error:
        at = [*record.of("update")[-1:], *record.of("step")[-1:]]
    yield found(key, [*at, record.raised], effect, level)


def _cause(record: Record, key: str) -> str:
    """The cause of an error of GradScaler that can have several."""
    if record.of("closure"):  # what raises depends on how it is passed
        return "closure"
    losses = record.of("backward")
    kinds = ("backward", "unscale", "step", "update")
    events = [event for event in record.events if event.kind in kinds]
    last = [event.kind for event in events][-1:]
    causes = {
        "no_gradients": _cause_of_no_gradients(record, losses),
        "unscaled_twice": _cause_of_second_unscale(events),
        "update_missing": "step_twice" if losses and last == ["step"] else key,
        "update_in_window": key if record.scales else "no_loss_scale",
    }
    return causes.get(key, key)


def _cause_of_second_unscale(events: list[Event]) -> str:
    """Why gradients were divided before the newest update."""
    backwards = [
        number for number, each in enumerate(events) if each.kind == "backward"
    ]
    before = events[backwards[-2] + 1 : backwards[-1]] if len(backwards) > 1 else []
    kinds = [event.kind for event in before]
    if not before or events[-1].kind != "backward":
        return "unscaled_twice"
    if {"update", "step"} <= {*kinds} and kinds.index("update") < kinds.index("step"):
        return "update_in_window"
    is_same_batch = before[-1].batch == events[-1].batch and "step" not in kinds
    return "unscaled_twice" if is_same_batch else "update_missing"


def _cause_of_no_gradients(record: Record, losses: list[Event]) -> str:
    trained = any(backward.reached for backward in losses)
    if losses and not losses[-1].loss.trains:
        return "constant_loss" if trained else "loss_cut_off"
    if record.windows and record.windows[-1].is_empty:
        return "zero_grad_in_window"
    return "no_gradients" if trained else "other_parameters"


# Events of one kind that are wrong by themselves.


class Row(NamedTuple):
    """A rule that filters the events of one kind."""

    key: str
    kind: str
    is_wrong: Callable[[Event], bool]
    effect: str  # with their `count`, their `share` of the kind, and the `last` of them
    level: Level = SUSPICION


_ROWS = (
    Row(
        "autocast_backward",
        "backward",
        lambda event: bool(event.autocast),
        "{share} ran under autocast",
    ),
    Row(
        "penalty_scaled",
        "backward",
        lambda event: event.loss.penalty is not None,
        "the gradients in it are {last.loss.penalty:g} times as large",
    ),
    Row(
        "nan_hidden",
        "hide",
        lambda event: bool(event.scalar),
        "{count} losses whose NaN would be 0, and which the scaler cannot see",
    ),
    Row(
        "no_16_bit_kernel",
        "gpu_refuses",
        lambda event: True,
        "{last.operation} got 16 bits {count} times: a CPU's autocast computes it in "
        "float32, CUDA's does not",
    ),
)


@rule
def _rows(record: Record) -> Found:
    for row in _ROWS if record.is_amp else ():
        wrong = [event for event in record.of(row.kind) if row.is_wrong(event)]
        if wrong:
            share, last = share_of(record, wrong), wrong[-1]
            effect = row.effect.format(count=len(wrong), share=share, last=last)
            yield found(row.key, wrong, effect, row.level)


# Scaling, stepping, updating.


@rule
def _scalers(record: Record) -> Found:
    """One scaler lasts for the whole training."""
    steps = record.of("step", scaled=True)
    skipped = record.of("step", scaled=True, skipped=True, disturbed=False)
    made = Counter(scaler.where for scaler in record.scalers if scaler.used)
    for line, times in made.items():
        if times > max(2, len(steps) / 2):
            many = count_of(skipped, steps, "step")
            effect = f"{times} scalers: each begins at init_scale, and {many} skipped"
            level = FAULT if len(skipped) > len(steps) / 2 else SUSPICION
            yield found("scaler_made_anew", [line], effect, level)


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
            many = f"{share_of(record, backwards)} {effect}"
            yield found("unscaled_loss", [line], many, holds=not is_part)


@rule
def _step_without_scaler(record: Record) -> Found:
    steps = record.of("step", scaled=False, again=False)
    calm = [step for step in steps if not step.disturbed]
    scaled = [step for step in calm if step.factor > SCALED]
    blind = [step for step in steps if step.overflows]
    # Else code of the user's has divided or replaced some, which it is to leave out.
    finite = [step for step in calm if math.isfinite(step.norm)]
    holds = not any(math.isnan(step.factor) for step in finite)
    if scaled:
        times = number(scaled[-1].factor)
        many = share_of(record, scaled)
        effect = f"{many} got gradients {times} times as large as they should be"
        yield found("step_without_scaler", scaled, effect, holds=holds)
    elif blind:
        effect = f"{len(blind)} forced overflows were stepped with"
        yield found("step_without_scaler", blind, effect, holds=holds)


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
        # Without a division by the scaler, that of the training is the only one.
        if step.scale > SCALED and step.divided
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
        scaled = [clip for clip in record.of("clip", of=of) if clip.factor > SCALED]
        same = _same_at_two_scales(scaled)
        bites = [clip for clip in scaled if clip.limit < clip.norm]
        wrong = [
            clip
            for clip in bites
            if clip.limit < _LIMIT * clip.factor or (clip.where, clip.limit) in same
        ]
        if wrong:
            last = wrong[-1]
            effect = (
                f"at scale {number(last.factor)} the limit {last.limit:g} clips true "
                f"gradients at {last.limit / last.factor:.3g}, whose norm was "
                f"{last.norm / last.factor:.3g}"
            )
            yield found(key, wrong, effect)


def _same_at_two_scales(clips: list[Event]) -> set[object]:
    """The lines and limits of clips that are the same number at two scales."""
    factors: dict[object, list[float]] = {}
    for clip in clips:
        factors.setdefault((clip.where, clip.limit), []).append(clip.factor)
    return {key for key, at in factors.items() if max(at) > _APART * min(at)}


# Schedules: what counts is the rate of each group over the steps of an optimizer.


@rule
def _schedules(record: Record) -> Found:
    for optimizer in range(record.optimizers):
        windows = [w for w in record.complete if w.optimizer == optimizer]
        own = [s for s in record.schedules if s.optimizer == optimizer]
        if len(windows) < 3 or _is_range_test(windows) or any(s.ours for s in own):
            continue
        moves = [move for move in record.of("move") if move.schedule in own]
        if moves:
            yield from _moves(record, own, windows, moves)
        elif own and record.is_amp and (record.determined or record.epochs):
            waits = [schedule for schedule in own if not schedule.wrapped]
            if waits and not any(_has_moved(*pair) for pair in pairwise(windows)):
                kinds = " and ".join(schedule.kind for schedule in waits)
                ends = f"{len(windows)} steps and {record.epochs} epochs"
                effect = f"{kinds} did not move in {ends}"
                at = [schedule.where for schedule in waits]
                yield found("schedule_never", at, effect, SUSPICION)


def _has_moved(window: StepWindow, after: StepWindow) -> bool:
    """Whether a rate is another one at the step of the next window."""
    return bool(window.steps[0].rates != after.steps[0].rates)


def _is_range_test(windows: list[StepWindow]) -> bool:
    """Whether the rate grows by one factor, as where a good one is looked for."""
    rates = [float((window.steps[0].rates or [0])[0] or 0) for window in windows]
    pairs = pairwise(rates)
    ratios = {round(after / rate, 3) for rate, after in pairs if rate}
    return len(ratios - {1.0}) == 1 and max(ratios) > 1


def _moves(
    record: Record,
    own: list[Schedule],
    windows: list[StepWindow],
    moves: list[Event],
) -> Found:
    skipped = [window for window in windows if window.skipped]
    steps = len(windows)
    if record.epochs >= _BY_STEPS * steps:  # an epoch is one step
        return
    moving: list[StepWindow] = []
    for schedule in own:
        those = [w for w in windows if w.movers_of(schedule)]
        if not _moves_by_steps(windows, those):
            continue
        moving += those
        at = [move for move in moves if move.schedule is schedule]
        effect = f"the rate moved {len(at)} times in {steps} steps"
        twice = [window for window in those if len(window.movers_of(schedule)) > 1]
        if len(twice) > steps / 2:
            effect += f": the schedule ends at {steps / len(at):.0%} of the training"
            yield found("schedule_twice", at, effect, SUSPICION)
        elif len(at) > 1.5 * steps and not schedule.wrapped:
            yield found("schedule_per_batch", at, effect, SUSPICION)
    wrong = [window for window in skipped if window in moving]
    if wrong:
        effect = f"{count_of(wrong, skipped, 'skipped step')} moved the schedule"
        if own[0].by_hand:
            files = (event.where.file for event in record.events if event.where)
            lines = lines_that_set_rates(dict.fromkeys(files))
            yield found("schedule_on_skipped", lines, effect, SUSPICION)
        else:
            yield found("schedule_on_skipped", moves, effect)


def _moves_by_steps(windows: list[StepWindow], moving: list[StepWindow]) -> bool:
    """Whether a schedule moves in most steps, as long as it moves."""
    if len(moving) < 3:
        return False
    span = windows[windows.index(moving[0]) : windows.index(moving[-1]) + 1]
    applied = [window for window in span if not window.skipped]
    return len(moving) >= _BY_STEPS * len(applied)


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
        if any(window.rewritten for window in lost):  # from buffers of its own perhaps
            level = SUSPICION
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
            yield found("loss_divided_twice", last.backwards, effect, SUSPICION)
    elif math.isclose(divisor, 1, rel_tol=1e-3) and not math.isclose(
        size * by_hand, 1, rel_tol=0.01
    ):
        effect = (
            f"a step has {size} times the mean gradient of its {size} micro-batches"
        )
        yield found("loss_not_divided", last.backwards, effect, SUSPICION)


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
def _weights_in_16_bits(record: Record) -> Found:
    for dtype, least in _UPDATES.items():
        # Weights in bfloat16 alone are a choice, which saves memory.
        if dtype in record.weights and (record.is_amp or dtype == "float16"):
            steps = record.of("step", skipped=False)
            lost = median([step.lost for step in steps] or [0.0])
            effect = (
                f"weights are in {dtype}: an update of less than {least} of one is lost"
            )
            if lost > _LOST:
                effect += (
                    f"; a step left {lost:.0%} of those with a gradient as they were"
                )
            lines = record.of("cast", dtype=dtype) or [
                each for each in steps if each.where
            ]
            level = FAULT if lost > _LOST else SUSPICION
            yield found("half_weights", lines[:1], effect, level)


@rule
def _autocast_of_nothing(record: Record) -> Found:
    is_float32 = record.forwards[False] and not record.forwards[True]
    if record.is_amp and is_float32 and _UPDATES.keys().isdisjoint(record.weights):
        count = record.forwards[False]
        effect = f"0 of {count} forwards of modules with weights ran under it"
        lines = record.regions or record.of("autocast_off")
        yield found("autocast_covers_nothing", lines, effect, SUSPICION)


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
        many = f"{len(losses)} backwards, 0 scaled"
        effect = f"{many}: gradients of 16-bit products below 6e-8 are 0"
        scalers = [scaler for scaler in record.scalers if not scaler.ours]
        if any(not scaler.enabled for scaler in scalers):
            effect += "; the GradScaler is switched off"
        lines = [scaler.where for scaler in scalers] or regions
        yield found("no_loss_scale", lines, effect, SUSPICION)


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
        off = [scaler.where for scaler in record.scalers if not scaler.enabled]
        effect = "a run with AMP cannot go on from it: it has 0 of 5 values of a state"
        yield found("empty_scaler_state", off, effect, SUSPICION)
