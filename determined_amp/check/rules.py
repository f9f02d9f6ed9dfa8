"""Mistakes that are known: each rule names their lines.

A rule looks at a record and yields what it has seen. Its name stands in the row of
`findings.json` whose finding that is.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from determined_amp.check.advice import FAR
from determined_amp.check.finding import ROWS, Found, Seen, Where
from determined_amp.check.record import Event, Record, StepWindow
from determined_amp.check.step_gradients import SCALED
from determined_amp.experiment.failures import name_in_16_bits

# A schedule that moves in this share of the steps moves by steps, not by epochs.
_BY_STEPS = 0.75

# A limit that is this share of the scale was multiplied by it, if it is not the same
# number at scales that differ by the factor.
_LIMIT, _APART = 0.01, 4.0

# A loss that is multiplied by this in float16 has a scale of its own.
_BY_HAND = 64.0

# In this share of 16-bit weights a lost update is no exception.
_LOST = 0.1

# What an update must be at least, as a share of a weight in this dtype.
_UPDATES = {"float16": "1/2048", "bfloat16": "1/256"}


# Scaling, unscaling, stepping, clipping.


def makes_scalers_anew(record: Record) -> Found:
    """One scaler lasts for the whole training of an optimizer."""
    of_lines: dict[tuple[int, Where | None], list[Event]] = defaultdict(list)
    for step in record.of("step", scaled=True):
        if not step.scaler.ours:
            of_lines[step.optimizer, step.scaler.where].append(step)
    for (_, line), steps in of_lines.items():
        scalers = len({step.scaler for step in steps})
        skipped = [step for step in steps if step.skipped and not step.disturbed]
        if scalers > 1:
            is_often = 2 * min(scalers, len(skipped)) > len(steps)
            yield Seen([line], scalers=scalers, part=skipped, of=steps, proven=is_often)


def divides_no_scale_of_its_own(record: Record) -> Found:
    """The loss is multiplied by a number in each batch, and no gradient is divided."""
    losses = [backward.loss for backward in record.of("backward")]
    factors = {loss.factor for loss in losses}
    steps = record.of("step", scaled=False, again=False)
    is_divided = any(not _is_near(step.by_hand, 1) for step in steps)
    is_fp16 = any(region.dtype == "float16" for region in record.regions)
    is_scaled = len(factors) == 1 and min(factors) >= _BY_HAND
    if is_fp16 and is_scaled and steps and not (is_divided or record.scales):
        yield Seen(record.of("backward"), factor=min(factors))


def reads_scaled_losses(record: Record) -> Found:
    reads = record.of("read")
    yield Seen(reads, part=reads)


def unscales_before_the_last_backward(record: Record) -> Found:
    early = [unscale for window in record.windows for unscale in window.unscaled_early]
    yield Seen(early)


def steps_with_scaled_gradients(record: Record) -> Found:
    steps = _steps_without_scaler(record)
    scaled = [step for step in steps if not step.disturbed and step.factor > SCALED]
    # A scaler cannot step in a backward.
    in_backward = any(step.in_backward for step in scaled)
    calm = [step for step in steps if not step.disturbed]
    holds = _are_as_computed(steps) and not in_backward
    yield Seen(scaled, of=calm, holds=holds)


def steps_with_an_overflow(record: Record) -> Found:
    steps = _steps_without_scaler(record)
    blind = [step for step in steps if step.overflows]
    yield Seen(blind, holds=_are_as_computed(steps))


def _steps_without_scaler(record: Record) -> list[Event]:
    return record.of("step", scaled=False, again=False)


def _are_as_computed(steps: list[Event]) -> bool:
    """Whether no code of the user's has divided or replaced gradients.

    Else the step of the scaler is not all that it is to write.
    """
    calm = [step for step in steps if not step.disturbed and math.isfinite(step.norm)]
    return not any(math.isnan(step.factor) for step in calm)


def scales_losses_in_a_step(record: Record) -> Found:
    """A closure: the scaler divides before the step, which makes new gradients."""
    inside = record.of("backward", in_step=True)
    if record.of("closure"):  # a scaler was given it; else its own code may divide
        yield Seen([backward for backward in inside if backward.loss.scale])


def steps_twice(record: Record) -> Found:
    windows = [window for window in record.undisturbed if window.is_scaled]
    twice = [window for window in windows if window.steps[-1].again]
    if twice:
        steps = twice[-1].steps
        yield Seen(steps, part=twice, of=record.complete, steps=steps)


def divides_by_hand_too(record: Record) -> Found:
    made = record.of("step", scaled=True, skipped=False)
    # Without a division by the scaler, that of the training is the only one.
    steps = [step for step in made if step.scale > SCALED and step.divided]
    twice = [step for step in steps if _is_near(step.by_hand * step.scale, 1)]
    if len(twice) > len(steps) / 2:
        yield Seen(twice, of=steps)


def clips_scaled_norms(record: Record) -> Found:
    return _clips_scaled(record, record.of("clip", of="max_norm"))


def clips_scaled_values(record: Record) -> Found:
    return _clips_scaled(record, record.of("clip", of="clip_value"))


def _clips_scaled(record: Record, clips: list[Event]) -> Found:
    scaled = [clip for clip in clips if clip.factor > SCALED]
    bites = [clip for clip in scaled if clip.limit < clip.norm]
    small = [clip for clip in bites if clip.limit < _LIMIT * clip.factor]
    wrong = small or [clip for clip in bites if _stays(clip, scaled)]
    if wrong:
        last = wrong[-1]
        true_limit, true_norm = last.limit / last.factor, last.norm / last.factor
        holds = not any(_is_elsewhere(record, clip) for clip in wrong)
        yield Seen(wrong, holds=holds, true_limit=true_limit, true_norm=true_norm)


def _is_elsewhere(record: Record, clip: Event) -> bool:
    """Whether the lines to write would not hold in place of a clip: a line far behind
    it unscales before the one that steps, or another backward comes.

    A line that is near is in the order, which moves it.
    """
    kinds = ("unscale", "step", "backward")
    later = [each for each in record.events[clip.number :] if each.kind in kinds][:2]
    if later and later[0].kind == "backward":
        return True
    # `step` unscales, too, from its own line.
    places = {each.where for each in later}
    if [each.kind for each in later] != ["unscale", "step"] or len(places) < 2:
        return False
    near = clip.where.code_around(FAR) if clip.where else {}
    return not any(".unscale_(" in code for code in near.values())


def _stays(clip: Event, clips: list[Event]) -> bool:
    """Whether a limit is the same number at scales that differ."""
    known = clip.where, clip.limit
    factors = [each.factor for each in clips if (each.where, each.limit) == known]
    return bool(max(factors) > _APART * min(factors))


# Schedules.


def moves_on_skipped_steps(record: Record) -> Found:
    for schedule in record.schedules:
        moves = record.of("move", schedule=schedule, place=False)
        windows = [w for w in record.complete if w.optimizer == schedule.optimizer]
        moved = [window for window in windows if schedule in window.moved]
        skipped = [window for window in windows if window.skipped]
        wrong = [window for window in moved if window.skipped]
        is_left = schedule.ours or _is_range_test(windows)
        is_reversed = len(wrong) > 1 and wrong == moved == skipped
        is_by_steps = moved and _is_by_steps(record, moves, windows, moved)
        if wrong and not is_left and (is_reversed or is_by_steps):
            yield Seen(moves, part=wrong, of=skipped)


def _is_range_test(windows: list[StepWindow]) -> bool:
    """Whether the rate grows by one factor, as where a good one is looked for."""
    rates = [window.steps[0].rate for window in windows]
    pairs = pairwise(rates)
    ratios = {round(after / rate, 3) for rate, after in pairs if rate}
    return len(ratios - {1.0}) == 1 and max(ratios) > 1


def _is_by_steps(
    record: Record,
    moves: list[Event],
    windows: list[StepWindow],
    moved: list[StepWindow],
) -> bool:
    """Whether a schedule moves once in most steps, as long as it moves.

    Else it is counted in batches, or in epochs, which may have one step each.
    """
    span = range(moved[0].place, moved[-1].place + 1)
    applied = [w for w in windows if w.place in span and not w.skipped]
    is_often = len(moved) > 2 and len(moved) >= _BY_STEPS * len(applied)
    is_by_batch = len(moves) > 1.5 * len(moved)
    is_by_epoch = record.epochs >= _BY_STEPS * len(windows)
    return is_often and not (is_by_batch or is_by_epoch)


# Windows of several batches.


def zeroes_in_a_window(record: Record) -> Found:
    lost = [
        window
        for window in record.undisturbed
        if window.lost
        and (window.is_empty or _is_accumulated(record, window))
        # A closure zeroes for each of its backwards.
        and not any(backward.in_step for backward in window.backwards)
    ]
    if _are_nearly_all(record, lost):
        last = lost[-1]
        is_known = bool(record.batches) or last.is_empty
        # Its gradients come from buffers perhaps.
        is_rewritten = any(window.rewritten for window in lost)
        yield Seen(
            [line for window in lost for line in window.zeroed or window.used],
            lost=last.lost,
            size=last.backwards,
            proven=is_known and not is_rewritten,
        )


def _is_near(number: float, other: float) -> bool:
    return math.isclose(number, other, rel_tol=0.01)


def _are_nearly_all(record: Record, windows: list[StepWindow]) -> bool:
    return 0 < len(record.undisturbed) - 1 <= len(windows)


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


def runs_backward_under_autocast(record: Record) -> Found:
    yield Seen(record.of("backward", autocast=True), proven=False)


def adds_scaled_gradients_to_the_loss(record: Record) -> Found:
    computed = [*record.of("backward"), *record.of("grad")]
    penalized = [each for each in computed if each.loss.penalty is not None]
    yield Seen(penalized, proven=False)


def gets_16_bits_that_cuda_refuses(record: Record) -> Found:
    yield Seen(record.of("gpu_refuses"))


def holds_16_bit_weights(record: Record) -> Found:
    for dtype, least in _UPDATES.items():
        # Weights in bfloat16 alone are a choice, which saves memory.
        if dtype in record.weights and (record.is_amp or dtype == "float16"):
            steps = record.of("step", skipped=False)
            lost = median([step.lost for step in steps] or [0.0])
            at = record.of("cast", dtype=dtype) or [s for s in steps if s.where]
            yield Seen(
                at[:1] or [None],
                dtype=dtype,
                least=least,
                lost=lost,
                proven=lost > _LOST,
            )


def runs_no_module_under_autocast(record: Record) -> Found:
    is_float32 = record.forwards[False] and not record.forwards[True]
    is_cast = record.of("cast") or not _UPDATES.keys().isdisjoint(record.weights)
    if is_float32 and not is_cast:
        at = record.regions or record.of("autocast_off")
        yield Seen(at or [None], forwards=record.forwards[False])


def begins_at_16_bit_losses(record: Record) -> Found:
    backwards = record.of("backward")
    losses = [backward for backward in backwards if not backward.loss.has_gradient]
    at = [backward for backward in losses if backward.loss.dtype == "float16"]
    bad = [backward for backward in at if not backward.finite]
    yield Seen(at, of=backwards, proven=len(bad) > len(at) / 2)


def scales_bfloat16(record: Record) -> Found:
    steps = record.of("step", scaled=True)
    dtypes = {region.dtype for region in record.regions}
    if steps and record.scales and dtypes == {"bfloat16"}:
        used = [scaler for scaler in record.scalers if scaler.used]
        at = [scaler.where for scaler in used if not scaler.ours]
        yield Seen(at, steps=steps, of=record.of("step"))


def scales_no_loss(record: Record) -> Found:
    losses = [backward.loss for backward in record.of("backward")]
    by_hand = any(loss.scale or loss.factor > 8 for loss in losses)
    regions = [region for region in record.regions if region.dtype == "float16"]
    if losses and regions and not (by_hand or record.scales):
        unused = [scaler.where for scaler in record.scalers if not scaler.ours]
        yield Seen(unused or regions, backwards=losses, proven=False)


# What is saved.


def saves_no_scale(record: Record) -> Found:
    """In a loop of the user's own: the optimizer is saved, and the scaler is not."""
    saves = [] if record.determined else record.of("save", optimizer=True)
    updates = record.of("update") if record.scales else []
    if updates and not record.of("save", scale=True):
        yield Seen(saves, scale=updates[-1].after)


