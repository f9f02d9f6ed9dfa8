"""Writes the report that compares precisions: answer, sentences, picture and table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import sub
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from determined_amp.amp.metric_names import MetricName
from determined_amp.amp.plain_data import Values
from determined_amp.amp.settings import SCALER_KEYS, Precision, yaml_lines
from determined_amp.finder.scale_score import DEFAULT_LOG2
from determined_amp.report import Sentences
from determined_amp.report.answer import (
    RULE,
    Answer,
    answer_of,
    what_to_type,
)
from determined_amp.report.change import Change
from determined_amp.report.comparison import Comparison, differences
from determined_amp.report.page import (
    Panel,
    Table,
    Written,
    write_page,
)
from determined_amp.report.precision_runs import Pair, PrecisionRuns, counted, speed_of
from determined_amp.runs.run import AMP, TRIAL, Run

# AMP may not speed up a loop that waits for data for more than this share of its time.
WAITS_FOR_DATA = 0.2

_CAPTION = (
    "A dot is the mean change over all seeds, its bar the 95 % interval. Two "
    "precisions are equal if the whole bar is inside the green band. A dot without a "
    "bar has one seed."
)


def write_precision_report(comparison: Comparison, folder: Path) -> Written:
    """Write the report on some compared runs into a folder.

    Raises:
        UserError: if it cannot be written.
    """
    answer = answer_of(comparison)
    names = ("metric", "margin", "pairs", "left_out")
    record = {name: getattr(comparison, name) for name in names}
    return write_page(
        folder,
        "precision",
        answer=answer.text,
        yaml=yaml_of(comparison, answer),
        sentences=list(precision_sentences(comparison)),
        panels=change_panels(comparison.pairs, comparison.metric),
        caption=_CAPTION,
        table=precision_table(comparison),
        origin=_method(comparison),
        record={"use": answer.precision, **record},
    )


def _scaler(run: Run) -> Values:
    return {key: run.settings.get(f"{AMP}.{key}") for key in SCALER_KEYS}


def yaml_of(comparison: Comparison, answer: Answer) -> str:
    """The lines to paste into an experiment YAML, without PyTorch's default scale."""
    changes: Values = {"precision": answer.precision.value}
    islands = comparison.settings.get(f"{AMP}.fp32_modules")
    if answer.precision.autocasts and islands:
        changes["fp32_modules"] = list(islands)
    if answer.precision is Precision.AMP_FP16:
        run = next(run for run in comparison.runs if run.precision is answer.precision)
        scale = run.settings[f"{AMP}.init_scale"]
        if scale != 2.0**DEFAULT_LOG2:
            changes["init_scale"] = scale
    return yaml_lines(changes)


def precision_sentences(comparison: Comparison) -> Sentences:
    """All sentences besides the answer. What to type comes first."""
    if more := what_to_type(comparison):
        yield more
    for pair in comparison.pairs:
        yield _pair_sentence(pair, comparison.metric)
    yield from comparison.notes
    yield from _waiting(comparison)
    yield from _failed(comparison)
    if comparison.left_out:
        yield f"left out: {'; '.join(comparison.left_out)}"
    yield from _audited(comparison)
    yield from _mixed(comparison)
    yield from _caveats(comparison)
    yield f"measured on {comparison.setting}"
    yield (
        "this says nothing about accuracy after more batches, other sizes or other "
        "devices"
    )


def _pair_sentence(pair: Pair, metric: str) -> str:
    parts = ["speed not measured"] if pair.speed is None else []
    for name, change in (("speed", pair.speed), ("memory", pair.memory)):
        if change is not None:
            parts.append(f"{name} {change}{change.verdict}")
    change = pair.metric
    parts.append(f"{metric} {change}{change.verdict} (margin {change.margin:.2g})")
    pairs = f"{counted(change.pairs, 'pair')} of equal seed"
    names = f"{pair.precision.value} against {pair.against.value}"
    return f"{names}, {pairs}: {'; '.join(parts)}"


def _waiting(comparison: Comparison) -> Sentences:
    waiting = []
    for same in comparison.precisions:
        share = same.data_wait_share
        if share is not None and share > WAITS_FOR_DATA:
            waiting.append(f"{same.name} {share:.0%}")
    if waiting:
        yield (
            f"the loop waits for data more than {WAITS_FOR_DATA:.0%} of the time "
            f"({', '.join(waiting)}): AMP may not help there, more workers of the data "
            "loader may"
        )


def _failed(comparison: Comparison) -> Sentences:
    for same in comparison.precisions:
        if same.failed:
            failed = [
                f"{run.seed_name} ({run.name}): {run.reason}" for run in same.failed
            ]
            rest = (
                "; its numbers are those of the runs that finished" if same.runs else ""
            )
            of = len(failed) + len(same.runs)
            yield (
                f"{same.name}: {len(failed)} of {of} runs failed:"
                f" {'; '.join(failed)}{rest}"
            )


