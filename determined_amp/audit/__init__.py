"""The public names of `determined_amp.amp.rehearse.precision_audit`."""

from determined_amp.amp.rehearse.precision_audit import Audit, AuditError, audit_loss

__all__ = ["Audit", "AuditError", "audit_loss"]
