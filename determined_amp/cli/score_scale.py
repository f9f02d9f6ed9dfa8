"""The command `score`: measure how many optimizer steps an initial loss scale loses.

The trial is not trained; see `determined_amp.finder.scale_score`. The scale is
`amp.init_scale`, or the scale of the trial's own `GradScaler`.

It can be the entrypoint of an experiment on a cluster, with the options `--trial` and
`--batches`. A search over `amp.init_scale` then scores every scale.
"""

from __future__ import annotations

from argparse import Namespace

from determined_amp.cli.options import (
    Parser,
    add_batches_option,
    add_trial_options,
    experiment_of,
)
from determined_amp.experiment.failures import is_task

# What the command does, for `--help`.
TEXT = "measure the optimizer steps that an initial loss scale loses"


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    add_trial_options(parser)
    add_batches_option(parser)


def run(options: Namespace) -> int:
    """Score the loss scale and print its metrics."""
    if is_task():
        from determined_amp.cluster import score_task  # noqa: PLC0415  # torch

        score_task(options.trial, options.batches)
        return 0
    from determined_amp.experiment.score_check import check_score  # noqa: PLC0415

    experiment = experiment_of(options)
    check_score(experiment)
    from determined_amp.local.open_trial import open_trial  # noqa: PLC0415  # torch: seconds

    with open_trial(experiment) as opened:
        metrics = opened.score(options.batches)
    for name, value in metrics.items():
        print(f"{name:24} {value:.6g}")
    return 0
