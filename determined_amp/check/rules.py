"""Judges a record: pure functions from what a training did to what is wrong with it."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from determined_amp.check.advice import ADVICE
from determined_amp.check.finding import Finding, Findings, Level, Where
from determined_amp.check.record import Event, Record, Window
from determined_amp.experiment.errors import name_in_16_bits

Rule = Callable[[Record], Iterator[Finding]]

FAULT, SUSPICION, COST = Level.FAULT, Level.SUSPICION, Level.COST

# A schedule that moves in this share of the steps moves by steps, not by epochs.
_BY_STEPS = 0.75

# Relative change of a validation metric by 16 bits that is no rounding, and one that may be some.
_CHANGED, _MAYBE_CHANGED = 0.05, 0.01


# Findings that say why an overflow was hidden.
_HIDE_OVERFLOWS = {"clip_value_scaled", "clip_by_hand_scaled", "nan_hidden"}


def judge(record: Record) -> Findings:
    """All findings of one run. What two rules find on one line is one finding."""
    by_place: dict[tuple[str, Where | None], Finding] = {}
    for finding in (each for rule in RULES for each in rule(record)):
        place = finding.key, finding.where[0] if finding.where else None
        same = by_place.get(place)
        effect = f"{same.effect}; {finding.effect}" if same else finding.effect
        by_place[place] = replace(same or finding, effect=effect)
    keys = {key for key, _ in by_place}
    explained = {"overflow_hidden"} if keys & _HIDE_OVERFLOWS else set()
    findings = Findings(
        [f for f in by_place.values() if f.key not in explained], seen=_seen(record)
    )
    off = [scaler["where"] for scaler in record.scalers if not scaler["enabled"]]
    if off and not _is_amp(record):
        findings.notes.append(f"the GradScaler of {off[0]} is switched off, so no AMP was examined")
    findings.sort()
    return findings


def _finding(
    record: Record,
    key: str,
    events: Iterable[Event | Where | None],
    effect: str,
    level: Level = FAULT,
) -> Finding:
    advice = ADVICE[key]
    lines = dict.fromkeys(e.where if isinstance(e, Event) else e for e in events)
    write = advice.in_a_trial if record.determined or not advice.in_a_loop else advice.in_a_loop
    where = tuple(line for line in lines if line is not None)
    return Finding(key, level, advice.sentence, where, effect, write)


def _seen(record: Record) -> str:
    steps = sum(not step.skipped for step in record.of("step"))
    skipped = len(record.of("step")) - steps
    scaler = any(s["enabled"] and s["used"] for s in record.scalers)
    dtypes = {e.dtype for e in record.of("autocast") if e.grad}
    amp = f"autocast in {' and '.join(sorted(dtypes))}" if dtypes else "no autocast"
    return (
        f"{record.batches} batches, {steps} steps, {skipped} skipped, {amp}, "
        f"{'a GradScaler' if scaler else 'no GradScaler'}"
    )


# What several rules ask.


def _is_amp(record: Record) -> bool:
    return any(s["enabled"] for s in record.scalers) or any(e.grad for e in record.of("autocast"))


def _scales(record: Record) -> bool:
    return any(s["enabled"] and s["used"] for s in record.scalers)


def _complete(record: Record) -> list[Window]:
    return [window for window in record.windows if window.steps]


def _usual_steps(record: Record) -> list[Event]:
    """Steps whose gradients are finite and were not touched by the doctor."""
    return [
        step
        for window in record.windows
        if not window.forced
        for step in window.steps
        if math.isfinite(step.norm) and step.norm > 0 and math.isfinite(step.factor)
    ]


def _some(
    record: Record,
    key: str,
    events: Sequence[Event],
    effect: str,
    *,
    level: Level = FAULT,
    lines: Iterable[Event | Where | None] | None = None,
) -> Iterator[Finding]:
    """A finding of these events, if there are any, that begins with their share of all."""
    if events:
        kind = events[0].kind
        share = _count(len(events), len(record.of(kind)), kind)
        yield _finding(record, key, events if lines is None else lines, f"{share} {effect}", level)


def _number(value: float) -> str:
    if value >= 1000 and value == int(value):
        return str(int(value))
    return f"{value:.3g}"


def _count(part: int, whole: int, what: str) -> str:
    return f"{part} of {whole} {what}{'' if whole == 1 else 's'}"


# Scaling, stepping, updating.


def _factors(record: Record) -> Iterator[Finding]:
    """The gradients of a step are not what the loss says."""
    steps = _usual_steps(record)
    wrong: dict[str, list[Event]] = defaultdict(list)
    for step in steps:
        if step.again:
            continue
        if step.via is None:
            if step.factor > 1.5:
                wrong["step_without_scaler"].append(step)
        elif step.updates:
            others = any(
                step.losses and e.optimizer != step.optimizer and e.batch == step.batch
                for e in record.of("step")
                if e.number < step.number
            )
            wrong["update_per_optimizer" if others else "update_in_window"].append(step)
        elif step.factor < 0.7:
            wrong["unscaled_twice" if all(step.losses) else "unscaled_loss"].append(step)
    for key, events in wrong.items():
        factor = events[-1].factor
        many = _count(len(events), len(steps), "step")
        if key == "step_without_scaler":
            effect = (
                f"in {many} the gradients are {_number(factor)} times as large as they should be"
            )
            lines: list[Event | Where | None] = [*events]
        elif key in ("unscaled_loss", "unscaled_twice"):
            effect = f"in {many} the gradients are 1/{_number(1 / factor)} of what they should be"
            lines = [*_backwards_of(record, events)] if key == "unscaled_loss" else [*events]
        else:
            lines = [*record.of("update")]
            effect = (
                f"in {many} the scale was updated before: where it changes, gradients are "
                "divided by another scale than they were multiplied by"
            )
        yield _finding(record, key, lines, effect)


def _faint(record: Record) -> Iterator[Finding]:
    """One of several losses was not scaled, and the scaler divides the gradients of all."""
    if any(step.via is not None for step in record.of("step")):
        faint = [event for event in record.of("backward") if event.faint]
        effect = "added gradients that are divided by the scale and were never multiplied"
        yield from _some(record, "unscaled_loss", faint, effect)


def _backwards_of(record: Record, steps: list[Event]) -> list[Event]:
    mine = [w for w in record.windows if any(step in w.steps for step in steps)]
    return [b for window in mine for b in window.backwards if b.loss.scale is None]


def _mixed(record: Record) -> Iterator[Finding]:
    mixed = [event for event in record.of("backward") if event.mixed]
    if mixed and record.error is None:
        lines = [e for e in record.of("unscale") if not e.in_step]
        effect = (
            f"added gradients that are {_number(mixed[-1].loss.scale)} times as large as those "
            "which were unscaled before"
        )
        yield from _some(record, "unscale_in_window", mixed, effect, lines=lines)


def _step_twice(record: Record) -> Iterator[Finding]:
    twice = [
        window
        for window in _complete(record)
        if not window.forced
        and any(step.again for step in window.steps)
        and any(step.via is not None for step in window.steps)
    ]
    if twice:
        steps = [step for window in twice for step in window.steps]
        many = _count(len(twice), len(_complete(record)), "window")
        effect = f"{many} had {len(twice[-1].steps)} steps"
        yield _finding(record, "step_twice", steps, effect)


_ERRORS = (
    ("step() has already been called since the last update()", "update_missing"),
    ("unscale_() has already been called on this optimizer", "unscaled_twice"),
    ("unscale_() is being called after step()", "unscaled_twice"),
    ("No inf checks were recorded prior to update", "update_in_window"),
    ("No inf checks were recorded for this optimizer", "no_gradients"),
    ("Attempting to unscale FP16 gradients", "half_weights"),
)


# https://pytorch.org/docs/stable/amp.html, "CUDA Ops that promote to the widest input type".
_CAST_ON_CUDA = re.compile(r"^(scatter|dot|grid_sampler)\b")


def _error(record: Record) -> Iterator[Finding]:
    if record.error is None:
        return
    kind, text = record.error
    after = (
        f"the training stops in batch {record.batches}: {': '.join([kind, *text.splitlines()[:1]])}"
    )
    for words, key in _ERRORS:
        if words in text:
            yield _finding(record, _cause(record, key), [record.raised], after)
            return
    name = name_in_16_bits(text)
    # What one device lacks another may have: CUDA's autocast casts the arguments of some operations
    # for which that of a CPU does not.
    elsewhere = name in (None, "no_16_bit_kernel") or _CAST_ON_CUDA.search(text)
    level = SUSPICION if elsewhere else FAULT
    yield _finding(record, name or "raised", [record.raised], after, level)


def _cause(record: Record, key: str) -> str:
    """What an error of GradScaler comes of, if it has several causes."""
    steps = record.of("step")
    if key == "unscaled_twice" and any(e.mixed for e in record.of("backward")):
        return "unscale_in_window"
    if key == "update_missing" and record.of("update"):
        return "step_twice"
    if key == "update_in_window" and not any(s["used"] for s in record.scalers):
        return "no_loss_scale"
    if key == "update_in_window" and steps and steps[-1].via is None and steps[-1].factor > 1.5:
        return "step_without_scaler"
    return key


def _clips(record: Record) -> Iterator[Finding]:
    by_line: dict[Where | None, list[Event]] = defaultdict(list)
    for event in record.of("clip"):
        if any(factor > 1.5 for factor in event.factors.values()):
            by_line[event.where].append(event)
    for line, clips in by_line.items():
        factors = [max(f for f in event.factors.values() if f > 1.5) for event in clips]
        limits = [event.limit / factor for event, factor in zip(clips, factors, strict=True)]
        last, factor = clips[-1], factors[-1]
        if len(set(factors)) > 1:
            times_scale = max(limits) <= 1.01 * min(limits)
        else:
            times_scale = last.limit >= max(100.0, 0.05 * factor)
        if times_scale or math.isinf(last.limit):
            continue  # the limit was multiplied by the scale, or nothing is clipped
        norms = [e.norm for e in clips if math.isfinite(e.norm)]
        seen = f"; the norm of the true gradients was {norms[-1] / factor:.3g}" if norms else ""
        effect = (
            f"at scale {_number(factor)} the limit {last.limit:g} clips true gradients at "
            f"{last.limit / factor:.3g}, 1/{_number(factor)} of the limit{seen}"
        )
        key = "clip_scaled" if last.of == "norm" else "clip_value_scaled"
        yield _finding(record, key, [line], effect)


def _clips_by_hand(record: Record) -> Iterator[Finding]:
    changed = [e for e in record.of("changed") if e.factor > 1.5 or math.isnan(e.factor)]
    if len(changed) < 3 or not _scales(record):
        return
    for number, what in enumerate(("norm", "largest element")):
        after, before = [e.after[number] for e in changed], [e.before[number] for e in changed]
        if max(after) <= 1.001 * min(after) and max(before) > 1.01 * min(before):
            effect = f"in {len(changed)} steps the scaled gradients got the {what} {after[-1]:.3g}"
            yield _finding(record, "clip_by_hand_scaled", changed, effect)
            return


def _hidden_overflow(record: Record) -> Iterator[Finding]:
    forced = [w for w in _complete(record) if w.forced and w.steps[0].via is not None]
    forced = [w for w in forced if not w.dropped]
    stepped = [w for w in forced if not w.skipped and math.isfinite(w.steps[0].norm)]
    if stepped:
        effect = f"{_count(len(stepped), len(forced), 'forced overflow')} did not skip the step"
        yield _finding(record, "overflow_hidden", [w.steps[0] for w in stepped], effect)


# Schedules.


def _schedules(record: Record) -> Iterator[Finding]:
    for number, scheduler in enumerate(record.schedulers):
        if scheduler["ours"] or scheduler["inner"]:
            continue
        moves = [e for e in record.of("move") if e.scheduler == number]
        windows = [w for w in _complete(record) if w.optimizer == scheduler.get("optimizer")]
        if not moves:
            yield from _never(record, scheduler, windows)
            continue
        moved = [[e for e in window.moves if e.scheduler == number] for window in windows]
        applied = sum(not w.skipped for w in windows)
        if len(windows) < 3 or sum(map(bool, moved)) < _BY_STEPS * applied:
            continue
        if record.epochs >= _BY_STEPS * len(windows):
            continue  # an epoch is one step, and the schedule may be one of epochs
        twice = [m for m in moved if len({_mover(e, scheduler) for e in m}) > 1]
        if len(twice) > 0.5 * len(windows):
            effect = (
                f"the rate moved {len(moves)} times in {len(windows)} steps: the schedule ends at "
                f"{len(windows) / len(moves):.0%} of the training"
            )
            yield _finding(record, "schedule_twice", [_mover(e, scheduler) for e in moves], effect)
        elif len(moves) > 1.5 * len(windows) and any(e.where for e in moves):
            effect = f"the rate moved {len(moves)} times in {len(windows)} steps"
            lines = [e.where for e in moves]
            yield _finding(record, "schedule_per_batch", lines, effect, SUSPICION)
        skipped = [m for w, m in zip(windows, moved, strict=True) if w.skipped]
        on_skipped = [m for m in skipped if m]
        if on_skipped:
            effect = f"{_count(len(on_skipped), len(skipped), 'skipped step')} moved the schedule"
            lines = [_mover(e, scheduler) for m in on_skipped for e in m]
            yield _finding(record, "schedule_on_skipped", lines, effect)


def _rates_by_hand(record: Record) -> Iterator[Finding]:
    """A rate that no scheduler of torch's moves, and that moves on skipped steps."""
    scheduled = {scheduler["optimizer"] for scheduler in record.schedulers}
    for number in {*range(len(record.optimizers))} - scheduled:
        windows = [w for w in _complete(record) if w.optimizer == number]
        moved = [
            window
            for window, later in pairwise(windows)
            if window.steps[0].rates != later.steps[0].rates
        ]
        skipped = [window for window in windows[:-1] if window.skipped]
        on_skipped = [window for window in moved if window.skipped]
        if len(moved) >= _BY_STEPS * (len(windows) - 1) and on_skipped:
            what = _count(len(on_skipped), len(skipped), "skipped step")
            effect = f"{what} moved a learning rate that no scheduler of torch has"
            yield _finding(record, "schedule_on_skipped", record.rates_set_at, effect, SUSPICION)


