"""Examines a trial: a few runs, each in a fresh process, and what they show together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from determined_amp.check.finding import Finding, Findings, Level
from determined_amp.check.fresh_process import run_afresh
from determined_amp.check.probe import Probe
from determined_amp.check.record import Record
from determined_amp.check.rules import found, judge, number
from determined_amp.check.stand_in import ONLY_ON_A_GPU
from determined_amp.experiment.files import temporary_folder

# Two scales at which the gradients of a step must be the same, and how much they may differ. Above
# the second limit that is no chance; below it, two runs at the same scale must not differ.
SCALES = (16.0, 4096.0)
_MAY_DEPEND, _DEPENDS = 1.01, 1.5
_SAME = 1.001

# Runs at most: one, one less disturbed, its resume, two at one scale and one at another.
RUNS = 6

Run = Callable[[Probe], Record]

# Faults that say why gradients depend on the scale.
_EXPLAIN = {
    *("unscaled_loss", "unscaled_twice", "step_without_scaler", "unscale_in_window"),
    *("clip_scaled", "clip_value_scaled", "clip_by_hand_scaled", "penalty_scaled"),
    *("half_weights", "raised", "no_loss_scale", "nan_hidden", "update_missing"),
    *("beyond_float16", "mixed_dtypes", "no_16_bit_kernel"),
}


def examine(
    config: Mapping[str, Any],
    source: str,
    trial: str | None,
    notify: Callable[[str], None],
    run: Run | None = None,
) -> Findings:
    """Examine the trial of an experiment.

    Args:
        config: The experiment configuration.
        source: Where it comes from, for error messages.
        trial: `module:Class`, if the configuration does not name it.
        notify: Called with what happens next.
        run: Runs a probe; by default in a fresh process.

    Raises:
        UserError: if the configuration is wrong, or the trial cannot be made or run here.
    """
    run = run or run_afresh
    with temporary_folder() as folder:
        first = Probe(config, source, trial, folder, saves=True)
        notify("training a few batches, two of them with an overflow if it scales its loss")
        record = run(first)
        findings = judge(record)
        if any(finding.key == "raised" for finding in findings):
            notify("once more, since it raised an error")
            again = replace(first, overflows=())
            undisturbed = run(again)
            if undisturbed.error is None:
                first, record, findings = again, undisturbed, judge(undisturbed)
                findings.notes.append("it raises an error on an overflow, so none was forced")
        findings.all += _in_the_checkpoint(record)
        if any(folder.glob("*/state_dict.pth")):
            notify("resuming from the checkpoint")
            resumed = run(replace(first, resumes=True, saves=False))
            findings.all += _lost_by_resume(record, resumed)
    if any(scaler.used for scaler in record.scalers) and record.error is None:
        notify("training two steps at each of two loss scales, in float32")
        with temporary_folder() as folder:
            short = replace(first, folder=folder, saves=False, windows=2, overflows=())
            low, high = (run(replace(short, scale=scale)) for scale in SCALES)
            ratio = _ratio(low, high)
            if _MAY_DEPEND < ratio <= _DEPENDS:
                repeated = run(replace(short, scale=SCALES[0]))
                if _ratio(low, repeated) > _SAME:
                    ratio = 1.0  # it draws numbers that no seed fixes
        if not _EXPLAIN & {finding.key for finding in findings.faults}:
            findings.all += _by_the_scale(record, ratio)
    if not record.has_cuda:
        findings.notes.append(ONLY_ON_A_GPU)
    findings.sort()
    return findings


def _in_the_checkpoint(record: Record) -> Iterator[Finding]:
    """What is wrong with the checkpoint that a run left."""
    if record.empty_scaler_state and (record.has_cuda or record.is_amp):
        off = [scaler for scaler in record.scalers if not scaler.enabled]
        effect = (
            "a run that goes on from it with AMP ends: 0 of the 5 values of its state are there"
        )
        # Without a GPU what is off may be on elsewhere, unless AMP needs no scaler.
        bfloat16 = any(each.explicit and each.dtype == "bfloat16" for each in record.regions)
        level = Level.FAULT if record.has_cuda or bfloat16 else Level.SUSPICION
        yield found("empty_scaler_state", [scaler.where for scaler in off], effect, level)


def _lost_by_resume(before: Record, after: Record) -> Iterator[Finding]:
    """What a resumed run has lost.

    Args:
        before: The run that saved the checkpoint at its end.
        after: A run in a fresh process that began with it.
    """
    if not after.batches:
        if after.error is not None:
            kind, text = after.error
            effect = ": ".join([kind, *text.splitlines()[:1]])
            yield found("resume_fails", [after.raised], effect, Level.SUSPICION)
        return
    for scaler, resumed in zip(before.scalers, after.scalers, strict=False):
        old, new = scaler.scales.get("end"), resumed.scales.get("start")
        if scaler.used and old is not None and new is not None and old != new:
            effect = f"scale {number(old)} became {number(new)} after resume"
            yield found("scaler_not_saved", [scaler.where], effect)
    for schedule, again in zip(before.schedules, after.schedules, strict=False):
        old, new = schedule.places.get("end"), again.places.get("start")
        if schedule.ours or schedule.inner or None in (old, new):
            continue
        if old != new:
            effect = f"{schedule.kind} was at step {old} and is at step {new} after resume"
            yield found("schedule_not_saved", [schedule.where], effect)


def _by_the_scale(record: Record, ratio: float) -> Iterator[Finding]:
    """Whether gradients of the same steps differ between two scales, and no rule says why."""
    if ratio > _MAY_DEPEND:
        scales = " to ".join(map(number, SCALES))
        effect = f"from scale {scales} the gradients of a step change {ratio:.3g} times"
        scaled = [step for step in record.of("step") if step.scaled][:1]
        yield found("depends_on_scale", scaled, effect)


def _ratio(one: Record, other: Record) -> float:
    """The largest ratio of the norms of gradients in the first two steps; 1 if they are equal."""
    ratios = [1.0]
    steps = ([step for window in run.complete for step in window.steps] for run in (one, other))
    for mine, theirs in list(zip(*steps, strict=False))[:2]:
        if 0 < mine.norm * theirs.norm < math.inf:
            ratios += [mine.norm / theirs.norm, theirs.norm / mine.norm]
    return max(ratios)
