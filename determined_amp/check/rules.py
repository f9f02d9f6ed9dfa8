"""Rules about known mistakes, which also find their lines.

Each rule reads a `Record`, or two of them for a resume, and yields what it has seen. It
is listed by name in the row of its finding in `findings.json`, and `judge.py` calls it.
`judge.py` also asks `cause_of_error` about the error that ended the training. Rules
about what holds for every training are in `invariants.py`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest
from statistics import median
from typing import Any

from determined_amp.check.advice import FAR
from determined_amp.check.finding import ROWS, Found, Seen, Where
from determined_amp.check.record import Event, Record, Scaler, StepWindow
from determined_amp.check.step_gradients import SCALED
from determined_amp.experiment.failures import name_in_16_bits

# A schedule that moves in this share of the applied steps or more may move by steps.
_BY_STEPS = 0.75

# A limit below this share of the scale was not multiplied by the scale. Neither was one
# that is the same number at scales that differ by more than the factor `_APART`.
_LIMIT, _APART = 0.01, 1.5

# In float16, a loss that is multiplied by this or more is scaled by hand.
_BY_HAND = 64.0

# Lost updates are a fault if more than this share of the 16-bit weights has them.
_LOST = 0.1

# The smallest update that changes a weight of this dtype, as a share of the weight.
_UPDATES = {"float16": "1/2048", "bfloat16": "1/256"}


# Scaling, unscaling, stepping, clipping.


def makes_scalers_anew(record: Record) -> Found:
    """One optimizer gets several scalers that the same line made."""
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
    """Each loss is multiplied by one number, and nothing divides the gradients."""
    losses = [backward.loss for backward in record.of("backward")]
    factors = {loss.factor for loss in losses}
    steps = _steps_without_scaler(record)
    is_divided = any(not _is_near(step.by_hand, 1) for step in steps)
    is_fp16 = any(region.dtype == "float16" for region in record.regions)
    is_scaled = len(factors) == 1 and min(factors) >= _BY_HAND
    if is_fp16 and is_scaled and steps and not (is_divided or record.scales_the_loss):
        yield Seen(record.of("backward"), factor=min(factors))


def reads_scaled_losses(record: Record) -> Found:
    """A scaled loss becomes a Python number."""
    reads = record.of("read")
    yield Seen(reads, part=reads)


def unscales_before_the_last_backward(record: Record) -> Found:
    """A scaler unscales between two backwards of a window."""
    early = [unscale for window in record.windows for unscale in window.unscaled_early]
    yield Seen(early)


def steps_with_scaled_gradients(record: Record) -> Found:
    """An optimizer steps without a scaler, with scaled gradients."""
    steps = _steps_without_scaler(record)
    scaled = [step for step in steps if not step.disturbed and step.factor > SCALED]
    # The advice is to step by a scaler, which cannot step in a backward.
    in_backward = any(step.in_backward for step in scaled)
    calm = [step for step in steps if not step.disturbed]
    holds = _are_as_computed(steps) and not in_backward
    yield Seen(scaled, of=calm, holds=holds)


def steps_with_an_overflow(record: Record) -> Found:
    """An optimizer steps without a scaler and would use a forced overflow."""
    steps = _steps_without_scaler(record)
    blind = [step for step in steps if step.overflows]
    yield Seen(blind, holds=_are_as_computed(steps))


def _steps_without_scaler(record: Record) -> list[Event]:
    """The steps that no enabled scaler makes."""
    return record.of("step", scaled=False, again=False)


def _are_as_computed(steps: list[Event]) -> bool:
    """Whether no code of the user's divided or replaced the gradients of these steps.

    Otherwise the step of a scaler is not all that the user has to write.
    """
    calm = [step for step in steps if not step.disturbed and math.isfinite(step.norm)]
    return not any(math.isnan(step.factor) for step in calm)


def scales_losses_in_a_step(record: Record) -> Found:
    """A scaler gets a closure, whose backward runs inside the step.

    The scaler divides gradients before the step, which then makes new ones.
    """
    inside = record.of("backward", in_step=True)
    if record.of("closure"):  # otherwise, the user's code may divide
        yield Seen([backward for backward in inside if backward.loss.scale])


def steps_twice(record: Record) -> Found:
    """A window of a scaler has a second step with the same gradients."""
    windows = [window for window in record.unforced_windows if window.is_scaled]
    twice = [window for window in windows if window.steps[-1].again]
    if twice:
        steps = twice[-1].steps
        yield Seen(steps, part=twice, of=record.stepped_windows, steps=steps)


def clips_scaled_norms(record: Record) -> Found:
    """Gradients are clipped by norm while they are scaled."""
    return _clips_scaled(record, record.of("clip", of="max_norm"))


def clips_scaled_values(record: Record) -> Found:
    """Gradients are clipped by value while they are scaled."""
    return _clips_scaled(record, record.of("clip", of="clip_value"))


def _clips_scaled(record: Record, clips: list[Event]) -> Found:
    """A limit takes effect on scaled gradients, and was not scaled itself."""
    scaled = [clip for clip in clips if clip.factor > SCALED]
    bites = [clip for clip in scaled if clip.limit < clip.norm]
    small = [clip for clip in bites if clip.limit < _LIMIT * clip.factor]
    wrong = small or [clip for clip in bites if _is_fixed_limit(clip, scaled)]
    if wrong:
        last = wrong[-1]
        true_limit, true_norm = last.limit / last.factor, last.norm / last.factor
        # A limit that moves, or is not small, may come from the scale or from norms.
        is_one_number = bool(small) and len({clip.limit for clip in scaled}) == 1
        is_elsewhere = any(_needs_other_lines(record, clip) for clip in wrong)
        holds = is_one_number and not is_elsewhere
        yield Seen(wrong, holds=holds, true_limit=true_limit, true_norm=true_norm)


def _needs_other_lines(record: Record, clip: Event) -> bool:
    """Whether the lines to write are wrong in place of a clip.

    They are if another backward follows the clip, or if a line far from it unscales
    before the step. If that line is near, the advice moves it.
    """
    kinds = ("unscale", "step", "backward")
    later = [each for each in record.events[clip.number :] if each.kind in kinds][:2]
    if later and later[0].kind == "backward":
        return True
    # `step` may also unscale, from its own line.
    places = {each.where for each in later}
    if [each.kind for each in later] != ["unscale", "step"] or len(places) < 2:
        return False
    near = clip.where.code_around(FAR) if clip.where else {}
    return not any(".unscale_(" in code for code in near.values())


def _is_fixed_limit(clip: Event, clips: list[Event]) -> bool:
    """Whether the limit is the same number at scales that differ."""
    known = clip.where, clip.limit
    factors = [each.factor for each in clips if (each.where, each.limit) == known]
    return bool(max(factors) > _APART * min(factors))


# Schedules.


def moves_on_skipped_steps(record: Record) -> Found:
    """A schedule that counts steps moves on steps that were skipped."""
    for schedule in record.schedules:
        moves = record.of("move", schedule=schedule, place=False)
        windows = [
            w for w in record.stepped_windows if w.optimizer == schedule.optimizer
        ]
        moved = [window for window in windows if schedule in window.moved]
        skipped = [window for window in windows if window.skipped]
        wrong = [window for window in moved if window.skipped]
        is_left = schedule.ours or _is_range_test(windows)
        is_reversed = len(wrong) > 1 and wrong == moved == skipped
        is_by_steps = moved and _is_by_steps(record, moves, windows, moved)
        if wrong and not is_left and (is_reversed or is_by_steps):
            yield Seen(moves, part=wrong, of=skipped)


def _is_range_test(windows: list[StepWindow]) -> bool:
    """Whether the rate only grows, by a single factor, as in a range test."""
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
    """Whether a schedule moves once in most steps, from its first move to its last.

    Other schedules count batches or epochs. An epoch may have a single step.
    """
    span = range(moved[0].place, moved[-1].place + 1)
    applied = [w for w in windows if w.place in span and not w.skipped]
    is_often = len(moved) > 2 and len(moved) >= _BY_STEPS * len(applied)
    is_by_batch = len(moves) > 1.5 * len(moved)
    is_by_epoch = record.epochs >= _BY_STEPS * len(windows)
    return is_often and not (is_by_batch or is_by_epoch)


# Windows of several batches.


def zeroes_in_a_window(record: Record) -> Found:
    """Gradients of a window are zeroed before its step."""
    lost = [
        window
        for window in record.unforced_windows
        if window.lost
        and (window.is_empty or _is_accumulated(record, window))
        # A closure may zero for each of its backwards.
        and not any(backward.in_step for backward in window.backwards)
    ]
    if _are_nearly_all(record, lost):
        last = lost[-1]
        is_known = bool(record.batches) or last.is_empty
        # The training may sum its gradients in buffers.
        is_rewritten = any(window.rewritten for window in lost)
        yield Seen(
            [line for window in lost for line in window.zeroed or window.used],
            lost=last.lost,
            size=last.backwards,
            proven=is_known and not is_rewritten,
        )


def _is_near(number: float, other: float) -> bool:
    """Whether two numbers differ by 1 % at most."""
    return math.isclose(number, other, rel_tol=0.01)


def _are_nearly_all(record: Record, windows: list[StepWindow]) -> bool:
    """Whether these are all windows without a forced overflow, or all but one."""
    return 0 < len(record.unforced_windows) - 1 <= len(windows)


def _is_accumulated(record: Record, window: StepWindow) -> bool:
    """Whether a window has several batches, with one backward each, all from one line.

    Without a `DataLoader`, each backward may belong to another batch.
    """
    many = len(window.backwards)
    batches = {backward.batch for backward in window.backwards}
    lines = {backward.where for backward in window.backwards}
    return many > 1 and len(lines) == 1 and (many == len(batches) or not record.batches)


# Precisions.


def runs_backward_under_autocast(record: Record) -> Found:
    """A backward runs under autocast."""
    yield Seen(record.of("backward", autocast=True), proven=False)


def gets_16_bits_that_cuda_refuses(record: Record) -> Found:
    """An operation gets 16 bits that has no such kernel on CUDA."""
    yield Seen(record.of("gpu_refuses"))


def holds_16_bit_weights(record: Record) -> Found:
    """An optimizer holds weights in 16 bits."""
    for dtype, least in _UPDATES.items():
        # bfloat16 weights without AMP are a choice that saves memory.
        if dtype in record.weight_dtypes and (record.is_amp or dtype == "float16"):
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
    """No module with weights runs under autocast."""
    is_float32 = record.forwards[False] and not record.forwards[True]
    is_cast = record.of("cast") or not _UPDATES.keys().isdisjoint(record.weight_dtypes)
    if is_float32 and not is_cast:
        at = record.regions or record.of("autocast_off")
        yield Seen(at or [None], forwards=record.forwards[False])


def begins_at_16_bit_losses(record: Record) -> Found:
    """Losses are in float16."""
    backwards = record.of("backward")
    losses = [backward for backward in backwards if not backward.loss.has_gradient]
    at = [backward for backward in losses if backward.loss.dtype == "float16"]
    bad = [backward for backward in at if not backward.finite]
    yield Seen(at, of=backwards, proven=len(bad) > len(at) / 2)


def scales_bfloat16(record: Record) -> Found:
    """A scaler scales losses, and all regions are in bfloat16."""
    steps = record.of("step", scaled=True)
    dtypes = {region.dtype for region in record.regions}
    if steps and record.scales_the_loss and dtypes == {"bfloat16"}:
        used = [scaler for scaler in record.scalers if scaler.used]
        at = [scaler.where for scaler in used if not scaler.ours]
        yield Seen(at, steps=steps, of=record.of("step"))


def scales_no_loss(record: Record) -> Found:
    """A region is in float16, and no loss is scaled."""
    losses = [backward.loss for backward in record.of("backward")]
    by_hand = any(loss.scale or loss.factor > 8 for loss in losses)
    regions = [region for region in record.regions if region.dtype == "float16"]
    if losses and regions and not (by_hand or record.scales_the_loss):
        unused = [scaler.where for scaler in record.scalers if not scaler.ours]
        yield Seen(unused or regions, backwards=losses, proven=False)


# Checkpoints.


def saves_no_scale(record: Record) -> Found:
    """A loop of the user's own saves the optimizer, but not the scale."""
    saves = [] if record.determined else record.of("save", optimizer=True)
    updates = record.of("update") if record.scales_the_loss else []
    if updates and not record.of("save", scale=True):
        yield Seen(saves, scale=updates[-1].after)