def _mover(move: Event, scheduler: Mapping[str, Any]) -> Where | None:
    """The line that moved it; where Determined did, the line that made the scheduler."""
    return move.where or scheduler["where"]


def _never(
    record: Record, scheduler: Mapping[str, Any], windows: list[Window]
) -> Iterator[Finding]:
    if len(windows) < 3 or scheduler.get("wrapped") or not _is_amp(record):
        return
    # Outside of Determined's loop a library may move it, after an epoch.
    proven = scheduler["never_named"] and (record.determined or record.epochs > 1)
    effect = (
        f"{scheduler['kind']} did not move in {len(windows)} steps and {record.epochs} "
        f"epoch{'' if record.epochs == 1 else 's'}"
    )
    level = FAULT if proven else SUSPICION
    yield _finding(record, "schedule_never", [scheduler["where"]], effect, level)


# Windows of several batches.


def _accumulation(record: Record) -> Iterator[Finding]:
    windows = [w for w in _complete(record) if not w.forced]
    if len(windows) < 2 or not _is_amp(record):
        return
    several = [w for w in windows if len(w.backwards) > 1]
    batches = [w for w in several if len({b.batch for b in w.backwards}) == len(w.backwards)]
    if len(batches) < len(windows) - 1:
        return
    one_line = [w for w in batches if len({b.where for b in w.backwards}) == 1]
    if len(one_line) < len(batches):
        return
    last = batches[-1]
    size = len(last.backwards)
    zeroed = [w for w in batches if len(w.dropped) >= len(w.backwards) - 1]
    if len(zeroed) >= len(windows) - 1:
        effect = f"{size - 1} of {size} micro-batches of each step are thrown away"
        lines = [e for w in zeroed for e in w.dropped]
        yield _finding(record, "zero_grad_in_window", lines, effect)
        return
    losses = [b.loss for b in last.backwards]
    divisor = losses[-1].divisor
    if record.aggregation > 1 and record.averages:
        if abs(divisor / record.aggregation - 1) < 1e-3:
            effect = f"gradients are 1/{record.aggregation} of the mean over the window"
            level = SUSPICION if losses[-1].sums else FAULT
            yield _finding(record, "loss_divided_twice", last.backwards, effect, level)
        return
    if all(abs(loss.divisor - 1) < 1e-3 for loss in losses) and not _is_divided(record, last):
        effect = f"a step has {size} times the mean gradient of its {size} micro-batches"
        level = FAULT if all(loss.mean for loss in losses) else SUSPICION
        yield _finding(record, "loss_not_divided", last.backwards, effect, level)


