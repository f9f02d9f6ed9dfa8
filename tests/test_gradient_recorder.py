"""`finder.gradient_recorder`: which values of a backward are recorded, and for which
module.
"""

from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from determined_amp.amp.rehearse.backward_graph import OUTSIDE, WHOLE_MODEL
from determined_amp.finder.gradient_recorder import GradientRecorder
from determined_amp.finder.histogram import Histogram
from tests.loss_scale import powers_in

BF16 = torch.bfloat16


class Net(nn.Module):
    """Two blocks and a head; the first ReLU is a function, so it belongs to the
    model.
    """

    def __init__(self, *, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.first = nn.Linear(8, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 4)

    def forward(self, inputs):
        hidden = functional.relu(self.first(inputs))
        if self.checkpointed:
            hidden = checkpoint(self.block, hidden, use_reentrant=False)
        else:
            hidden = self.block(hidden)
        return self.head(hidden)


def by_module(recorder):
    modules = defaultdict(Histogram)
    for source, histogram in recorder.histograms.items():
        modules[source.module] += histogram
    return modules


def watched(models, train):
    """The recorder of a forward in autocast and its backward."""
    recorder = GradientRecorder(models)
    with recorder.watching():
        with torch.autocast("cpu", BF16):
            loss = train()
        loss.backward()
    return recorder


def recorded(model):
    torch.manual_seed(1)
    inputs, classes = torch.randn(5, 8), torch.arange(5) % 4

    def train():
        return functional.cross_entropy(model(inputs), classes)

    return by_module(watched([model], train))


def net(*, checkpointed=False):
    torch.manual_seed(0)
    return Net(checkpointed=checkpointed)


class TestModules:
    def test_every_gradient_is_recorded_with_the_module_whose_forward_it_is_of(self):
        found = recorded(net())
        assert list(found) == [
            OUTSIDE,
            "head",
            "block.2",
            "block.1",
            "block.0",
            WHOLE_MODEL,
            "first",
        ]
        # Of the head: input (5, 16), weight (4, 16), bias (4,), each in bfloat16.
        assert found["head"].counts.total() == 5 * 16 + 4 * 16 + 4
        # Its input's gradient is nobody's, so it is not computed for the first layer.
        assert found["first"].counts.total() == 16 * 8 + 16

    def test_recomputed_forwards_are_left_out(self):
        plain, checkpointed = recorded(net()), recorded(net(checkpointed=True))
        assert {n: powers_in(h) for n, h in plain.items()} == {
            n: powers_in(h) for n, h in checkpointed.items()
        }

    def test_two_models_are_told_apart(self):
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        inputs = torch.ones(1, 2)
        recorder = watched(models, lambda: models[1](models[0](inputs)).float().sum())
        assert set(by_module(recorder)) == {
            OUTSIDE,
            f"model 0: {WHOLE_MODEL}",
            f"model 1: {WHOLE_MODEL}",
        }


class TestValues:
    def test_recorded_values_are_those_of_the_gradients(self):
        model = nn.Linear(3, 2, bias=False)
        inputs, factors = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[1.0, 1024.0]])

        def train():
            return (model(inputs).float() * factors).sum()

        recorder = watched([model], train)
        # Weight: the outer product of (1, 1024) and (1, 2, 4).
        weights = powers_in(by_module(recorder)[WHOLE_MODEL])
        assert weights == {0: 1, 1: 1, 2: 1, 10: 1, 11: 1, 12: 1}
        assert max(h.largest for h in recorder.histograms.values()) == 4096.0

    def test_gradients_are_told_apart_by_operation_output_and_shape(self):
        """Of w * w: two results, each 2 * 4; then w is cast, which sums them up in
        float32.
        """
        model = nn.ParameterList([torch.full((3,), 2.0)])
        recorder = GradientRecorder([model])
        with recorder.watching():
            half = model[0].to(BF16)
            seed = torch.full((3,), 4.0, dtype=BF16)
            torch.autograd.backward(torch.mul(half, half.clone()), seed)
        found = [
            (*source[1:], powers_in(h)) for source, h in recorder.histograms.items()
        ]
        assert found == [
            ("MulBackward0", 0, (3,), {3: 3}),
            ("MulBackward0", 1, (3,), {3: 3}),
        ]

    def test_view_and_a_gradient_that_is_passed_on_are_counted_once(self):
        model = nn.ParameterList([torch.ones(4)])
        recorder = GradientRecorder([model])
        with recorder.watching():
            half = model[0].to(BF16) * 2.0
            loss = (half.view(2, 2) + torch.ones(2, 2, dtype=BF16)).float().sum()
            torch.autograd.backward(loss)
        operations = [source.operation for source in recorder.histograms]
        assert operations == ["ToCopyBackward0", "MulBackward0"]


class TestGraph:
    def test_recorder_leaves_no_hook_and_no_engine_behind(self):
        model = net()
        recorder = GradientRecorder([model])
        engine = torch.autograd.Variable._execution_engine
        with recorder.watching():
            loss = model(torch.ones(1, 8)).sum()
            loss.backward(retain_graph=True)
        counted = dict(recorder.histograms)
        loss.backward()
        assert torch.autograd.Variable._execution_engine is engine
        assert recorder.histograms == counted
        assert not any(module._forward_hooks for module in model.modules())
