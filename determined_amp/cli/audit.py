"""The command `audit`: show in which precision one training batch is computed.

python -m determined_amp audit CONFIG.yaml [--trial module:Class] [--config KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from determined import pytorch

from determined_amp.amp.precision import DeviceSupport
from determined_amp.audit import Audit, AuditError, audited
from determined_amp.cli.options import (
    add_override_option,
    add_precision_option,
    add_trial_option,
    chosen_precision,
)
from determined_amp.experiment.amp_settings import Precision
from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.overrides import in_precision, with_overrides
from determined_amp.local.open_trial import open_trial
from determined_amp.trial.determined_0_38 import SafeController, controlled_by, end_loop
from determined_amp.trial.mixed_precision import MixedPrecision


def audit_here(
    config: Mapping[str, Any], source: str, trial: str | None = None
) -> tuple[Audit, Precision | None]:
    """Train one batch here, or two on a GPU, in Determined's loop and without writing files.

    Args:
        config: The experiment configuration.
        source: Where it comes from, for the error message.
        trial: `module:Class`, if the configuration does not name it.

    Returns:
        The audit of the batch, and the precision that the trial asks for. The precision is None
        for a trial without a `MixedPrecision`; then nothing is judged.

    Raises:
        AuditError: if the batch is not computed in the precision that the trial asks for.
        ConfigError: if the configuration is wrong or names no trial.
    """
    with open_trial(config, source, trial) as opened:
        amp = MixedPrecision.of(opened.context)
        asked = None if amp is None else amp.settings.precision
        if amp is not None:
            amp.watched = False  # otherwise it audits the batch as well
        try:
            audit = _audit(opened.trial, opened.context, asked or Precision.FP32)
        except AuditError as error:
            if asked is not None:
                raise
            audit = error.audit
    return audit, asked


def _audit(
    trial: pytorch.PyTorchTrial, context: pytorch.PyTorchTrialContext, asked: Precision
) -> Audit:
    done: list[Audit] = []

    def stop(audit: Audit) -> None:
        done.append(audit)
        end_loop()

    has_tf32 = DeviceSupport.of(context.device).tf32
    audited(trial, context.device, asked, stop, has_tf32=has_tf32, time_kernels=True)
    with controlled_by(SafeController):
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(2), checkpoint_policy="none")
    return done[0]


def _unjudged_table(audit: Audit) -> str:
    lines = (line for line in audit.table().splitlines() if " asks for " not in line)
    return "\n".join(
        [*lines, "not judged: the trial has no MixedPrecision; --precision gives it one"]
    )


def main(arguments: Sequence[str]) -> int:
    """Audit a batch and print the table.

    Returns:
        The exit status: 0 if the audit passed, 1 if it failed.

    Raises:
        UserError: if the configuration is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m determined_amp audit",
        description="Train one batch and print what it was computed in.",
    )
    parser.add_argument("config", help="experiment YAML")
    add_trial_option(parser)
    add_precision_option(parser)
    add_override_option(parser)
    options = parser.parse_args(arguments)
    config = with_overrides(read_yaml(options.config), options.overrides)
    config = in_precision(config, chosen_precision(options))
    try:
        audit, asked = audit_here(config, options.config, options.trial)
    except AuditError as error:
        print(error)
        return 1
    print(audit.table() if asked is not None else _unjudged_table(audit))
    return 0
