"""The `amp` section of the hyperparameters: precision, loss scale, and when to stop a run."""

from __future__ import annotations

import argparse
import enum
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from determined_amp.experiment.settings import ConfigError, setting

logger = logging.getLogger(__name__)


class Precision(enum.Enum):
    """The arithmetic of matrix products and convolutions.

    `fp32` is IEEE float32 with TF32 off, the baseline. `tf32` rounds the inputs of float32
    products to 10 mantissa bits on tensor cores. `amp_fp16` and `amp_bf16` autocast to that dtype.
    Weights and optimizer state are float32 in all four.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    AMP_FP16 = "amp_fp16"
    AMP_BF16 = "amp_bf16"

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast; None without autocast."""
        return {Precision.AMP_FP16: torch.float16, Precision.AMP_BF16: torch.bfloat16}.get(self)


class OnOverflow(enum.Enum):
    """What to do with a run that no longer trains: end it with a diagnosis, or log a warning."""

    ABORT = "abort"
    WARN = "warn"


class EvalPrecision(enum.Enum):
    """The precision of validation: float32, or the same as in training."""

    FP32 = "fp32"
    SAME = "same"


class Compile(enum.Enum):
    """The `torch.compile` mode for forward and backward in training; `false` runs them eagerly.

    `default` fuses kernels. `reduce-overhead` and `max-autotune` also replay CUDA graphs.
    """

    OFF = False
    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE = "max-autotune"

    @property
    def replays_graphs(self) -> bool:
        """Whether CUDA graphs are replayed, so that the next batch overwrites earlier results."""
        return self in (Compile.REDUCE_OVERHEAD, Compile.MAX_AUTOTUNE)


# Settings that have an effect only if the loss is scaled.
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
        precision: Precision of training.
        init_scale: Loss scale of the first step.
        growth_factor: Multiplies the scale after `growth_interval` applied steps in a row.
        backoff_factor: Multiplies the scale after a skipped step.
        growth_interval: Number of applied optimizer steps in a row before the scale grows.
        min_scale: Lower limit of the scale. A skipped step at this limit counts as a failure.
        max_consecutive_skips: More skipped steps in a row than this count as a failure.
        max_skip_ratio: A larger share of skipped steps than this, over ten or more steps, counts as
            a failure, except at the start, while the scale settles.
        on_overflow: What to do about a failure. A loss that is not finite is a failure, too.
        eval_precision: Precision of validation.
        fp32_modules: Regular expressions; modules whose names match compute in float32.
        audit: Stop if the first batch is not computed in `precision`; see `determined_amp.audit`.
        set_backends: Set torch's TF32 switches to match `precision`. They are global to the
            process.
        compile: Mode of `torch.compile` for the models given to `prepare`.
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
    compile: Compile = setting(Compile.OFF)

    @property
    def scales_the_loss(self) -> bool:
        """Whether there is a loss scale: only in `amp_fp16`."""
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


def without_scaler(section: Mapping[str, Any]) -> dict[str, Any]:
    """An `amp` section without the settings of a loss scale."""
    return {key: value for key, value in section.items() if key not in SCALER_KEYS}


def without_unused_scaler(section: Mapping[str, Any]) -> dict[str, Any]:
    """An `amp` section without the loss scale settings, unless its precision is `amp_fp16`.

    A log line names the removed settings.
    """
    precision = section.get("precision")
    unused = sorted(section.keys() & set(SCALER_KEYS))
    if precision == Precision.AMP_FP16.value or not unused:
        return dict(section)
    logger.info("%s has no loss scale: ignoring %s", precision, ", ".join(unused))
    return without_scaler(section)


def in_precision(config: Mapping[str, Any], precision: str | None) -> dict[str, Any]:
    """An experiment configuration with another precision.

    Settings of the loss scale are kept for `amp_fp16` only; a log line names the removed ones.

    Args:
        config: The configuration, with or without a section `hyperparameters.amp`.
        precision: The value of a `Precision`; None changes nothing.
    """
    hyperparameters = config.get("hyperparameters") or {}
    if precision is None or not isinstance(hyperparameters, Mapping):
        return dict(config)
    given = hyperparameters.get("amp")
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(
            "--precision",
            [
                f"hyperparameters.amp: got {given!r}, which is the trial's own; allowed: a section "
                "amp: {precision: ...}, or no key of that name"
            ],
        )
    section = without_unused_scaler({**(given or {}), "precision": precision})
    return {**config, "hyperparameters": {**hyperparameters, "amp": section}}


def chosen_precision(options: argparse.Namespace) -> str | None:
    """The precision that `--precision` or `--config` chooses; None if neither does."""
    key = "hyperparameters.amp.precision="
    chosen = [change.removeprefix(key) for change in options.overrides if change.startswith(key)]
    precision: str | None = options.precision
    return precision or (chosen[-1] if chosen else None)


def add_precision_option(parser: argparse.ArgumentParser) -> None:
    """Add `--precision`."""
    parser.add_argument(
        "--precision",
        choices=[precision.value for precision in Precision],
        help="instead of hyperparameters.amp.precision; a trial without AMP trains in it as it is",
    )
