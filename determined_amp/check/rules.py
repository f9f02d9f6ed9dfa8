"""Rules that know a mistake and name its lines."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

from determined_amp.check.finding import CheckFinding, Where
from determined_amp.check.invariants import dependence_of
from determined_amp.check.record import Event, Record, Schedule, StepWindow
from determined_amp.check.ruling import (
    COST,
    FAULT,
    SUSPICION,
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

# Relative change of a validation metric by 16 bits that is no rounding, and one that may be some.
_CHANGED, _MAYBE_CHANGED = 0.05, 0.01

# A limit that is this share of the scale was multiplied by it.
_LIMIT = 0.01


# Scaling, stepping, updating.


@rule
def _ranks(record: Record) -> Iterator[CheckFinding]:
    """The ranks of a distributed training have scales of their own."""
    different = {tuple(scales) for scales in record.scales_of_ranks if scales}
    if len(different) > 1:
        last = sorted(scales[-1] for scales in different)
        effect = f"{len(different)} ranks have other scales, at the end {number(last[0])} and "
        lines = [scaler.where for scaler in record.scalers if scaler.used]
        yield found("scale_differs_by_rank", lines, effect + number(last[-1]))


_ERRORS = (
    ("step() has already been called since the last update()", "update_missing"),
    ("unscale_() has already been called on this optimizer", "unscaled_twice"),
    ("unscale_() is being called after step()", "unscaled_twice"),
    ("No inf checks were recorded prior to update", "update_in_window"),
    ("No inf checks were recorded for this optimizer", "no_gradients"),
    ("Attempting to unscale FP16 gradients", "half_weights"),
    ("_scale is None", "no_loss_scale"),
)

# https://pytorch.org/docs/stable/amp.html, "CUDA Ops that promote to the widest input type".
_CAST_ON_CUDA = re.compile(r"^(scatter|dot|grid_sampler)\b")


@rule
def _error(record: Record) -> Iterator[CheckFinding]:
    if record.error is None:
        return
    kind, text = record.error
    said = ": ".join([kind, *text.splitlines()[:1]])
    effect = f"the training stops in batch {record.batches}: {said}"
    level = FAULT
    key = next((_cause(record, key) for words, key in _ERRORS if words in text), None)
    if key is None:
        key = name_in_16_bits(text) or "raised"
        # What one device lacks another may have: CUDA's autocast casts the arguments of some
        # operations for which that of a CPU does not.
        elsewhere = key in ("raised", "no_16_bit_kernel") or _CAST_ON_CUDA.search(text)
        if elsewhere and kind != "InvalidExperimentException":
            level = SUSPICION
    yield found(key, [record.raised], effect, level)


def _cause(record: Record, key: str) -> str:
    """The cause of an error of GradScaler that can have several."""
    if key == "no_gradients":
        losses = record.of("backward")
        trained = any(backward.reached for backward in losses)
        if losses and losses[-1].loss.leaf:
            key = "constant_loss" if trained else "loss_cut_off"
        elif losses and not trained:
            key = "other_parameters"
    elif key == "unscaled_twice":
        since = [e.kind for e in record.events if e.kind in ("unscale", "backward", "update")]
        key = "update_missing" if since[-1:] == ["backward"] else key
        key = "unscale_in_window" if any(map(_unscaled_before, record.windows)) else key
    elif key == "update_missing":
        key = "step_twice" if record.of("update") else key
    elif key == "update_in_window":
        by_hand = [step for step in record.of("step")[-1:] if not step.scaled and step.factor > 1.5]
        key = "step_without_scaler" if by_hand else key
        key = key if any(scaler.used for scaler in record.scalers) else "no_loss_scale"
    return key


def _unscaled_before(window: StepWindow) -> list[Event]:
    """What has unscaled gradients to which scaled ones were added then."""
    last = max((each.number for each in window.used if each.loss.scale), default=-1)
    return [unscale for unscale in window.unscales if unscale.number < last]


@rule
def _unscaled_early(record: Record) -> Iterator[CheckFinding]:
    early = [unscale for window in record.windows for unscale in _unscaled_before(window)]
    if early and record.error is None:
        effect = f"after {share_of(record, early)} gradients were added that are still scaled"
        yield found("unscale_in_window", early, effect)


@rule
def _unscaled_loss(record: Record) -> Iterator[CheckFinding]:
    """A loss was not scaled, or a part of it, and the scaler divides the gradients of all."""
    divided = [w for w in record.complete if any(step.scaled for step in w.steps)]
    by_line: dict[Where | None, list[Event]] = defaultdict(list)
    for backward in {id(b): b for window in divided for b in window.used}.values():
        if backward.loss.unscaled and not backward.loss.has_gradient:
            by_line[backward.where].append(backward)
    for line, backwards in by_line.items():
        # A gradient of a scaled loss that is handed on is scaled, whatever the graph says.
        seen = dependence((each.scale, each.added) for each in backwards)
        is_part = any(backward.loss.scale for backward in backwards)
        if is_part or seen is None or seen.exponent < 0.5:
            effect = "added gradients that are divided by the scale and were never multiplied"
            yield found("unscaled_loss", [line], f"{share_of(record, backwards)} {effect}")


@rule
def _step_without_scaler(record: Record) -> Iterator[CheckFinding]:
    for optimizer in range(record.optimizers):
        steps = record.of("step", optimizer=optimizer, scaled=False, again=False)
        large = [step for step in steps if step.factor > 1.5 and math.isfinite(step.norm)]
        seen = dependence_of(record, optimizer)
        is_right = seen is not None and abs(seen.exponent) < 0.1
        blind = [step for step in steps if step.disturbed and not math.isfinite(step.norm)]
        effect = ""
        if large and not is_right:
            times = number(large[-1].factor)
            effect = f"in {count_of(len(large), len(steps), 'step')} the gradients are {times} "
            effect += "times as large as they should be"
        elif blind:
            effect = f"{len(blind)} forced overflows reached the weights"
        if effect:
            yield found("step_without_scaler", large or blind, effect)


@rule
def _step_twice(record: Record) -> Iterator[CheckFinding]:
    usual = [window.steps for window in record.complete if not window.forced]
    twice = [s for s in usual if any(x.again for x in s) and any(x.scaled for x in s)]
    if twice:
        many = count_of(len(twice), len(record.complete), "window")
        lines = [step for steps in twice for step in steps]
        yield found("step_twice", lines, f"{many} had {len(twice[-1])} steps")


@rule
def _clips(record: Record) -> Iterator[CheckFinding]:
    by_line: dict[Where | None, list[Event]] = defaultdict(list)
    for clip in record.of("clip"):
        takes_effect = clip.norm > clip.limit and clip.limit < _LIMIT * clip.factor
        if clip.factor > 1.5 and takes_effect:
            by_line[clip.where].append(clip)
    for line, clips in by_line.items():
        last = clips[-1]
        effect = (
            f"at scale {number(last.factor)} the limit {last.limit:g} clips true gradients at "
            f"{last.limit / last.factor:.3g}, whose norm was {last.norm / last.factor:.3g}"
        )
        key = "clip_scaled" if last.of == "max_norm" else "clip_value_scaled"
        yield found(key, [line], effect)


@rule
def _penalty(record: Record) -> Iterator[CheckFinding]:
    penalties = [backward for backward in record.of("backward") if backward.loss.penalty]
    if penalties:
        times = number(penalties[-1].loss.penalty)
        yield found("penalty_scaled", penalties, f"the gradients in it are {times} times as large")


# Schedules.


@rule
def _schedules(record: Record) -> Iterator[CheckFinding]:
    for schedule in record.schedules:
        windows = [w for w in record.complete if w.optimizer == schedule.optimizer]
        if schedule.ours or len(windows) < 3:
            continue
        if record.of("move", schedule=schedule):
            yield from _moves(record, schedule, windows)
        elif not schedule.wrapped and record.is_amp and (record.determined or record.epochs):
            effect = f"{schedule.kind} did not move in {len(windows)} steps, {record.epochs} epochs"
            # It may move where an epoch ends, and the only one has just ended.
            level = FAULT if record.epochs > 1 else SUSPICION
            yield found("schedule_never", [schedule.where], effect, level)


def _moves(record: Record, schedule: Schedule, windows: list[StepWindow]) -> Iterator[CheckFinding]:
    # By window, the lines that moved it: where Determined did, the line that made the scheduler.
    moved = []
    for window in windows:
        moves = [move for move in window.moves if move.schedule is schedule]
        moved.append([move.where or schedule.where for move in moves])
    steps, applied = len(windows), sum(not window.skipped for window in windows)
    by_epochs = record.epochs >= _BY_STEPS * steps  # an epoch is one step
    if sum(map(bool, moved)) < _BY_STEPS * applied or by_epochs:
        return
    moves = record.of("move", schedule=schedule)
    effect = f"the rate moved {len(moves)} times in {steps} steps"
    if sum(len(set(lines)) > 1 for lines in moved) > 0.5 * steps:
        effect += f": the schedule ends at {steps / len(moves):.0%} of the training"
        yield found("schedule_twice", [move.where or schedule.where for move in moves], effect)
    elif len(moves) > 1.5 * steps and any(move.where for move in moves):
        yield found("schedule_per_batch", moves, effect, SUSPICION)
    skipped = [lines for window, lines in zip(windows, moved, strict=True) if window.skipped]
    wrong = [lines for lines in skipped if lines]
    if wrong:
        many = count_of(len(wrong), len(skipped), "skipped step")
        lines = [line for lines in wrong for line in lines]
        yield found("schedule_on_skipped", lines, f"{many} moved the schedule")


@rule
def _rates_by_hand(record: Record) -> Iterator[CheckFinding]:
    """A rate that no scheduler of torch's moves, and that moves on skipped steps."""
    scheduled = {schedule.optimizer for schedule in record.schedules}
    for optimizer in {*range(record.optimizers)} - scheduled:
        windows = [w for w in record.complete if w.optimizer == optimizer]
        moved = [w for w, then in pairwise(windows) if w.steps[0].rates != then.steps[0].rates]
        skipped = sum(window.skipped for window in moved)
        if skipped and len(moved) >= _BY_STEPS * (len(windows) - 1):
            effect = f"{skipped} skipped steps moved a learning rate that no scheduler of torch has"
            yield found("schedule_on_skipped", [], effect, SUSPICION)


