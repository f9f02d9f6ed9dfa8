"""Rules that know a mistake and name its lines."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

from determined_amp.check.finding import Finding, Where
from determined_amp.check.graph import Loss
from determined_amp.check.invariants import power_of_steps
from determined_amp.check.lines import is_users
from determined_amp.check.record import Event, Record, Schedule, Window
from determined_amp.check.ruling import (
    COST,
    FAULT,
    SUSPICION,
    Power,
    count_of,
    found,
    number,
    power_of,
    rule,
    share_of,
    usual_steps,
)
from determined_amp.experiment.errors import name_in_16_bits

# A schedule that moves in this share of the steps moves by steps, not by epochs.
_BY_STEPS = 0.75

# Relative change of a validation metric by 16 bits that is no rounding, and one that may be some.
_CHANGED, _MAYBE_CHANGED = 0.05, 0.01


# Scaling, stepping, updating.


@rule
def _ranks(record: Record) -> Iterator[Finding]:
    """The ranks of a distributed training have scales of their own."""
    used = [scales for scales in record.scales_of_ranks if scales]
    differ = [values for values in zip(*used, strict=False) if len(set(values)) > 1]
    if len(used) > 1 and (differ or len({len(scales) for scales in used}) > 1):
        different = sorted(set(differ[-1] if differ else (scales[-1] for scales in used)))
        effect = f"{len(differ)} of {max(map(len, used))} updates left different scales, as "
        effect += " and ".join(map(number, different))
        lines = [scaler.where for scaler in record.scalers if scaler.used]
        yield found("scale_differs_by_rank", lines, effect)


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
def _error(record: Record) -> Iterator[Finding]:
    if record.error is None:
        return
    kind, text = record.error
    said = ": ".join([kind, *text.splitlines()[:1]])
    after = f"the training stops in batch {record.batches}: {said}"
    level = FAULT
    key = next((_cause(record, key) for words, key in _ERRORS if words in text), None)
    if key is None:
        key = name_in_16_bits(text)
        # What one device lacks another may have: CUDA's autocast casts the arguments of some
        # operations for which that of a CPU does not.
        if key in (None, "no_16_bit_kernel") or _CAST_ON_CUDA.search(text):
            level = FAULT if kind == "InvalidExperimentException" else SUSPICION
    yield found(key or "raised", [record.raised], after, level)


def _cause(record: Record, key: str) -> str:
    """The cause of an error of GradScaler that can have several."""
    if key == "no_gradients":
        key = _why_no_gradients(record)
    elif key == "unscaled_twice":
        since_before = _newest(record, "backward") > _newest(record, "unscale")
        key = "update_missing" if since_before else key
        key = "unscale_in_window" if _mixed(record) else key
    elif key == "update_missing":
        key = "step_twice" if record.of("update") else key
    elif key == "update_in_window":
        past = [step for step in record.of("step")[-1:] if not step.scaled and step.factor > 1.5]
        key = "step_without_scaler" if past else key
        key = key if any(scaler.used for scaler in record.scalers) else "no_loss_scale"
    return key


def _why_no_gradients(record: Record) -> str:
    losses = record.of("backward")
    trained = any(backward.reached for backward in losses)
    if losses and losses[-1].loss.leaf:
        return "constant_loss" if trained else "loss_cut_off"
    return "no_gradients" if trained or not losses else "other_parameters"


def _newest(record: Record, kind: str) -> int:
    return max((event.number for event in record.of(kind)), default=-1)


@rule
def _refusals(record: Record) -> Iterator[Finding]:
    """The training catches what the scaler raises, and never steps again."""
    refusals = record.of("refusal")
    if record.error is not None or len(refusals) < 3:
        return
    text = refusals[0].text
    keys = [_cause(record, key) for words, key in _ERRORS if words in text]
    if keys and refusals[0].number > _newest(record, "step"):
        effect = f"{len(refusals)} calls raised {text!r}, and no step follows the first of them"
        yield found(keys[0], refusals, effect)


@rule
def _factors(record: Record) -> Iterator[Finding]:
    """The gradients of a step are not what the loss says."""
    steps = usual_steps(record)
    wrong: dict[str, list[Event]] = defaultdict(list)
    right = {o for o in range(record.optimizers) if _is_right(power_of_steps(record, o))}
    for step in steps:
        key = None if step.again or step.optimizer in right else _wrong_factor(record, step)
        if key:
            wrong[key].append(step)
    for key, events in wrong.items():
        factor = events[-1].factor
        many = f"in {count_of(len(events), len(steps), 'step')}"
        lines = events
        if key == "step_without_scaler":
            effect = f"the gradients are {number(factor)} times as large as they should be"
        elif key.startswith("update"):
            lines = [update for update in record.of("update") if update.early]
            another = "divided by another scale than they were multiplied by"
            effect = f"the scale was updated before: where it changes, gradients are {another}"
        else:
            effect = f"the gradients are 1/{number(1 / factor)} of what they should be"
            if key == "unscaled_loss":
                lines = [b for step in events for b in step.backwards if b.loss.scale is None]
        yield found(key, lines, f"{many} {effect}")


def _is_right(power: Power | None) -> bool:
    """Whether norms were seen not to follow the scale, whatever the calls looked like."""
    return power is not None and power.measured >= 12 and abs(power.exponent) < 0.1


def _wrong_factor(record: Record, step: Event) -> str | None:
    if not step.scaled:
        return "step_without_scaler" if step.factor > 1.5 else None
    if step.updates:
        others = any(
            step.backwards and e.optimizer != step.optimizer and e.batch == step.batch
            for e in record.of("step")
            if e.number < step.number
        )
        return "update_per_optimizer" if others else "update_in_window"
    if step.factor < 0.7:
        scaled = all(backward.loss.scale for backward in step.backwards)
        return "unscaled_twice" if scaled else "unscaled_loss"
    return None


@rule
def _faint(record: Record) -> Iterator[Finding]:
    """One of several losses was not scaled, and the scaler divides the gradients of all."""
    unscaled = [b for b in record.of("backward") if not (b.loss.scale or b.loss.has_gradient)]
    mixed = {backward.number for backward in _mixed(record)}
    before = {
        earlier.number
        for window in record.windows
        for backward in _onto_unscaled(window)
        for earlier in window.backwards
        if earlier.number < backward.number and backward.number not in mixed
    }
    faint = [b for b in unscaled if b.number in before or any(factor > 1 for factor in b.onto)]
    faint = [b for b in faint if not _grows_with_scale(record, b)]
    faint += [b for b in record.of("backward") if b.loss.in_part]
    if faint and any(step.scaled for step in record.of("step")):
        effect = "added gradients that are divided by the scale and were never multiplied"
        yield found("unscaled_loss", faint, f"{share_of(record, faint)} {effect}")


def _grows_with_scale(record: Record, backward: Event) -> bool:
    """Whether what the backwards of a line add was seen to be multiplied by the scale after all.

    As where a gradient of a scaled loss is handed on.
    """
    same = [b for b in record.of("backward") if b.where == backward.where]
    power = power_of((b.scale, b.added) for b in same)
    return power is not None and power.exponent > 0.5


def _onto_unscaled(window: Window) -> list[Event]:
    """Backwards that added scaled gradients to others that are not."""
    return [b for b in window.backwards if b.loss.scale not in (None, 1.0) and 1.0 in b.onto]


def _mixed(record: Record) -> list[Event]:
    """Backwards that added scaled gradients to others that were unscaled before."""
    divided = [event.number for kind in ("unscale", "changed") for event in record.of(kind)]
    found_in = [
        (backward.number, backward)
        for window in record.windows
        for backward in _onto_unscaled(window)
        if any(window.backwards[0].number < n < backward.number for n in divided)
    ]
    return [*dict(found_in).values()]


@rule
def _unscaled_early(record: Record) -> Iterator[Finding]:
    mixed = _mixed(record)
    if mixed and record.error is None:
        times = f"{number(mixed[-1].loss.scale)} times as large as those which were unscaled before"
        effect = f"{share_of(record, mixed)} added gradients that are {times}"
        lines = [event for event in record.of("unscale") if not event.in_step]
        yield found("unscale_in_window", lines, effect)


@rule
def _step_twice(record: Record) -> Iterator[Finding]:
    usual = [window.steps for window in record.complete if not window.forced]
    again = [steps for steps in usual if any(step.again for step in steps)]
    twice = [steps for steps in again if any(step.scaled for step in steps)]
    if twice:
        many = count_of(len(twice), len(record.complete), "window")
        lines = [step for steps in twice for step in steps]
        yield found("step_twice", lines, f"{many} had {len(twice[-1])} steps")


# Clipping.


@rule
def _clips(record: Record) -> Iterator[Finding]:
    by_line: dict[Where | None, list[Event]] = defaultdict(list)
    for clip in record.of("clip"):
        if any(factor > 1.5 for factor in clip.factors):
            by_line[clip.where].append(clip)
    for line, clips in by_line.items():
        factors = [max(f for f in clip.factors if f > 1.5) for clip in clips]
        limits = [clip.limit / factor for clip, factor in zip(clips, factors, strict=True)]
        last, factor = clips[-1], factors[-1]
        if len(set(factors)) > 1:
            times_scale = max(limits) <= 1.01 * min(limits)
        else:
            times_scale = last.limit >= max(100.0, 0.05 * factor)
        if times_scale or math.isinf(last.limit):
            continue  # the limit was multiplied by the scale, or nothing is clipped
        norms = [clip.norm for clip in clips if math.isfinite(clip.norm)]
        seen = f"; the norm of the true gradients was {norms[-1] / factor:.3g}" if norms else ""
        effect = (
            f"at scale {number(factor)} the limit {last.limit:g} clips true gradients at "
            f"{last.limit / factor:.3g}, 1/{number(factor)} of the limit{seen}"
        )
        key = "clip_scaled" if last.of == "norm" else "clip_value_scaled"
        yield found(key, [line], effect)


@rule
def _clips_by_hand(record: Record) -> Iterator[Finding]:
    changed = [e for e in record.of("changed") if e.factor > 1.5 or math.isnan(e.factor)]
    if len(changed) < 3 or not record.scales:
        return
    for which, what in enumerate(("norm", "largest element")):
        after, before = [e.after[which] for e in changed], [e.before[which] for e in changed]
        if max(after) <= 1.001 * min(after) and max(before) > 1.01 * min(before):
            effect = f"in {len(changed)} steps the scaled gradients got the {what} {after[-1]:.3g}"
            yield found("clip_by_hand_scaled", changed, effect)
            return


@rule
def _overflow_in_weights(record: Record) -> Iterator[Finding]:
    """Gradients were unscaled, and the optimizer stepped without asking what `unscale_` found."""
    forced = [window for window in record.complete if window.forced]
    first = [window.steps[0] for window in forced]
    blind = [step for step in first if not (step.scaled or math.isfinite(step.norm))]
    if blind:
        many = count_of(len(blind), len(forced), "forced overflow")
        yield found("step_without_scaler", blind, f"{many} reached the weights")


# Schedules.


@rule
def _schedules(record: Record) -> Iterator[Finding]:
    for schedule in record.schedules:
        if schedule.ours or schedule.inner:
            continue
        windows = [w for w in record.complete if w.optimizer == schedule.optimizer]
        if any(move.schedule is schedule for move in record.of("move")):
            yield from _moves(record, schedule, windows)
        elif record.determined or record.epochs:
            if len(windows) < 3 or schedule.wrapped or not record.is_amp:
                continue
            yield _never(record, schedule, len(windows))


def _never(record: Record, schedule: Schedule, steps: int) -> Finding:
    epochs = f"{record.epochs} epoch{'' if record.epochs == 1 else 's'}"
    effect = f"{schedule.kind} did not move in {steps} steps and {epochs}"
    return found("schedule_never", [schedule.where], effect, SUSPICION)


def _moves(record: Record, schedule: Schedule, windows: list[Window]) -> Iterator[Finding]:
    moves = [move for move in record.of("move") if move.schedule is schedule]
    # By window, the lines that moved it: where Determined did, the line that made the scheduler.
    moved = [
        [move.where or schedule.where for move in window.moves if move.schedule is schedule]
        for window in windows
    ]
    steps, applied = len(windows), sum(not window.skipped for window in windows)
    if steps < 3 or sum(map(bool, moved)) < _BY_STEPS * applied:
        return
    if record.epochs >= _BY_STEPS * steps:
        return  # an epoch is one step, and the schedule may be one of epochs
    effect = f"the rate moved {len(moves)} times in {steps} steps"
    if sum(len(set(lines)) > 1 for lines in moved) > 0.5 * steps:
        effect += f": the schedule ends at {steps / len(moves):.0%} of the training"
        yield found("schedule_twice", [move.where or schedule.where for move in moves], effect)
    elif len(moves) > 1.5 * steps and any(move.where for move in moves):
        yield found("schedule_per_batch", moves, effect, SUSPICION)
    skipped = [lines for window, lines in zip(windows, moved, strict=True) if window.skipped]
    on_skipped = [lines for lines in skipped if lines]
    if on_skipped:
        many = count_of(len(on_skipped), len(skipped), "skipped step")
        lines = [line for lines in on_skipped for line in lines]
        yield found("schedule_on_skipped", lines, f"{many} moved the schedule")


@rule
def _rates_by_hand(record: Record) -> Iterator[Finding]:
    """A rate that no scheduler of torch's moves, and that moves on skipped steps."""
    scheduled = {schedule.optimizer for schedule in record.schedules}
    for optimizer in {*range(record.optimizers)} - scheduled:
        windows = [w for w in record.complete if w.optimizer == optimizer]
        rates = [window.steps[0].rates for window in windows]
        moved = [w for w, (now, then) in zip(windows, pairwise(rates), strict=False) if now != then]
        skipped = sum(window.skipped for window in windows[:-1])
        on_skipped = sum(window.skipped for window in moved)
        if len(moved) >= _BY_STEPS * (len(windows) - 1) and on_skipped:
            what = count_of(on_skipped, skipped, "skipped step")
            effect = f"{what} moved a learning rate that no scheduler of torch has"
            yield found("schedule_on_skipped", [], effect, SUSPICION)


