"""Examines a trial: a few runs, each in a fresh process, and what they show
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from determined_amp.amp.plain_data import Config
from determined_amp.check.finding import CheckFindings
from determined_amp.check.fresh_process import run_afresh
from determined_amp.check.judge import judge_record, merged, without_consequences
from determined_amp.check.probe import RESUMED, Probe
from determined_amp.check.record import Record
from determined_amp.check.ruling import FAULT, REMEDIES, SUSPICION, Found, found, number
from determined_amp.check.stand_in import ONLY_ON_A_GPU
from determined_amp.experiment.files import temporary_folder

# Runs at most: one, one less disturbed, its resume, and one that moves the scale
# further.
RUNS = 4


def examine(
    config: Config,
    source: str,
    trial: str | None,
    notify: Callable[[str], None],
    run: Callable[[Probe], Record] | None = None,
) -> CheckFindings:
    """Examine the trial of an experiment.

    Args:
        config: The experiment configuration.
        source: Where it comes from, for error messages.
        trial: `module:Class`, if the configuration does not name it.
        notify: Called with what happens next.
        run: Runs a probe; by default in a fresh process.

    Raises:
        UserError: if the configuration is wrong, or the trial cannot be made or run
            here.
    """
    run = run or run_afresh
    with temporary_folder() as folder:
        probe = Probe(config, source, trial, folder)
        notify(
            "training a few batches, two of them with an overflow if it scales its loss"
        )
        record = run(probe)
        findings = judge_record(record)
        if any(finding.key == "raised" for finding in findings):
            notify("once more, since it raised an error")
            probe = replace(probe, overflows=())
            undisturbed = run(probe)
            if not undisturbed.error:
                record, findings = undisturbed, judge_record(undisturbed)
                findings.notes.append(
                    "it raises an error on an overflow, so none was forced"
                )
        findings.all += _found_by_further_runs(record, probe, notify, run)
    if not record.has_cuda:
        findings.notes.append(ONLY_ON_A_GPU)
    findings.all = without_consequences(merged(findings.all))
    findings.sort()
    return findings


def _found_by_further_runs(
    record: Record,
    first: Probe,
    notify: Callable[[str], None],
    run: Callable[[Probe], Record],
) -> Found:
    if any(first.folder.glob("*/state_dict.pth")):
        notify("resuming from the checkpoint")
        yield from _lost_by_resume(record, run(replace(first, resumes=True)))
    if record.scales and not record.error:
        notify("training while the loss scale moves, in float32")
        for finding in judge_record(run(replace(first, overflows=(), exact=True))):
            proofs = [finding.key, *REMEDIES[finding.key].get("proven_by", ())]
            if "depends_on_scale" in proofs and finding.level is FAULT:
                yield finding


def _lost_by_resume(before: Record, after: Record) -> Found:
    """What a resumed run has lost.

    Args:
        before: The run that saved the checkpoint.
        after: A run in a fresh process that began with it.
    """
    if not after.batches:
        if after.error:
            yield found(
                "resume_fails", [after.raised], after.first_line_of_error, SUSPICION
            )
        return
    for scaler, was, now in _changed(before.scalers, after.scalers):
        if scaler.used:
            effect = f"scale {number(was)} became {number(now)} after resume"
            yield found("scaler_not_saved", [scaler.where], effect)
    for schedule, was, now in _changed(before.schedules, after.schedules):
        if not schedule.ours:
            effect = f"{schedule.kind} was at step {was}, and is at {now} after resume"
            yield found("schedule_not_saved", [schedule.where], effect)
            return
    for optimizer in range(before.optimizers):
        went_on = before.of("step", optimizer=optimizer, after_save=True)[:RESUMED]
        resumed = after.of("step", optimizer=optimizer)[:RESUMED]
        lost = [
            pair
            for pair in zip(went_on, resumed, strict=False)
            if pair[0].rates != pair[1].rates
        ]
        if lost and not any(step.skipped for step in went_on + resumed):
            was, now = (number(float(step.rates[0])) for step in lost[0])
            effect = f"a step after a resume has the rate {now}; without a break {was}"
            yield found("schedule_not_saved", [], effect)
            return


def _changed(
    before: Sequence[Any], after: Sequence[Any]
) -> Iterator[tuple[Any, Any, Any]]:
    """What a resume has not brought back: scalers or schedules, their state before and
    after it.
    """
    for one, again in zip(before, after, strict=False):
        was, now = one.states.get("saved"), again.states.get("resumed")
        if None not in (was, now) and was != now:
            yield one, was, now
