"""`experiment.failures`: errors of 16 bits that say what to write, with the line."""

import pytest
import torch
from torch import nn

from determined_amp.amp.errors import UserError
from determined_amp.experiment.failures import fault_in_16_bits, faults_of_the_trial

layer, points, rows = nn.Linear(4, 4), torch.ones(6, 4), torch.tensor([0, 2])


def island(operation):
    """Of a 16-bit tensor, where autocast is off."""
    hidden = layer(points)
    with torch.autocast("cpu", enabled=False):
        return operation(hidden)


BEYOND, MISSING, MIXED = (
    "a number is beyond float16",
    "this device cannot compute an operation in 16 bits",
    "an operation gets a 16-bit tensor",
)
# Code that runs in float32, and what it fails of in 16 bits: one for each wording of
# torch.
IN_FLOAT32_ALONE = {
    "full_like": (BEYOND, lambda: torch.full_like(layer(points), -1e30)),
    "logdet": (MISSING, lambda: torch.logdet(layer(points[:4]))),
    "index_put": (
        MIXED,
        lambda: torch.zeros(6, 4).index_put((rows,), layer(points[rows])),
    ),
    "index_add": (
        MIXED,
        lambda: torch.zeros(6, 4).index_add(0, rows, layer(points[rows])),
    ),
    "lerp": (MIXED, lambda: torch.lerp(points, layer(points), 0.5)),
    "dot": (MIXED, lambda: torch.dot(layer(points)[0], points[0])),
    "linear": (MIXED, lambda: island(layer)),
    "bmm": (
        MIXED,
        lambda: island(lambda hidden: torch.bmm(hidden[None], points.T[None])),
    ),
    "conv2d": (
        MIXED,
        lambda: island(lambda hidden: nn.Conv2d(4, 4, 1)(hidden.T.reshape(1, 4, 6, 1))),
    ),
}


@pytest.mark.parametrize("operation", IN_FLOAT32_ALONE)
def test_error_in_16_bits_alone_is_explained_with_its_line(operation):
    fault, code = IN_FLOAT32_ALONE[operation]
    code()
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(Exception) as error,  # noqa: PT011
    ):
        code()
    explained = fault_in_16_bits(error.value)
    assert explained is not None
    assert explained.startswith(fault)
    assert "test_failures.py, line" in explained


@pytest.mark.parametrize(
    "code",
    [
        lambda: layer(torch.ones(6, 3)),
        lambda: layer(points.double()),
        lambda: nn.CrossEntropyLoss()(points, torch.full((6,), 9)),
        lambda: points.long().mean(),
    ],
    ids=["shape", "double", "class", "mean of integers"],
)
def test_error_that_float32_has_too_is_left_to_its_traceback(code):
    with pytest.raises(Exception) as error:  # noqa: PT011
        code()
    assert fault_in_16_bits(error.value) is None


def test_error_that_the_trial_raises_itself_keeps_its_words():
    words = "expected torch.float16 weights"
    with pytest.raises(RuntimeError, match=words) as caught, faults_of_the_trial():
        raise RuntimeError(words)
    assert not isinstance(caught.value, UserError)


def test_error_of_torch_in_16_bits_says_what_to_write():
    """Negative control: the same block replaces the words of torch."""
    half = torch.ones(1, dtype=torch.float16)
    with pytest.raises(UserError, match=r"one dtype for both"), faults_of_the_trial():
        torch.mm(half[None], torch.ones(1, 1))