# Windows of several batches.


@rule
def _accumulation(record: Record) -> Iterator[CheckFinding]:
    windows = [window for window in record.complete if not window.forced]
    several = [window for window in windows if _is_accumulated(record, window)]
    if len(windows) < 2 or len(several) < len(windows) - 1 or not record.is_amp:
        return
    last = several[-1]
    size, losses = len(last.backwards), [backward.loss for backward in last.backwards]
    level = FAULT if record.batches else SUSPICION
    zeroed = [each for window in several if window.lost for each in window.zeroed or window.used]
    divisors = [loss.divisor / record.aggregation for loss in losses if loss.mean]
    by_hand = abs(size * last.steps[0].by_hand - 1) < 1e-2
    if sum(bool(window.lost) for window in several) >= len(windows) - 1:
        effect = f"{last.lost} of {size} micro-batches of each step are thrown away"
        yield found("zero_grad_in_window", zeroed, effect, level)
    elif record.aggregation > 1 and record.averages:
        if divisors and abs(divisors[-1] - 1) < 1e-3:
            effect = f"gradients are 1/{record.aggregation} of the mean over the window"
            yield found("loss_divided_twice", last.backwards, effect)
    elif all(loss.mean and abs(loss.divisor - 1) < 1e-3 for loss in losses) and not by_hand:
        effect = f"a step has {size} times the mean gradient of its {size} micro-batches"
        yield found("loss_not_divided", last.backwards, effect, level)


