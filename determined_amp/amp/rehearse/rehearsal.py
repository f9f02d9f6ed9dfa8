"""Trains a batch again without a step, in any precision, and puts everything back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from determined_amp.amp.fp32_modules import meanwhile_in_float32
from determined_amp.amp.rehearse.regions import float16_as
from determined_amp.amp.rehearse.restored import undisturbed
from determined_amp.amp.tensors import (
    largest_of,
    named_parameters,
    parameters_in,
    tensors_of,
    values_of,
)
from determined_amp.amp.torch_private import backwards_through

# Runs forward, loss and backward as in training, without a step, at this loss scale;
# None means the current scale.
Train = Callable[["float | None"], object]


@dataclass(frozen=True)
class Rehearsed:
    """The outcome of a rehearsal."""

    # the largest magnitude of the scaled losses; infinite if one is not finite
    largest_loss: float
    # Names of the parameters whose gradients are not finite, in the order of the
    # backward.
    lost: tuple[str, ...]
    has_gradients: bool  # whether any parameter got one
    # Whether a float16 autocast region was entered, in whatever dtype it ran.
    uses_float16: bool

    @property
    def loss_is_finite(self) -> bool:
        return math.isfinite(self.largest_loss)

    @property
    def is_sound(self) -> bool:
        return self.loss_is_finite and not self.lost


class Rehearsal:
    """A batch that can be trained again and again without a step.

    Everything is put back after a run, see `undisturbed`. A run needs only this slot,
    unless the forward waits for the others, as SyncBatchNorm does. Then all slots must
    make the same runs.

    Args:
        train: Trains the batch.
        models: All models of the training.
        optimizers: The optimizers of the training, which may hold parameters of no
            model.
        batch: The batch itself, so that its data can be examined.
    """

    def __init__(
        self,
        train: Train,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer] = (),
        batch: Any = None,
    ) -> None:
        self.models = models
        self.optimizers = optimizers
        self.batch = batch
        self._train = train

    def run(
        self,
        scale: float | None = None,
        dtype: torch.dtype | None = None,
        *,
        islands: Sequence[nn.Module] = (),
        watch: AbstractContextManager[Any] | None = None,
    ) -> Rehearsed:
        """Train the batch once; synchronises.

        Args:
            scale: The loss scale; by default the current one.
            dtype: bfloat16 in place of float16, or float32 for no autocast at all; by
                default as in training.
            islands: Modules to keep in float32.
            watch: A context manager to hold open while the batch is trained.
        """
        parameters = parameters_in(self.models)
        device_type = next((parameter.device.type for parameter in parameters), "cpu")
        results = _Results(self.models, self.optimizers)
        with (
            float16_as(dtype) as regions,
            meanwhile_in_float32(islands, device_type),
            undisturbed(*self.models, optimizers=self.optimizers),
            results.watching(),
            watch or nullcontext(),
        ):
            self._train(scale)
            results.look_at_gradients()
        return results.read(uses_float16=torch.float16 in regions)


class _Results:
    """The losses and gradients of a rehearsal. Only `read` waits for the device."""

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> None:
        self._parameters: dict[str, torch.Tensor] = dict(named_parameters(models))
        others = set(parameters_in((), optimizers)) - set(self._parameters.values())
        self._parameters |= {
            f"(parameter {i} of no model)": p for i, p in enumerate(others)
        }
        self._losses: list[torch.Tensor] = []
        self._finite: list[tuple[str, torch.Tensor]] = []

    def watching(self) -> AbstractContextManager[None]:
        """Record every loss, and the gradients right after every backward.

        Later a trial may clip or drop them.
        """
        return backwards_through(self._run_and_look)

    def _run_and_look(
        self, run: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if kwargs.get("accumulate_grad"):
            self._losses += [loss.detach() for loss in tensors_of(outputs)]
        result = run(outputs, *args, **kwargs)
        self.look_at_gradients()
        return result

    def look_at_gradients(self) -> None:
        """Record the gradients, also for a trial that sets them without a backward."""
        # reversed, because a backward reaches the last parameters first
        for name, parameter in reversed(self._parameters.items()):
            if parameter.grad is not None:
                is_finite = torch.isfinite(values_of(parameter.grad)).all()
                self._finite.append((name, is_finite))

    def read(self, *, uses_float16: bool) -> Rehearsed:
        losses = [largest_of(loss) for loss in self._losses]
        # `max` would lose a NaN, which is not larger than any number.
        losses = [loss if math.isfinite(loss) else math.inf for loss in losses]
        lost = dict.fromkeys(name for name, is_finite in self._finite if not is_finite)
        return Rehearsed(
            max(losses, default=0.0), tuple(lost), bool(self._finite), uses_float16
        )
