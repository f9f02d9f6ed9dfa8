"""The command `find`: find the initial loss scale in one pass over a few batches.

The trial can be any `PyTorchTrial` with a wrapped `GradScaler` and float16 autocast,
named in the YAML or by `--trial module:Class`. It is not trained. One forward and
backward pass per batch in bfloat16 predicts overflow and underflow at every power of
two. Passes in float16 verify the choice.

It can be the entrypoint of an experiment on a cluster, with the options `--trial` and
`--batches`.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from determined_amp.amp.errors import ConfigError, UserError
from determined_amp.cli.options import (
    AddParser,
    add_batches_option,
    add_command,
    add_trial_options,
    experiment_of,
)
from determined_amp.experiment.failures import is_task
from determined_amp.experiment.files import write_together, write_whole

if TYPE_CHECKING:
    from determined_amp.finder.found_scale import FoundScale


def add_find(add_parser: AddParser) -> None:
    """Add the command."""
    text = "find the initial loss scale in one pass"
    parser = add_command(add_parser, "find", text, _find)
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
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw the prediction, in place of an old FILE",
    )


def _find(options: Namespace) -> int:
    """Find the scale, print it, and write the files that the options name."""
    if is_task():
        from determined_amp.cluster import find_task  # noqa: PLC0415

        find_task(options.trial, options.batches, options.words)
        return 0
    for option, target, suffix in (
        ("--json", options.json, ".json"),
        ("--plot", options.plot, ".png"),
    ):
        # Before the work, and so that no YAML is replaced.
        if target is not None and (
            target.suffix != suffix or not target.parent.is_dir()
        ):
            text = f"got {target}; allowed: a name in {suffix}, in a folder that exists"
            raise ConfigError(option, [text])
    experiment = experiment_of(options)
    # This imports torch, which takes seconds.
    from determined_amp.local.open_trial import open_trial  # noqa: PLC0415

    with open_trial(experiment, options.checkpoint) as opened:
        answer = opened.find(options.batches)
    print(answer)
    _save(answer, options)
    return 0


def _save(answer: FoundScale, options: Namespace) -> None:
    try:
        if options.json:
            write_whole(options.json, answer.json_text())
        if options.plot:
            # matplotlib takes seconds to import.
            from determined_amp.report.loss_scale_figure import draw_loss_scale  # noqa: PLC0415
            from determined_amp.report.page import as_png  # noqa: PLC0415
            from determined_amp.search.search_folder import Search  # noqa: PLC0415

            figure = draw_loss_scale(answer, Search("", ()))
            write_together({options.plot: [as_png(figure)]})
            print(f"written: {options.plot}")
    except OSError as error:
        raise UserError(
            f"the answer cannot be written: {error}; allowed: another file"
        ) from error
