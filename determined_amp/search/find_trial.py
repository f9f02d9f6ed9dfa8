r"""Find the initial loss scale on a Determined cluster: on its device, with its data.

    entrypoint: python3 -m determined.launch.torch_distributed \
        python3 -m determined_amp.search.find_trial

Verdict and tables are in the task's log, and everything is in `loss_scale.json` of its checkpoint:
`python -m determined_amp report loss-scale SEARCH --finding ID` reads it. The metrics of the trial
are the window and the choice; the metric group `loss_scale` holds overflow and flush for every
power of two from 2^1 on, which the WebUI plots over "batches": read log2 of the scale there.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import determined as det
from determined import core, pytorch
from rich.console import Console

from determined_amp.config.experiment import Experiment, parse
from determined_amp.config.settings import ConfigError
from determined_amp.finder.advice import FILE_NAME, Run, json_text, show, shown_scales
from determined_amp.finder.find import look
from determined_amp.finder.verdict import Finding
from determined_amp.local.context import with_averaging
from determined_amp.search import on_cluster


def main() -> int:
    """Returns the exit status."""
    return on_cluster.run(_find)


def _find(info: det.ClusterInfo) -> int:
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    experiment = parse(info.trial._config, "search", completed_by_master=True)
    batches = _batches(experiment)
    info.trial.trial_seed = experiment.seed
    with pytorch.init(
        hparams=dict(experiment.hyperparameters),
        aggregation_frequency=experiment.aggregation_frequency,
    ) as context:
        with_averaging(context, experiment)
        trial = experiment.make(context)
        finding, run = look(experiment.name, trial, context, batches)
        if context.distributed.rank == 0:
            _report(context._core.train, finding, batches)
            _save(context._core.checkpoint, finding, run)
            context._core.train.report_progress(1.0)
            show(finding, run, Console(width=100))  # last: the reports, too, are in the log
    return 0


def _batches(experiment: Experiment[Any]) -> int:
    length = experiment.training.max_length
    batches = None if length is None else length.batches
    if batches is None:
        raise ConfigError(
            "search",
            [
                f"hyperparameters.training.max_length.batches: got {batches!r}; allowed: the "
                "number of training batches to look at, such as 4"
            ],
        )
    return batches


def _report(train: core.TrainContext, finding: Finding, batches: int) -> None:
    prediction = finding.prediction
    for scale in range(1, shown_scales(finding)[-1] + 1):
        shares = {
            "overflow_share": prediction.total.overflow_share(scale),
            "flushed_share": prediction.flushed_share(scale),
        }
        train.report_metrics(group="loss_scale", steps_completed=scale, metrics=shares)
    metrics = {
        "window_low_log2": finding.low_log2,
        "window_top_log2": finding.top_log2,
        "window_bits": finding.window_bits,
        "expected_skips_at_default": finding.expected_skips(16),
    }
    if finding.choice_log2 is not None:
        metrics["init_scale_log2"] = finding.choice_log2
    train.report_validation_metrics(steps_completed=batches, metrics=metrics)


def _save(checkpoint: core.CheckpointContext, finding: Finding, run: Run) -> None:
    with checkpoint.store_path({"steps_completed": run.batches}) as (folder, _):
        (folder / FILE_NAME).write_text(json_text(finding, run))


if __name__ == "__main__":
    sys.exit(main())
