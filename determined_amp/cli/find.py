"""The command `find`: find the initial loss scale in one pass over a few batches.

The trial can be any `PyTorchTrial` with a wrapped `GradScaler` and float16 autocast,
named in the YAML or by `--trial module:Class`. It is not trained. One forward and
backward pass per batch in bfloat16 predicts overflow and underflow at every power of
two. Passes in float16 verify the choice.

It can be the entrypoint of an experiment on a cluster, with the options `--trial` and
`--batches`.
"""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from determined_amp.amp.errors import ConfigError
from determined_amp.cli.options import (
    Parser,
    add_batches_option,
    add_trial_options,
    experiment_of,
)
from determined_amp.experiment.failures import is_task
from determined_amp.experiment.files import write_whole

# What the command does, for `--help`.
TEXT = "find the initial loss scale in one pass"


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    add_trial_options(parser)
    add_batches_option(parser)
    if is_task():
        return
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="start from this checkpoint, or from the newest one of this run folder",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the whole answer as JSON, in place of an old FILE",
    )


def run(options: Namespace) -> int:
    """Find the scale, print it, and write the file that the options name."""
    if is_task():
        from determined_amp.cluster import find_task  # noqa: PLC0415

        find_task(options.trial, options.batches, options.words)
        return 0
    target = options.json
    # Check the file before the work. Its suffix makes sure that no YAML is replaced.
    if target and (target.suffix != ".json" or not os.access(target.parent, os.W_OK)):
        text = (
            f"got {target}; allowed: a name in .json, in a folder that exists and can "
            "be written"
        )
        raise ConfigError("--json", [text])
    experiment = experiment_of(options)
    # This imports torch, which takes seconds.
    from determined_amp.local.open_trial import open_trial  # noqa: PLC0415

    with open_trial(experiment, options.checkpoint) as opened:
        answer = opened.find(options.batches)
    print(answer)
    if target:
        write_whole(target, answer.json_text())
    return 0
