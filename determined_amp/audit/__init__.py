"""Does a run compute in the precision its YAML asks for? One real training batch is counted.

A model that leaves autocast trains in float32 without any sign of it. The audit counts the products
of the first batch by dtype, forward and backward, and stops the run if the wrong one dominates.

A product is what `torch.utils.flop_counter` has a formula for: matrix products, convolutions and
fused attention, which torch 2.3 does not count on a CPU. Recurrent layers are not counted, and
neither is anything in `torch.inference_mode`.
"""

from determined_amp.audit.batch import audited
from determined_amp.audit.count import ProductCount
from determined_amp.audit.kernels import tensor_core_share
from determined_amp.audit.report import Audit, AuditError, AuditMetrics

__all__ = [
    "Audit",
    "AuditError",
    "AuditMetrics",
    "ProductCount",
    "audited",
    "tensor_core_share",
]
