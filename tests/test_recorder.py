"""`finder.recorder`: which values of a backward are recorded, and for which module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from determined_amp.amp.origin import OUTSIDE, WHOLE_MODEL, backwards_through
from determined_amp.finder.histogram import Histogram
from determined_amp.finder.passes import Prediction
from determined_amp.finder.recorder import BackwardRecorder, Source

BF16 = torch.bfloat16


class Net(nn.Module):
    """Two blocks and a head; the first ReLU is a function, so it belongs to the model."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.first = nn.Linear(8, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.first(inputs))
        if self.checkpointed:
            hidden = checkpoint(self.block, hidden, use_reentrant=False)
        else:
            hidden = self.block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def by_module(recorder: BackwardRecorder) -> dict[str, Histogram]:
    return Prediction(recorder.histograms, 0.0).modules


def recorded(model: nn.Module, dtype: torch.dtype = BF16) -> dict[str, Histogram]:
    recorder = BackwardRecorder([model])
    torch.manual_seed(1)
    inputs = torch.randn(5, 8)
    with recorder.recording():
        with torch.autocast("cpu", dtype):
            loss = functional.cross_entropy(model(inputs), torch.arange(5) % 4)
        loss.backward()  # type: ignore[no-untyped-call]
    return by_module(recorder)