# Windows of several batches.


@rule
def _accumulation(record: Record) -> Iterator[Finding]:
    windows = [window for window in record.complete if not window.forced]
    several = [window for window in windows if _is_accumulated(record, window)]
    if len(windows) < 2 or len(several) < len(windows) - 1 or not record.is_amp:
        return
    if any(len({b.where for b in window.backwards}) > 1 for window in several):
        return
    last = several[-1]
    size, losses = len(last.backwards), [backward.loss for backward in last.backwards]
    zeroed = [window for window in several if window.lost]
    if len(zeroed) >= len(windows) - 1:
        effect = f"{last.lost} of {size} micro-batches of each step are thrown away"
        level = FAULT if record.batches else SUSPICION
        yield found("zero_grad_in_window", [e for w in zeroed for e in w.dropped], effect, level)
    elif record.aggregation > 1 and record.averages:
        if abs(losses[-1].divisor / record.aggregation - 1) < 1e-3:
            effect = f"gradients are 1/{record.aggregation} of the mean over the window"
            level = SUSPICION if losses[-1].sums else FAULT
            yield found("loss_divided_twice", last.backwards, effect, level)
    elif all(_is_whole_mean(loss) for loss in losses) and not _is_divided(record, last):
        effect = f"a step has {size} times the mean gradient of its {size} micro-batches"
        level = FAULT if record.batches else SUSPICION
        yield found("loss_not_divided", last.backwards, effect, level)


