"""Checks on one training batch that a run computes in the precision of its YAML.

A model that leaves autocast trains in float32 without any sign of it. The audit counts
the products of the first batch by dtype, forward and backward, and stops the run if the
wrong dtype dominates.

A product is an operation for which `torch.utils.flop_counter` has a formula: matrix
products, convolutions and fused attention (on a CPU, torch 2.3 does not count fused
attention). Recurrent layers and anything in `torch.inference_mode` are not counted.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from determined_amp.amp.errors import ConfigError, UserError
from determined_amp.amp.loop import AmpLoop
from determined_amp.amp.metric_names import AuditMetricName
from determined_amp.amp.precision import DeviceSupport
from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.settings import Precision
from determined_amp.amp.tensors import dtype_name
from determined_amp.amp.torch_private import TorchDispatchMode

_REMEDY = (
    "Is the forward in train_batch under amp.autocast()? In a trial without a "
    "MixedPrecision of its own, is every model, a teacher too, given to "
    "context.wrap_model, and called as model(inputs) or model.member(inputs)? Look for "
    "fp32_modules in the YAML, for autocast(enabled=False), .float(), .double() and "
    ".to() in the model, and for code that sets torch.backends; or ask for the "
    "precision that it computes in."
)

# The keyword for an operation's result in torch's FLOP formulas; torch 2.3 has another.
_FORMULA = inspect.signature(flop_registry[torch.ops.aten.mm], follow_wrapped=False)
_RESULT = "out_val" if "out_val" in _FORMULA.parameters else "out"


class ProductCount(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Counts products by dtype. No synchronisation.

    Use it in a rehearsal, never on a batch that is trained: while a dispatch mode
    watches, autocast does not reach the products inside some operations, such as those
    of `nn.Bilinear` and `torch.sparse.mm`.

    It counts the backward, too, because autograd's threads inherit the mode.

    Attributes:
        flops: FLOPs by operation and dtype of its factors; a multiply-add counts as 2.
    """

    # Otherwise torch refuses a batch with flex_attention.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operation = getattr(func, "overloadpacket", func)
        if operation in flop_registry:
            flops = flop_registry[operation](*args, **{**kwargs, _RESULT: result})
            self._count_product(operation.__name__, flops, args)
        return result

    def _count_product(self, operation: str, flops: int, args: tuple[Any, ...]) -> None:
        dtypes = [
            a.dtype
            for a in args
            if isinstance(a, torch.Tensor) and a.is_floating_point()
        ]
        if dtypes:  # attention also takes statistics, which are wider than its factors
            self.flops[operation, min(dtypes, key=lambda dtype: dtype.itemsize)] += (
                flops
            )


@dataclasses.dataclass(frozen=True)
class Audit:
    """The dtypes that one batch was computed in, on one slot."""

    precision: Precision  # the precision that the YAML asks for
    # FLOPs by operation and dtype, forward and backward.
    flops: Mapping[tuple[str, torch.dtype], int]
    # State of torch's TF32 switches for float32 products: `on`, `off`, or `mixed` if
    # they disagree. TF32 products are counted as float32.
    tf32: str
    device_has_tf32: bool  # whether the device has TF32 at all

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
        right = sum(
            flops for (_, dtype), flops in self.flops.items() if dtype == self.dtype
        )
        return right / max(self.total_flops, 1)

    @property
    def passed(self) -> bool:
        return self.failure() is None

    def failure(self) -> str | None:
        """What is wrong, in one sentence; None if the batch was computed as asked."""
        setting = f"hyperparameters.amp.precision is {self.precision.value}"
        # Without FLOPs, as with only embeddings or recurrent layers, nothing is judged.
        if not self.total_flops:
            return None
        if self.share <= 0.5:
            return (
                f"{setting}, but {self.share:.1%} of the FLOPs are in"
                f" {dtype_name(self.dtype)}"
            )
        fp32, tf32 = self.precision is Precision.FP32, self.precision is Precision.TF32
        if (fp32 and self.tf32 != "off") or (
            tf32 and self.device_has_tf32 and self.tf32 != "on"
        ):
            return f"{setting}, but torch's switches for TF32 are {self.tf32}"
        return None

    def table(self, verdict: str = "") -> str:
        """The counts as text, the largest first.

        Args:
            verdict: The line below the counts; by default the share in the precision.
        """
        width = max(
            len(operation) for operation in ("operation", *(o for o, _ in self.flops))
        )
        lines = [f"{'operation':{width}}  {'dtype':9}{'GFLOP':>10}{'share':>8}"]
        for (operation, dtype), flops in sorted(
            self.flops.items(), key=lambda row: -row[1]
        ):
            name, share = dtype_name(dtype), flops / self.total_flops
            lines.append(
                f"{operation:{width}}  {name:9}{flops / 1e9:>10.4g}{share:>8.1%}"
            )
        asked = f"{self.precision.value} asks for {dtype_name(self.dtype)}"
        lines.append(verdict or f"{asked}: {self.share:.1%} of the FLOPs")
        lines.append(f"TF32 switches: {self.tf32}")
        return "\n".join(lines)

    def metrics(self) -> dict[str, float]:
        """Only the share, because numbers that are measured once make no curve."""
        return {AuditMetricName.SHARE: self.share}


class AuditError(UserError):
    """The batch was not computed in the precision that the YAML asks for."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit
        super().__init__(f"audit: {audit.failure()}\n{audit.table()}\n{_REMEDY}")


def audit_loss(
    amp: AmpLoop, loss_fn: Callable[[Any], torch.Tensor], batch: Any
) -> Audit:
    """Audit one batch of your own loop, forward and backward, without a step.

    Parameters, gradients, buffers and random state are restored.

    Args:
        amp: The loop's `AmpLoop`. Its models are those given to `prepare`.
        loss_fn: Runs the forward of a batch and returns the loss; called under
            autocast.
        batch: A training batch.

    Raises:
        AuditError: if the batch is not computed in the precision of the settings.
        ConfigError: if `amp` knows no model, or `loss_fn` returns no loss.
    """
    if not amp.models:  # the gradients of unknown models would stay
        problem = (
            "audit_loss: no model was given; allowed: amp.prepare(model) for each,"
            " before"
        )
        raise ConfigError(amp.words.source, [problem])
    rehearsal = amp.rehearsal(batch, loss_fn)
    return audit_rehearsal(rehearsal, amp.settings.precision, amp.device)


def audit_rehearsal(
    rehearsal: Rehearsal, precision: Precision, device: torch.device
) -> Audit:
    """Rehearse a batch, and audit it.

    Args:
        rehearsal: The rehearsal.
        precision: The precision that the YAML asks for.
        device: The device that computes the batch.

    Raises:
        AuditError: if the batch is not computed in that precision.
    """
    count = ProductCount()
    rehearsal.run(watch=count)
    has_tf32 = DeviceSupport.of(device).tf32
    audit = Audit(precision, count.flops, _tf32(), has_tf32)
    if not audit.passed:
        raise AuditError(audit)
    return audit


def _tf32() -> str:
    try:
        matmul = torch.get_float32_matmul_precision() != "highest"
        convolution = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # torch's new switches were set, to different values
        return "mixed"
    if matmul != convolution:
        return "mixed"
    return "on" if matmul else "off"
