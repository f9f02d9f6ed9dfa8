"""`amp.compile`: compiled code trains as the model does, and whoever looks sees the
model.
"""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from determined_amp.amp.compiled import CompileError, as_written, compile_forward
from determined_amp.amp.fp32_modules import keep_in_float32
from determined_amp.amp.rehearse.diagnosis import find_cause
from determined_amp.amp.rehearse.precision_audit import ProductCount
from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.settings import Compile
from determined_amp.amp.slots import OneSlot
from tests import run_here
from tests.harness import fit_as_it_is, refusal, same_bits
from tests.trials import Converted, Plain, Weights

pytestmark = [
    # torch looks at gradients where a float32 module interrupts the graph.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    # torch 2.3 loads what it has compiled in an old way.
    pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning"),
    # A scheduler that Determined moves is moved by a skipped first step, too.
    pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step"),
]

ON = "hyperparameters.amp.compile=default"
INDUCTOR = torch.compile


@pytest.fixture(autouse=True)
def _fast_compiler(monkeypatch):
    """Captures graphs as Inductor does, forward and backward, and runs torch's own
    kernels.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    without_mode = lambda forward, mode: INDUCTOR(  # noqa: E731
        forward, backend="aot_eager"
    )
    monkeypatch.setattr(torch, "compile", without_mode)
    yield
    torch._dynamo.reset()


def graphs():
    """How many graphs have been captured since the test began."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class Block(nn.Module):
    """Two layers around one that may be kept in float32; checkpointed on request."""

    def __init__(self, *, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x):
        if self.checkpointed:
            return checkpoint(self.layers, x, use_reentrant=False)
        return self.layers(x)

    def layers(self, x):
        return self.last(self.middle(self.first(x).relu()).relu())


def gradients(model, dtype=torch.bfloat16):
    """Of one batch under autocast."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=dtype):
        loss = model(x).float().square().mean()
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    return [gradient for gradient in found if gradient is not None]


def compiled_block():
    model = Block()
    compile_forward(model, Compile.DEFAULT)
    return model


class TestForward:
    def test_forward_is_compiled_once_for_each_shape_and_in_training_alone(self):
        """A validation, a batch that is counted and one that is replayed capture no
        graph.
        """
        model = compiled_block()
        with torch.no_grad():
            model(torch.ones(4, 8))
        with as_written(), ProductCount() as count:
            model(torch.ones(4, 8))
        assert graphs() == 0
        assert sum(count.flops.values()) == 3 * 2 * 4 * 8 * 8
        assert same_bits(gradients(model), gradients(Block()))
        for _ in range(3):
            gradients(model)
            with torch.no_grad():
                model(torch.ones(3, 8))
        assert graphs() == 1

    def test_compiling_leaves_class_names_and_weights_as_they_are(self):
        model = compiled_block()
        assert list(model.state_dict()) == list(Block().state_dict())
        assert isinstance(model, Block)
        plain = Block()
        compile_forward(plain, Compile.OFF)
        assert "forward" not in vars(plain)

    def test_compiled_copy_computes_with_its_own_weights(self):
        """A teacher is a copy of its student; a pickled model goes to another
        process.
        """
        model = compiled_block()
        gradients(model)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with torch.no_grad():
                other.last.weight.zero_()
                other.last.bias.zero_()
            assert not other(torch.ones(4, 8)).any()
            assert model(torch.ones(4, 8)).any()

    @pytest.mark.parametrize(
        ("checkpointed", "kept"),
        [(False, ("middle",)), (True, ()), (True, ("middle",))],
    )
    def test_compiled_model_has_the_gradients_of_the_model(self, checkpointed, kept):
        model, right = (Block(checkpointed=checkpointed) for _ in range(2))
        keep_in_float32(model, kept, "cpu", compiled=True)
        keep_in_float32(right, kept, "cpu", compiled=False)
        compile_forward(model, Compile.DEFAULT)
        assert same_bits(gradients(model), gradients(right))
        assert graphs() > 0 or (checkpointed and kept)

    @pytest.mark.parametrize("in_place", [False, True])
    def test_model_that_the_user_compiled_keeps_its_float32_modules(
        self, in_place, monkeypatch
    ):
        monkeypatch.setattr(torch, "compile", INDUCTOR)
        backend: Any = {"backend": "aot_eager"}
        model, right = Block(), Block()
        keep_in_float32(right, ["middle"], "cpu")
        if in_place:
            model.compile(**backend)
            compiled: Any = model
        else:
            compiled = INDUCTOR(model, **backend)
        keep_in_float32(compiled, ["middle"], "cpu")
        assert same_bits(gradients(compiled), gradients(right))
        assert graphs() > 0

    def test_compiled_forward_raises_the_models_own_error(self):
        # and no `CompileError`, which is no RuntimeError
        with pytest.raises(RuntimeError):
            compiled_block()(torch.ones(4, 5))

    def test_forward_that_cannot_be_compiled_says_what_to_write(self, monkeypatch):
        def backend(graph, inputs):
            raise RuntimeError("no C++ compiler here\n\nSet TORCH_LOGS")

        make = partial(INDUCTOR, backend=backend)
        monkeypatch.setattr(torch, "compile", lambda forward, mode: make(forward))
        with pytest.raises(
            CompileError, match=r"no C\+\+ compiler here; allowed: compile: false"
        ):
            gradients(compiled_block())

    def test_rehearsal_of_a_compiled_forward_names_the_module_that_overflows(self):
        """Hooks that come after the compilation are not called by what was compiled."""
        model = compiled_block()
        gradients(model, torch.float16)
        with torch.no_grad():
            model.middle.weight.fill_(1.0e5)
        rehearsal = Rehearsal(lambda scale: gradients(model, torch.float16), [model])
        cause = find_cause(rehearsal, OneSlot(), scale=1.0)
        assert cause is not None
        assert "forward overflow in module middle" in cause


def test_mode_that_replays_cuda_graphs_is_refused_with_accumulation():
    """CUDA graphs would keep the newest gradient in place of the sum, without an
    error.
    """
    amp = {"precision": "fp32", "compile": "reduce-overhead"}
    words = "reduce-overhead and aggregation_frequency 2"
    assert words in refusal(Weights, amp, aggregation_frequency=2)


class TestRun:
    def test_compiled_model_trains_as_itself_in_one_graph_and_resumes_to_the_bit(
        self, tmp_path
    ):
        eager = run_here.run_small("mlp/amp.yaml", tmp_path / "eager")
        assert graphs() == 0
        with run_here.killed_in_batch(9):
            run_here.run_small("mlp/amp.yaml", tmp_path / "compiled", ON)
        assert graphs() == 1  # with validations, checkpoints and the audit in between
        assert weights(run_here.resume(tmp_path / "compiled")) == weights(eager)

    def test_compiled_unmodified_trial_trains_as_the_converted_one(self):
        amp = {"precision": "amp_fp16", "init_scale": 2.0**24, "compile": "default"}
        seen = []
        for trial in (Plain, Converted):
            before = graphs()
            seen.append(
                fit_as_it_is(trial, amp, batches=4).checkpoint["models_state_dict"]
            )
            assert graphs() > before
            torch._dynamo.reset()
        assert same_bits(*seen)


def weights(folder):
    return run_here.digest(run_here.checkpoint(folder, 12)["models_state_dict"])