def _is_accumulated(record: Record, window: Window) -> bool:
    """Whether it has the gradients of several batches, of one backward each.

    Where no loader gives batches, each backward may be of another one.
    """
    batches = {backward.batch for backward in window.backwards}
    many = len(window.backwards)
    return many > 1 and (many == len(batches) or not record.batches)


def _is_whole_mean(loss: Loss) -> bool:
    return loss.mean and abs(loss.divisor - 1) < 1e-3


def _is_divided(record: Record, window: Window) -> bool:
    """Whether the gradients were divided by the number of micro-batches before the step."""
    first, last = window.backwards[-1].number, window.steps[0].number
    ratios = [e.before[0] / e.after[0] for e in record.of("changed") if first < e.number < last]
    return any(abs(ratio / len(window.backwards) - 1) < 1e-2 for ratio in ratios)


# What is computed in what.


@rule
def _autocast(record: Record) -> Iterator[Finding]:
    inside = [backward for backward in record.of("backward") if backward.autocast]
    if inside:
        yield found("autocast_backward", inside, f"{share_of(record, inside)} ran under autocast")
    if not record.mixes:
        return
    halves = {"float16", "bfloat16"} & record.weights
    if halves:
        dtype = min(halves)
        lost = 2048 if dtype == "float16" else 256
        effect = f"weights are in {dtype}: an update smaller than 1/{lost} of a weight is lost"
        lines = [step for step in record.of("step") if step.where][:1]
        if record.error is None or "FP16" not in record.error[1]:
            yield found("half_weights", lines, effect)
    elif record.forwards[False] and not record.forwards[True]:
        off, level = record.of("autocast_off"), FAULT
        modules = f"{record.forwards[False]} forwards of modules with weights"
        effect = f"0 of {modules} ran under autocast"
        if off and not record.regions and not record.has_cuda:
            level = SUSPICION
            effect += "; a region is switched off here, as it may be without a GPU"
        yield found("autocast_covers_nothing", record.regions or off, effect, level)


