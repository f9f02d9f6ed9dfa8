"""The command `check`: say what is wrong with a trial's own mixed precision.

It trains a few batches of the trial as it is, in fresh processes: with two overflows, from a
checkpoint, and at two loss scales. It writes to no file of the user. The first line that it prints
is the number of faults.

It can be the entrypoint of an experiment on a cluster, with the options `--trial` and `--json`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from determined_amp.cli.options import checked_configuration, is_task, parser_of
from determined_amp.cli.search import start_server


def main(arguments: Sequence[str]) -> int:
    """Examine a trial and print the findings; 0 without a fault, else 1.

    In a task on a cluster it is 0 even with faults, so that the cluster does not restart it.
    """
    parser = parser_of("check", "Say what is wrong with the AMP of a trial.", precision=False)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(arguments)
    if is_task():
        start_server("determined_amp.check.doctor")
        from determined_amp.cluster import check_task  # noqa: PLC0415  # torch

        check_task(options.trial, as_json=options.json)
        return 0
    config = checked_configuration(options)
    start_server("determined_amp.check.doctor")
    # Imported after the server starts: both spend seconds importing torch, at the same time.
    from determined_amp.check.doctor import RUNS, examine  # noqa: PLC0415
    from determined_amp.check.fresh_process import PATIENCE  # noqa: PLC0415

    def show(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    show(
        f"at most {RUNS} short runs of the trial, each in a fresh process: most take less than a "
        f"minute, none more than {PATIENCE / 60:.0f} minutes"
    )
    findings = examine(config, options.config, options.trial, show)
    print(findings.to_json() if options.json else findings)
    return 1 if findings.faults else 0
