"""Score the loss scale of one trial of a search on a Determined cluster; nothing is trained.

    entrypoint: python3 -m determined_amp.search.score_trial

Parameters stay as they were initialised. Every trial sees the same parameters and the same batches,
whatever seed the platform gave it: only the scale differs.
"""

from __future__ import annotations

import logging
import sys

import determined as det
from determined import pytorch

from determined_amp.config import experiment
from determined_amp.local.context import with_averaging
from determined_amp.search import on_cluster
from determined_amp.search.scale_metrics import batches_to_score, scored


def main() -> int:
    """Returns the exit status."""
    return on_cluster.run(_score)


def _score(info: det.ClusterInfo) -> int:
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    config = experiment.parse(info.trial._config, "search", completed_by_master=True)
    batches = batches_to_score(config)
    info.trial.trial_seed = config.seed
    frequency = config.aggregation_frequency
    hparams = dict(config.hyperparameters)
    with pytorch.init(hparams=hparams, aggregation_frequency=frequency) as context:
        with_averaging(context, config)
        trial = config.make(context)
        report = context._core.train
        report.set_status(f"scoring on {batches} batches")
        metrics = scored(trial, context, config, batches)
        report.report_validation_metrics(steps_completed=batches, metrics=metrics)
        report.report_progress(1.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