@rule
def _loss_in_16_bits(record: Record) -> Iterator[Finding]:
    float16 = "a loss above 65504 is inf, one below 6e-8 is 0, and a scale of 65536 is inf in it"
    limits = (("float16", float16), ("bfloat16", "it has 3 digits"))
    losses = [b for b in record.of("backward") if not b.loss.has_gradient]
    for dtype, limit in limits if record.mixes else ():
        events = [backward for backward in losses if backward.loss.dtype == dtype]
        if events:
            bad = sum(not backward.finite for backward in events)
            level = FAULT if bad > len(events) / 2 else SUSPICION
            effect = f"{share_of(record, events)} began at a loss in {dtype}: {limit}"
            yield found("loss_16_bits", events, effect, level)


@rule
def _penalty(record: Record) -> Iterator[Finding]:
    penalties = [backward for backward in record.of("backward") if backward.loss.penalty]
    if penalties:
        times = number(penalties[-1].loss.penalty)
        yield found("penalty_scaled", penalties, f"the gradients in it are {times} times as large")


@rule
def _hidden_nan(record: Record) -> Iterator[Finding]:
    losses = [backward for backward in record.of("backward") if backward.loss.hides_nan]
    gradients = [event for event in record.of("hide") if event.of_gradient is not None]
    replaced = [event for event in record.of("hide") if event.hidden]
    if losses and record.mixes:
        effect = f"{share_of(record, losses)} began at a loss whose NaN would be 0"
        lines = [event for event in record.of("hide") if event.scalar and event.where]
        yield found("nan_hidden", lines or losses, effect)
        return
    hidden = [event for event in gradients if event.hidden]
    stepped_with = [event for event in hidden if not _step_was_skipped(record, event)]
    if hidden and not stepped_with:
        return  # the scaler had looked before
    events = stepped_with or gradients or replaced
    values = f"{sum(event.hidden for event in events)} values"
    if stepped_with:
        effect = "of gradients that were not finite were replaced, and stepped with"
        yield found("nan_hidden", events, f"{values} {effect}")
    elif events and record.mixes:
        effect = "that were not finite were replaced here"
        yield found("nan_hidden", events, f"{values} {effect}", SUSPICION)


