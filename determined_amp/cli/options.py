"""Adds the options that several commands share, and reads the configuration from them.

Nothing here imports torch, so a mistake in an option or in a YAML is named at once.
"""

from __future__ import annotations

import math
import re
import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from determined_amp.amp.errors import UserError, near_name
from determined_amp.amp.plain_data import Config
from determined_amp.amp.settings import Precision
from determined_amp.experiment.entrypoint import BATCHES, MOST_BATCHES
from determined_amp.experiment.failures import is_task

if TYPE_CHECKING:
    from determined_amp.experiment.experiment import Experiment

# The exit status of a command that a signal has stopped, so that `a && b` stops, too.
INTERRUPTED = 130

PRECISIONS = [precision.value for precision in Precision]


class Parser(ArgumentParser):
    """A parser that raises a `UserError` for a mistake. `main` prints the error.

    Attributes:
        instead: What to type instead of words that are no options.
    """

    instead = ""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; {self.prog} --help lists all")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Raise a `UserError` for words that no option takes."""
        known = re.findall(r"--[\w-]+", self.format_help())
        option = words[0].partition("=")[0] if words[0].startswith("--") else ""
        near = near_name(option, known, self.instead)
        self.error(f"unrecognized arguments: {shlex.join(words)}{near}")


def add_trial_options(
    parser: Parser, *, precision: bool = True, needs_config: bool = True
) -> None:
    """Add the options that open a trial.

    In a task on a cluster the only option is `--trial`, because the task has its own
    configuration.

    Args:
        parser: The parser of the command.
        precision: Whether the command has the option `--precision`.
        needs_config: Whether the experiment YAML is required.
    """
    parser.add_argument(
        "--trial",
        metavar="MODULE:CLASS",
        help="the trial class, or a function that makes the trial, if the YAML does "
        "not name it",
    )
    if is_task():
        return
    parser.add_argument(
        "config", nargs=None if needs_config else "?", help="experiment YAML"
    )
    parser.add_argument(
        "--config",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help=(
            "set one value of the YAML, as `det experiment create --config` does;"
            " repeatable"
        ),
    )
    if precision:
        parser.add_argument(
            "--precision",
            choices=PRECISIONS,
            help="overrides hyperparameters.amp.precision; a trial without AMP needs "
            "no change",
        )


def configuration_of(options: Namespace) -> Config:
    """Read the configuration that the options describe, without checking it.

    Args:
        options: `config`, `overrides`, and `precision` if the command has it.

    Raises:
        ConfigError: if the YAML cannot be read, or an override is malformed.
        UserError: if the file is Python.
    """
    # `check SCRIPT.py` must work without the packages that read YAML.
    from determined_amp.experiment.experiment import read_yaml  # noqa: PLC0415
    from determined_amp.experiment.overrides import in_precision, with_overrides  # noqa: PLC0415

    if options.config.endswith(".py"):
        module = ".".join(Path(options.config).with_suffix("").parts)
        raise UserError(
            f"{options.config}: is Python; allowed: {options.parser.prog} YAML --trial "
            f"{module}:CLASS with a PyTorchTrial of it, and of a script: det-amp check "
            f"{options.config}"
        )
    config = with_overrides(read_yaml(options.config), options.overrides)
    return in_precision(config, getattr(options, "precision", None))


def experiment_of(options: Namespace) -> Experiment:
    """Read the experiment that the options describe, and check it without its trial.

    Raises:
        ConfigError: naming every mistake.
        UserError: if the file is Python.
    """
    from determined_amp.experiment.experiment import experiment_in  # noqa: PLC0415

    config = configuration_of(options)
    return experiment_in(config, options.config, trial=options.trial)


def add_batches_option(parser: Parser) -> None:
    """Add `--batches`, the number of batches to measure on."""
    parser.add_argument(
        "--batches",
        type=at_least(1, MOST_BATCHES),
        default=BATCHES,
        metavar="N",
        help=f"training batches to measure on ({BATCHES})",
    )


def at_least(least: int, most: int = 10**9) -> Callable[[str], int]:
    """The `type` of an option that takes an integer from `least` to `most`."""

    def number(text: str) -> int:
        if not (text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
            limit = f" and <= {most}" if most < 10**9 else ""
            raise ArgumentTypeError(
                f"got {text}; allowed: an integer >= {least}{limit}"
            )
        return int(text)

    return number


def positive(text: str) -> float:
    """The `type` of an option that takes a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"got {text}; allowed: a number above 0")
    return value
