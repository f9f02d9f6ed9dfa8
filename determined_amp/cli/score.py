"""The command `score`: measure how many optimizer steps an initial loss scale loses.

    python -m determined_amp score CONFIG.yaml [--trial module:Class] [--batches 4]
                                   [--config KEY=VALUE ...]

The trial is not trained; see `determined_amp.finder.score`. The scale is `amp.init_scale`, or that
of the trial's own `GradScaler`. As the entrypoint of an experiment on a cluster it takes the
options `--trial` and `--batches`, and a search over `amp.init_scale` scores every scale.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from determined_amp.cli.options import add_batches_option, add_override_option, add_trial_option
from determined_amp.cluster import score_task, trial_task
from determined_amp.experiment.experiment import parse, read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.finder.score import score
from determined_amp.local.open_trial import open_trial
from determined_amp.search.task import check_score


def main(arguments: Sequence[str]) -> int:
    """Score the loss scale and print its metrics.

    Returns:
        The exit status, 0.

    Raises:
        UserError: if the configuration is wrong, or the trial has no loss scale.
    """
    info = trial_task()
    parser = argparse.ArgumentParser(
        prog="python -m determined_amp score",
        description="Measure how many optimizer steps an initial loss scale loses.",
    )
    if info is None:
        parser.add_argument("config", help="experiment YAML")
        add_override_option(parser)
    add_trial_option(parser)
    add_batches_option(parser)
    options = parser.parse_args(arguments)
    if info is not None:
        score_task(info, options.trial, options.batches)
        return 0
    config = with_overrides(read_yaml(options.config), options.overrides)
    check_score(parse(config, options.config, trial=options.trial))
    with open_trial(config, options.config, options.trial) as opened:
        metrics = score(opened.trial, opened.context, options.batches)
    for name, value in metrics.items():
        print(f"{name:24} {value:.6g}")
    return 0
