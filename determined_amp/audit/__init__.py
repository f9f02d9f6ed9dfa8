"""Checks on one real training batch that a run computes in the precision its YAML asks for.

A model that leaves autocast trains in float32 without any sign of it. The audit counts the products
of the first batch by dtype, forward and backward, and stops the run if the wrong dtype dominates.

A product is an operation for which `torch.utils.flop_counter` has a formula: matrix products,
convolutions and fused attention (on a CPU, torch 2.3 does not count fused attention). Recurrent
layers and anything in `torch.inference_mode` are not counted.
"""

from determined_amp.audit.batch import audit_loss, audited
from determined_amp.audit.count import ProductCount
from determined_amp.audit.kernels import tensor_core_share
from determined_amp.audit.report import Audit, AuditError, AuditMetrics

__all__ = [
    "Audit",
    "AuditError",
    "AuditMetrics",
    "ProductCount",
    "audit_loss",
    "audited",
    "tensor_core_share",
]
