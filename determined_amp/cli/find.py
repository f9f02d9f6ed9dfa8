"""The command `find`: find the initial loss scale in one pass over a few batches.

The trial can be any `PyTorchTrial` with a wrapped `GradScaler` and float16 autocast, named in the
YAML or by `--trial module:Class`. It is not trained. One forward and backward pass per batch in
bfloat16 predicts overflow and underflow at every power of two. Passes in float16 verify the choice.

It can be the entrypoint of an experiment on a cluster, with the options `--trial` and `--batches`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from determined_amp.amp.errors import ConfigError, UserError
from determined_amp.cli.options import add_batches_option, checked_configuration, is_task, parser_of
from determined_amp.experiment.files import write_together, write_whole

if TYPE_CHECKING:
    from determined_amp.finder.found_scale import FoundScale

# The first bytes of the files that the command writes.
_JSON, _PNG = b'{\n "run": {', b"\x89PNG"


def main(arguments: Sequence[str]) -> int:
    """Find the scale, print it, and write the files that the options name."""
    options = _options(arguments)
    if is_task():
        from determined_amp.cluster import find_task  # noqa: PLC0415

        find_task(options.trial, options.batches, arguments)
        return 0
    _check_targets(options)
    config = checked_configuration(options)
    # This imports torch, which takes seconds.
    from determined_amp.local.open_trial import open_trial  # noqa: PLC0415

    with open_trial(config, options.config, options.trial, options.checkpoint) as opened:
        name = str(config.get("name", options.config))
        answer = opened.find(options.batches, name=name)
    print(answer)
    _save(answer, options)
    return 0


def _save(answer: FoundScale, options: argparse.Namespace) -> None:
    try:
        if options.json:
            write_whole(options.json, answer.json_text())
        if options.plot:
            # matplotlib takes seconds to import.
            from determined_amp.report.loss_scale_figure import draw_loss_scale  # noqa: PLC0415
            from determined_amp.report.page import as_png  # noqa: PLC0415

            write_together({options.plot: [as_png(draw_loss_scale(answer, None))]})
            print(f"written: {options.plot}")
    except OSError as error:
        raise UserError(f"the answer cannot be written: {error}; allowed: another file") from error


def _check_targets(options: argparse.Namespace) -> None:
    """Raise for a wrong option before the work starts."""
    problems = [
        problem
        for target, begins in ((options.json, _JSON), (options.plot, _PNG))
        if target is not None and (problem := _problem(target, begins)) is not None
    ]
    if options.json is not None and options.json == options.plot:
        problems.append(f"got {options.plot} for --json and for --plot; allowed: two files")
    if options.plot is not None and options.plot.suffix != ".png":
        problems.append(f"--plot: got {options.plot}; allowed: a name in .png")
    if problems:
        raise ConfigError("command line", problems)


def _problem(target: Path, begins: bytes) -> str | None:
    if not target.parent.is_dir():
        return f"got {target}, whose folder does not exist"
    if target.is_dir():
        return f"got {target}, which is a folder; allowed: a file"
    if not target.is_file():  # a device or a pipe has no content to lose
        return None
    with suppress(OSError), target.open("rb") as file:
        if file.read(len(begins)) == begins:  # an earlier answer
            return None
    return f"got {target}, which is there and no answer of this command; allowed: another file"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("find", "Find the initial loss scale in one pass.")
    add_batches_option(parser)
    if is_task():
        return parser.parse_args(arguments)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="start from this checkpoint, or from the newest one of this run folder",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole answer as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the prediction")
    return parser.parse_args(arguments)
