"""Runs training batches repeatedly while the parameters stay the same.

Only the optimizer step is left out. Float16 autocast regions can run in another dtype instead:
bfloat16 builds the same graph with the range of float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from determined_amp.amp.diagnosis import find_cause
from determined_amp.amp.errors import UserError
from determined_amp.amp.replay import float16_as, undisturbed
from determined_amp.amp.slots import Slots
from determined_amp.amp.tensors import parameters_in


class LossScaleError(UserError):
    """No loss scale can be found. The message says why, and what to do."""


@dataclass(frozen=True)
class Gradients:
    """The result of one backward."""

    loss_is_finite: bool  # whether the scaled loss, the argument of `context.backward`, was finite
    # The gradients of all parameters that got one, still scaled.
    parameters: tuple[torch.Tensor, ...]

    @property
    def are_finite(self) -> bool:
        """Whether `GradScaler` would step; synchronises.

        Raises:
            LossScaleError: if no parameter got a gradient.
        """
        if not self.parameters:
            raise LossScaleError("no parameter gets a gradient: there is nothing to scale")
        filled = [gradient for gradient in self.parameters if gradient.numel()]
        norms = torch._foreach_norm(filled, float("inf"))
        return bool(torch.isfinite(torch.stack([norm.float() for norm in norms])).all())


class FrozenBatch(ABC):
    """A batch whose forward, loss and backward can run any number of times.

    Args:
        models: The models whose parameters get the gradients.
        batch: The batch.
        optimizers: Those of the trial; they may hold parameters that are in no model.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        batch: Any,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        self._models = models
        self._optimizers = optimizers
        self.batch = batch

    @property
    @abstractmethod
    def samples(self) -> int:
        """Number of samples of this batch, on this slot."""

    @abstractmethod
    def _pass(self, scale: float, after_backward: Callable[[torch.Tensor], None]) -> None:
        """Run forward, scaled loss and backward, then pass the scaled loss to `after_backward`."""

    def backward(self, dtype: torch.dtype | None, scale_log2: float = 0) -> Gradients:
        """Run forward, loss and backward, without a step.

        Parameters, gradients, buffers, scaler and random state are restored.

        Args:
            dtype: The dtype to use in float16 autocast regions; None for float32.
            scale_log2: log2 of the loss scale.

        Raises:
            LossScaleError: if a trial does not call `context.backward`.
        """
        losses: list[torch.Tensor] = []
        gradients: dict[torch.Tensor, torch.Tensor] = {}
        parameters = parameters_in(self._models, self._optimizers)

        def keep(loss: torch.Tensor) -> None:
            losses.append(loss.detach())
            # Copied before the trial clips them or sets them to 0.
            gradients.update({p: p.grad.clone() for p in parameters if p.grad is not None})

        with undisturbed(*self._models, optimizers=self._optimizers), float16_as(dtype):
            self._pass(2.0**scale_log2, keep)
        finite = all(bool(torch.isfinite(loss).all()) for loss in losses)
        return Gradients(finite, tuple(gradients.values()))

    def cause(self, slots: Slots) -> str | None:
        """A sentence on what overflows in float16 without a loss scale, see `find_cause`."""

        def train(scale: float) -> None:
            self._pass(scale, lambda loss: None)

        return find_cause(self._models, self.batch, train, optimizers=self._optimizers, slots=slots)
