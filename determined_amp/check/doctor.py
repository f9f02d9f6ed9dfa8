"""Examines a trial: a few runs, each in a fresh process, and what they show together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from determined_amp.check.finding import CheckFinding, CheckFindings, Level
from determined_amp.check.fresh_process import run_afresh
from determined_amp.check.judge import judge_record, without_consequences
from determined_amp.check.probe import RESUMED, Probe
from determined_amp.check.record import Record
from determined_amp.check.ruling import found, number
from determined_amp.check.scale_moves import Moves
from determined_amp.check.stand_in import ONLY_ON_A_GPU
from determined_amp.experiment.files import temporary_folder

# The loss scale of the run in float32 that moves it. Float32 needs none, so it may go down to 1.
_SCALE = 4096.0
_MOVES = Moves(by=_SCALE, least=1.0)

# Steps of that run: half of them with another scale.
_STEPS = 17

# Runs at most: one, one less disturbed, its resume, and one that moves the scale.
RUNS = 4

# Findings that follow from calls, and that the measured update refutes.
_REFUTED = {"unscaled_loss", "clip_scaled", "clip_value_scaled"}

Run = Callable[[Probe], Record]


def examine(
    config: Mapping[str, Any],
    source: str,
    trial: str | None,
    notify: Callable[[str], None],
    run: Run | None = None,
) -> CheckFindings:
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
        findings = judge_record(record)
        if any(finding.key == "raised" for finding in findings):
            notify("once more, since it raised an error")
            again = replace(first, overflows=())
            undisturbed = run(again)
            if undisturbed.error is None:
                first, record, findings = again, undisturbed, judge_record(undisturbed)
                findings.notes.append("it raises an error on an overflow, so none was forced")
        findings.all += _in_the_checkpoint(record)
        if any(folder.glob("*/state_dict.pth")):
            notify("resuming from the checkpoint")
            resumed = run(replace(first, resumes=True, saves=False))
            findings.all += _lost_by_resume(record, resumed)
    if any(scaler.used for scaler in record.scalers) and record.error is None:
        notify("training while the loss scale moves, in float32")
        with temporary_folder() as folder:
            moving = Probe(config, source, trial, folder, _STEPS, (), _SCALE, _MOVES)
            _compare(findings, run(moving))
    if not record.has_cuda:
        findings.notes.append(ONLY_ON_A_GPU)
    findings.all = without_consequences(findings.all)
    findings.sort()
    return findings


def _in_the_checkpoint(record: Record) -> Iterator[CheckFinding]:
    """What is wrong with the checkpoint that a run left."""
    if record.empty_scaler_state and (record.has_cuda or record.is_amp):
        # Without a GPU what is off may be on elsewhere, unless AMP needs no scaler.
        bfloat16 = any(each.explicit and each.dtype == "bfloat16" for each in record.regions)
        level = Level.FAULT if record.has_cuda or bfloat16 else Level.SUSPICION
        off = [scaler.where for scaler in record.scalers if not scaler.enabled]
        effect = "a run with AMP that goes on from it ends: 0 of 5 values of its state are there"
        yield found("empty_scaler_state", off, effect, level)


def _lost_by_resume(before: Record, after: Record) -> Iterator[CheckFinding]:
    """What a resumed run has lost.

    Args:
        before: The run that saved the checkpoint at its end.
        after: A run in a fresh process that began with it.
    """
    if not after.batches:
        if after.error is not None:
            effect = ": ".join([after.error[0], *after.error[1].splitlines()[:1]])
            yield found("resume_fails", [after.raised], effect, Level.SUSPICION)
        return
    for scaler, resumed in zip(before.scalers, after.scalers, strict=False):
        old, new = scaler.scales.get("end"), resumed.scales.get("start")
        if scaler.used and old is not None and new is not None and old != new:
            effect = f"scale {number(old)} became {number(new)} after resume"
            yield found("scaler_not_saved", [scaler.where], effect)
    for schedule, again in zip(before.schedules, after.schedules, strict=False):
        places = schedule.places.get("end"), again.places.get("start")
        if not schedule.ours and None not in places and places[0] != places[1]:
            effect = f"{schedule.kind} was at step {places[0]}, and is at {places[1]} after resume"
            yield found("schedule_not_saved", [schedule.where], effect)
            return
    for optimizer in range(before.optimizers):
        went_on = before.of("step", optimizer=optimizer, after_save=True)
        pairs = [*zip(went_on, after.of("step", optimizer=optimizer), strict=False)][:RESUMED]
        lost = [(one, other) for one, other in pairs if one.rates != other.rates]
        if lost and not any(step.skipped for pair in pairs for step in pair):
            was, now = (number(float(step.rates[0])) for step in lost[0])
            effect = f"a step after a resume has the rate {now}; without a break {was}"
            yield found("schedule_not_saved", [], effect)
            return


def _compare(findings: CheckFindings, moved: Record) -> None:
    """Add what a run shows whose scale moved, and drop what it refutes.

    Args:
        findings: Those of a run whose scale did not move.
        moved: The run whose scale did.
    """
    shown = judge_record(moved)
    keys = {finding.key for finding in shown}
    if moved.error is None:
        findings.all = [f for f in findings if f.key not in _REFUTED - keys]
    measured = [finding for finding in shown if finding.key in ("depends_on_scale", "scales_mixed")]
    known = {finding.key for finding in findings}
    findings.all += [finding for finding in measured if finding.key not in known]
