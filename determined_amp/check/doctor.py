"""Examines a trial: a few runs, each in a fresh process, and what they show together."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from determined_amp.amp.errors import UserError
from determined_amp.check import probe as probes
from determined_amp.check.finding import Findings
from determined_amp.check.probe import Probe
from determined_amp.check.record import Record
from determined_amp.check.rules import confirm, dependence, judge, judge_checkpoint, judge_resume
from determined_amp.check.stand_in import ONLY_ON_A_GPU
from determined_amp.experiment.files import temporary_folder
from determined_amp.trial.determined_0_38 import leave_the_cluster

# Two scales at which the gradients of a step must be the same.
SCALES = (16.0, 4096.0)

# Seconds that one run may take, with its start.
PATIENCE = 300.0

# Runs at most: one, its resume, and one at each scale; and two that are less disturbed.
RUNS = 6

Run = Callable[[Probe], Record]

# Ways to run a trial that raises an error, and what they leave out.
_OTHERWISE: tuple[tuple[dict[str, Any], str], ...] = (
    ({"overflows": ()}, "it raises an error on an overflow, so none was forced"),
    (
        {"overflows": (), "pretends": False},
        "it raises an error where a GPU is pretended or a step overflows, so neither was done",
    ),
)


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
        try:
            record = run(first)
        except UserError:  # maybe it needs more of a GPU than can be pretended
            first = replace(first, pretends=False)
            record = run(first)
        findings = judge(record)
        for change, note in _OTHERWISE:
            if any(finding.key == "raised" for finding in findings):
                notify("once more, since it raised an error")
                again = replace(first, **change)
                undisturbed = run(again)
                if undisturbed.error is None:
                    first, record, findings = again, undisturbed, judge(undisturbed)
                    findings.notes.append(note)
        findings.all += judge_checkpoint(record)
        if any(folder.glob("*/state_dict.pth")):
            notify("resuming from the checkpoint")
            findings.all += judge_resume(record, run(replace(first, resumes=True, saves=False)))
    if any(scaler["used"] for scaler in record.scalers) and record.error is None:
        notify("training two steps at each of two loss scales, in float32")
        with temporary_folder() as folder:
            short = replace(first, folder=folder, saves=False, windows=2, overflows=())
            low, high = (run(replace(short, scale=scale)) for scale in SCALES)
        confirm(findings, record, dependence(low, high), SCALES)
    if not record.has_cuda:
        findings.notes.append(ONLY_ON_A_GPU)
    findings.sort()
    return findings


def run_afresh(probe: Probe) -> Record:
    """Run a probe in a process of its own, which prints nothing.

    Raises:
        UserError: if the trial cannot be run.
    """
    processes = multiprocessing.get_context("forkserver")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=_serve, args=(theirs, probe, os.getcwd()))
    process.start()
    theirs.close()
    try:
        if not ours.poll(PATIENCE):
            raise UserError(
                f"a run of the trial took more than {PATIENCE:.0f} s; give it less data"
            )
        answer = ours.recv()
    except EOFError:
        process.join()
        raise UserError(f"a run of the trial died with exit status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if isinstance(answer, UserError):
        raise answer
    if isinstance(answer, str):
        raise UserError(f"a run of the trial failed: {answer}")
    assert isinstance(answer, Record)
    return answer


def _serve(connection: Connection, probe: Probe, directory: str) -> None:
    os.chdir(directory)
    leave_the_cluster()  # the doctor may be a task of one, but its runs are not
    multiprocessing.set_start_method("fork", force=True)  # for data loaders, as in a training
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(nothing, stream.fileno())
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    answer: Any
    try:
        answer = probes.run(probe)
    except UserError as error:
        answer = UserError(str(error))
    except BaseException:  # a trial may raise anything, and the doctor must hear of it
        answer = traceback.format_exc().strip().splitlines()[-1]
    connection.send(answer)