def recorded_from(backward: Callable[[torch.Tensor], torch.Tensor]) -> dict[Source, Histogram]:
    """What is recorded of a function whose backward is this; three gradients of 2 arrive."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return backward(gradients[0])

    model = nn.ParameterList([torch.ones(3)])
    apply: Callable[[torch.Tensor], torch.Tensor] = Function.apply
    recorder = BackwardRecorder([model])
    with recorder.recording():
        (apply(model[0]) * 2.0).sum().backward()  # type: ignore[no-untyped-call]
    return recorder.histograms


def net(*, checkpointed: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(checkpointed=checkpointed)


class TestModules:
    def test_every_gradient_is_recorded_with_the_module_whose_forward_it_is_of(self) -> None:
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
        assert found["head"].nonzero + found["head"].zeros == 5 * 16 + 4 * 16 + 4
        # Its input's gradient is nobody's, so it is not computed for the first layer.
        assert found["first"].nonzero + found["first"].zeros == 16 * 8 + 16

    def test_recomputed_forwards_are_left_out(self) -> None:
        plain, checkpointed = recorded(net()), recorded(net(checkpointed=True))
        assert {n: h.by_power() for n, h in plain.items()} == {
            n: h.by_power() for n, h in checkpointed.items()
        }

    def test_two_models_are_told_apart(self) -> None:
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        recorder = BackwardRecorder(models)
        with recorder.recording():
            with torch.autocast("cpu", BF16):
                output = models[1](models[0](torch.ones(1, 2)))
            output.float().sum().backward()
        assert set(by_module(recorder)) == {
            OUTSIDE,
            f"model 0: {WHOLE_MODEL}",
            f"model 1: {WHOLE_MODEL}",
        }


class TestValues:
    def test_float32_is_not_recorded(self) -> None:
        assert recorded(net(), torch.float16)  # the control
        model = net()
        recorder = BackwardRecorder([model])
        with recorder.recording():
            model(torch.randn(5, 8)).sum().backward()
        assert recorder.histograms == {}

    def test_recorded_values_are_those_of_the_gradients(self) -> None:
        model = nn.Linear(3, 2, bias=False)
        recorder = BackwardRecorder([model])
        inputs = torch.tensor([[1.0, 2.0, 4.0]])
        with recorder.recording():
            with torch.autocast("cpu", BF16):
                loss = (model(inputs).float() * torch.tensor([[1.0, 1024.0]])).sum()
            loss.backward()
        # Weight: the outer product of (1, 1024) and (1, 2, 4).
        weights = by_module(recorder)[WHOLE_MODEL].by_power()
        assert weights == {0: 1, 1: 1, 2: 1, 10: 1, 11: 1, 12: 1}
        assert max(h.largest for h in recorder.histograms.values()) == 4096.0

    def test_two_backwards_add_up_and_keep_the_largest_of_both(self) -> None:
        """Of y = w x, cast to bfloat16: dy is s, dw is s x. The second backward has the smaller."""
        model = nn.Linear(1, 1, bias=False)
        recorder = BackwardRecorder([model])
        for scale in (8.0, 2.0):
            with recorder.recording():
                with torch.autocast("cpu", BF16):
                    loss = (model(torch.full((1, 1), 4.0)).float() * scale).sum()
                loss.backward()
        modules = by_module(recorder)
        assert modules[WHOLE_MODEL].by_power() == {5: 1, 3: 1}
        assert modules[OUTSIDE].by_power() == {3: 1, 1: 1}
        assert max(h.largest for h in recorder.histograms.values()) == 32.0
        assert recorder.dtypes == {BF16}

    def test_recorded_results_are_told_apart_by_operation_place_and_shape(self) -> None:
        """A backward of three results: an empty one and one in float32 hide none after them."""

        def three_results(gradient: torch.Tensor) -> torch.Tensor:
            half = gradient.to(BF16)
            torch.split(half, 2)  # views are no new values
            made = torch._foreach_mul([half[:0], gradient, half.view(1, 3)], 4.0)
            return made[2].view(3).float()

        found = recorded_from(three_results)
        assert [(*source[1:], histogram.by_power()) for source, histogram in found.items()] == [
            ("aten._to_copy.default", 0, (3,), {1: 3}),
            ("aten._foreach_mul.Scalar", 2, (1, 3), {3: 3}),
        ]

    def test_only_what_depends_on_the_loss_and_reaches_a_parameter_is_recorded(self) -> None:
        """Gradients of 2 are doubled; all else of 16 bits is a factor, a mask or a by-product."""

        def busy(gradient: torch.Tensor) -> torch.Tensor:
            half = gradient.to(BF16)
            torch.empty(1000, dtype=BF16)  # not written
            factor = torch.full((3,), 1024.0, dtype=BF16) * 0.5
            like = torch.ones_like(half) + torch.zeros_like(half)
            sign = half.sgn() * factor
            shown = half * 2**20  # for a log: no parameter gets it
            mask = (half > 0) * factor
            assert shown.isfinite().all()
            return (half * (like + sign / factor) * (mask / factor)).float()

        powers = [histogram.by_power() for histogram in recorded_from(busy).values()]
        assert powers == [{1: 3}, {2: 6}]

    def test_gradient_written_through_a_view_is_recorded(self) -> None:
        def in_parts(gradient: torch.Tensor) -> torch.Tensor:
            buffer = torch.zeros(2, 3, dtype=BF16)
            buffer[1] = gradient
            return (buffer * 8.0).sum(0).float()

        assert {0: 3} not in [h.by_power() for h in recorded_from(in_parts).values()]
        assert {4: 3} in [h.by_power() for h in recorded_from(in_parts).values()]

    def test_inputs_gradient_is_not_recorded_and_that_of_a_gradient_is(self) -> None:
        """Of y = w x and the loss y + dy/dx = w (x + 1): only dw, 1 + x, and the cast of it."""
        model = nn.Linear(1, 1, bias=False)
        inputs = torch.full((1, 1), 2.0**20, requires_grad=True)
        recorder = BackwardRecorder([model])
        with recorder.recording():
            with torch.autocast("cpu", BF16):
                output = model(inputs)
                (slope,) = torch.autograd.grad(output, inputs, create_graph=True)
                loss = (output + slope).float().sum()
            loss.backward()
        assert inputs.grad is not None
        assert model.weight.grad is not None
        powers = {q for h in recorder.histograms.values() for q in h.by_power()}
        assert powers == {0, 20}

    def test_sparse_gradients_are_recorded_by_their_values(self) -> None:
        def sparse(gradient: torch.Tensor) -> torch.Tensor:
            return (gradient.to(BF16).to_sparse() * 4.0).to_dense().float()

        assert {3: 3} in [histogram.by_power() for histogram in recorded_from(sparse).values()]


def test_callback_for_the_end_of_a_backward_is_called() -> None:
    """As `DistributedDataParallel` queues one."""
    called: list[str] = []

    def queue(gradient: torch.Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: called.append("at the end"))
        called.append("first")

    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(queue)  # type: ignore[no-untyped-call]
    with backwards_through(lambda run, *args, **kwargs: run(*args, **kwargs)):
        torch.autograd.backward(weight.sum())
    assert called == ["first", "at the end"]