def _is_divided(record: Record, window: Window) -> bool:
    """Whether the gradients were divided by the number of micro-batches before the step."""
    first, last = window.backwards[-1].number, window.steps[0].number
    ratios = [e.before[0] / e.after[0] for e in record.of("changed") if first < e.number < last]
    return any(abs(ratio / len(window.backwards) - 1) < 1e-2 for ratio in ratios)


# What is computed in what.


def _autocast(record: Record) -> Iterator[Finding]:
    inside = [event for event in record.of("backward") if event.autocast]
    yield from _some(record, "autocast_backward", inside, "ran under autocast")
    regions = [e for e in record.of("autocast") if e.grad]
    uses = bool(regions) or _scales(record)
    halves = {"float16", "bfloat16"} & {*record.weights}
    if uses and record.forwards[False] and not record.forwards[True] and not halves:
        off = record.of("autocast_off")
        level = SUSPICION if off and not regions and not record.has_cuda else FAULT
        effect = (
            f"0 of {record.forwards[False]} forwards of modules with weights ran under autocast"
        )
        if level is SUSPICION:
            effect += "; a region is switched off here, as it may be without a GPU"
        yield _finding(record, "autocast_covers_nothing", regions or off, effect, level)
    if halves and uses:
        dtype = halves.pop()
        effect = (
            f"an update smaller than 1/{2048 if dtype == 'float16' else 256} of a weight is lost"
        )
        where: list[Event] = [e for e in record.of("step") if e.where][:1]
        if record.error is None or "FP16" not in record.error[1]:
            yield _finding(record, "half_weights", where, f"weights are in {dtype}: {effect}")


