"""The command `check`: say what is wrong with a trial's own mixed precision.

It trains a few batches of the trial as it is, in fresh processes: with two overflows,
from a checkpoint, and at two loss scales. It writes to no file of the user. The first
line that it prints is the number of faults.

It can be the entrypoint of an experiment on a cluster, with the options `--trial` and
`--json`.

`check SCRIPT.py ARGUMENTS` runs any script that trains, as it is, until the doctor has
seen enough. Determined is not needed for that.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

from determined_amp.amp.errors import UserError
from determined_amp.check.finding import CheckFindings
from determined_amp.cli import Arguments
from determined_amp.experiment.failures import is_task


def main(arguments: Arguments) -> int:
    """Examine a trial and print the findings; 0 without a fault, else 1.

    In a task on a cluster it is 0 even with faults, so that the cluster does not
    restart it.
    """
    paths = [word for word in arguments if word.endswith((".py", ".yaml", ".yml"))]
    if paths and paths[0].endswith(".py"):
        return _check_script(arguments)
    # Imported here: a script needs nothing of it, nor what it imports.
    from determined_amp.cli.options import experiment_of, parser_of  # noqa: PLC0415
    from determined_amp.cli.search import start_server  # noqa: PLC0415

    parser = parser_of(
        "check", "Say what is wrong with the AMP of a trial.", precision=False
    )
    parser.add_argument(
        "--json", action="store_true", help="print the findings as JSON"
    )
    options = parser.parse_args(arguments)
    if is_task():
        start_server("determined_amp.check.doctor")
        from determined_amp.cluster import check_task  # noqa: PLC0415  # torch

        check_task(options.trial, as_json=options.json)
        return 0
    experiment = experiment_of(options)
    start_server("determined_amp.check.doctor")
    # Imported after the server starts: both spend seconds importing torch, at the same
    # time.
    from determined_amp.check.doctor import RUNS, examine  # noqa: PLC0415
    from determined_amp.check.fresh_process import PATIENCE  # noqa: PLC0415

    _say(
        f"at most {RUNS} short runs of the trial, each in a fresh process: most take "
        f"less than a minute, none more than {PATIENCE / 60:.0f} minutes"
    )
    return _answer(
        examine(experiment.config, experiment.source, None, _say), as_json=options.json
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _answer(findings: CheckFindings, *, as_json: bool) -> int:
    print(findings.to_json() if as_json else findings)
    return 1 if findings.faults else 0


def _check_script(arguments: Arguments) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m determined_amp check",
        description="Say what is wrong with the mixed precision of a script.",
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print the findings as JSON")
    add(
        "--minutes",
        type=float,
        default=2.0,
        help="how long the script may run (default: 2)",
    )
    add(
        "--in-place",
        action="store_true",
        help="save, log and upload where the script says",
    )
    add("script")
    add("arguments", nargs=argparse.REMAINDER, help="its own")
    options = parser.parse_args(arguments)
    if not Path(options.script).is_file():
        raise UserError(
            f"{options.script}: no such file; allowed: a script that trains"
        )
    from determined_amp.check import script  # noqa: PLC0415  # torch

    first = script.is_first_rank()
    if first:
        saved = (
            "where it says"
            if options.in_place
            else "into a scratch folder, loggers are off"
        )
        _say(
            f"running {options.script} until each of its optimizers has made "
            f"{script.STEPS} steps or {options.minutes:g} minutes are over; two steps "
            "of each are made to overflow, and the loss scale moves in others. "
            f"torch.save and safetensors write {saved}; {script.ONE_RUN}"
        )
    findings, raised = script.examine_script(
        options.script, options.arguments, options.minutes, in_place=options.in_place
    )
    status = _answer(findings, as_json=options.json) if first else 0
    sys.stdout.flush()
    if raised is None:
        return status
    if isinstance(raised, KeyboardInterrupt):
        raise raised
    traceback.print_exception(raised)
    return 1