def _is_accumulated(record: Record, window: StepWindow) -> bool:
    """Whether it has the gradients of several batches, of one backward each, from one line.

    Where no loader gives batches, each backward may be of another one.
    """
    many = len(window.backwards)
    batches = {backward.batch for backward in window.backwards}
    lines = {backward.where for backward in window.backwards}
    return many > 1 and len(lines) == 1 and (many == len(batches) or not record.batches)


# What is computed in what.


@rule
def _autocast(record: Record) -> Iterator[CheckFinding]:
    inside = record.of("backward", autocast=True)
    if inside:
        yield found("autocast_backward", inside, f"{share_of(record, inside)} ran under autocast")
    halves = {"float16": 2048, "bfloat16": 256}
    dtype = next((dtype for dtype in halves if dtype in record.weights), None)
    mixes = record.regions or record.scales
    if mixes and dtype and not (record.error and "FP16" in record.error[1]):
        lost = f"an update smaller than 1/{halves[dtype]} of a weight is lost"
        lines = [step for step in record.of("step") if step.where][:1]
        yield found("half_weights", lines, f"weights are in {dtype}: {lost}")
    elif mixes and record.forwards[False] and not (dtype or record.forwards[True]):
        off = record.of("autocast_off")
        effect = f"0 of {record.forwards[False]} forwards of modules with weights ran under it"
        # A region that is switched off here may be on with a GPU.
        is_off_here = off and not record.regions and not record.has_cuda
        level = SUSPICION if is_off_here else FAULT
        yield found("autocast_covers_nothing", record.regions or off, effect, level)


