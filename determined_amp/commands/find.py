"""Find the initial loss scale in one pass over a few batches.

    python -m determined_amp find experiment_configs/mlp/amp.yaml
    python -m determined_amp find CONFIG.yaml [--batches 4] [--checkpoint RUN_FOLDER] [--sweep]
                               [--write NEW.yaml] [--json FILE] [--plot FILE.png]

The trial is any `PyTorchTrial`, named by the YAML or by `--trial module:Class`. It needs a wrapped
`GradScaler` and float16 autocast, and is started but not trained. One forward and backward per
batch in bfloat16 predicts overflow and underflow at every power of two; as many in float16 verify
the choice.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from determined import pytorch
from rich.console import Console

from determined_amp.amp.mixed_precision import MixedPrecision
from determined_amp.config.experiment import read_yaml
from determined_amp.config.overrides import (
    add_override_option,
    add_trial_option,
    with_overrides,
)
from determined_amp.config.settings import ConfigError
from determined_amp.finder.advice import FinderRun, json_text, show, yaml_changes
from determined_amp.finder.find import look
from determined_amp.finder.verdict import Finding
from determined_amp.finder.written import write_copy
from determined_amp.local.open_trial import open_trial


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0 with a finding.

    Raises:
        UserError: if there is none.
    """
    options = _options(arguments)
    config = with_overrides(read_yaml(options.config), options.overrides)
    _check_targets(options)
    with open_trial(config, options.config, options.trial, options.checkpoint) as found:
        _check_writable(options, found.trial, found.context)
        finding, run = look(
            str(config.get("name", options.config)),
            found.trial,
            found.context,
            options.batches,
            latest_checkpoint=found.latest_checkpoint,
            sweep=options.sweep,
        )
    show(finding, run, Console())
    _save(finding, run, options)
    return 0


def _save(finding: Finding, run: FinderRun, options: argparse.Namespace) -> None:
    if options.json:
        options.json.write_text(json_text(finding, run))
    if options.plot:
        # matplotlib takes seconds to import.
        from determined_amp.reports.loss_scale_figure import draw  # noqa: PLC0415
        from determined_amp.reports.page import save_png  # noqa: PLC0415

        save_png(draw(finding, None), options.plot)
        print(f"written: {options.plot}")
    if options.write:
        write_copy(Path(options.config), options.write, yaml_changes(finding, run))
        print(f"written: {options.write}")


def _check_targets(options: argparse.Namespace) -> None:
    """Before the work, not after it."""
    problems = [
        f"got {target}, whose folder does not exist"
        for target in (options.json, options.write, options.plot)
        if target is not None and not target.parent.is_dir()
    ]
    if options.write is not None and options.write.exists():
        problems.append(f"--write: {options.write} exists; allowed: a new file")
    if options.write is not None and options.overrides:
        problems.append(
            "--write: copies the YAML as it is, and what --config changes would be lost; allowed: "
            "one of the two"
        )
    if options.batches < 1:
        problems.append(f"--batches: got {options.batches}; allowed: 1 or more")
    if problems:
        raise ConfigError("command line", problems)


def _check_writable(
    options: argparse.Namespace,
    trial: pytorch.PyTorchTrial,
    context: pytorch.PyTorchTrialContext,
) -> None:
    if options.write is not None and MixedPrecision.of(context) is None:
        raise ConfigError(
            "--write",
            [
                f"{type(trial).__name__} reads no section hyperparameters.amp, which this would "
                "change; allowed: trials that do"
            ],
        )


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m determined_amp find", description="Find the initial loss scale in one pass."
    )
    parser.add_argument("config", help="experiment YAML")
    parser.add_argument(
        "--batches", type=int, default=4, help="training batches to look at (default: 4)"
    )
    add_trial_option(parser)
    parser.add_argument(
        "--checkpoint", type=Path, help="start from this checkpoint, or a run folder's newest"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="measure every scale that is shown in float16, too"
    )
    parser.add_argument("--write", type=Path, metavar="NEW.yaml", help="the YAML with the answer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything, for programs")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="a picture of it")
    add_override_option(parser)
    return parser.parse_args(arguments)
