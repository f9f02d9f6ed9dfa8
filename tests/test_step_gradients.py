"""`check.step_gradients`: which forced overflows a step is about to use."""

import math

import pytest
import torch
from torch import nn

from determined_amp.check.record import Record
from determined_amp.check.step_gradients import StepGradients

TRUE = [1.0, -2.0, 0.0, 0.0, 0.0, 0.0, 3.0, 4.0]


def masked_by(number):
    def mask(gradient):
        torch.nan_to_num(gradient, 0.0, number, -number, out=gradient)

    return mask


def put_back(gradient):
    gradient.copy_(torch.tensor(TRUE) / 4)


@pytest.mark.parametrize(
    ("change", "between", "is_used"),
    [
        (lambda gradient: None, False, True),
        (lambda gradient: None, True, True),
        (masked_by(0.0), False, True),
        (masked_by(1.0), False, True),
        (masked_by(1.0), True, True),
        (masked_by(1e5), False, True),
        (masked_by(1e5), True, True),
        (put_back, False, False),
        (put_back, True, False),
    ],
)
def test_step_gets_zeros_for_an_overflow_unless_true_gradients_are_back(
    change, between, is_used
):
    """`between`: the change comes before a second backward, else before the step."""
    weight = nn.Parameter(torch.ones(len(TRUE)))
    weight.grad = torch.tensor(TRUE)
    record = Record()
    backward = record.note("backward")
    gradients = StepGradients(torch.optim.SGD([weight]), record, [])
    gradients.measure()
    gradients.window.backwards = [backward]
    gradients.force_overflow()
    gradients.share_overflow({weight})
    assert not weight.grad.isfinite().any()
    change(weight.grad)
    if between:
        gradients.window.lost = 1  # no window that `zero_grad` has emptied
        gradients.before_backward()
        gradients.window.backwards = [backward, backward]
        weight.grad += torch.tensor(TRUE) ** 2
    assert gradients.take_overflow_back() is is_used
    assert (weight.grad.count_nonzero() == 0) == is_used
    assert math.isfinite(float(weight.grad.sum()))
