"""Audits one batch of a trial on this machine, in Determined's loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from determined import pytorch

from determined_amp.amp.precision import DeviceSupport
from determined_amp.amp.settings import Precision
from determined_amp.audit import Audit, AuditError, audited
from determined_amp.local.open_trial import open_trial
from determined_amp.trial.determined_0_38 import SafeController, controlled_by, end_loop
from determined_amp.trial.mixed_precision import MixedPrecision


def audit_here(
    config: Mapping[str, Any], source: str, trial: str | None = None
) -> tuple[Audit, Precision | None]:
    """Train one batch here, in Determined's loop and without writing files.

    Returns:
        The audit of the batch, and the precision that the trial asks for. The precision is None
        for a trial without a `MixedPrecision`; then nothing is judged.

    Raises:
        AuditError: if the batch is not computed in the precision that the trial asks for.
        ConfigError: if the configuration is wrong or names no trial.
    """
    with open_trial(config, source, trial) as opened:
        amp = MixedPrecision.of(opened.context)
        precision = None if amp is None else amp.settings.precision
        if amp is not None:
            amp.guard.enabled = False  # otherwise it audits the batch as well
            amp.finds_scale = False
        try:
            audit = _audit(opened.trial, opened.context, precision or Precision.FP32)
        except AuditError as error:
            if precision is not None:
                raise
            audit = error.audit
    return audit, precision


def _audit(
    trial: pytorch.PyTorchTrial, context: pytorch.PyTorchTrialContext, precision: Precision
) -> Audit:
    done: list[Audit] = []

    def stop(audit: Audit) -> None:
        done.append(audit)
        end_loop()

    has_tf32 = DeviceSupport.of(context.device).tf32
    audited(trial, precision, stop, has_tf32=has_tf32)
    with controlled_by(SafeController):
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(1), checkpoint_policy="none")
    return done[0]