def _step_was_skipped(record: Record, change: Event) -> bool:
    """Whether the next step with gradients that were changed is skipped."""
    steps = (step for step in record.of("step") if step.optimizer == change.of_gradient)
    return next((step.skipped for step in steps if step.number > change.number), False)


@rule
def _scaler_and_dtype(record: Record) -> Iterator[Finding]:
    regions = record.regions
    dtypes = {region.dtype for region in regions}
    enabled = [scaler for scaler in record.scalers if scaler.enabled and not scaler.ours]
    waits = [step for step in record.of("step") if step.scaled]
    explicit = all(region.explicit for region in regions)
    if dtypes == {"bfloat16"} and record.scales and explicit and waits:
        effect = f"{share_of(record, waits)} asked the device whether to skip, for nothing"
        yield found("bfloat16_with_scaler", [scaler.where for scaler in enabled], effect)
    if record.error is not None and "_scale is None" in record.error[1]:
        return  # that is found with its line
    losses = [backward.loss for backward in record.of("backward")]
    if "float16" in dtypes and losses and not any(x.scale or x.divisor < 1 / 8 for x in losses):
        flush = "gradients of 16-bit products below 6e-8 are 0"
        unused = [scaler.where for scaler in enabled if not scaler.used]
        if unused:
            effect = f"a GradScaler is made and scales nothing: {flush}"
            yield found("no_loss_scale", unused, effect)
        elif not record.scales:
            yield found("no_loss_scale", regions, flush, SUSPICION)


