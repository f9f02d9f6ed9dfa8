"""The command `find`: find the initial loss scale in one pass over a few batches.

    python -m determined_amp find experiment_configs/mlp/amp.yaml
    python -m determined_amp find CONFIG.yaml [--batches 4] [--checkpoint RUN_FOLDER] [--sweep]
                               [--write NEW.yaml] [--json FILE] [--plot FILE.png]

The trial can be any `PyTorchTrial` with a wrapped `GradScaler` and float16 autocast, named in the
YAML or by `--trial module:Class`. It is not trained. One forward and backward pass per batch in
bfloat16 predicts overflow and underflow at every power of two. Passes in float16 verify the choice.

It can be the entrypoint of an experiment on a cluster, with the options `--trial` and `--batches`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from determined_amp.cli.options import (
    add_batches_option,
    add_override_option,
    add_precision_option,
    add_trial_option,
    chosen_precision,
)
from determined_amp.cluster import find_task, trial_task
from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.overrides import in_precision, with_overrides
from determined_amp.experiment.settings import ConfigError
from determined_amp.finder.advice import FoundScale, yaml_changes
from determined_amp.finder.trial import find_in_trial
from determined_amp.finder.yaml_copy import write_copy
from determined_amp.local.open_trial import OpenTrial, open_trial
from determined_amp.trial.mixed_precision import MixedPrecision


def main(arguments: Sequence[str]) -> int:
    """Find the scale, print it, and write the files that the options name.

    Returns:
        The exit status, 0.

    Raises:
        UserError: if an option is wrong, or no loss scale can be found.
    """
    info = trial_task()
    if info is not None:
        options = _cluster_parser().parse_args(arguments)
        find_task(info, options.trial, options.batches, arguments)
        return 0
    options = _options(arguments)
    config = with_overrides(read_yaml(options.config), options.overrides)
    config = in_precision(config, chosen_precision(options))
    _check_targets(options)
    with open_trial(config, options.config, options.trial, options.checkpoint) as opened:
        if options.write is not None:
            _check_reads_amp(opened)
        found = find_in_trial(
            str(config.get("name", options.config)),
            opened.trial,
            opened.context,
            options.batches,
            latest_checkpoint=opened.latest_checkpoint,
            sweep=options.sweep,
        )
    found.show(Console())
    _save(found, options)
    return 0


def _save(found: FoundScale, options: argparse.Namespace) -> None:
    if options.json:
        found.write(options.json)
    if options.plot:
        # matplotlib takes seconds to import.
        from determined_amp.report.loss_scale_figure import draw  # noqa: PLC0415
        from determined_amp.report.page import save_png  # noqa: PLC0415

        save_png(draw(found, None), options.plot)
        print(f"written: {options.plot}")
    if options.write:
        write_copy(Path(options.config), options.write, yaml_changes(found))
        print(f"written: {options.write}")


def _check_targets(options: argparse.Namespace) -> None:
    """Raise for a wrong option before the work starts."""
    problems = [
        f"got {target}, whose folder does not exist"
        for target in (options.json, options.write, options.plot)
        if target is not None and not target.parent.is_dir()
    ]
    problems += [
        f"got {target}, which is a folder; allowed: a file"
        for target in (options.json, options.plot)
        if target is not None and target.is_dir()
    ]
    if options.plot is not None and options.plot.suffix != ".png":
        problems.append(f"--plot: got {options.plot}; allowed: a name in .png")
    if options.write is not None and options.write.exists():
        problems.append(f"--write: {options.write} exists; allowed: a new file")
    if options.write is not None and options.overrides:
        problems.append(
            "--write: copies the YAML as it is, and what --config changes would be lost; allowed: "
            "one of the two"
        )
    if problems:
        raise ConfigError("command line", problems)


def _check_reads_amp(opened: OpenTrial) -> None:
    if MixedPrecision.of(opened.context) is None:
        name = type(opened.trial).__name__
        raise ConfigError(
            "--write",
            [
                f"{name} reads no section hyperparameters.amp, which --write changes; allowed: "
                "trials that read it"
            ],
        )


def _cluster_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m determined_amp find",
        description="Find the loss scale of this task's trial.",
    )
    add_trial_option(parser)
    add_batches_option(parser)
    return parser


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m determined_amp find", description="Find the initial loss scale in one pass."
    )
    parser.add_argument("config", help="experiment YAML")
    add_batches_option(parser)
    add_trial_option(parser)
    parser.add_argument(
        "--checkpoint", type=Path, help="start from this checkpoint, or a run folder's newest"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="also measure every shown scale in float16"
    )
    parser.add_argument(
        "--write", type=Path, metavar="NEW.yaml", help="write a copy of the YAML with the answer"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a picture")
    add_precision_option(parser)
    add_override_option(parser)
    return parser.parse_args(arguments)
