"""The command `check`: say what is wrong with a trial's own mixed precision.

It trains a few batches of the trial as it is, in fresh processes: with two overflows,
from a checkpoint, and at two loss scales. It writes to no file of the user. The first
line that it prints is the number of faults.

It can be the entrypoint of an experiment on a cluster, with the options `--trial` and
`--json`.

`check SCRIPT.py ARGUMENTS` runs any script that trains, as it is, until the doctor has
seen enough. Determined is not needed for that. `check --explain KEY` explains a
finding.
"""

from __future__ import annotations

import sys
import textwrap
import traceback
from argparse import Namespace
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from determined_amp.amp.errors import UserError, near_name
from determined_amp.check.finding import ROWS
from determined_amp.cli.options import (
    Parser,
    add_trial_options,
    experiment_of,
    positive,
)
from determined_amp.experiment.failures import is_task
from determined_amp.search.server import start_server

if TYPE_CHECKING:
    from determined_amp.check.finding import CheckFindings


_MINUTES = 2.0

# The keys of a finding's row that are printed, and their labels.
_SHOWN = {
    "evidence": "evidence",
    "means": "it means",
    "write": "write",
    "in_a_loop_write": "write in a loop of your own",
    "look": "look at",
    "in_a_loop_look": "look at in a loop of your own",
    "explains": "not told beside it",
}


# What the command does, for `--help`.
TEXT = "say what is wrong with the AMP of a trial, or of a script and its arguments"


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    add_trial_options(parser, needs_config=False)
    parser.add_argument(
        "--json", action="store_true", help="print the findings as JSON"
    )
    if is_task():
        return
    parser.usage = (
        "det-amp check [options] (YAML | SCRIPT.py ITS ARGUMENTS | --explain [KEY])"
    )
    parser.instead = (
        "; write det-amp check SCRIPT.py ITS ARGUMENTS, with the file of a module in "
        "place of -m MODULE, or torchrun ... -m determined_amp check SCRIPT.py"
    )
    parser.add_argument(
        "--explain",
        nargs="?",
        const="",
        metavar="KEY",
        help="say what a finding means, or list all",
    )
    parser.add_argument(
        "--minutes",
        type=positive,
        metavar="N",
        help=f"how long a script may run (default: {_MINUTES:g})",
    )
    parser.add_argument(
        "--in-place",
        action="store_true",
        help="let a script save, log and upload where it says",
    )


def run(options: Namespace) -> int:
    """Examine a trial or a script and print the findings. Return 0 without a fault, or
    else 1.

    A task on a cluster returns 0 even with faults, so that the cluster does not restart
    it.
    """
    if is_task():
        start_server("determined_amp.check.doctor")
        from determined_amp.cluster import check_task  # noqa: PLC0415  # torch

        check_task(options.trial, as_json=options.json)
        return 0
    if options.explain is not None:
        print(_explained(options.explain))
        return 0
    if options.config is None:
        options.parser.error("give an experiment YAML, or a SCRIPT.py that trains")
    if options.config.endswith(".py"):
        return _check_script(options)
    if options.minutes is not None or options.in_place:
        options.parser.error("--minutes and --in-place are for a SCRIPT.py")
    experiment = experiment_of(options)
    start_server("determined_amp.check.doctor")
    # Import this after the server starts, so that both import torch at the same time.
    # It takes seconds.
    from determined_amp.check.doctor import PATIENCE, RUNS, examine  # noqa: PLC0415

    _say(
        f"at most {RUNS} short runs of the trial, each in a fresh process: most take "
        f"less than a minute, none more than {PATIENCE / 60:.0f} minutes"
    )
    findings = examine(experiment, _say)
    return _answer(findings, options)


def _explained(key: str) -> str:
    """The row of a finding; without a key, the name and sentence of every finding."""
    if not key:
        return "\n".join(f"{key:24}{row['sentence']}" for key, row in ROWS.items())
    if key not in ROWS:
        near = near_name(key, ROWS)
        raise UserError(
            f"--explain {key}: no such finding{near}; --explain alone lists all"
        )
    row = ROWS[key]
    said = [f"{key} ({row['level']}): {row['sentence']}"]
    for name, label in _SHOWN.items():
        told = row.get(name, ())
        lines = textwrap.wrap(told, 84) if isinstance(told, str) else told
        said += [f"  {label}:"] * bool(lines) + [f"    {line}" for line in lines]
    return "\n".join(said)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _answer(findings: CheckFindings, options: Namespace) -> int:
    print(findings.to_json() if options.json else findings)
    return 0 if findings.are_right else 1


def _refuse_script(options: Namespace) -> None:
    """Refuse a script that does not exist, and options that are for a YAML only."""
    if options.trial or options.overrides or options.precision:
        options.parser.error(
            "--trial, --config and --precision are for a YAML; options of a script "
            "stand behind it"
        )
    file = Path(options.config)
    if not file.is_file():
        raise UserError(f"{file}: no such file; allowed: a script that trains")


def _check_script(options: Namespace) -> int:
    _refuse_script(options)
    from determined_amp.check import any_loop  # noqa: PLC0415  # torch

    minutes = options.minutes or _MINUTES
    is_first = any_loop.is_first_rank()
    if is_first:
        _say(any_loop.announced(options.config, minutes, in_place=options.in_place))
    # The JSON stands alone on standard output.
    with redirect_stdout(sys.stderr if options.json else sys.stdout):
        findings, raised = any_loop.examine_script(
            options.config, options.arguments, minutes, in_place=options.in_place
        )
    status = _answer(findings, options) if is_first else 0
    sys.stdout.flush()
    if raised is None:
        return status
    if isinstance(raised, KeyboardInterrupt):
        raise raised
    if not isinstance(raised, SystemExit):
        traceback.print_exception(raised)
    elif isinstance(raised.code, str):  # Python prints this, too
        _say(raised.code)
    return 1
