"""The `amp` section of the hyperparameters: precision, loss scale, when to stop."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from determined_amp.amp.errors import ConfigError, Problem
from determined_amp.amp.fields import fill, setting
from determined_amp.amp.plain_data import Config

if TYPE_CHECKING:
    import torch


class Precision(enum.Enum):
    """The arithmetic of matrix products and convolutions.

    `fp32` is IEEE float32 with TF32 off, the baseline. `tf32` rounds the inputs of
    float32 products to 10 mantissa bits on tensor cores. `amp_fp16` and `amp_bf16`
    autocast to float16 and bfloat16. Weights and optimizer state are always float32.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    AMP_FP16 = "amp_fp16"
    AMP_BF16 = "amp_bf16"

    @property
    def autocasts(self) -> bool:
        """Whether the precision uses autocast."""
        return self in (Precision.AMP_FP16, Precision.AMP_BF16)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast; None without autocast."""
        # Importing torch takes seconds. Mistakes in an `amp` section must show before.
        import torch  # noqa: PLC0415

        return {
            Precision.AMP_FP16: torch.float16,
            Precision.AMP_BF16: torch.bfloat16,
        }.get(self)


class OnOverflow(enum.Enum):
    """What to do with a run that no longer trains: end it with a diagnosis, or warn."""

    ABORT = "abort"
    WARN = "warn"


class EvalPrecision(enum.Enum):
    """The precision of validation: float32, or the same as in training."""

    FP32 = "fp32"
    SAME = "same"


class Compile(enum.Enum):
    """The `torch.compile` mode of training; `false` runs forward and backward eagerly.

    `default` fuses kernels. `reduce-overhead` and `max-autotune` also replay CUDA
    graphs.
    """

    OFF = False
    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE = "max-autotune"

    @property
    def replays_graphs(self) -> bool:
        """Whether it replays CUDA graphs: the next batch overwrites earlier results."""
        return self in (Compile.REDUCE_OVERHEAD, Compile.MAX_AUTOTUNE)


class FindScale(enum.Enum):
    """In place of a number: the finder chooses the loss scale on the first batch."""

    FIND = "find"


# PyTorch's own default.
DEFAULT_SCALE = 65536.0

# Settings of the loss scale. They have no effect in the other precisions.
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
    """The `amp` section of the hyperparameters, with `GradScaler`'s names and defaults.

    A script may also write an enumeration member as in a YAML, such as "amp_fp16".

    Args:
        precision: Precision of training.
        init_scale: Loss scale of the first step. `find` lets the finder choose it on
            the first batch, in a `PyTorchTrial` only.
        growth_factor: Multiplies the scale after `growth_interval` applied steps in a
            row.
        backoff_factor: Multiplies the scale after a skipped step.
        growth_interval: Number of applied optimizer steps in a row before the scale
            grows.
        min_scale: Lower limit of the scale. A skipped step at this limit counts as a
            failure.
        max_consecutive_skips: More skipped steps in a row than this count as a failure.
        max_skip_ratio: A larger share of skipped steps than this, over ten or more
            steps, counts as a failure, except at the start, while the scale settles.
        on_overflow: What to do about a failure. In a precision without a loss scale, a
            loss that is not finite is a failure, too.
        eval_precision: Precision of validation.
        fp32_modules: Regular expressions; modules whose names match compute in float32.
        audit: Stop if the first batch of a `PyTorchTrial` is not computed in
            `precision`; for a loop see `audit_loss`.
        set_backends: Set torch's TF32 switches to match `precision`. They are global to
            the process.
        compile: Mode of `torch.compile` for the models given to `prepare`.

    Raises:
        ConfigError: naming every mistake, as for a YAML.
    """

    precision: Precision = setting()
    init_scale: float | FindScale = setting(DEFAULT_SCALE, above=0, at_most=2.0**127)
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

    if not TYPE_CHECKING:  # type checkers know what the fields take

        def __init__(self, *values: object, **named: object) -> None:
            names = [field.name for field in dataclasses.fields(self)]
            problems: list[Problem] = []
            if len(values) > len(names):
                text = f"got {len(values)} values; allowed: {len(names)}, or by name"
                problems.append(Problem("", text))
            by_place = dict(zip(names, values, strict=False))
            for name in by_place.keys() & named.keys():
                text = (
                    f"got {values[names.index(name)]} and {named[name]}; allowed: one"
                )
                problems.append(Problem(name, text))
            given = {**by_place, **named}
            fill(self, given, "", problems)
            if problems:
                raise ConfigError("AmpSettings", problems)

    @property
    def scales_the_loss(self) -> bool:
        """Whether there is a loss scale: only in `amp_fp16`."""
        return self.precision is Precision.AMP_FP16

    @property
    def finds_scale(self) -> bool:
        """Whether the finder must choose the loss scale on the first batch."""
        return self.scales_the_loss and isinstance(self.init_scale, FindScale)

    @property
    def first_scale(self) -> float:
        """The initial scale; for `find` the larger of the default and `min_scale`."""
        if isinstance(self.init_scale, FindScale):
            return max(DEFAULT_SCALE, self.min_scale)
        return self.init_scale

    @property
    def ignored(self) -> tuple[str, ...]:
        """Changed settings of the loss scale, if this precision has no loss scale."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        changed = (key for key in SCALER_KEYS if getattr(self, key) != defaults[key])
        return () if self.scales_the_loss else tuple(changed)

    def contradictions(self, fields_set: frozenset[str]) -> Iterator[tuple[str, str]]:
        is_given = self.scales_the_loss and not self.finds_scale
        if is_given and self.first_scale < self.min_scale:
            yield (
                "init_scale",
                f"got {self.first_scale:g}, which is below min_scale "
                f"{self.min_scale:g}; allowed: min_scale or more",
            )


def scale_text(scale: float) -> str:
    """A loss scale as text: 2^k if it is a power of two, else a number."""
    fraction, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if fraction == 0.5 else f"{scale:g}"


def yaml_lines(changes: Config) -> str:
    """Format changes to the `amp` section as lines to paste into an experiment YAML."""
    lines = ["hyperparameters:", "  amp:"]
    for key, value in changes.items():
        # `json` writes a float with all its digits, so a power of two stays exact.
        text = value if isinstance(value, str) else json.dumps(value)
        line = f"# without {key}" if value is None else f"{key}: {text}"
        lines.append(f"    {line}")
    return "\n".join(lines)
