"""An exponential moving average of the weights that follows the optimizer steps that
were applied.

Whether the scaler skipped a step is known on the device alone. A skipped step must not
pull the average towards weights that have not changed, nor move the warm-up of the
decay. So both are decided on the device, without a synchronisation.
"""

from __future__ import annotations

from typing import Any

import torch
from determined import pytorch
from torch import nn

from determined_amp import MixedPrecision


class EMAWeights(pytorch.PyTorchCallback):
    """The averaged weights of one model: moved, used and checkpointed.

    The decay warms up: with n applied steps it is 0 for n = 1, then n / (9 + n), and
    `decay` at most. So the average of a short run is not dominated by the initial
    weights. diffusers' `EMAModel` does the same.

    Validation computes with the average in place of the weights, which are not touched,
    so nothing has to be put back when a validation fails half way.

    Args:
        model: The trial's model, as `wrap_model` returned it; its parameters are
            float32.
        amp: The trial's mixed precision; counts the applied steps.
        decay: Share of the old average that a step keeps, once warmed up.
        optimizer: The one that steps the model; by default the first of the trial.
    """

    def __init__(
        self,
        model: nn.Module,
        amp: MixedPrecision,
        decay: float,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        parallel = isinstance(model, nn.parallel.DistributedDataParallel)
        inner = model.module if parallel else model
        assert isinstance(inner, nn.Module)
        self._model, self._decay = inner, decay
        self._averages = {
            name: parameter.clone().detach()
            for name, parameter in inner.named_parameters()
        }
        self._counts = (
            amp.windows.first.counts if optimizer is None else amp.steps(optimizer)
        )
        self._attempted = 0
        self._applied = self._counts.applied.clone()

    @torch.no_grad()
    def step(self) -> None:
        """Call after `amp.update`; moves if a step was applied. No synchronisation."""
        if self._attempted == self._counts.attempted:
            return
        newly = self._counts.applied - self._applied  # 1 or 0
        count = self._counts.applied.double()
        decay = (count / (9 + count)).clamp(max=self._decay) * (count > 1)
        # After a skipped step the weight is 0, and the average stays what it is to the
        # bit.
        weight = ((1 - decay) * newly).float()
        averages = list(self._averages.values())
        towards = torch._foreach_sub(list(self._model.parameters()), averages)
        torch._foreach_mul_(towards, weight)
        torch._foreach_add_(averages, towards)
        self._mark_averaged()

    def _mark_averaged(self) -> None:
        """Mark the current step as already averaged."""
        self._attempted = self._counts.attempted
        self._applied.copy_(self._counts.applied)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """The model's output, computed with the averaged weights."""
        return torch.func.functional_call(self._model, self._averages, inputs)

    def state_dict(self) -> dict[str, Any]:
        """The averages by the names of the model's parameters."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises: KeyError: if a parameter of the model has no average in
        `state_dict`.
        """
        for name, average in self._averages.items():
            average.copy_(state_dict[name])

    def on_training_start(self) -> None:
        self._mark_averaged()