def _losses(record: Record) -> Iterator[Finding]:
    backwards = record.of("backward")
    mixed = bool([e for e in record.of("autocast") if e.grad]) or _scales(record)
    for dtype, level in (("float16", FAULT), ("bfloat16", SUSPICION)):
        events = [e for e in backwards if e.loss.dtype == dtype and not e.loss.has_gradient]
        limit = (
            "a loss above 65504 is inf, one below 6e-8 is 0, and a scale of 65536 is inf in it"
            if dtype == "float16"
            else "it has 3 digits"
        )
        if mixed:
            effect = f"began at a loss in {dtype}: {limit}"
            yield from _some(record, "loss_16_bits", events, effect, level=level)
    penalties = [e for e in backwards if e.loss.penalty]
    if penalties:
        effect = f"the gradients in it are {_number(penalties[-1].loss.penalty)} times as large"
        yield _finding(record, "penalty_scaled", penalties, effect)
    hidden = [e for e in backwards if e.loss.hides_nan]
    gradients = [e for e in record.of("hide") if e.of_gradient]
    replaced = [e for e in gradients if e.hidden]
    if hidden and mixed:
        effect = "began at a loss whose NaN would be 0"
        yield from _some(record, "nan_hidden", hidden, effect)
    elif replaced:
        values = sum(e.hidden for e in replaced)
        effect = (
            f"{values} values of gradients that were not finite were replaced, and stepped with"
        )
        yield _finding(record, "nan_hidden", replaced, effect)
    elif mixed and (gradients or any(e.hidden for e in record.of("hide"))):
        where = gradients or [e for e in record.of("hide") if e.hidden]
        effect = f"{sum(e.hidden for e in where)} values that were not finite were replaced here"
        yield _finding(record, "nan_hidden", where, effect, SUSPICION)


