"""An exponential moving average of the weights, updated after applied steps only.

A skipped step must not move the average or the warm-up of its decay. Only the device
knows whether a step was skipped. So the device decides both, without synchronisation.
"""

from __future__ import annotations

from typing import Any

import torch
from determined import pytorch
from torch import nn

from determined_amp import MixedPrecision


class EMAWeights(pytorch.PyTorchCallback):
    """The averaged weights of one model, which it updates, applies and checkpoints.

    The decay warms up: it is 0 after the first applied step, and min(n / (9 + n),
    `decay`) after the n-th. So the initial weights do not dominate the average of a
    short run. diffusers' `EMAModel` does the same.

    Call the object to compute with the average. This does not touch the weights of the
    model, so nothing needs to be restored when a validation fails.

    Args:
        model: The trial's model, as `wrap_model` returned it; its parameters are
            float32.
        amp: The trial's mixed precision, which counts the applied steps.
        decay: Share of the old average that a step keeps, after the warm-up.
        optimizer: The optimizer of the model; by default the trial's first one.
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
            amp.windows.first_counts if optimizer is None else amp.steps(optimizer)
        )
        self._attempted = 0
        self._applied = self._counts.applied.clone()

    @torch.no_grad()
    def step(self) -> None:
        """Update the average if a step was applied, without waiting for the device.

        Call it after `amp.update`.
        """
        if self._attempted == self._counts.attempted:
            return
        newly = self._counts.applied - self._applied  # 1 or 0
        count = self._counts.applied.double()
        decay = (count / (9 + count)).clamp(max=self._decay) * (count > 1)
        # After a skipped step the weight is 0, and the average keeps its exact bits.
        weight = ((1 - decay) * newly).float()
        averages = list(self._averages.values())
        towards = torch._foreach_sub(list(self._model.parameters()), averages)
        torch._foreach_mul_(towards, weight)
        torch._foreach_add_(averages, towards)
        self._mark_averaged()

    def _mark_averaged(self) -> None:
        """Remember that the average includes all steps so far."""
        self._attempted = self._counts.attempted
        self._applied.copy_(self._counts.applied)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """The model's output, computed with the averaged weights."""
        return torch.func.functional_call(self._model, self._averages, inputs)

    def state_dict(self) -> dict[str, Any]:
        """The averages, by the names of the model's parameters."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the averages.

        Raises:
            KeyError: if `state_dict` has no average of a parameter of the model.
        """
        for name, average in self._averages.items():
            average.copy_(state_dict[name])

    def on_training_start(self) -> None:
        self._mark_averaged()
