"""Audits the next batch that a trial trains, in any training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from determined import pytorch
from torch.profiler import ProfilerActivity, profile

from determined_amp.amp.loop import AmpLoop
from determined_amp.amp.precision import DeviceSupport
from determined_amp.amp.replay import undisturbed
from determined_amp.audit.count import ProductCount
from determined_amp.audit.kernels import tensor_core_share
from determined_amp.audit.report import Audit, AuditError
from determined_amp.experiment.amp_settings import Precision


def audited(
    trial: pytorch.PyTorchTrial,
    device: torch.device,
    precision: Precision,
    on_done: Callable[[Audit], None],
    *,
    has_tf32: bool,
    time_kernels: bool = False,
) -> None:
    """Audit the next batch that `trial` trains, in any training loop.

    Args:
        trial: The trial. Its `train_batch` is replaced for the audited batches, then restored.
        device: The device that the trial computes on.
        precision: The precision that the YAML asks for.
        on_done: Called with the audit if it passes. Otherwise `train_batch` raises `AuditError`.
        has_tf32: Whether the device has TF32.
        time_kernels: On an NVIDIA GPU, also time the kernels of the following batch, when cuDNN has
            chosen its algorithms. Do not use it in a training run: a process that has profiled once
            may train 10 to 20 % slower from then on
            (https://github.com/pytorch/pytorch/issues/144455).
    """

    @contextmanager
    def counting() -> Iterator[None]:
        with ProductCount() as count:
            yield
        audit = _judged(precision, count, has_tf32=has_tf32)
        if time_kernels and device.type == "cuda" and torch.version.hip is None:
            _around_next_batch(trial, _timing(audit, on_done))
        else:
            on_done(audit)

    _around_next_batch(trial, counting())


def audit_loss(amp: AmpLoop, loss_fn: Callable[[Any], torch.Tensor], batch: Any) -> Audit:
    """Audit one batch of a loop of one's own, forward and backward, without a step.

    Parameters, gradients, buffers and random state are restored.

    Args:
        amp: The loop's; its models are those given to `prepare`.
        loss_fn: Runs the forward of a batch and returns the loss; called under autocast.
        batch: A training batch.

    Raises:
        AuditError: if the batch is not computed in the precision of the settings.
    """
    with undisturbed(*amp.models, optimizers=amp.optimizers), ProductCount() as count:
        amp.replay(batch, loss_fn)
    return _judged(amp.settings.precision, count, has_tf32=DeviceSupport.of(amp.device).tf32)


def _judged(precision: Precision, count: ProductCount, *, has_tf32: bool) -> Audit:
    audit = Audit(precision, count.flops, count.casts, count.cast_bytes, _tf32(), has_tf32)
    if not audit.passed:
        raise AuditError(audit)
    return audit


@contextmanager
def _timing(audit: Audit, on_done: Callable[[Audit], None]) -> Iterator[None]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield
    kernels = (
        (event.name, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    )
    on_done(dataclasses.replace(audit, tensor_core_share=tensor_core_share(kernels)))


def _around_next_batch(trial: pytorch.PyTorchTrial, around: AbstractContextManager[None]) -> None:
    train_batch = trial.train_batch

    def once(*args: Any, **kwargs: Any) -> Any:
        trial.train_batch = train_batch  # type: ignore[method-assign]  # as it was
        with around:
            return train_batch(*args, **kwargs)

    trial.train_batch = once  # type: ignore[method-assign]  # for one call


def _tf32() -> str:
    try:
        matmul = torch.get_float32_matmul_precision() != "highest"
        convolution = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # torch's new switches were set, to different values
        return "mixed"
    if matmul != convolution:
        return "mixed"
    return "on" if matmul else "off"
