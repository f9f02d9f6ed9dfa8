"""The public names of `determined_amp.amp.precision_audit`."""

from determined_amp.amp.precision_audit import Audit, AuditError, audit_loss

__all__ = ["Audit", "AuditError", "audit_loss"]
