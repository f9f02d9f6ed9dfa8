"""Runs `train`, `score`, `find` and `check` as the task of a trial on a Determined
cluster.

The platform has sampled the hyperparameters of the trial; `info.trial.hparams` has
them.

score   Measures on a few frozen batches how many optimizer steps the trial's loss scale
        loses; nothing is trained. All trials use the seed of the experiment, so they
        have the same parameters and batches. If several trials lose none, the platform
        may name any of them as the best.
find    Finds the loss scale in one pass over a few batches. The log ends with tables
        and the verdict. The checkpoint has everything in `loss_scale.json`.
check   Says what is wrong with the trial's own AMP. The findings end the log.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import determined as det
from determined import core, pytorch

from determined_amp.amp.errors import UserError
from determined_amp.amp.plain_data import Metrics, Values
from determined_amp.check.doctor import examine
from determined_amp.experiment.experiment import Experiment, experiment_in, parse
from determined_amp.experiment.failures import faults_of_the_trial
from determined_amp.experiment.hyperparameters import TRIAL_SEED
from determined_amp.experiment.score_check import check_score
from determined_amp.finder.found_scale import FILE_NAME, FoundScale
from determined_amp.local.open_trial import OpenTrial
from determined_amp.runs.run import FAULTS
from determined_amp.trial.determined_private import (
    average_by_default,
    checkpoint_context,
    task_configuration,
    train_context,
)
from determined_amp.trial.fitting import fit
from determined_amp.trial.make import trial_of_run
from determined_amp.trial.notes import note, note_on_master, show_failure, show_status

logger = logging.getLogger(__name__)


# In the functions below, `trial` is the option `--trial`, and `words` are those of the
# command.


def train_task(trial: str | None, words: Sequence[str]) -> None:
    """Train the trial of this task."""
    experiment = _experiment(trial)
    _ = experiment.max_length  # raises if the configuration has none
    start_ranks(words)
    of_this_task = task_info().trial
    if TRIAL_SEED in of_this_task.hparams:
        of_this_task.trial_seed = experiment.seed
    with _context(experiment) as context:
        trained = trial_of_run(experiment, context)
        fit(trained, context)


def score_task(trial: str | None, batches: int) -> None:
    """Score the loss scale of the trial of this task."""
    experiment = _experiment(trial)
    check_score(experiment)
    with _opened(experiment) as opened:
        report = train_context(opened.context)
        metrics = opened.score(batches)
        leave_answer(
            report, f"{metrics['steps_lost']:.3g} steps lost", batches, metrics
        )


def find_task(trial: str | None, batches: int, words: Sequence[str]) -> None:
    """Find the loss scale of the trial of this task."""
    experiment = _experiment(trial)
    start_ranks(words)
    with _opened(experiment) as opened:
        answer = opened.find(batches)
        if opened.context.distributed.rank == 0:
            _leave_finding(opened.context, answer, batches)
            print(answer)  # last, because the log also contains the reports


def check_task(trial: str | None, *, as_json: bool) -> None:
    """Examine the trial of this task. The findings end the log, and the number of
    faults is a metric.
    """
    with task_without_trial() as (config, core_context):
        experiment = experiment_in(config, "experiment", trial=trial)
        findings = examine(experiment, print)
        faults = len(findings.faults)
        status = f"{faults} fault{'s' * (faults != 1)}"
        leave_answer(core_context.train, status, 1, {FAULTS: faults}, faults=faults)
    print(findings.to_json() if as_json else findings)


@contextmanager
def task_without_trial() -> Iterator[tuple[Values, core.Context]]:
    """Yield configuration and context of a task that makes its trial in other
    processes.

    Raises:
        UserError: if the task has several slots.
    """
    info = task_info()
    slots = _slots_of(info)
    if slots > 1:
        raise UserError(
            f"resources.slots_per_trial: got {slots}; allowed: 1 for compare and "
            "check, whose runs are single processes"
        )
    config = {
        **task_configuration(info),
        "hyperparameters": info.trial.hparams,
    }
    # In every task without TensorFlow, this logger warns that it writes by torch.
    logging.getLogger("determined.tensorboard").setLevel(logging.ERROR)
    with core.init(distributed=core.DummyDistributedContext()) as core_context:
        yield config, core_context


def leave_answer(
    train: core.TrainContext, status: str, batches: int, metrics: Metrics, **noted: Any
) -> None:
    """Report the result of a task to the master: its status, metrics, and metadata."""
    note(train, **noted)
    show_status(train, status)
    train.report_validation_metrics(steps_completed=batches, metrics=metrics)
    train.report_progress(1.0)


def _slots_of(info: det.ClusterInfo) -> int:
    return max(len(info.slot_ids), 1) * len(info.container_addrs)


def start_ranks(command: Sequence[str]) -> None:
    """In a task of several slots, replace this process by Determined's launcher.

    The launcher starts `command` for every slot; in a process that it started, this
    function returns. Call it after checking the configuration, so that mistakes are
    reported once and without the launcher's traceback.
    """
    if _slots_of(task_info()) == 1 or "RANK" in os.environ:
        return
    rank = [sys.executable, "-m", "determined_amp", *command]
    launcher = [sys.executable, "-m", "determined.launch.torch_distributed"]
    os.execv(sys.executable, [*launcher, *rank])  # noqa: S606


def task_info() -> det.ClusterInfo:
    """Determined's information on the trial that this task runs."""
    info = det.get_cluster_info()
    assert info is not None  # `is_task` has checked it
    return info


