"""The `amp` section of the hyperparameters: precision, loss scale, and what to do about trouble."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from determined_amp.config.settings import setting


class Precision(enum.Enum):
    """What matrix products and convolutions are computed in.

    `fp32` is IEEE float32: TF32 is off, which makes it the honest baseline. `tf32` rounds the
    inputs of float32 products to 10 mantissa bits on tensor cores. `amp_fp16` and `amp_bf16`
    autocast to that dtype; weights and optimizer state stay float32 in all four.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    AMP_FP16 = "amp_fp16"
    AMP_BF16 = "amp_bf16"

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype autocast computes in, or None where autocast is off."""
        return {
            Precision.AMP_FP16: torch.float16,
            Precision.AMP_BF16: torch.bfloat16,
        }.get(self)


class OnOverflow(enum.Enum):
    """What to do with a run that no longer trains: end it with a diagnosis, or only say so."""

    ABORT = "abort"
    WARN = "warn"


class EvalPrecision(enum.Enum):
    """What validation computes in: float32, or what training computes in."""

    FP32 = "fp32"
    SAME = "same"


# Settings that mean something only where the loss is scaled.
SCALER_KEYS = (
    "init_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "min_scale",
    "max_consecutive_skips",
    "max_skip_ratio",
)


@dataclass(frozen=True)
class AmpSettings:
    """The `amp` section of the hyperparameters; the scaler's names and defaults are torch's own.

    Args:
        precision: What training computes in.
        init_scale: Loss scale of the first step.
        growth_factor: The scale is multiplied by it after `growth_interval` applied steps in a row.
        backoff_factor: The scale is multiplied by it after a skipped step.
        growth_interval: Optimizer steps.
        min_scale: The scale falls no further. Skipping a step at this floor counts as failure.
        max_consecutive_skips: Skipping more optimizer steps in a row counts as failure.
        max_skip_ratio: A larger share of skipped steps, over ten or more, counts as failure, except
            at the start, where the scale finds its level.
        on_overflow: What to do about a failure, a loss that is not finite included.
        eval_precision: What validation computes in.
        fp32_modules: Regular expressions; modules whose names they match compute in float32.
        audit: Stop if the first batch is not computed in `precision`; see `determined_amp.audit`.
        set_backends: Set torch's switches for TF32 as `precision` needs them. They are switches of
            the whole process; False leaves them alone.
    """

    precision: Precision = setting()
    init_scale: float = setting(65536.0, above=0)
    growth_factor: float = setting(2.0, above=1)
    backoff_factor: float = setting(0.5, above=0, below=1)
    growth_interval: int = setting(2000, at_least=1)
    min_scale: float = setting(1.0, above=0)
    max_consecutive_skips: int = setting(50, at_least=1)
    max_skip_ratio: float = setting(0.5, above=0, at_most=1)
    on_overflow: OnOverflow = setting(OnOverflow.ABORT)
    eval_precision: EvalPrecision = setting(EvalPrecision.FP32)
    fp32_modules: tuple[str, ...] = setting(())
    audit: bool = setting(True)
    set_backends: bool = setting(True)

    @property
    def scales_the_loss(self) -> bool:
        """Whether there is a loss scale: in `amp_fp16` alone."""
        return self.precision is Precision.AMP_FP16

    def contradictions(self, given: frozenset[str]) -> Iterator[tuple[str, str]]:
        if self.init_scale < self.min_scale:
            yield (
                "init_scale",
                f"got {self.init_scale:g}, which is below min_scale {self.min_scale:g}; "
                "allowed: min_scale or more",
            )
        if not self.scales_the_loss:
            for key in SCALER_KEYS:
                if key in given:
                    yield (
                        key,
                        f"given, but precision {self.precision.value} does not scale the loss; "
                        "allowed: precision amp_fp16, or the key left out",
                    )