def _scaler_and_dtype(record: Record) -> Iterator[Finding]:
    regions = [e for e in record.of("autocast") if e.grad]
    dtypes = {e.dtype for e in regions}
    enabled = [s for s in record.scalers if s["enabled"] and not s["ours"]]
    scaled = any(e.loss.scale or e.loss.divisor < 1 / 8 for e in record.of("backward"))
    if dtypes == {"bfloat16"} and _scales(record) and all(e.explicit for e in regions):
        waits = [e for e in record.of("step") if e.via is not None]
        effect = "asked the device whether to skip, for nothing"
        lines = [s["where"] for s in enabled]
        yield from _some(record, "bfloat16_with_scaler", waits, effect, lines=lines)
    if "float16" in dtypes and not scaled and record.of("backward"):
        flush = "gradients of 16-bit products below 6e-8 are 0"
        unused = [s["where"] for s in enabled if not s["used"]]
        if unused:
            effect = f"a GradScaler is made and scales nothing: {flush}"
            yield _finding(record, "no_loss_scale", unused, effect)
        elif not _scales(record):
            where = [e.where for e in regions]
            yield _finding(record, "no_loss_scale", where, flush, SUSPICION)


def _tf32(record: Record) -> Iterator[Finding]:
    for event in record.of("tf32"):
        by = str(event.by)
        ours = any(f"/{name}/" in by for name in ("torch", "determined", "determined_amp"))
        if ours and not event.in_batch:
            continue
        what = f"{event.name} = {event.value}"
        if event.in_batch:
            yield _finding(record, "tf32", [event], f"{what} while batch {event.batch} trains")
            return
        if "site-packages" in by and _is_amp(record):
            yield _finding(record, "tf32", [event], f"{what}, set by {by}", SUSPICION)
            return


