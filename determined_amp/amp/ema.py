"""An exponential moving average of the weights that follows the optimizer steps that were applied.

diffusers' `EMAModel.step` always moves, by a decay that it counts on the host: a step that the
scaler skips would pull the average towards weights that have not changed, and move the warm-up of
the decay. Whether a step was skipped is known on the device alone, so both are decided there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from determined import pytorch
from diffusers.training_utils import EMAModel
from torch import nn

from determined_amp.amp.steps import StepCounts


class AppliedStepEMA(EMAModel):  # type: ignore[misc]  # diffusers is not typed
    """diffusers' `EMAModel`, moved by applied steps only and without a synchronisation.

    The decay warms up as there: with n applied steps it is 0 for n = 1, then n / (9 + n), and
    `decay` at most. So the average of a short run is not dominated by the initial weights.

    Args:
        parameters: What is averaged; float32.
        counts: The steps of their optimizer.
        decay: Share of the old average that a step keeps, once warmed up.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], counts: StepCounts, decay: float
    ) -> None:
        super().__init__(parameters, decay=decay)
        self._counts = counts
        self._followed = counts.applied.clone()

    @torch.no_grad()
    def step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Call after every optimizer step, applied or not. No synchronisation."""
        applied = self._counts.applied - self._followed  # 1 or 0
        count = self._counts.applied.double()
        decay = (count / (9 + count)).clamp(max=self.decay) * (count > 1)
        # Against a skipped step the weight is 0, and the average stays what it is to the bit.
        weight = ((1 - decay) * applied).float()
        towards = torch._foreach_sub(list(parameters), self.shadow_params)
        torch._foreach_mul_(towards, weight)
        torch._foreach_add_(self.shadow_params, towards)
        self.take_up()

    def take_up(self) -> None:
        """Take the present count of applied steps for one that has been followed."""
        self._followed.copy_(self._counts.applied)


class EMAWeights(pytorch.PyTorchCallback):
    """The averaged weights of one model: moved, used and checkpointed.

    Validation computes with the average in place of the weights, which are not touched, so nothing
    has to be put back when a validation fails half way.

    Args:
        model: The trial's model, as `wrap_model` returned it.
        amp: The trial's mixed precision; counts the applied steps.
        decay: See `AppliedStepEMA`.
        optimizer: The one that steps the model; by default the first of the trial.
    """

    def __init__(
        self,
        model: nn.Module,
        amp: Any,
        decay: float,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        parallel = isinstance(model, nn.parallel.DistributedDataParallel)
        inner = model.module if parallel else model
        assert isinstance(inner, nn.Module)
        self._model = inner
        self._names = [name for name, _ in self._model.named_parameters()]
        self._counts = amp.metrics.first.counts if optimizer is None else amp.steps(optimizer)
        self._average = AppliedStepEMA(self._model.parameters(), self._counts, decay)
        self._followed = 0

    def step(self) -> None:
        """Call after `amp.update`; moves if there was a step. No synchronisation."""
        if self._followed != self._counts.attempted:
            self._followed = self._counts.attempted
            self._average.step(self._model.parameters())

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """The model's output, computed with the averaged weights."""
        return torch.func.functional_call(self._model, self.state_dict(), inputs)

    def state_dict(self) -> dict[str, Any]:
        """The averages by the names of the model's parameters."""
        return dict(zip(self._names, self._average.shadow_params, strict=True))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises: KeyError: if a parameter of the model has no average in `state_dict`."""
        for name, average in self.state_dict().items():
            average.copy_(state_dict[name])

    def on_training_start(self) -> None:
        self._followed = self._counts.attempted
        self._average.take_up()