def _experiment(trial: str | None) -> Experiment:
    """The experiment of a trial on a cluster, with its sampled hyperparameters."""
    info = task_info()
    return parse(
        task_configuration(info),
        "experiment",
        trial=trial,
        hyperparameters=info.trial.hparams,
    )


@contextmanager
def _context(experiment: Experiment) -> Iterator[pytorch.PyTorchTrialContext]:
    """Yield Determined's context of a task.

    Determined drops the reason of an `InvalidHP`. We write the reason to the overview
    and the metadata of the run, and print it as the last line of the log.
    """
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    hparams = dict(experiment.hyperparameters)
    frequency = experiment.aggregation_frequency
    with (
        ExitStack() as after_the_context,
        pytorch.init(hparams=hparams, aggregation_frequency=frequency) as context,
    ):
        averages = experiment.platform.optimizations.average_aggregated_gradients
        average_by_default(context, averages)
        try:
            with faults_of_the_trial():
                yield context
        except det.InvalidHP as error:
            # Determined's own lines go to stderr. On stdout, this line might not be the
            # last one of the log.
            said = f"invalid trial: {error}"
            after_the_context.callback(print, said, file=sys.stderr, flush=True)
            if context.distributed.rank == 0:
                show_failure(train_context(context), str(error))
            raise


@contextmanager
def _opened(experiment: Experiment) -> Iterator[OpenTrial]:
    """Make the trial with the seed of the experiment instead of the trial's seed."""
    task_info().trial.trial_seed = experiment.seed
    with _context(experiment) as context:
        amp = experiment.amp
        note_on_master(
            context,
            seed=experiment.seed,
            failure=None,
            precision=amp and amp.precision.value,
            init_scale=amp and amp.first_scale,
        )
        yield OpenTrial(trial_of_run(experiment, context), context, experiment)


def _leave_finding(
    context: pytorch.PyTorchTrialContext, answer: FoundScale, batches: int
) -> None:
    """Report the finder's answer to the master, and store the whole answer."""
    finding = answer.finding
    scale_log2 = finding.answer_log2
    metrics = {"range_bits": finding.range_bits}
    status = finding.verdict.value
    init_scale = None
    if scale_log2 is not None:
        status = f"init_scale 2^{scale_log2}"
        init_scale = 2.0**scale_log2
        metrics["init_scale_log2"] = scale_log2
    leave_answer(
        train_context(context), status, batches, metrics, init_scale=init_scale
    )
    storage = checkpoint_context(context).store_path({"steps_completed": batches})
    with storage as (folder, _):
        (folder / FILE_NAME).write_text(answer.json_text())