def _averages(record: Record) -> Iterator[Finding]:
    moved = [e for e in record.of("skipped step") if e.moved]
    lines = [line for event in moved for line in event.lines]
    effect = "moved it, though no weight had moved"
    yield from _some(record, "average_on_skipped", moved, effect, lines=lines)


def _syncs(record: Record) -> Iterator[Finding]:
    lines: Counter[Where] = Counter()
    for (where, _), count in record.syncs.items():
        lines[where] += count
    often = {where: n for where, n in lines.items() if n >= 0.5 * record.batches > 0}
    if often and _is_amp(record):
        total = sum(often.values()) / record.batches
        methods = sorted({method for where, method in record.syncs if where in often})
        effect = f"{total:.3g} in each batch, by {', '.join(methods)}"
        yield _finding(record, "synchronisation", often, effect, COST)


def _metrics(record: Record) -> Iterator[Finding]:
    for name, (as_is, exact) in record.metrics.items():
        if not math.isfinite(exact):
            continue
        change = abs(as_is - exact) / max(abs(exact), 1e-12) if as_is != exact else 0.0
        if math.isnan(change) or change > _MAYBE_CHANGED:
            sure = not change <= _CHANGED
            effect = f"{name} of the same weights: {as_is:.4g}, in float32 {exact:.4g}"
            regions = [e for e in record.of("autocast") if not e.grad]
            yield _finding(record, "eval_16_bits", regions, effect, FAULT if sure else SUSPICION)


def _checkpoint_of_a_loop(record: Record) -> Iterator[Finding]:
    """In a loop of the user's own: the optimizer is saved, and the scaler is not."""
    saves = [e for e in record.of("save") if e.optimizer]
    if record.determined or not saves or not _scales(record):
        return
    if not any(e.scale for e in record.of("save")):
        updates = record.of("update")
        effect = "after a resume it begins at init_scale again"
        effect += f", not at {_number(updates[-1].after)}" if updates else ""
        yield _finding(record, "scaler_not_saved", saves, effect)


def _ranks(record: Record) -> Iterator[Finding]:
    """The ranks of a distributed training have scales of their own."""
    used = [scales for scales in record.scales_of_ranks if scales]
    differ = [values for values in zip(*used, strict=False) if len(set(values)) > 1]
    if len(used) > 1 and (differ or len({len(scales) for scales in used}) > 1):
        different = sorted(set(differ[-1] if differ else (scales[-1] for scales in used)))
        effect = f"{len(differ)} of {max(map(len, used))} updates left different scales, as "
        effect += " and ".join(map(_number, different))
        lines = [scaler["where"] for scaler in record.scalers if scaler["used"]]
        yield _finding(record, "scale_differs_by_rank", lines, effect)


