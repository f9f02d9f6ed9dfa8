"""What the finder predicts is what float16 does, for operations as people write them.

The largest power of two that overflows is measured in float16 backwards that know
nothing of the finder, the flush by casting the recorded gradients. Most of these
operations compute a factor of their derivative in 16 bits, which no loss scale moves.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.slots import OneSlot
from determined_amp.finder.scale_finding import find_range
from tests.loss_scale import first_failing

SAMPLES, WIDTH = 24, 32

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using backward.. with create_graph:UserWarning"
)


def autocast():
    return torch.autocast("cpu", dtype=torch.float16)


class Swish(torch.autograd.Function):
    """With a backward written by hand, which fills a buffer in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, *gradients):
        (x,) = ctx.saved_tensors
        sigmoid = torch.sigmoid(x)
        result = torch.zeros_like(x)
        result[:] = gradients[0] * sigmoid * (1 + x * (1 - sigmoid))
        return result


def rms_norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def in_place(x):
    y = x.clone()
    y[:, ::2] *= 3
    y.clamp_(min=-1)
    return y.add_(x.abs())


OPERATIONS = {
    "SIREN": lambda x: torch.sin(30 * x),
    "RMSNorm by hand": rms_norm,
    "scaled_dot_product_attention": lambda x: functional.scaled_dot_product_attention(
        x[None], x[None], x[None]
    )[0],
    "normalize": lambda x: functional.normalize(x, dim=-1),
    "reciprocal": lambda x: 1 / (x * x + 0.01),
    "square root of a ReLU": lambda x: torch.sqrt(functional.relu(x)),
    "Fourier transform": lambda x: torch.fft.rfft(x.float()).abs()[:, :16].repeat(1, 2),
    "in place": in_place,
    "checkpoint": lambda x: checkpoint(lambda y: (y**3).sin(), x, use_reentrant=False),
    "checkpoint, reentrant": lambda x: checkpoint(
        lambda y: (y**3).sin(), x, use_reentrant=True
    ),
    "autograd function": Swish.apply,
}


class Around(nn.Module):
    """An operation between two layers."""

    def __init__(self, operation):
        super().__init__()
        self.first, self.operation = nn.Linear(WIDTH, WIDTH), operation
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, x):
        return self.last(self.operation(self.first(x)))


def outputs(model, x=None):
    """Of inputs, by default random ones, in float16; handed on in float32."""
    with autocast():
        return model(torch.rand(SAMPLES, WIDTH) if x is None else x).float()


def regression(model, scaler, factor):
    loss = (outputs(model, torch.randn(SAMPLES, WIDTH)) - 0.3).square().mean() * factor
    scaler.scale(loss).backward()


def physics(model, scaler, factor):
    """A PINN: second derivatives by the coordinates, which are leaves that get a
    gradient, too.
    """
    x = torch.rand(SAMPLES, WIDTH, requires_grad=True)
    with autocast():
        u = model(x)
        (slope,) = torch.autograd.grad(u.float().sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        loss = (bend.sum(1) + torch.sin(u.sum(1))).square().mean() * factor
    scaler.scale(loss).backward()


def penalty(model, scaler, factor):
    """A gradient penalty as PyTorch's own recipe for AMP has it: of a scaled loss,
    unscaled.
    """
    loss = outputs(model).square().mean()
    scaled = torch.autograd.grad(
        scaler.scale(loss), list(model.parameters()), create_graph=True
    )
    gradients = [gradient / scaler.get_scale() for gradient in scaled]
    with autocast():
        total = sum((gradient.square().sum() for gradient in gradients), loss)
    scaler.scale(total * factor).backward()


def two_losses(model, scaler, factor):
    output = outputs(model)
    scaler.scale(output.square().mean() * factor).backward(retain_graph=True)
    scaler.scale((output - 3).abs().sum() * factor).backward()


def adversarial(model, scaler, factor):
    """The gradient of the input is a thousand times that of any parameter."""
    x = (torch.rand(SAMPLES, WIDTH) * 1e-3).requires_grad_()
    scaler.scale(outputs(model, x * 1e3).square().mean() * factor).backward()


def half_loss(model, scaler, factor):
    """The scale itself is cast to float16."""
    with autocast():
        loss = model(torch.rand(SAMPLES, WIDTH)).abs().mean() * factor
    scaler.scale(loss).backward()


LOOPS = {
    "double backward": physics,
    "penalty on scaled gradients": penalty,
    "two losses": two_losses,
    "gradient of the input": adversarial,
    "loss in float16": half_loss,
}


def rehearsal(model, train, factor):
    """A batch of one of these loops; its values are the same every time."""

    def train_at(scale):
        assert scale is not None
        torch.manual_seed(1)
        train(model, torch.amp.GradScaler("cpu", init_scale=scale), factor)

    return Rehearsal(train_at, [model])


def model_of(name):
    torch.manual_seed(0)
    return Around(OPERATIONS.get(name, torch.tanh))


def rehearsed(name, factor):
    return [rehearsal(model_of(name), LOOPS.get(name, regression), factor)]


def first_overflow(name, factor):
    """log2 of the smallest power of two at which a parameter's gradient is not
    finite.
    """
    fine = partial(is_finite, model_of(name), LOOPS.get(name, regression), factor)
    assert fine(0)
    return first_failing(0, 100, fine)


def is_finite(model, train, factor, scale_log2):
    """Whether all gradients of parameters are, in float16 at a loss scale."""
    torch.manual_seed(1)
    model.zero_grad()
    train(model, torch.amp.GradScaler("cpu", init_scale=2.0**scale_log2), factor)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize("factor", [1.0, 1e-6])
@pytest.mark.parametrize("name", [*OPERATIONS, *LOOPS])
def test_first_overflow_is_exact(name, factor):
    found = find_range(rehearsed(name, factor), OneSlot())
    assert found.top_log2 + 1 == first_overflow(name, factor)
