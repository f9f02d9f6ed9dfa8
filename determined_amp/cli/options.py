"""The options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from determined_amp.experiment.amp_settings import Precision


def add_override_option(parser: argparse.ArgumentParser) -> None:
    """Add the repeatable option `--config KEY=VALUE`, stored as `overrides`."""
    parser.add_argument(
        "--config",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change one value of the YAML, as `det experiment create --config` does",
    )


def add_trial_option(parser: argparse.ArgumentParser) -> None:
    """Add `--trial module:Class`."""
    parser.add_argument(
        "--trial",
        metavar="MODULE:CLASS",
        help="the trial, or a function that makes it, if the YAML does not name it",
    )


def add_precision_option(parser: argparse.ArgumentParser) -> None:
    """Add `--precision`."""
    parser.add_argument(
        "--precision",
        choices=[precision.value for precision in Precision],
        help="instead of hyperparameters.amp.precision; a trial without AMP trains in it as it is",
    )


def chosen_precision(options: argparse.Namespace) -> str | None:
    """The precision that `--precision` or `--config` chooses; None if neither does."""
    key = "hyperparameters.amp.precision="
    chosen = [change.removeprefix(key) for change in options.overrides if change.startswith(key)]
    precision: str | None = options.precision
    return precision or (chosen[-1] if chosen else None)


def add_batches_option(parser: argparse.ArgumentParser) -> None:
    """Add `--batches`, the number of batches to measure on."""
    parser.add_argument(
        "--batches",
        type=at_least(1, 1000),
        default=4,
        metavar="N",
        help="training batches to measure on (4)",
    )


def at_least(least: int, most: int = 10**9) -> Callable[[str], int]:
    """The `type` of an option that takes an integer from `least` to `most`."""

    def number(text: str) -> int:
        if not (text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
            limit = f" and <= {most}" if most < 10**9 else ""
            raise argparse.ArgumentTypeError(f"got {text}; allowed: an integer >= {least}{limit}")
        return int(text)

    return number