@rule
def _metrics(record: Record) -> Iterator[Finding]:
    for name, (as_is, exact) in record.metrics.items():
        if not math.isfinite(exact):
            continue
        change = abs(as_is - exact) / max(abs(exact), 1e-12) if as_is != exact else 0.0
        if math.isnan(change) or change > _MAYBE_CHANGED:
            level = SUSPICION if change <= _CHANGED else FAULT
            effect = f"{name} of the same weights: {as_is:.4g}, in float32 {exact:.4g}"
            yield found("eval_16_bits", record.regions_of_validation, effect, level)


# What is saved, switched and waited for.


@rule
def _checkpoint_of_a_loop(record: Record) -> Iterator[Finding]:
    """In a loop of the user's own: the optimizer is saved, and the scaler is not."""
    saves = [save for save in record.of("save") if save.optimizer]
    if record.determined or not saves or not record.scales:
        return
    if not any(save.scale for save in record.of("save")):
        updates = record.of("update")
        effect = "after a resume it begins at init_scale again"
        effect += f", not at {number(updates[-1].after)}" if updates else ""
        yield found("scaler_not_saved", saves, effect)


@rule
def _tf32(record: Record) -> Iterator[Finding]:
    for event in record.of("tf32"):
        ours = any(f"/{name}/" in event.by for name in ("torch", "determined", "determined_amp"))
        if ours and not event.in_batch:
            continue
        what = f"{event.name} = {event.value}"
        if event.in_batch:
            yield found("tf32", [event], f"{what} while batch {event.batch} trains")
            return
        if not is_users(event.by) and record.is_amp:
            yield found("tf32", [event], f"{what}, set by {event.by}", SUSPICION)
            return


@rule
def _syncs(record: Record) -> Iterator[Finding]:
    lines: Counter[Where] = Counter()
    for (where, _), times in record.syncs.items():
        lines[where] += times
    often = {where: n for where, n in lines.items() if n >= 0.5 * record.batches > 0}
    if often and record.is_amp:
        total = sum(often.values()) / record.batches
        methods = sorted({method for where, method in record.syncs if where in often})
        effect = f"{total:.3g} in each batch, by {', '.join(methods)}"
        yield found("synchronisation", often, effect, COST)
