"""Every case of PyTorch's page of AMP examples, in Determined's loop, against that page's own loop.

https://pytorch.org/docs/stable/notes/amp_examples.html. A case is what the trial and the loop have
in common: its losses and clips. Both start from the same weights, see the same batches, and must
end in the same weights to the bit. The first scale is so large that the first steps are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from determined import pytorch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from determined_amp import MixedPrecision
from tests.harness import fit, same_bits

INIT_SCALE = 2.0**22
BATCHES = 12
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def make_batches() -> Batches:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator))
        for _ in range(BATCHES)
    ]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def weights(models: list[Any]) -> list[torch.Tensor]:
    return [p.detach().clone() for model in models for p in model.parameters()]


@dataclass(frozen=True)
class Case:
    """What a training has to do.

    Args:
        losses: Of some models on images and labels; the first argument has autocast and the scaler.
        max_norms: A clip for each model's optimizer; without one there is nothing to unscale for.
    """

    losses: Callable[[Any, list[Any], torch.Tensor, torch.Tensor], list[torch.Tensor]]
    max_norms: tuple[float | None, ...] = (None,)


class ByHand:
    """Autocast and scaler of the page's loops."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE)
        self.loss_scale = self.scaler.get_scale

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.float16)


def by_hand(case: Case, window: int = 1) -> list[torch.Tensor]:
    """The weights after the page's own loop."""
    amp, models = ByHand(), [make_model() for _ in case.max_norms]
    optimizers = [adam(model) for model in models]
    for number, batch in enumerate(make_batches(), start=1):
        losses = case.losses(amp, models, *batch)
        for loss in losses:
            scaled = amp.scaler.scale(loss / window)
            scaled.backward(retain_graph=loss is not losses[-1])  # type: ignore[no-untyped-call]
        if number % window:
            continue
        for model, optimizer, max_norm in zip(models, optimizers, case.max_norms, strict=True):
            if max_norm is not None:
                amp.scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            amp.scaler.step(optimizer)
            optimizer.zero_grad()
        amp.scaler.update()
    return weights(models)


class Example(pytorch.PyTorchTrial):
    """A case as a trial."""

    def __init__(self, context: pytorch.PyTorchTrialContext, case: Case) -> None:
        self.context, self.case = context, case
        self.amp = MixedPrecision(context)
        self.nets = [context.wrap_model(make_model()) for _ in case.max_norms]
        self.optimizers = [context.wrap_optimizer(adam(net)) for net in self.nets]

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, float]:
        losses = self.case.losses(self.amp, self.nets, *batch)
        for loss in losses:
            scaled = self.amp.scaler.scale(loss)
            self.context.backward(scaled, retain_graph=loss is not losses[-1])
        for optimizer, max_norm in zip(self.optimizers, self.case.max_norms, strict=True):
            clip = None if max_norm is None else self.amp.clip(optimizer, max_norm)
            self.context.step_optimizer(optimizer, clip_grads=clip, scaler=self.amp.scaler)
        return self.amp.update(sum(losses))

    def evaluate_batch(self, batch: pytorch.TorchData, batch_idx: int) -> dict[str, float]:
        return {"validation_loss": 0.0}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        images, labels = (torch.cat(column) for column in zip(*make_batches(), strict=True))
        return pytorch.DataLoader(TensorDataset(images, labels), batch_size=4)

    build_validation_data_loader = build_training_data_loader

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return self.amp.callbacks(self)


def cross_entropy(amp: Any, models: list[Any], images: Any, labels: Any) -> list[torch.Tensor]:
    with amp.autocast():
        return [functional.cross_entropy(models[0](images), labels)]


def with_penalty(amp: Any, models: list[Any], images: Any, labels: Any) -> list[torch.Tensor]:
    (loss,) = cross_entropy(amp, models, images, labels)
    parameters = list(models[0].parameters())
    scaled = torch.autograd.grad(amp.scaler.scale(loss), parameters, create_graph=True)
    inverse = 1.0 / amp.loss_scale()  # `scaler.get_scale()` of a trial would wait for the device
    with amp.autocast():
        penalty: Any = sum((gradient * inverse).pow(2).sum() for gradient in scaled)
        return [loss + penalty.sqrt()]


def of_two_models(amp: Any, models: list[Any], images: Any, labels: Any) -> list[torch.Tensor]:
    with amp.autocast():
        one, two = (model(images) for model in models)
        sums = (2 * one + 3 * two, 3 * one - 5 * two)
        return [functional.cross_entropy(logits, labels) for logits in sums]


# torch 2.3 has them for CUDA alone.
HAS_CUSTOM = hasattr(torch.amp, "custom_fwd")
custom_fwd: Any = getattr(torch.amp, "custom_fwd", lambda **given: lambda function: function)
custom_bwd: Any = getattr(torch.amp, "custom_bwd", lambda **given: lambda function: function)


class Float32Product(torch.autograd.Function):
    """A function that needs float32, as the page writes one."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        assert left.dtype is right.dtype is torch.float32
        ctx.save_for_backward(left, right)
        return left @ right

    @staticmethod
    @custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (gradient,) = gradients
        left, right = ctx.saved_tensors
        return gradient @ right.T, left.T @ gradient


def of_own_function(amp: Any, models: list[Any], images: Any, labels: Any) -> list[torch.Tensor]:
    with amp.autocast():
        product: torch.Tensor = Float32Product.apply(models[0](images), torch.eye(3))
        return [functional.cross_entropy(product, labels)]


CLIPPED, UNCLIPPED = Case(cross_entropy, (0.1,)), Case(cross_entropy)
CASES = {
    "clipping": CLIPPED,
    "no clipping": UNCLIPPED,
    "gradient penalty": Case(with_penalty),
    "several losses, models and optimizers": Case(of_two_models, (1.0, math.inf)),
    **({"custom autograd function": Case(of_own_function)} if HAS_CUSTOM else {}),
}


def trained(case: Case, **options: Any) -> tuple[list[torch.Tensor], int]:
    """The weights after all batches, and the number of skipped steps of the first optimizer."""
    amp = {"precision": "amp_fp16", "init_scale": INIT_SCALE}
    made = fit(partial(Example, case=case), amp, batches=BATCHES, **options)
    counts = made.trial.amp.steps(made.trial.optimizers[0])
    return weights(made.trial.nets), counts.attempted - int(counts.applied)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_case_of_the_page_ends_in_the_same_weights_to_the_bit(case: Case) -> None:
    found, skipped = trained(case)
    assert 0 < skipped < BATCHES
    assert same_bits(found, by_hand(case))


def test_accumulation_ends_in_the_weights_of_the_page() -> None:
    """The page divides the loss, Determined the sum of the gradients: by 4 that is the same."""
    found, skipped = trained(UNCLIPPED, aggregation_frequency=4)
    assert skipped > 0
    assert same_bits(found, by_hand(UNCLIPPED, window=4))


def test_another_clip_ends_elsewhere() -> None:
    """Negative control: the comparison sees the smallest of the differences between two cases."""
    assert not same_bits(trained(CLIPPED)[0], by_hand(UNCLIPPED))