# What a resume has lost, by a run that saved a checkpoint, and one that began with it.


def resume_raises(before: Record, after: Record) -> Found:
    if after.error and not after.batches:
        yield Seen([after.raised], error=after.first_line_of_error)


def scale_is_lost(before: Record, after: Record) -> Found:
    for scaler, was, now in _changed(before.scalers, after.scalers):
        if scaler.used:
            yield Seen([scaler.where], was=was, now=now)


def schedule_is_lost(before: Record, after: Record) -> Found:
    for schedule, was, now in _changed(before.schedules, after.schedules):
        if not schedule.ours:
            yield Seen([schedule.where], kind=schedule.kind, was=was, now=now)


def _changed(
    before: Sequence[Any], after: Sequence[Any]
) -> Iterator[tuple[Any, Any, Any]]:
    """Scalers or schedules whose state a resume has not brought back: that before and
    after it.
    """
    for one, again in zip(before, after, strict=False):
        was, now = one.states.get("saved"), again.states.get("resumed")
        if None not in (was, now) and was != now:
            yield one, was, now


def rates_are_lost(before: Record, after: Record) -> Found:
    for optimizer in range(before.optimizers):
        went_on = before.of("step", optimizer=optimizer, after_save=True)
        resumed = after.of("step", optimizer=optimizer)
        for one, again in zip(went_on, resumed, strict=False):
            if one.skipped or again.skipped:
                break
            if one.rates != again.rates:
                yield Seen([None], was=one.rate, now=again.rate)
                break