@rule
def _loss_in_16_bits(record: Record) -> Iterator[CheckFinding]:
    float16 = "a loss above 65504 is inf, one below 6e-8 is 0, and a scale of 65536 is inf in it"
    limits = {"float16": float16, "bfloat16": "it has 3 digits"}
    losses = [b for b in record.of("backward") if not b.loss.has_gradient]
    for dtype, limit in limits.items() if record.regions or record.scales else ():
        events = [backward for backward in losses if backward.loss.dtype == dtype]
        bad = sum(not backward.finite for backward in events)
        if events:
            level = FAULT if bad > len(events) / 2 else SUSPICION
            effect = f"{share_of(record, events)} began at a loss in {dtype}: {limit}"
            yield found("loss_16_bits", events, effect, level)


@rule
def _hidden_nan(record: Record) -> Iterator[CheckFinding]:
    hidden = record.of("hide", scalar=True)
    if hidden and record.is_amp:
        effect = f"{len(hidden)} losses whose NaN would be 0, and which the scaler cannot see"
        yield found("nan_hidden", hidden, effect)


@rule
def _scaler_and_dtype(record: Record) -> Iterator[CheckFinding]:
    dtypes = {region.dtype for region in record.regions}
    enabled = [scaler for scaler in record.scalers if scaler.enabled and not scaler.ours]
    waits = record.of("step", scaled=True)
    explicit = all(region.explicit for region in record.regions)
    if dtypes == {"bfloat16"} and record.scales and explicit and waits:
        effect = f"{share_of(record, waits)} asked the device whether to skip, for nothing"
        yield found("bfloat16_with_scaler", [scaler.where for scaler in enabled], effect)
    raised = record.error is not None and "_scale is None" in record.error[1]  # found with its line
    losses = [backward.loss for backward in record.of("backward")]
    scaled = any(loss.scale or loss.divisor < 1 / 8 for loss in losses)
    if "float16" in dtypes and losses and not (scaled or raised or record.scales):
        unused = [scaler.where for scaler in enabled]
        effect = f"{len(losses)} backwards, 0 scaled: gradients of 16-bit products below 6e-8 are 0"
        level = FAULT if unused else SUSPICION
        yield found("no_loss_scale", unused or record.regions, effect, level)


@rule
def _metrics(record: Record) -> Iterator[CheckFinding]:
    for name, (as_is, exact) in record.metrics.items():
        change = abs(as_is - exact) / max(abs(exact), 1e-12) if as_is != exact else 0.0
        if math.isfinite(exact) and not change <= _MAYBE_CHANGED:
            level = SUSPICION if change <= _CHANGED else FAULT
            effect = f"{name} of the same weights: {as_is:.4g}, in float32 {exact:.4g}"
            yield found("eval_16_bits", record.regions_of_validation, effect, level)


# What is saved, switched and waited for.


@rule
def _checkpoint_of_a_loop(record: Record) -> Iterator[CheckFinding]:
    """In a loop of the user's own: the optimizer is saved, and the scaler is not."""
    saves = record.of("save", optimizer=True)
    updates = record.of("update")
    if (
        saves
        and updates
        and record.scales
        and not (record.determined or record.of("save", scale=True))
    ):
        effect = f"after a resume it begins at init_scale again, not at {number(updates[-1].after)}"
        yield found("scaler_not_saved", saves, effect)


@rule
def _state_of_disabled_scaler(record: Record) -> Iterator[CheckFinding]:
    """Without a GPU what is off may be on elsewhere, unless AMP needs no scaler."""
    if record.empty_scaler_state and (record.has_cuda or record.is_amp):
        bfloat16 = any(each.explicit and each.dtype == "bfloat16" for each in record.regions)
        level = FAULT if record.has_cuda or bfloat16 else SUSPICION
        off = [scaler.where for scaler in record.scalers if not scaler.enabled]
        effect = "a run with AMP that goes on from it ends: 0 of 5 values of its state are there"
        yield found("empty_scaler_state", off, effect, level)


@rule
def _tf32(record: Record) -> Iterator[CheckFinding]:
    for event in record.of("tf32")[:1]:
        effect = f"float32 products became {event.value!r} while batch {event.batch} trained"
        yield found("tf32", [event], effect)


@rule
def _syncs(record: Record) -> Iterator[CheckFinding]:
    lines: Counter[Where] = Counter()
    for (where, _), times in record.syncs.items():
        lines[where] += times
    often = {where: n for where, n in lines.items() if n >= 0.5 * record.batches > 0}
    if often and record.is_amp:
        total = sum(often.values()) / record.batches
        methods = sorted({method for where, method in record.syncs if where in often})
        effect = f"{total:.3g} in each batch, by {', '.join(methods)}"
        yield found("synchronisation", often, effect, COST)
