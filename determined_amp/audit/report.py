"""The result of an audit: whether it passed, as a table, and as metrics."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

import torch
from determined import pytorch

from determined_amp.experiment.amp_settings import Precision
from determined_amp.experiment.errors import UserError

logger = logging.getLogger(__name__)

_REMEDY = (
    "Is the forward in train_batch under amp.autocast()? Without a MixedPrecision of its own, does "
    "the trial call the model as model(inputs), and not another method of it? Look for "
    "fp32_modules in the YAML, for autocast(enabled=False), .float() and .to() in the model, and "
    "for code that sets torch.backends; or ask for the precision that it computes in."
)


@dataclasses.dataclass(frozen=True)
class Audit:
    """The dtypes that one batch was computed in, on one slot.

    Args:
        precision: The precision that the YAML asks for.
        flops: FLOPs by operation and dtype, forward and backward.
        casts: Tensors converted from one floating dtype to another.
        cast_bytes: Bytes that these conversions read and wrote.
        tf32: State of torch's TF32 switches for float32 products: `on`, `off`, or `mixed` if they
            disagree. TF32 products are counted as float32.
        device_has_tf32: Whether the device has TF32 at all.
        tensor_core_share: Share of GPU time in tensor-core kernels; None if it was not timed.
    """

    precision: Precision
    flops: Mapping[tuple[str, torch.dtype], int]
    casts: int
    cast_bytes: int
    tf32: str
    device_has_tf32: bool
    tensor_core_share: float | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that must have more than half of the FLOPs."""
        return self.precision.autocast_dtype or torch.float32

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    @property
    def share(self) -> float:
        """Share of the FLOPs that are in `dtype`; 0 if there are no FLOPs."""
        right = sum(flops for (_, dtype), flops in self.flops.items() if dtype == self.dtype)
        return right / max(self.total_flops, 1)

    @property
    def passed(self) -> bool:
        return self.failure() is None

    def failure(self) -> str | None:
        """What is wrong, in one sentence; None if the batch was computed as asked."""
        asked = f"hyperparameters.amp.precision is {self.precision.value}"
        if not self.total_flops:
            return None  # nothing to judge, as with only embeddings or a recurrent layer
        if self.share <= 0.5:
            return f"{asked}, but {self.share:.1%} of the FLOPs are in {_name(self.dtype)}"
        fp32, tf32 = self.precision is Precision.FP32, self.precision is Precision.TF32
        if (fp32 and self.tf32 != "off") or (tf32 and self.device_has_tf32 and self.tf32 != "on"):
            return f"{asked}, but torch's switches for TF32 are {self.tf32}"
        return None

    def table(self) -> str:
        """The counts as text, the largest first."""
        width = max(len(operation) for operation in ("operation", *(o for o, _ in self.flops)))
        lines = [f"{'operation':{width}}  {'dtype':9}{'GFLOP':>10}{'share':>8}"]
        for (operation, dtype), flops in sorted(self.flops.items(), key=lambda row: -row[1]):
            share = flops / self.total_flops
            lines.append(f"{operation:{width}}  {_name(dtype):9}{flops / 1e9:>10.4g}{share:>8.1%}")
        lines += [
            f"{self.precision.value} asks for {_name(self.dtype)}: {self.share:.1%} of the FLOPs",
            f"casts: {self.casts}, {self.cast_bytes / 2**20:.4g} MiB read and written",
            f"TF32 switches: {self.tf32}",
        ]
        if self.tensor_core_share is not None:
            lines.append(f"GPU time in tensor-core kernels: {self.tensor_core_share:.1%}")
        return "\n".join(lines)

    def metrics(self) -> dict[str, float]:
        """Only the share: numbers that are measured once make no curve."""
        return {AuditMetricName.SHARE: self.share}


class AuditMetricName:
    """The metric's name in the first training report; it covers one batch, on the chief's slot."""

    # Share of the FLOPs in the dtype that the precision asks for.
    SHARE = "watch_audit_share"


class AuditError(UserError):
    """The batch was not computed in the precision that the YAML asks for."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit
        super().__init__(f"audit: {audit.failure()}\n{audit.table()}\n{_REMEDY}")


class AuditMetrics(pytorch.MetricReducer):
    """Adds an audit to the first training report after it, and to no other.

    Args:
        context: The trial's context; the reducer registers itself there.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self._metrics: dict[str, float] = {}
        context.wrap_reducer(self, for_validation=False)

    def add(self, audit: Audit) -> None:
        logger.info("audit of the first batch:\n%s", audit.table())
        self._metrics = audit.metrics()

    def reset(self) -> None:
        """Called by Determined before every stretch of training and every validation."""
        self._metrics = {}

    def per_slot_reduce(self) -> dict[str, float]:
        return self._metrics

    def cross_slot_reduce(self, per_slot_metrics: Sequence[dict[str, float]]) -> dict[str, float]:
        return per_slot_metrics[0]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