def saves_too_few_scales(record: Record) -> Found:
    """A loop of the user's own saves the states of some of its scalers only.

    Saves without a step between them belong together.
    """
    if record.determined:
        return
    events = [each for each in record.events if each.kind in ("step", "save")]
    used, saves = set[Scaler](), list[Event]()
    for event, following in zip_longest(events, events[1:]):
        if event.kind == "step":
            used |= {event.scaler} if event.scaler else set()
            continue
        saves += [event] * event.optimizer
        if following is None or following.kind == "step":
            saved = sum(save.scalers for save in saves)
            if 0 < saved < len(used):
                yield Seen(saves, saved=saved, used=len(used), holds=False)
            used, saves = set(), []


def loads_no_scale(record: Record) -> Found:
    """A loop of the user's own resumes its optimizer, but not the scale."""
    loads = [load for load in record.of("load") if load.scalers]
    restores = record.of("restore")
    is_left = record.determined or any(each.scaler for each in restores)
    if loads and record.scales_the_loss and not is_left:
        yield Seen(restores)


# A resume. Each rule compares the run that saved the checkpoint with the resumed one.


def resume_raises(before: Record, after: Record) -> Found:
    """The resume raises an error before its first batch."""
    if after.error and not after.batches:
        yield Seen([after.raised], error=after.first_line_of_error)


