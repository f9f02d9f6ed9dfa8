"""The command `audit`: show in which precision one training batch is computed."""

from __future__ import annotations

from collections.abc import Sequence

from determined_amp.cli.options import checked_configuration, parser_of


def main(arguments: Sequence[str]) -> int:
    """Audit a batch and print the table; 0 if the audit passed, 1 if it failed."""
    parser = parser_of("audit", "Train one batch and print what it was computed in.")
    options = parser.parse_args(arguments)
    config = checked_configuration(options)
    # These import torch, which takes seconds.
    from determined_amp.amp.precision_audit import AuditError  # noqa: PLC0415
    from determined_amp.local.open_trial import audit_here  # noqa: PLC0415

    try:
        audit, precision = audit_here(config, options.config, options.trial)
    except AuditError as error:
        print(error)
        return 1
    if precision is None:
        lines = (line for line in audit.table().splitlines() if " asks for " not in line)
        print(
            *lines,
            "not judged: the trial has no MixedPrecision; --precision gives it one",
            sep="\n",
        )
    else:
        print(audit.table())
    return 0
