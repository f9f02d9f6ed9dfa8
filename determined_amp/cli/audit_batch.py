"""The command `audit`: show in which precision one training batch is computed."""

from __future__ import annotations

from argparse import Namespace

from determined_amp.cli.options import (
    Parser,
    add_trial_options,
    experiment_of,
)

# What the command does, for `--help`.
TEXT = "show what one training batch is computed in"


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    add_trial_options(parser)


def run(options: Namespace) -> int:
    """Audit a batch and print the table. Return 0 if the audit passed, else 1."""
    experiment = experiment_of(options)
    # These import torch, which takes seconds.
    from determined_amp.amp.rehearse.precision_audit import AuditError  # noqa: PLC0415
    from determined_amp.local.open_trial import audit_here  # noqa: PLC0415

    try:
        audit, precision = audit_here(experiment)
    except AuditError as error:
        print(error)
        return 1
    verdict = ""
    if precision is None:
        verdict = (
            "not judged: the trial has no MixedPrecision; --precision gives it one"
        )
    print(audit.table(verdict))
    return 0