def _audited(comparison: Comparison) -> Sentences:
    runs = comparison.completed
    unaudited = [run.short_name for run in runs if run.audit_share is None]
    if unaudited:
        yield (
            "not audited, so whether the precision was on is unknown:"
            f" {', '.join(unaudited)}"
        )
    elif all(run.audit_share == 1.0 for run in runs):
        yield (
            "audit: every finished run computed all products in the precision that it"
            " asks for"
        )
    for same in comparison.precisions:
        share = same.audit_share
        if share is not None and share < 1.0:
            yield (
                f"audit: {same.name} computed at least {_share(share)} of the FLOPs of "
                "the first batch in the precision that it asks for, the rest in another"
            )


def _share(share: float) -> str:
    """A share in percent. A share below 1 is never rounded up to 100 %."""
    return f"{share if share == 1.0 else min(share, 0.999):.1%}"


def _mixed(comparison: Comparison) -> Sentences:
    """Name the scaler settings and versions in which the runs differ."""
    scaled = [run for run in comparison.runs if run.precision is Precision.AMP_FP16]
    by_scaler = differences(scaled, _scaler)
    by_version = differences(comparison.completed, lambda run: run.machine.versions)
    for difference in (*by_scaler, *by_version):
        yield f"the runs differ in {difference}"


def _caveats(comparison: Comparison) -> Sentences:
    if any(run.is_only_fp32 for run in comparison.completed):
        yield (
            "tf32 is fp32 on this device, which has no TF32: it is shown, and not"
            " compared"
        )
    if any(run.shares_device for run in comparison.runs):
        yield (
            "several trials ran at the same time: their speeds are left out; compare "
            "speeds with one worker"
        )
    if not comparison.machine.on_gpu:
        yield (
            "on a CPU speed drifts from run to run, with heat and load: trust only "
            "ratios far outside the range of the runs. The memory is that of the whole "
            "process, libraries included"
        )


def change_panels(pairs: Sequence[Pair], metric: str) -> list[Panel]:
    """A panel for speed and one for the metric, with a dot for each pair."""
    speeds = [(pair, pair.speed) for pair in pairs if pair.speed is not None]
    metrics = [(pair, pair.metric) for pair in pairs]
    drawn = (("Times as fast", speeds), (f"Difference of {metric}", metrics))
    return [_panel(title, changes) for title, changes in drawn if changes]


def _panel(title: str, changes: Sequence[tuple[Pair, Change]]) -> Panel:
    low, middle, high = zip(*(change.ends for _, change in changes), strict=True)
    names = [
        f"{pair.precision.value}\n- {pair.against.value}:\n{change.judgement.value}"
        for pair, change in changes
    ]
    _, one = changes[0]
    band = one.shown(-one.margin), one.shown(one.margin)
    errors = [[*map(sub, middle, low)], [*map(sub, high, middle)]]
    return Panel(title, "", [*enumerate(middle)], "", errors, names, band)


def precision_table(comparison: Comparison) -> Table:
    """A row per precision."""
    return [list(_cells(same, comparison)) for same in comparison.precisions]


def _cells(same: PrecisionRuns, comparison: Comparison) -> Iterator[tuple[str, Any]]:
    """The head and the cell of each column, for one precision."""
    yield "precision", same.name
    failed = f", {len(same.failed)} failed" if same.failed else ""
    yield "runs", f"{len(same.runs)}{failed}"
    middle = f"{mean(same.values):.4g}" if same.runs else ""
    std = f" ± {stdev(same.values):.2g}" if len(same.runs) > 1 else ""
    yield comparison.metric, f"{middle}{std}"
    yield "samples/s", same.spread(speed_of)
    yield "speed", _speed(same, comparison)
    memory = "allocated" if comparison.machine.on_gpu else "resident, not judged"
    yield f"peak MiB, {memory}", same.last(MetricName.PEAK_MEMORY_MIB)
    yield "applied steps", same.last(MetricName.APPLIED_STEPS)
    yield "skipped", same.last(MetricName.SKIPPED_STEPS)
    yield "loss scale", _scale(same)
    waits = same.data_wait_share
    yield "waits for data", None if waits is None else f"{waits:.0%}"
    share = same.audit_share
    yield "audit", None if share is None else _share(share)


def _speed(same: PrecisionRuns, comparison: Comparison) -> str:
    """How many times as fast as the baseline a precision is; empty if unknown."""
    if same.precision is comparison.baseline:
        return "1"
    pair = comparison.against_baseline(same.precision)
    return f"{pair.times_as_fast:.2f}x" if pair and pair.speed else ""


def _scale(same: PrecisionRuns) -> str:
    """The range of final loss scales; only float16 has one."""
    scale = same.last(MetricName.LOSS_SCALE_LOG2)
    if scale is None or same.precision is not Precision.AMP_FP16:
        return "none" if same.runs else ""
    ends = dict.fromkeys((scale.low, scale.high))
    return " to ".join(f"2^{end:g}" for end in ends)


def _method(comparison: Comparison) -> str:
    """The trial, how the answer was found, and the versions."""
    versions = comparison.machine.versions.items()
    known = ", ".join(f"{name} {value}" for name, value in versions if value)
    return (
        f"Precisions: {comparison.settings[TRIAL]}. Speed is that of the steady "
        f"reports: the first report of every process is left out. The rule: {RULE}. "
        f"Versions: {known}."
    )
