"""Examines a trial: a few runs, each in a fresh process, and what they show
together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from determined_amp.amp.plain_data import Config
from determined_amp.check.finding import CheckFindings
from determined_amp.check.judge import concluded, judge_record, told
from determined_amp.check.probe import Probe, run_afresh
from determined_amp.check.record import Record
from determined_amp.check.stand_in import ONLY_ON_A_GPU
from determined_amp.experiment.files import temporary_folder

# Runs at most: one, one less disturbed, and its resume.
RUNS = 3

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
        if any(folder.glob("*/state_dict.pth")):
            notify("resuming from the checkpoint")
            resumed = run(replace(probe, resumes=True))
            findings.all += told("resumed", record, resumed)
    if findings.trained and not (findings.amp or record.scalers):
        findings.notes.append(ASK_FOR_AMP)
    if not record.has_cuda:
        findings.notes.append(ONLY_ON_A_GPU)
    findings.all = concluded(findings.all)
    return findings
