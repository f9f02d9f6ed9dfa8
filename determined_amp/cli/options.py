"""The options that several commands share, and the configuration that they lead to.

Nothing here imports torch: a mistake in an option or in a YAML is named at once.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from typing import NoReturn

from determined_amp.amp.errors import UserError
from determined_amp.amp.plain_data import Config
from determined_amp.amp.settings import Precision
from determined_amp.experiment.experiment import Experiment, experiment_in, read_yaml
from determined_amp.experiment.failures import is_task
from determined_amp.experiment.overrides import in_precision, with_overrides
from determined_amp.search.task import BATCHES, MOST_BATCHES

# The exit status of a command that a signal has stopped, so that `a && b` stops, too.
INTERRUPTED = 130


class Parser(ArgumentParser):
    """Raises a `UserError` for a mistake, which the door prints and a task notes."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; {self.prog} --help lists all")


def parser_of(
    command: str, description: str, *, precision: bool = True, needs_config: bool = True
) -> ArgumentParser:
    """The parser of a command that opens a trial.

    In a task on a cluster the only option is `--trial`: the task has its own
    configuration.

    Args:
        command: The name of the command.
        description: What it does, for `--help`.
        precision: Whether it has the option `--precision`.
        needs_config: Whether the experiment YAML is required.
    """
    parser = Parser(prog=f"python -m determined_amp {command}", description=description)
    parser.add_argument(
        "--trial",
        metavar="MODULE:CLASS",
        help=(
            "the trial class, or a function that makes the trial, if the YAML does not"
            " name it"
        ),
    )
    if is_task():
        return parser
    parser.add_argument(
        "config", nargs=None if needs_config else "?", help="experiment YAML"
    )
    add_override_option(parser)
    if precision:
        parser.add_argument(
            "--precision",
            choices=[member.value for member in Precision],
            help=(
                "overrides hyperparameters.amp.precision; a trial without AMP needs no"
                " change"
            ),
        )
    return parser


def configuration_of(options: Namespace) -> Config:
    """The configuration that the options lead to, unchecked.

    Args:
        options: `config`, `overrides`, and `precision` where the command has it.

    Raises:
        ConfigError: if the YAML cannot be read, or an override is malformed.
    """
    config = with_overrides(read_yaml(options.config), options.overrides)
    return in_precision(config, getattr(options, "precision", None))


def experiment_of(options: Namespace) -> Experiment:
    """The experiment that the options lead to, checked as far as it goes without the
    trial.

    Raises:
        ConfigError: naming every mistake.
    """
    return experiment_in(configuration_of(options), options.config, trial=options.trial)


def add_override_option(parser: ArgumentParser) -> None:
    """Add the repeatable option `--config KEY=VALUE`, stored as `overrides`."""
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


def add_batches_option(parser: ArgumentParser) -> None:
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
