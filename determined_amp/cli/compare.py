"""The command `compare`: train a trial in every precision, and say which one to use.

The trial needs no change. First the command trains a few batches in every precision
that the device supports, with an audit, and finds the loss scale. Then it prints its
plan with a time limit, and trains in all precisions in turn, with the same seeds and
batches. Each run has its own process. Ctrl-C ends the command with a report on the runs
so far.

It can be the entrypoint of an experiment on a cluster, with the options `--trial`,
`--precisions`, `--seeds`, `--batches` and `--minutes`. The whole comparison is then one
task.

It writes `runs/compare-NAME/TIME/`, a search folder with the page `precision.md`.
"""

from __future__ import annotations

from argparse import Namespace

from determined_amp.amp.errors import UserError
from determined_amp.amp.settings import Precision
from determined_amp.cli.options import (
    INTERRUPTED,
    PRECISIONS,
    Parser,
    add_trial_options,
    at_least,
    experiment_of,
)
from determined_amp.compare.comparable import (
    LEAST_BATCHES,
    ComparisonRequest,
    check_comparable,
)
from determined_amp.experiment.failures import is_task
from determined_amp.search.server import start_server

# What the command does, for `--help`.
TEXT = "train in every precision in turn, and say which one to use"


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    add_trial_options(parser, precision=False)
    # The precision of the YAML is ignored.
    parser.set_defaults(precision=Precision.FP32.value)
    parser.add_argument(
        "--precisions",
        choices=PRECISIONS,
        nargs="+",
        default=PRECISIONS,
        metavar="PRECISION",
        help=f"of {', '.join(PRECISIONS)}, with fp32 (all)",
    )
    parser.add_argument(
        "--seeds",
        type=at_least(1),
        default=3,
        metavar="N",
        help="runs in each precision (3)",
    )
    parser.add_argument(
        "--batches",
        type=at_least(LEAST_BATCHES),
        metavar="N",
        help="length of each run; default: as many as fit into --minutes",
    )
    parser.add_argument(
        "--minutes",
        type=at_least(1),
        default=3,
        metavar="N",
        help=f"time for all runs; each has at least {LEAST_BATCHES} batches (3)",
    )


def run(options: Namespace) -> int:
    """Compare the precisions of a trial. Return 130 if a signal stops it, else 0."""
    chosen = [p for p in Precision if p.value in options.precisions]
    if len(chosen) < 2 or Precision.FP32 not in chosen:
        names = " ".join(options.precisions)
        raise UserError(
            f"--precisions: got {names}; allowed: fp32, and what to compare with it"
        )
    request = ComparisonRequest(
        chosen, options.seeds, options.batches, options.minutes, options.words
    )
    # The imports below come after the server starts, so that this process and the
    # server import torch at the same time. It takes seconds.
    if is_task():
        start_server()
        from determined_amp.compare.comparison_task import compare_on_cluster  # noqa: PLC0415

        compare_on_cluster(options.trial, request)
        return 0
    experiment = experiment_of(options)
    check_comparable(experiment, request.batches)
    start_server()
    from determined_amp.compare.runs import compare  # noqa: PLC0415

    end = compare(experiment, request)
    return INTERRUPTED if end.is_interrupted else 0