# What is raised.

# https://pytorch.org/docs/stable/amp.html, "CUDA Ops that promote to the widest input
# type".
_CAST_ON_CUDA = re.compile(r": (scatter|dot|grid_sampler)\b")


def cause_of_error(record: Record) -> tuple[str, Seen]:
    """The key of the mistake that has raised the error of a training, and its lines."""
    error = record.error
    key = name_in_16_bits(error) or "raised"
    for known, row in ROWS.items():
        if any(words in error for words in row.get("errors", ())):
            key = _cause(record, known)
    at: list[Event] = []
    if key == "zero_grad_in_window":
        at = record.windows[-1].zeroed
    if key == "update_in_window" and "unscale_" in error:
        at = [*record.of("update")[-1:], *record.of("step")[-1:]]
    # What one device lacks another may have: CUDA's autocast casts the arguments of
    # some operations for which that of a CPU does not.
    is_refused = error.startswith("InvalidExperimentException")
    is_known = key != "raised" and not _CAST_ON_CUDA.search(error)
    return key, Seen([*at, record.raised], proven=is_refused or is_known)


def _cause(record: Record, key: str) -> str:
    """The cause of an error of GradScaler that can have several."""
    losses = record.of("backward")
    in_closure = any(each.in_step and each.loss.scale for each in losses)
    if in_closure or record.of("closure"):  # what raises depends on how it is passed
        return "closure"
    if key == "no_gradients":
        return _cause_of_no_gradients(record, losses)
    if key == "unscaled_twice":
        return _cause_of_second_unscale(record)
    if key == "update_missing" and losses and _calls(record)[-1].kind == "step":
        return "step_twice"
    if key == "no_loss_scale" and record.scales:
        return "scales_mixed"  # another scaler has scaled
    return key if record.scales or key != "update_in_window" else "no_loss_scale"


def _calls(record: Record) -> list[Event]:
    kinds = ("backward", "unscale", "step", "update")
    return [event for event in record.events if event.kind in kinds]


def _cause_of_second_unscale(record: Record) -> str:
    """Why gradients were divided before the newest update."""
    updates = record.of("update")
    last = updates[-1].number if updates else -1
    since = [each for each in _calls(record) if each.number > last]
    if updates and (not since or since[0].kind != "backward"):
        return "update_in_window"
    has_stepped = any(each.kind == "step" for each in since)
    is_one_batch = len({each.batch for each in since}) < 2
    is_twice = is_one_batch and not has_stepped
    return "unscaled_twice" if is_twice else "update_missing"


def _cause_of_no_gradients(record: Record, losses: list[Event]) -> str:
    trained = any(backward.reached for backward in losses)
    if losses and not losses[-1].loss.trains:
        return "constant_loss" if trained else "loss_cut_off"
    if record.windows and record.windows[-1].is_empty:
        return "zero_grad_in_window"
    return "no_gradients" if trained else "other_parameters"
