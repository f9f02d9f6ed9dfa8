"""Every case of PyTorch's page of AMP examples, in Determined's loop, against that
page's own loop.

https://pytorch.org/docs/stable/notes/amp_examples.html. Both start from the same
weights, see the same batches, and must have the same weights and scale after each
batch, to the bit.
"""

import math

import pytest
import torch
from torch.nn import functional

from tests.harness import same_bits
from tests.loops import Case, by_hand, cross_entropy, fitted


def with_penalty(amp, models, images, labels):
    (loss,) = cross_entropy(amp, models, images, labels)
    parameters = list(models[0].parameters())
    scaled = torch.autograd.grad(amp.scaler.scale(loss), parameters, create_graph=True)
    # `scaler.get_scale()` of a trial would wait for the device
    inverse = 1.0 / amp.loss_scale()
    with amp.autocast():
        penalty = sum((gradient * inverse).pow(2).sum() for gradient in scaled)
        return [loss + penalty.sqrt()]


def of_two_models(amp, models, images, labels):
    with amp.autocast():
        one, two = (model(images) for model in models)
        sums = (2 * one + 3 * two, 3 * one - 5 * two)
        return [functional.cross_entropy(logits, labels) for logits in sums]


# torch 2.3 has them for CUDA alone.
HAS_CUSTOM = hasattr(torch.amp, "custom_fwd")
custom_fwd = getattr(torch.amp, "custom_fwd", lambda **given: lambda function: function)
custom_bwd = getattr(torch.amp, "custom_bwd", lambda **given: lambda function: function)


class Float32Product(torch.autograd.Function):
    """A function that needs float32, as the page writes one."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, left, right):
        assert left.dtype is right.dtype is torch.float32
        ctx.save_for_backward(left, right)
        return left @ right

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, *gradients):
        (gradient,) = gradients
        left, right = ctx.saved_tensors
        return gradient @ right.T, left.T @ gradient


def of_own_function(amp, models, images, labels):
    with amp.autocast():
        product = Float32Product.apply(models[0](images), torch.eye(3))
        return [functional.cross_entropy(product, labels)]


CLIPPED, UNCLIPPED = Case(), Case(max_norms=(None,))
CASES = {
    "clipping": CLIPPED,
    "no clipping": UNCLIPPED,
    "gradient penalty": Case(with_penalty, (None,)),
    "several losses, models and optimizers": Case(of_two_models, (1.0, math.inf)),
    **(
        {"custom autograd function": Case(of_own_function, (None,))}
        if HAS_CUSTOM
        else {}
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_case_of_torchs_amp_examples_has_the_same_weights_and_scales_to_the_bit(case):
    made = fitted(case).trial
    assert same_bits(made.bits, by_hand(case))
    counts = made.amp.steps(made.optimizers[0])
    assert 0 < int(counts.applied) < counts.attempted


def test_comparison_with_torchs_page_sees_another_clip():
    """Negative control: the comparison sees the smallest of the differences between two
    cases.
    """
    assert not same_bits(fitted(CLIPPED).trial.bits, by_hand(UNCLIPPED))
