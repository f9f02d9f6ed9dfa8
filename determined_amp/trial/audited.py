"""Audits a rehearsal of the first batch that a trial trains."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from determined import pytorch

from determined_amp.amp.errors import one_line
from determined_amp.amp.precision_audit import Audit, AuditError, audit_rehearsal
from determined_amp.amp.rehearsal import Rehearsal
from determined_amp.amp.settings import Precision

logger = logging.getLogger(__name__)


def audited(
    trial: pytorch.PyTorchTrial,
    rehearsal_of: Callable[..., Rehearsal],
    precision: Precision,
    on_done: Callable[[Audit], None],
    *,
    has_tf32: bool,
) -> None:
    """Audit a rehearsal of the next batch that `trial` trains, in any training loop.

    Args:
        trial: The trial. Its `train_batch` is replaced until its next call.
        rehearsal_of: Makes the rehearsal of a batch; called with the arguments of
            `train_batch`.
        precision: The precision that the YAML asks for.
        on_done: Called with the audit if it passes, before the batch is trained.
            Otherwise `train_batch` raises `AuditError`. An error of the rehearsal is
            the trial's if the batch cannot be trained either; if it can, a warning says
            that there was no audit.
        has_tf32: Whether the device has TF32.
    """
    train_batch = trial.train_batch

    def audit_and_train(batch: Any, **indices: Any) -> Any:
        trial.train_batch = train_batch  # type: ignore[method-assign]  # as it was

        try:
            rehearsal = rehearsal_of(batch=batch, **indices)
            audit = audit_rehearsal(rehearsal, precision, has_tf32=has_tf32)
        except AuditError:
            raise
        except Exception as error:  # whatever the trial raises
            metrics = train_batch(batch=batch, **indices)
            logger.warning(
                "the first batch is trained, but not audited: %s", one_line(error)
            )
            return metrics
        on_done(audit)
        return train_batch(batch=batch, **indices)

    trial.train_batch = audit_and_train  # type: ignore[assignment,method-assign]  # for one call
