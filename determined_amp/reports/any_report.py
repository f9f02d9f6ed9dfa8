"""The command `report`: `report precision` or `report loss-scale`, whichever fits the source.

python -m determined_amp report SOURCE [OPTIONS OF THAT REPORT]
"""

from __future__ import annotations

from collections.abc import Sequence

from determined_amp.config.errors import UserError
from determined_amp.reports import loss_scale_report, precision_report, report_command


def main(arguments: Sequence[str]) -> int:
    """Write the report that fits the source; return the exit status, 0.

    Raises:
        UserError: if the report cannot be made.
    """
    if not arguments or arguments[0].startswith("-"):
        raise UserError("report: no source given; allowed: report SOURCE, then options")
    if report_command.is_over_loss_scale(report_command.read(arguments[0])):
        return loss_scale_report.main(arguments)
    return precision_report.main(arguments)
