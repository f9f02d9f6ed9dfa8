"""`amp.diagnosis`: the first thing in a batch that is not finite; looking for it moves nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from determined_amp.amp.diagnosis import find_cause


class Net(nn.Module):
    """Two layers by name, each multiplying by one number."""

    def __init__(self, body: float, head: float) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.body.weight.fill_(body)
            self.head.weight.fill_(head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head: torch.Tensor = self.head(self.body(x))
        return head


class Keyword(nn.Module):
    """Takes its input by name."""

    def forward(self, *, by: torch.Tensor) -> torch.Tensor:
        return by


def cause(model: nn.Module, x: torch.Tensor, scale: float = 1.0) -> str | None:
    """The cause that is found for one fp16 batch with the loss mean(model(x))."""

    def backward() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().mean()
        (loss * scale).backward()

    return find_cause([model], (x,), backward)


class TestDiagnosis:
    def test_sound_batch_has_none(self) -> None:
        assert cause(Net(1, 1), torch.ones(4, 1)) is None

    @pytest.mark.parametrize(
        ("batch", "where"),
        [
            (torch.tensor([[1.0, 1.0], [1.0, math.nan], [math.inf, 1.0]]), "0 {} [1, 2]"),
            ((torch.ones(3, 2), torch.tensor([1.0, math.nan, 2.0])), "1 {} [1]"),
            ({"empty": torch.empty(0, 2), "number": torch.tensor(math.inf)}, "1 {} [0]"),
        ],
    )
    def test_names_the_samples_that_are_not_finite(self, batch: Any, where: str) -> None:
        place = where.format("of the batch is not finite in samples")
        found = find_cause([nn.Linear(2, 1)], batch, lambda: None)
        assert found == f"input {place}; fix or remove these samples"

    def test_names_the_module_whose_forward_overflows(self) -> None:
        """2^10 * 2^10 = 2^20 = 1.05e6 is beyond 65504, in the head and not in the body."""
        sentence = str(cause(Net(2.0**10, 2.0**10), torch.ones(4, 1)))
        assert "forward overflow in module head: largest |activation| 1.05e+06" in sentence
        assert 'fp32_modules: ["^head$"]' in sentence

    def test_names_the_module_whose_gradient_overflows(self) -> None:
        """The gradient at the body's output is scale * 2^10 / 4 = 2^18; at the head's, 2^8."""
        sentence = str(cause(Net(2.0**-10, 2.0**10), torch.ones(4, 1), scale=2.0**10))
        assert "gradient overflow at module body" in sentence

    def test_names_the_first_module_that_the_backward_reaches(self) -> None:
        """2^18 / 4 = 2^16 > 65504 at the head's output, and then at the body's, too."""
        sentence = str(cause(Net(1, 1), torch.ones(4, 1), scale=2.0**18))
        assert "gradient overflow at module head" in sentence

    @pytest.mark.parametrize(
        ("lost", "module"), [(["body"], "body"), (["body", "head"], "head"), ([], "the model")]
    )
    def test_names_the_module_of_a_parameter_whose_gradient_alone_overflows(
        self, lost: list[str], module: str
    ) -> None:
        model = Net(1, 1)
        own = nn.Parameter(torch.ones(1))
        if not lost:
            model.register_parameter("own", own)

        def backward() -> None:
            for parameter in [model.get_parameter(f"{name}.weight") for name in lost] or [own]:
                parameter.grad = torch.full_like(parameter, math.inf)

        found = find_cause([model], (), backward)
        assert str(found).startswith(f"gradient overflow at module {module}; lower init_scale")

    def test_output_that_is_not_finite_in_float32_either_is_no_overflow_of_float16(self) -> None:
        """1e30 * 1e30; and a module whose keywords a hook does not see cannot be asked again."""
        assert cause(Net(1e30, 1), torch.full((1, 1), 1e30)) == (
            "the output of module body is not finite, not even in float32 "
            "(largest |activation| inf); lower the learning rate"
        )
        loud = Keyword()
        found = find_cause([loud], (), lambda: loud(by=torch.full((1,), math.inf)))
        assert "(largest |activation| nan)" in str(found)

    def test_without_memory_it_is_what_was_seen_before(self) -> None:
        def fail() -> None:
            raise torch.cuda.OutOfMemoryError

        def overflow_and_fail(model: Net, scale: float = 1.0) -> str | None:
            def backward() -> None:
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = model(torch.ones(4, 1)).float().mean()
                (loss * scale).backward()
                fail()

            return find_cause([model], (), backward)

        assert find_cause([Net(1, 1)], (), fail) == "unknown: there was no memory to look for it"
        assert "forward overflow in module head" in str(overflow_and_fail(Net(2.0**10, 2.0**10)))
        assert "gradient overflow at" in str(overflow_and_fail(Net(1, 1), scale=2.0**18))

    def test_names_a_parameter_that_is_lost_already(self) -> None:
        assert cause(Net(math.nan, 1), torch.ones(4, 1)) == (
            "parameter body.weight is already not finite; resume from an earlier "
            "checkpoint with a lower learning rate or a clip"
        )

    def test_tells_several_models_apart(self) -> None:
        sound, lost = Net(1, 1), Net(1, math.nan)
        found = find_cause([sound, lost], (torch.ones(1, 1),), lambda: None)
        assert "parameter model 1: head.weight is already not finite" in str(found)

    def test_changes_nothing(self) -> None:
        last = nn.Linear(1, 1)
        model = nn.Sequential(nn.BatchNorm1d(1), nn.Dropout(0.5), last)
        last.weight.grad = torch.full((1, 1), 7.0)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        x, state = torch.ones(4, 1), torch.random.get_rng_state()
        cause(model, x)
        assert torch.equal(torch.random.get_rng_state(), state)
        assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
        assert last.weight.grad.item() == 7
        assert last.bias.grad is None


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(count)))


class TestAdvice:
    @pytest.mark.parametrize(
        ("models", "lost", "module", "patterns"),
        [
            ([Net(1, 1)], "head.weight", "head", '["^head$"]'),
            ([nn.Sequential(layers(2), layers(1))], "0.1.weight", "0.1", r'["^0\\.1$"]'),
            # As DistributedDataParallel names what it wraps.
            ([nn.ModuleDict({"module": Net(1, 1)})], "module.body.weight", "body", '["^body$"]'),
            ([Net(1, 1), Net(1, 1)], "head.weight", "model 1: head", '["^head$"]'),
            ([nn.Linear(1, 1)], "weight", "the model", None),
        ],
    )
    def test_is_bfloat16_or_the_module_in_float32(
        self, models: list[nn.Module], lost: str, module: str, patterns: str | None
    ) -> None:
        parameter = models[-1].get_parameter(lost)
        found = find_cause(
            models, (), lambda: setattr(parameter, "grad", torch.full((1, 1), math.inf))
        )
        islands = f", or fp32_modules: {patterns}" if patterns else ""
        assert found == (
            f"gradient overflow at module {module}; lower init_scale or learning_rate. "
            f"Or, in the YAML: precision: amp_bf16{islands}"
        )

    def test_knows_sparse_gradients(self) -> None:
        table = nn.Embedding(3, 1, sparse=True)

        def backward(factor: float) -> None:
            torch.autograd.backward(table(torch.tensor([1, 1])).sum() * factor)

        assert find_cause([table], (), lambda: backward(1.0)) is None
        table.weight.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]
        assert "gradient overflow at module the model" in str(
            find_cause([table], (), lambda: backward(1.0))
        )


def test_gradients_of_parameters_that_are_in_no_model_are_put_back() -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    seen: list[object] = []
    find_cause([], (), lambda: seen.append(weight.grad), optimizers=[optimizer])
    assert seen == [None]
    assert weight.grad.item() == 1