def scale_is_lost(before: Record, after: Record) -> Found:
    """The resume does not restore the scale of a scaler."""
    for scaler, was, now in _changed(before.scalers, after.scalers):
        if scaler.used:
            yield Seen([scaler.where], was=was, now=now)


def schedule_is_lost(before: Record, after: Record) -> Found:
    """The resume does not restore the place of a schedule."""
    for schedule, was, now in _changed(before.schedules, after.schedules):
        if not schedule.ours:
            yield Seen([schedule.where], kind=schedule.kind, was=was, now=now)


def _changed(
    before: Sequence[Any], after: Sequence[Any]
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield what a resume does not restore, with its state before and after."""
    for one, again in zip(before, after, strict=False):
        was, now = one.states.get("saved"), again.states.get("resumed")
        if None not in (was, now) and was != now:
            yield one, was, now


def rates_are_lost(before: Record, after: Record) -> Found:
    """The resume trains with other learning rates than the run went on with."""
    for optimizer in range(before.optimizers):
        went_on = before.of("step", optimizer=optimizer, after_save=True)
        resumed = after.of("step", optimizer=optimizer)
        for one, again in zip(went_on, resumed, strict=False):
            if one.skipped or again.skipped:
                break
            if one.rates != again.rates:
                yield Seen([None], was=one.rate, now=again.rate)
                break


# Errors.

# https://pytorch.org/docs/stable/amp.html, "CUDA Ops that promote to the widest input
# type".
_CAST_ON_CUDA = re.compile(r": (scatter|dot|grid_sampler)\b")


def cause_of_error(record: Record) -> tuple[str, Seen]:
    """Find the mistake behind the error that ended the training.

    Returns:
        The key of its finding, and its lines.
    """
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
    # CUDA's autocast casts the arguments of some operations, and the CPU's does not. So
    # an error of theirs on a CPU proves nothing about CUDA.
    is_refused = error.startswith("InvalidExperimentException")
    is_known = key != "raised" and not _CAST_ON_CUDA.search(error)
    return key, Seen([*at, record.raised], proven=is_refused or is_known)


def _cause(record: Record, key: str) -> str:
    """Which mistake raised an error of `GradScaler` that several mistakes can raise."""
    losses = record.of("backward")
    in_closure = any(each.in_step and each.loss.scale for each in losses)
    if in_closure or record.of("closure"):  # it can raise several errors
        return "closure"
    if key == "no_gradients":
        return _cause_of_no_gradients(record, losses)
    if key == "unscaled_twice":
        return _cause_of_second_unscale(record)
    if key == "update_missing" and losses and _recipe_events(record)[-1].kind == "step":
        return "step_twice"
    if key == "no_loss_scale" and record.scales_the_loss:
        return "scales_mixed"  # another scaler scaled the loss
    return (
        key if record.scales_the_loss or key != "update_in_window" else "no_loss_scale"
    )


def _recipe_events(record: Record) -> list[Event]:
    """The backwards, unscales, steps and updates, in their order."""
    kinds = ("backward", "unscale", "step", "update")
    return [event for event in record.events if event.kind in kinds]


def _cause_of_second_unscale(record: Record) -> str:
    """Which mistake made a scaler unscale twice before an update."""
    updates = record.of("update")
    last = updates[-1].number if updates else -1
    since = [each for each in _recipe_events(record) if each.number > last]
    if updates and (not since or since[0].kind != "backward"):
        return "update_in_window"
    has_stepped = any(each.kind == "step" for each in since)
    is_one_batch = len({each.batch for each in since}) < 2
    is_twice = is_one_batch and not has_stepped
    return "unscaled_twice" if is_twice else "update_missing"


def _cause_of_no_gradients(record: Record, losses: list[Event]) -> str:
    """Which mistake left a scaler's step without gradients."""
    trained = any(backward.reached for backward in losses)
    if losses and not losses[-1].loss.trains:
        return "constant_loss" if trained else "loss_cut_off"
    if record.windows and record.windows[-1].is_empty:
        return "zero_grad_in_window"
    return "no_gradients" if trained else "other_parameters"
