"""Every case of PyTorch's page of AMP examples, in Determined's loop, against that page's own loop.

https://pytorch.org/docs/stable/notes/amp_examples.html. Each case is a trial and a plain function;
both start from the same weights, see the same batches, and must end in the same weights to the bit.
The first scale is so large that the first steps of each are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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


def float16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.float16)


def weights(*models: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for model in models for p in model.parameters()]


class Example(pytorch.PyTorchTrial):
    """One model, Adam, cross-entropy; a case does something else with them."""

    models = 1
    max_norm: float | None = None

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.amp = MixedPrecision(context)
        self.nets = [context.wrap_model(make_model()) for _ in range(self.models)]
        self.optimizers = [
            context.wrap_optimizer(torch.optim.Adam(net.parameters(), lr=0.01)) for net in self.nets
        ]

    def outputs(self, images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.nets[0](images)
        return outputs

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, float]:
        images, labels = batch
        with self.amp.autocast():
            loss = functional.cross_entropy(self.outputs(images), labels)
        self.context.backward(self.amp.scaler.scale(loss))
        self.step(self.optimizers[0], self.max_norm)
        return self.amp.update(loss)

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
        """Without a clip there is nothing to unscale for: `scaler.step` does it."""
        clip = None if max_norm is None else self.amp.clip(optimizer, max_norm)
        self.context.step_optimizer(optimizer, clip_grads=clip, scaler=self.amp.scaler)

    def evaluate_batch(self, batch: pytorch.TorchData, batch_idx: int) -> dict[str, float]:
        return {"validation_loss": 0.0}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        images, labels = (torch.cat(column) for column in zip(*make_batches(), strict=True))
        return pytorch.DataLoader(TensorDataset(images, labels), batch_size=4)

    build_validation_data_loader = build_training_data_loader

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return self.amp.callbacks(self)


def by_hand() -> Iterator[tuple[Any, Any, Any, Any, Any]]:
    """The parts of the page's loops, and a batch at a time."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE)
    for images, labels in make_batches():
        yield model, optimizer, scaler, images, labels


class Clipped(Example):
    max_norm = 0.1


def clipped() -> list[torch.Tensor]:
    for model, optimizer, scaler, images, labels in by_hand():
        optimizer.zero_grad()
        with float16():
            loss = functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return weights(model)


def unclipped(window: int = 1) -> list[torch.Tensor]:
    for batch, (model, optimizer, scaler, images, labels) in enumerate(by_hand()):
        with float16():
            loss = functional.cross_entropy(model(images), labels) / window
        scaler.scale(loss).backward()
        if (batch + 1) % window == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return weights(model)


class GradientPenalty(Example):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, float]:
        images, labels = batch
        net = self.nets[0]
        with self.amp.autocast():
            loss = functional.cross_entropy(net(images), labels)
        scaled = torch.autograd.grad(
            self.amp.scaler.scale(loss), list(net.parameters()), create_graph=True
        )
        inverse = 1.0 / self.amp.loss_scale()  # `scaler.get_scale()` would wait for the device
        with self.amp.autocast():
            penalty = sum((g * inverse).pow(2).sum() for g in scaled)
            loss = loss + penalty.sqrt()  # type: ignore[union-attr]  # a tensor
        self.context.backward(self.amp.scaler.scale(loss))
        self.step(self.optimizers[0], math.inf)
        return self.amp.update(loss)


def gradient_penalty() -> list[torch.Tensor]:
    for model, optimizer, scaler, images, labels in by_hand():
        optimizer.zero_grad()
        with float16():
            loss = functional.cross_entropy(model(images), labels)
        scaled = torch.autograd.grad(
            scaler.scale(loss), list(model.parameters()), create_graph=True
        )
        inverse = 1.0 / scaler.get_scale()
        gradients = [gradient * inverse for gradient in scaled]
        with float16():
            penalty: Any = sum(gradient.pow(2).sum() for gradient in gradients)
            loss = loss + penalty.sqrt()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return weights(model)


class SeveralLossesAndModels(Example):
    models = 2

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, float]:
        images, labels = batch
        with self.amp.autocast():
            outputs = [net(images) for net in self.nets]
            first = functional.cross_entropy(2 * outputs[0] + 3 * outputs[1], labels)
            second = functional.cross_entropy(3 * outputs[0] - 5 * outputs[1], labels)
        self.context.backward(self.amp.scaler.scale(first), retain_graph=True)
        self.context.backward(self.amp.scaler.scale(second))
        self.step(self.optimizers[0], max_norm=1.0)
        self.step(self.optimizers[1], math.inf)
        return self.amp.update(first + second)


def several_losses_and_models() -> list[torch.Tensor]:
    models = [make_model(), make_model()]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE)
    for images, labels in make_batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        with float16():
            outputs = [model(images) for model in models]
            first = functional.cross_entropy(2 * outputs[0] + 3 * outputs[1], labels)
            second = functional.cross_entropy(3 * outputs[0] - 5 * outputs[1], labels)
        torch.autograd.backward(scaler.scale(first), retain_graph=True)
        torch.autograd.backward(scaler.scale(second))
        scaler.unscale_(optimizers[0])
        nn.utils.clip_grad_norm_(models[0].parameters(), 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    return weights(*models)


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


def with_custom_function(net: nn.Module, images: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = Float32Product.apply(net(images), torch.eye(3))
    return product


class CustomFunction(Example):
    max_norm = math.inf

    def outputs(self, images: torch.Tensor) -> torch.Tensor:
        return with_custom_function(self.nets[0], images)


def custom_function() -> list[torch.Tensor]:
    for model, optimizer, scaler, images, labels in by_hand():
        optimizer.zero_grad()
        with float16():
            loss = functional.cross_entropy(with_custom_function(model, images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return weights(model)


CASES: dict[str, tuple[type[Example], Callable[[], list[torch.Tensor]]]] = {
    "clipping": (Clipped, clipped),
    "no clipping": (Example, unclipped),
    "gradient penalty": (GradientPenalty, gradient_penalty),
    "several losses, models and optimizers": (SeveralLossesAndModels, several_losses_and_models),
    "custom autograd function": (CustomFunction, custom_function),
}


def trained(example: type[Example], **options: Any) -> tuple[list[torch.Tensor], int]:
    """The weights after all batches, and the number of skipped steps of the first optimizer."""
    amp = {"precision": "amp_fp16", "init_scale": INIT_SCALE}
    made = fit(example, amp, batches=BATCHES, **options)
    counts = made.trial.amp.steps(made.trial.optimizers[0])
    return weights(*made.trial.nets), counts.attempted - int(counts.applied)


@pytest.mark.parametrize(
    "case", [case for case in CASES if HAS_CUSTOM or case != "custom autograd function"]
)
def test_case_of_the_page_ends_in_the_same_weights_to_the_bit(case: str) -> None:
    example, reference = CASES[case]
    found, skipped = trained(example)
    assert 0 < skipped < BATCHES
    assert same_bits(found, reference())


def test_accumulation_ends_in_the_weights_of_the_page() -> None:
    """The page divides the loss, Determined the sum of the gradients: by 4 that is the same."""
    found, skipped = trained(Example, aggregation_frequency=4)
    assert skipped > 0
    assert same_bits(found, unclipped(window=4))


def test_another_clip_ends_elsewhere() -> None:
    """Negative control: the comparison sees the smallest of the differences between two cases."""
    assert not same_bits(trained(Clipped)[0], unclipped())