RULES: tuple[Rule, ...] = (
    _ranks,
    _error,
    _factors,
    _faint,
    _mixed,
    _step_twice,
    _clips,
    _clips_by_hand,
    _hidden_overflow,
    _schedules,
    _rates_by_hand,
    _accumulation,
    _autocast,
    _losses,
    _scaler_and_dtype,
    _metrics,
    _checkpoint_of_a_loop,
    _averages,
    _tf32,
    _syncs,
)


# What several runs show together.


def judge_checkpoint(record: Record) -> Iterator[Finding]:
    """What is wrong with the checkpoint that a run left."""
    if record.empty_scaler_state:
        off = [s for s in record.scalers if not s["enabled"]]
        effect = (
            "a run that goes on from it with AMP ends: 0 of the 5 values of its state are there"
        )
        by_device = not record.has_cuda and any(s["by_device"] for s in off)
        level = SUSPICION if by_device else FAULT  # it may be enabled on a GPU
        yield _finding(record, "empty_scaler_state", [s["where"] for s in off], effect, level)


def judge_resume(before: Record, after: Record) -> Iterator[Finding]:
    """What a resumed run has lost.

    Args:
        before: The run that saved the checkpoint at its end.
        after: A run in a fresh process that began with it.
    """
    if after.error is not None and "start" not in after.states:
        kind, text = after.error
        effect = ": ".join([kind, *text.splitlines()[:1]])
        yield _finding(before, "resume_fails", [after.raised], effect, SUSPICION)
        return
    if "end" not in before.states or "start" not in after.states:
        return
    end, start = before.states["end"], after.states["start"]
    for number, (old, new) in enumerate(zip(end["scale"], start["scale"], strict=False)):
        if old is not None and new is not None and old != new and before.scalers[number]["used"]:
            effect = f"scale {_number(old)} became {_number(new)} after resume"
            yield _finding(before, "scaler_not_saved", [before.scalers[number]["where"]], effect)
    for number, (old, new) in enumerate(zip(end["place"], start["place"], strict=False)):
        scheduler = before.schedulers[number]
        if scheduler["ours"] or scheduler["inner"] or old == new or old is None:
            continue
        effect = f"{scheduler['kind']} was at step {old} and is at step {new} after resume"
        yield _finding(before, "schedule_not_saved", [scheduler["where"]], effect)


# Steps of one and the same training whose gradients differ by this much are different ones.
_DEPENDS = 1.5


def dependence(low: Record, high: Record) -> float:
    """How much gradients of the same steps differ between two scales; 1 if they are equal."""
    ratios = [1.0]
    steps = ([s for w in _complete(run) for s in w.steps] for run in (low, high))
    for one, other in list(zip(*steps, strict=False))[:2]:
        if 0 < one.norm * other.norm < math.inf:
            ratios += [max(one.norm / other.norm, other.norm / one.norm)]
    return max(ratios)


# Faults that say why gradients depend on the scale.
_EXPLAIN = {
    *("unscaled_loss", "unscaled_twice", "step_without_scaler", "unscale_in_window"),
    *("clip_scaled", "clip_value_scaled", "clip_by_hand_scaled", "penalty_scaled"),
    *("half_weights", "raised", "no_loss_scale", "nan_hidden", "update_missing"),
    *("beyond_float16", "mixed_dtypes", "no_16_bit_kernel"),
}


def confirm(findings: Findings, record: Record, ratio: float, scales: tuple[float, float]) -> None:
    """Add a finding if the gradients of two runs depend on the scale and no rule says why."""
    if ratio > _DEPENDS and not _EXPLAIN & {finding.key for finding in findings.faults}:
        low, high = map(_number, scales)
        effect = f"from scale {low} to {high} the gradients of a step change {ratio:.3g} times"
        steps = [e for e in record.of("step") if e.via is not None][:1]
        findings.all.append(_finding(record, "depends_on_scale", steps, effect))
    findings.sort()
