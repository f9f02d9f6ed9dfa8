"""Examines a trial: a few runs, each in a fresh process, and what they show
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from determined_amp.amp.plain_data import Config
from determined_amp.check.finding import ROWS, CheckFinding, CheckFindings, Level
from determined_amp.check.fresh_process import run_afresh
from determined_amp.check.judge import concluded, judge_record, told
from determined_amp.check.probe import Probe
from determined_amp.check.record import Record
from determined_amp.check.stand_in import ONLY_ON_A_GPU
from determined_amp.experiment.files import temporary_folder

# Runs at most: one, one less disturbed, its resume, and one that moves the scale
# further.
RUNS = 4

ASK_FOR_AMP = (
    "--precision amp_fp16, or hyperparameters.amp.precision: amp_fp16 in the YAML, "
    "examines this trial with AMP"
)


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
    if findings.trained and not (findings.amp or record.scalers):
        findings.notes.append(ASK_FOR_AMP)
    if not record.has_cuda:
        findings.notes.append(ONLY_ON_A_GPU)
    findings.all = concluded(findings.all)
    return findings


def _found_by_further_runs(
    record: Record,
    first: Probe,
    notify: Callable[[str], None],
    run: Callable[[Probe], Record],
) -> Iterator[CheckFinding]:
    if any(first.folder.glob("*/state_dict.pth")):
        notify("resuming from the checkpoint")
        yield from told("resumed", record, run(replace(first, resumes=True)))
    if record.scales and not record.error:
        notify("training while the loss scale moves, in float32")
        for finding in judge_record(run(replace(first, overflows=(), exact=True))):
            proofs = [finding.key, *ROWS[finding.key].get("proven_by", ())]
            if "depends_on_scale" in proofs and finding.level is Level.FAULT:
                yield finding
