"""Float32 trials trained in mixed precision as they are: equal to converted ones, bit for bit.

Each pair is one trial as a stranger writes it, and the same with the lines of docs/your_trial.md.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import pickle
import re
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, cast

import pytest
import torch
from determined import pytorch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from determined_amp import AmpSettings, AuditError, ConfigError, GuardError, MixedPrecision
from determined_amp.amp.fp32_modules import as_float32
from determined_amp.amp.precision import autocast_is_on
from determined_amp.experiment.fields import read_section
from determined_amp.trial.fused import fuse
from determined_amp.trial.unmodified import make_with_amp
from tests import habits
from tests.loops import Fitted, Reports, content, fit, loader
from tests.test_amp import FUSED_ON_CPU
from tests.training import digest

FEATURES, CLASSES, BATCHES, BATCH_SIZE = 6, 3, 8, 4
PRECISIONS = ("fp32", "tf32", "amp_fp16", "amp_bf16")

# A scheduler that Determined moves is moved by a skipped first step, too.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")

# The first step overflows: 2^24 times a gradient of about 0.1. Two good ones double the scale.
FP16 = {"precision": "amp_fp16", "init_scale": 2.0**24, "growth_interval": 2}


def points() -> TensorDataset:
    """(N, FEATURES) float32 and the class (N,) int64 of each."""
    made = torch.randn(BATCHES * BATCH_SIZE, FEATURES, generator=torch.Generator().manual_seed(3))
    return TensorDataset(made, made[:, :CLASSES].argmax(1))


class Plain(pytorch.PyTorchTrial):
    """A classifier in float32 with what people use: norm, dropout, clip, a moving rate."""

    clips = True

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(self.prepared(self.net()))
        adamw = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.optimizer = context.wrap_optimizer(adamw)
        halving: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        context.wrap_lr_scheduler(halving, pytorch.LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP)

    def net(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Dropout(0.25), nn.Linear(16, CLASSES)
        )

    def prepared(self, model: nn.Module) -> nn.Module:
        return model

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, classes = batch
        loss = functional.cross_entropy(self.model(inputs), classes)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=self.clip if self.clips else None)
        return {"loss": loss}

    def clip(self, parameters: Any) -> None:
        nn.utils.clip_grad_norm_(parameters, 0.5)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        inputs, classes = batch
        return {"validation_loss": functional.cross_entropy(self.model(inputs), classes)}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(points(), batch_size=self.context.get_per_slot_batch_size())

    build_validation_data_loader = build_training_data_loader


class Converted(Plain):
    """The same by docs/your_trial.md."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.amp = MixedPrecision(context)
        super().__init__(context)

    def prepared(self, model: nn.Module) -> nn.Module:
        return self.amp.prepare(model)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, classes = batch
        with self.amp.autocast():
            loss = functional.cross_entropy(self.model(inputs), classes)
        self.context.backward(self.amp.scaler.scale(loss))
        clip = self.amp.clip(self.optimizer, 0.5) if self.clips else None
        self.context.step_optimizer(self.optimizer, clip_grads=clip, scaler=self.amp.scaler)
        return {"loss": loss, **self.amp.update(loss)}

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return self.amp.callbacks(self)


class PlainPair(Plain):
    """Two models, and an optimizer for each, as a GAN has them; the loss is a plain tensor."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        widths = ((FEATURES, CLASSES), (CLASSES, FEATURES))
        self.models = [context.wrap_model(self.prepared(nn.Linear(*width))) for width in widths]
        self.optimizers = [
            context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            for model in self.models
        ]

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, classes = batch
        coder, decoder = self.models
        loss = functional.cross_entropy(coder(inputs), classes)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizers[0], clip_grads=self.clip)
        error = (decoder(coder(inputs).detach()) - inputs).pow(2).mean()
        self.context.backward(error)
        self.context.step_optimizer(self.optimizers[1])
        return error

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.models[0](batch[0]).sum()}


class ConvertedPair(PlainPair):
    """The same with the lines of the documentation."""

    prepared = Converted.prepared
    build_callbacks = Converted.build_callbacks

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.amp = MixedPrecision(context)
        super().__init__(context)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, classes = batch
        coder, decoder = self.models
        with self.amp.autocast():
            loss = functional.cross_entropy(coder(inputs), classes)
        self.context.backward(self.amp.scaler.scale(loss))
        clip, scaler = self.amp.clip(self.optimizers[0], 0.5), self.amp.scaler
        self.context.step_optimizer(self.optimizers[0], clip_grads=clip, scaler=scaler)
        with self.amp.autocast():
            code = coder(inputs).detach()
        with self.amp.autocast():
            error = (decoder(code).float() - inputs).pow(2).mean()
        self.context.backward(scaler.scale(error))
        self.context.step_optimizer(self.optimizers[1], scaler=scaler)
        return {"loss": error, **self.amp.update(loss + error)}


class Bare(Plain):
    """No clip and no schedule: what is left of the recipe is the scale alone."""

    clips = False


class ConvertedBare(Converted):
    """The same with the lines of the documentation."""

    clips = False


PAIRS = [(Plain, Converted), (PlainPair, ConvertedPair), (Bare, ConvertedBare)]
each_pair = pytest.mark.parametrize(
    ("plain", "converted"), PAIRS, ids=[plain.__name__ for plain, _ in PAIRS]
)


def as_it_is(trial: Callable[..., Any], amp: dict[str, Any]) -> Callable[..., Any]:
    """Makes the trial with mixed precision from outside."""
    settings = read_section(AmpSettings, amp, "amp")
    return lambda context: make_with_amp(trial, context, settings)


def run(trial: Callable[..., Any], folder: Path, amp: dict[str, Any], **options: Any) -> Fitted:
    """Train the trial as it is; a converted one is left alone."""
    options = {"batches": BATCHES, "batch_size": BATCH_SIZE, **options}
    return fit(as_it_is(trial, amp), folder, amp, **options)


def trained(made: Fitted, folder: Path) -> str:
    """A hash of weights, optimizers, scale, counts and random state."""
    saved = content(folder, made.checkpoint)
    saved["callbacks"].pop("determined_amp.unmodified", None)
    return digest(saved)


def resumed(trial: Callable[..., Any], folder: Path) -> Fitted:
    """Trained in two halves, the second from the checkpoint of the first."""
    first = run(trial, folder, FP16, batches=5)
    return run(trial, folder, FP16, first_batch=5, resume=first.checkpoint)


def numbers(made: Fitted) -> list[dict[str, Any]]:
    """The training reports without what a clock or the machine decides."""
    timed = ("samples_per_second", "watch_data_wait_share", "watch_peak_memory_mib")
    return [
        {name: value for name, value in report.items() if not name.startswith(timed)}
        for report in made.reports.training
    ]


@each_pair
@pytest.mark.parametrize("precision", PRECISIONS)
def test_trains_as_the_converted_trial_does_bit_for_bit(
    folder: Path, plain: Any, converted: Any, precision: str
) -> None:
    amp = FP16 if precision == "amp_fp16" else {"precision": precision}
    ours, theirs = run(plain, folder, amp), run(converted, folder, amp)
    assert trained(ours, folder) == trained(theirs, folder)
    assert ours.reports.validation == theirs.reports.validation
    skipped = [n for n in ours.reports.training[-1] if n.startswith("skipped_steps")]
    assert any(ours.reports.training[-1][n] for n in skipped) == (precision == "amp_fp16")


@each_pair
def test_accumulates_as_the_converted_trial_does_bit_for_bit(
    folder: Path, plain: Any, converted: Any
) -> None:
    ours, theirs = (run(t, folder, FP16, aggregation_frequency=2) for t in (plain, converted))
    assert trained(ours, folder) == trained(theirs, folder)


@each_pair
def test_resumes_bit_for_bit(folder: Path, plain: Any, converted: Any) -> None:
    undisturbed = run(plain, folder, FP16)
    ours, theirs = (resumed(trial, folder) for trial in (plain, converted))
    assert trained(ours, folder) == trained(theirs, folder)
    # The validation at the end of the first half takes random numbers.
    parts = ("models_state_dict", "optimizers_state_dict", "scaler_state_dict")
    saved, whole = (content(folder, made.checkpoint) for made in (ours, undisturbed))
    assert [digest(saved[part]) for part in parts] == [digest(whole[part]) for part in parts]


def test_reports_what_the_converted_trial_reports(folder: Path) -> None:
    ours, theirs = (numbers(run(trial, folder, FP16)) for trial in (Plain, Converted))
    assert [set(report) for report in ours] == [set(report) for report in theirs]
    for report, expected in zip(ours, theirs, strict=True):
        assert {k: report[k] for k in report if k != "loss"} == pytest.approx(
            {k: expected[k] for k in expected if k != "loss"}, nan_ok=True
        )


def test_outputs_left_in_16_bits_train_something_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: what a model returns has to be cast."""

    class Squares(Plain):
        clips = False

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = self.model(batch[0]).pow(2).float().mean()
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return {"loss": loss}

    amp = {"precision": "amp_fp16", "init_scale": 16.0}
    right = trained(run(Squares, folder, amp), folder)
    assert right == trained(run(Squares, folder, amp), folder)
    monkeypatch.setattr("determined_amp.trial.outer_autocast.as_float32", lambda value: value)
    assert trained(run(Squares, folder, amp), folder) != right


class TestForward:
    @pytest.mark.parametrize("eval_precision", ["fp32", "same"])
    def test_validation_is_in_the_precision_of_the_settings(
        self, folder: Path, eval_precision: str
    ) -> None:
        seen: list[tuple[bool, torch.dtype]] = []

        class Watching(Plain):
            def net(self) -> nn.Module:
                model = nn.Linear(FEATURES, CLASSES)
                model.register_forward_hook(
                    lambda module, _, output: seen.append((module.training, output.dtype))
                )
                forward = model.forward

                def look(x: torch.Tensor) -> torch.Tensor:
                    found: torch.Tensor = forward(x)
                    seen.append((model.training, found.dtype))
                    return found

                model.forward = look  # type: ignore[method-assign,assignment]
                return model

        run(Watching, folder, {"precision": "amp_bf16", "eval_precision": eval_precision})
        validated = torch.bfloat16 if eval_precision == "same" else torch.float32
        # Inside, then as handed on.
        assert set(seen[::2]) == {(True, torch.bfloat16), (False, validated)}
        assert {dtype for _, dtype in seen[1::2]} == {torch.float32}

    def test_model_that_calls_another_wrapped_one_is_one_region(self, folder: Path) -> None:
        dtypes: list[torch.dtype] = []

        class Outer(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = self.inner(x)
                dtypes.append(found.dtype)
                return found

        class Nested(Plain):
            def prepared(self, model: nn.Module) -> nn.Module:
                return Outer(self.context.wrap_model(model))

        run(Nested, folder, {"precision": "amp_bf16", "eval_precision": "same"})
        assert set(dtypes) == {torch.bfloat16}
        assert not autocast_is_on("cpu")

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_wrapped_model_under_a_checkpoint_of_another_one(
        self, folder: Path, reentrant: bool
    ) -> None:
        class Outer(nn.Module):
            def __init__(self, inner: nn.Module, checkpoints: bool) -> None:
                super().__init__()
                self.inner, self.checkpoints = inner, checkpoints
                self.head = nn.Linear(CLASSES, CLASSES)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.checkpoints:
                    x = checkpoint(self.inner, x.requires_grad_(), use_reentrant=reentrant)
                else:
                    x = self.inner(x)
                found: torch.Tensor = self.head(x)
                return found

        class Nested(Bare):
            checkpoints = False

            def net(self) -> nn.Module:
                return nn.Linear(FEATURES, CLASSES)

            def prepared(self, model: nn.Module) -> nn.Module:
                return Outer(self.context.wrap_model(model), self.checkpoints)

        class Checkpointed(Nested):
            checkpoints = True

        made = [run(t, folder, {"precision": "amp_bf16"}) for t in (Nested, Checkpointed)]
        assert len({trained(each, folder) for each in made}) == 1

    def test_fp32_modules_apply(self, folder: Path) -> None:
        amp = {"precision": "amp_bf16", "fp32_modules": ["^3$"]}
        ours, theirs = run(Plain, folder, amp), run(Converted, folder, amp)
        assert trained(ours, folder) == trained(theirs, folder)
        without = run(Plain, folder, {"precision": "amp_bf16"})
        assert trained(ours, folder) != trained(without, folder)

    def test_copy_of_the_model_computes_with_its_own_weights(self, folder: Path) -> None:
        made = run(Plain, folder, {"precision": "amp_bf16"}).trial
        average = copy.deepcopy(made.model)
        with torch.no_grad():
            for parameter in average.parameters():
                parameter.zero_()
        assert not average(torch.ones(2, FEATURES)).any()
        assert made.model(torch.ones(2, FEATURES)).any()

    def test_pickled_model_is_the_plain_one(self, folder: Path) -> None:
        made = run(Plain, folder, {"precision": "amp_bf16"}).trial
        again = pickle.loads(pickle.dumps(made.model.eval()))
        inputs = torch.ones(2, FEATURES)
        assert torch.equal(again(inputs), made.model(inputs))

    def test_dictionaries_and_dataclasses_are_handed_on_in_float32(self) -> None:
        @dataclasses.dataclass(frozen=True)
        class Output:
            logits: torch.Tensor
            hidden: tuple[torch.Tensor, ...]
            name: str = "x"

        half = torch.ones(2, dtype=torch.float16)
        cast = as_float32({"out": Output(half, (half,)), "n": 1})
        out = cast["out"]
        assert (out.logits.dtype, out.hidden[0].dtype, out.name) == (
            torch.float32,
            torch.float32,
            "x",
        )
        single = Output(half.float(), ())
        assert as_float32(single) is single


class TestRefused:
    """Each with its reason and the line to write, in the first batch at the latest."""

    def refusal(self, folder: Path, trial: Callable[..., Any], amp: Any = None) -> str:
        with pytest.raises(ConfigError) as raised:
            run(trial, folder, amp or {"precision": "amp_fp16"})
        return str(raised.value)

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_own_backward(self, folder: Path, precision: str) -> None:
        class Own(Plain):
            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                loss = functional.cross_entropy(self.model(batch[0]), batch[1])
                loss.backward()  # type: ignore[no-untyped-call]
                self.context.step_optimizer(self.optimizer)
                return loss

        said = self.refusal(folder, Own, {"precision": precision})
        assert "calls loss.backward() itself" in said
        assert "self.context.backward(loss)" in said

    def test_own_backward_beside_the_right_one(self, folder: Path) -> None:
        class Mixed(PlainPair):
            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                super().train_batch(batch, epoch_idx, batch_idx)
                self.models[0](batch[0]).sum().backward()

        assert "calls loss.backward() itself" in self.refusal(folder, Mixed)

    def test_backward_of_torch_autograd(self, folder: Path) -> None:
        class Own(Plain):
            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                loss = functional.cross_entropy(self.model(batch[0]), batch[1])
                torch.autograd.backward(loss)
                self.context.step_optimizer(self.optimizer)

        assert "calls loss.backward() itself" in self.refusal(folder, Own)

    def test_own_autocast(self, folder: Path) -> None:
        class Own(Plain):
            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                with torch.autocast("cpu", torch.bfloat16):
                    return super().train_batch(batch, epoch_idx, batch_idx)

        assert "enters autocast itself" in self.refusal(folder, Own)

    def test_own_scaler(self, folder: Path) -> None:
        class Own(Plain):
            def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
                self.scaler = context.wrap_scaler(torch.amp.GradScaler("cpu"))
                super().__init__(context)

        assert "GradScaler of its own" in self.refusal(folder, Own)

    def test_own_scaler_that_the_context_does_not_know(self, folder: Path) -> None:
        class Own(Plain):
            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                scaler = torch.amp.GradScaler("cpu")
                loss = scaler.scale(self.model(batch[0]).sum())
                self.context.backward(loss)
                self.context.step_optimizer(self.optimizer, scaler=scaler)

        assert "GradScaler of its own" in self.refusal(folder, Own)

    def test_scaler_that_is_switched_off_is_no_trouble(self, folder: Path) -> None:
        class Off(Plain):
            def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
                self.scaler = context.wrap_scaler(torch.amp.GradScaler("cpu", enabled=False))
                super().__init__(context)

            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                inputs, classes = batch
                with torch.autocast("cpu", enabled=False):
                    loss = functional.cross_entropy(self.model(inputs), classes)
                self.context.backward(self.scaler.scale(loss))
                clip = self.clip_unscaled
                self.context.step_optimizer(self.optimizer, clip, scaler=self.scaler)
                self.scaler.update()
                return {"loss": loss}

            def clip_unscaled(self, parameters: Any) -> None:
                self.scaler.unscale_(self.optimizer)
                self.clip(parameters)

        ours, theirs = run(Off, folder, FP16), run(Converted, folder, FP16)
        assert trained(ours, folder) == trained(theirs, folder)

    def test_dropping_gradients_is_no_trouble(self, folder: Path) -> None:
        class Dropping(Bare):
            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                loss = functional.cross_entropy(self.model(batch[0]), batch[1])
                self.context.backward(loss)
                next(self.model.parameters()).grad = None
                self.context.step_optimizer(self.optimizer)
                return loss

        weight = run(Dropping, folder, {"precision": "amp_fp16"}).trial.model[0].weight
        torch.manual_seed(0)
        assert torch.equal(weight, nn.Linear(FEATURES, 16).weight)

    def test_two_optimizers_of_one_parameter_with_a_backward_each(self, folder: Path) -> None:
        class Shared(Bare):
            def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
                super().__init__(context)
                sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
                self.second = context.wrap_optimizer(sgd)

            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                for optimizer in (self.optimizer, self.second):
                    loss = functional.cross_entropy(self.model(batch[0]), batch[1])
                    self.context.backward(loss)
                    self.context.step_optimizer(optimizer)
                return loss

        made = run(Shared, folder, {"precision": "amp_fp16", "init_scale": 16.0})
        assert made.reports.training[-1]["watch_applied_steps_1"] == BATCHES

    def test_second_order_gradients_of_a_scaled_loss(self, folder: Path) -> None:
        class Second(Plain):
            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                self.context.backward(self.model(batch[0]).sum(), create_graph=True)

        assert "create_graph" in self.refusal(folder, Second)

    def test_output_that_cannot_be_cast(self, folder: Path) -> None:
        assert "its loss is in float16" in self.refusal(folder, habits.ReturnsBox)

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_weights_in_16_bits(self, folder: Path, precision: str) -> None:
        said = self.refusal(folder, habits.HalfWeights, {"precision": precision})
        assert "its weights are in bfloat16, as after .half() or .bfloat16()" in said

    def test_frozen_weights_in_16_bits_are_no_trouble(self, folder: Path) -> None:
        class Frozen(habits.HalfWeights):
            def net(self) -> nn.Module:
                model: Any = habits.Habit.net(self)
                model[0].bfloat16().requires_grad_(False)
                return model  # type: ignore[no-any-return]

            def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
                return {"validation_loss": 0.0}

        run(Frozen, folder, {"precision": "amp_bf16"})

    def test_line_search_in_16_bits(self, folder: Path) -> None:
        """In float32 it trains as in plain Determined, to the bit."""
        plain = way(habits.LineSearch, folder, None)
        assert torch.equal(way(habits.LineSearch, folder, {"precision": "fp32"}).end, plain.end)
        for precision in ("amp_bf16", "amp_fp16"):
            said = self.refusal(folder, habits.LineSearch, {"precision": precision})
            assert "it steps LBFGS with a closure, for which no line helps in 16 bits" in said

    def test_step_inside_the_backward(self, folder: Path) -> None:
        class Within(habits.Habit):
            def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
                super().__init__(context)
                self.own = torch.optim.SGD(self.model.parameters(), lr=0.1)
                last = next(iter(self.model.parameters()))
                last.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # torch
                    lambda _: self.own.step()
                )

        assert "steps an optimizer inside the backward" in self.refusal(folder, Within)
        run(Within, folder, {"precision": "amp_bf16"})

    def test_no_wrapped_model(self, folder: Path) -> None:
        class Unwrapped(Plain):
            def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
                self.context = context

        assert "context.wrap_model(model)" in self.refusal(folder, Unwrapped)

    def test_forward_of_another_name_fails_the_audit(self, folder: Path) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(FEATURES, CLASSES)

            def logits(self, x: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = self.layer(x)
                return found

        class Another(Plain):
            def net(self) -> nn.Module:
                return Net()

            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                model: Any = self.model
                loss = functional.cross_entropy(model.logits(batch[0]), batch[1])
                self.context.backward(loss)
                self.context.step_optimizer(self.optimizer)

        with pytest.raises(AuditError, match=r"model\(inputs\)"):
            run(Another, folder, {"precision": "amp_bf16"})

    def test_nothing_stays_patched(self, folder: Path) -> None:
        owners = (torch.Tensor, torch.autograd.Variable, nn.Module)
        before = [dict(vars(owner)) for owner in owners]
        run(Plain, folder, FP16)
        assert [dict(vars(owner)) for owner in owners] == before


class WithMomentum(pytorch.PyTorchTrial):
    """y = w x from w = 1, the loss is mean(y), and the first batch overflows.

    Momenta of the applied steps are 1 and 1.5: w is 1 - 0.5, then 0.5 - 0.75.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        self.model = context.wrap_model(model)
        amp = MixedPrecision.of(context)
        assert amp is not None
        amp.fused = True  # as on a GPU
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)
        self.optimizer = context.wrap_optimizer(sgd)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        assert self.optimizer.defaults["fused"] is True
        loss = self.model(batch[0]).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": 0.0}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return loader([[math.inf], [1.0], [1.0]])

    build_validation_data_loader = build_training_data_loader


class WithSGD(Plain):
    """With momentum; its net in two parts, of which the second begins to train in batch 3."""

    clips = False

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.parts = self.net()
        sgd = self.made(self.parts)
        self.model = context.wrap_model(self.parts)
        self.optimizer = context.wrap_optimizer(sgd)

    def net(self) -> nn.Module:
        return InTwoParts()

    def made(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        cast(InTwoParts, self.parts).second_trains = batch_idx > 2
        return super().train_batch(batch, epoch_idx, batch_idx)


class InTwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.head = nn.Linear(16, CLASSES)
        self.second_trains = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        answer: torch.Tensor = self.head(hidden)
        return answer + self.second(hidden) if self.second_trains else answer


class GetsAGroupLater(WithSGD):
    """It thaws the head in batch 3, whose step overflows."""

    def made(self, model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, InTwoParts)
        parts = [*model.first.parameters(), *model.second.parameters()]
        return torch.optim.SGD(parts, lr=0.1, momentum=0.9)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == 3:
            head = cast(InTwoParts, self.parts).head
            self.optimizer.add_param_group({"params": list(head.parameters())})
        return super().train_batch(batch, epoch_idx, batch_idx)


class WithSparseGradients(WithSGD):
    def net(self) -> nn.Module:
        return nn.Sequential(OfWords(), nn.Linear(8, CLASSES))


class OfWords(nn.Module):
    """Takes the sign of each feature for a word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2 * FEATURES, 8, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        words = (inputs > 0).long() + 2 * torch.arange(FEATURES)
        embedded: torch.Tensor = self.words(words)
        return embedded.mean(1)


class ClipsInAHook(WithSGD):
    """Registered after the optimizer was wrapped."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.optimizer.register_step_pre_hook(self.clip_gradients)

    def clip_gradients(self, *call: Any) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)


class ClipsInItsStep(WithSGD):
    """And a scheduler of torch has wrapped that step, too."""

    def made(self, model: nn.Module) -> torch.optim.Optimizer:
        sgd = super().made(model)
        step = type(sgd).step

        def clip_and_step(optimizer: Any, *given: Any) -> Any:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            return step(optimizer, *given)

        sgd.step = MethodType(clip_and_step, sgd)  # type: ignore[method-assign]
        torch.optim.lr_scheduler.StepLR(sgd, 100)
        return sgd


@pytest.fixture
def _fused_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    make = MixedPrecision.__init__

    def make_fused(amp: MixedPrecision, *given: Any) -> None:
        make(amp, *given)
        amp.fused = True

    monkeypatch.setattr(MixedPrecision, "__init__", make_fused)


@pytest.mark.skipif(not FUSED_ON_CPU, reason="this torch has no fused optimizer on the CPU")
@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "amp_fp16"])
@pytest.mark.parametrize(
    ("trial", "is_fused"),
    [
        (WithSGD, True),
        (GetsAGroupLater, True),
        (WithSparseGradients, False),
        (ClipsInAHook, False),
        (ClipsInItsStep, False),
    ],
)
def test_making_an_optimizer_fused_changes_nothing_but_its_speed(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    precision: str,
    trial: type[WithSGD],
    *,
    is_fused: bool,
) -> None:
    """Up to the rounding of 8 steps; one that does not clip moves by fifty times as much.

    The first step of a new group overflows: after three steps the scale is 256 times as large.
    """
    amp: dict[str, Any] = {"precision": precision, "audit": False}
    if precision == "amp_fp16":
        amp |= {"growth_interval": 3, "growth_factor": 2.0**8, "backoff_factor": 2.0**-8}

    def trained_weights() -> tuple[torch.Tensor, Any]:
        torch.manual_seed(1)
        made = run(trial, folder, amp)
        weights = [p.detach().flatten() for p in made.trial.model.parameters()]
        return torch.cat(weights), made.trial.optimizer.defaults["fused"]

    plain, fused = trained_weights()
    assert not fused
    request.getfixturevalue("_fused_as_on_a_gpu")
    weights, fused = trained_weights()
    assert bool(fused) is is_fused
    torch.testing.assert_close(weights, plain, rtol=1e-5, atol=1e-6)


class TestFused:
    @pytest.mark.skipif(not FUSED_ON_CPU, reason="this torch has no fused optimizer on the CPU")
    @pytest.mark.parametrize(
        "make",
        [
            partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
            partial(torch.optim.Adam, lr=0.1, amsgrad=True),
            partial(torch.optim.AdamW, lr=0.1),
        ],
    )
    def test_steps_as_one_that_was_made_fused(self, make: Callable[..., Any]) -> None:
        weights = []
        for fused in (True, None):
            weight = nn.Parameter(torch.linspace(-1, 1, 5))
            optimizer = make([weight], fused=fused)
            assert fuse(optimizer)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            for factor in (1.0, float("inf"), 2.0):
                scaler.scale((weight * torch.arange(5.0)).sum() * factor).backward()  # type: ignore[no-untyped-call]
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            weights.append(weight.detach())
        assert torch.equal(*weights)

    @pytest.mark.skipif(not FUSED_ON_CPU, reason="this torch has no fused optimizer on the CPU")
    @pytest.mark.usefixtures("_deterministic")
    @pytest.mark.parametrize("stops_after", [0, 1])
    def test_momentum_is_right_after_a_first_step_that_overflows(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, stops_after: int
    ) -> None:
        """Fresh memory is NaN, also where a run resumes before its first applied step."""

        def last_weight() -> float:
            amp = {"precision": "amp_fp16", "init_scale": 4.0}
            first = run(WithMomentum, folder, amp, batches=1) if stops_after else None
            checkpoint = None if first is None else first.checkpoint
            there = {"batches": 3, "first_batch": stops_after, "resume": checkpoint}
            made = run(WithMomentum, folder, amp, **there)
            return next(made.trial.model.parameters()).item()  # type: ignore[no-any-return]

        assert last_weight() == -0.25
        never = "determined_amp.amp.steps.fill_momentum"
        monkeypatch.setattr(never, lambda *_, **named: None)
        assert math.isnan(last_weight())  # the negative control

    @pytest.mark.parametrize(
        "optimizer",
        [
            partial(torch.optim.RMSprop),
            partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
            partial(torch.optim.AdamW, foreach=True),
        ],
    )
    def test_others_stay_as_they_are(self, optimizer: Callable[..., Any]) -> None:
        made = optimizer([nn.Parameter(torch.ones(1))])
        before = copy.deepcopy(made.defaults)
        assert not fuse(made)
        assert made.defaults == before

    def test_one_that_waits_for_the_device_is_named(
        self, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Slow(Plain):
            def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
                self.context = context
                self.model = context.wrap_model(self.net())
                amp = MixedPrecision.of(context)
                assert amp is not None
                amp.fused = True  # as on a GPU
                rmsprop = torch.optim.RMSprop(self.model.parameters())
                self.optimizer = context.wrap_optimizer(rmsprop)

        with caplog.at_level(logging.INFO):
            run(Slow, folder, {"precision": "amp_fp16", "init_scale": 16.0})
        assert "RMSprop cannot be fused" in caplog.text


# What a trial does, and how far 16 bits may take its weights from where float32 takes them, as a
# share of the way: rounding alone. None is refused, in the precisions that have a reason.
HABITS = [
    habits.Habit,
    habits.ClampsData,
    habits.ClampsInPlace,
    habits.ClipsOutside,
    habits.AddsNoise,
    habits.StepsIfSmall,
    habits.ReportsNorm,
    habits.KeepsNorms,
    habits.StepsItself,
    habits.StepsByHand,
    habits.OwnAccumulation,
    habits.ZeroesItself,
    habits.TwoBackwards,
    habits.SecondOptimizer,
    habits.UnknownOptimizer,
    habits.SharedParameters,
    habits.AlternatingHeads,
    habits.OwnOptimizer,
    habits.LooksAhead,
    habits.Sam,
    habits.SamInItsStep,
    habits.Wgan,
    habits.ParameterHook,
    habits.AccumulatedHook,
    habits.ModuleHook,
    habits.CopiesItself,
    habits.ActivationHook,
    habits.RetainedGradient,
    habits.Penalty,
    habits.FunctionalPenalty,
    habits.Adversarial,
    habits.SetsGradients,
    habits.Features,
    habits.DoublesInHook,
    habits.Attribute,
    habits.ReturnsSlots,
    habits.ReturnsNamespace,
    habits.ReturnsMapping,
    habits.Tied,
    habits.SparseEmbedding,
    habits.TwoTowers,
    habits.Vae,
    habits.Sequences,
    habits.Graph,
    habits.Pinn,
    habits.MeanTeacher,
    habits.PseudoLabels,
    habits.Functional,
    habits.Container,
    habits.Checkpointing,
    habits.Complex,
]


SCALE: dict[str, dict[str, float]] = {"amp_bf16": {}, "amp_fp16": {"init_scale": 1024.0}}


@dataclasses.dataclass
class Way:
    """How a habit trained.

    Args:
        reports: What the trial reported.
        start: Its weights before, flat.
        end: The same after it.
        still: The batches that left them where they were.
        checkpoint: Its last one.
    """

    reports: Reports
    start: torch.Tensor
    end: torch.Tensor
    still: list[int]
    checkpoint: str | None

    def distance(self, other: Way) -> float:
        """Between the ends of two ways, as a share of the way."""
        return float((self.end - other.end).norm() / (self.end - self.start).norm())


def way(
    habit: Any,
    folder: Path,
    amp: dict[str, Any] | None,
    without: Collection[int] = (),
    **options: Any,
) -> Way:
    """Train in plain Determined if `amp` is None.

    Args:
        habit: The trial's class.
        folder: For checkpoints.
        amp: The section `amp`.
        without: The batches that change nothing.
        options: Of the loop.
    """
    starts: list[torch.Tensor] = []
    still = []

    def weights(trial: Any) -> torch.Tensor:
        leaves = [p for model in trial.context.models for p in model.parameters()]
        leaves += [it for it in vars(trial).values() if isinstance(it, nn.Parameter)]
        return (
            torch.cat(
                [
                    torch.view_as_real(leaf).flatten() if leaf.is_complex() else leaf.flatten()
                    for leaf in leaves
                ]
            )
            .detach()
            .clone()
        )

    class Watched(habit):  # type: ignore[misc]
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            starts.append(weights(self))

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx in without:
                return {"loss": 0.0}
            before = weights(self)
            reported = super().train_batch(batch, epoch_idx, batch_idx)
            if torch.allclose(before, weights(self), rtol=0, atol=1e-6):
                still.append(batch_idx)
            return reported

    Watched.__module__ = habit.__module__
    make = Watched if amp is None else as_it_is(Watched, amp)
    options = {"batches": 8, "batch_size": 4, "reporting_period": 8, **options}
    made = fit(make, folder, amp, **options)
    return Way(made.reports, starts[0], weights(made.trial), still, made.checkpoint)


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
class TestHabits:
    def test_is_plain_determined_in_float32_to_the_bit(self, habit: Any, folder: Path) -> None:
        plain, ours = (way(habit, folder, amp) for amp in (None, {"precision": "fp32"}))
        assert torch.equal(ours.end, plain.end)
        assert not torch.equal(ours.start, ours.end)
        assert ours.reports.validation[-1] == plain.reports.validation[-1]

    def test_trains_in_16_bits_as_in_float32(self, habit: Any, folder: Path) -> None:
        plain = way(habit, folder, None)
        for precision, rounding in (("amp_bf16", 0.015), ("amp_fp16", 0.002)):
            ours = way(habit, folder, {"precision": precision, **SCALE[precision]})
            assert ours.distance(plain) < rounding
            theirs = plain.reports.training[-1]
            assert {name: ours.reports.training[-1][name] for name in theirs} == pytest.approx(
                theirs, rel=2 * rounding
            )


# What these keep Determined does not save: histories, and parameters and optimizers that nobody
# wrapped.
KEEP_THEIR_OWN = {
    habits.KeepsNorms,
    habits.SecondOptimizer,
    habits.UnknownOptimizer,
    habits.LooksAhead,
    habits.Sam,
    habits.SamInItsStep,
    habits.TwoTowers,
    habits.MeanTeacher,
}


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")
@pytest.mark.parametrize("precision", SCALE)
@pytest.mark.parametrize("habit", [habit for habit in HABITS if habit not in KEEP_THEIR_OWN])
def test_resumed_habit_ends_as_if_undisturbed_to_the_bit(
    habit: Any, precision: str, folder: Path
) -> None:
    amp = {"precision": precision, **SCALE[precision]}
    whole, half = way(habit, folder, amp), way(habit, folder, amp, batches=4)
    resumed = way(habit, folder, amp, resume=half.checkpoint, first_batch=4)
    assert torch.equal(resumed.end, whole.end)
    assert not torch.equal(half.end, whole.end)


# Those that do something with the gradients of a window that overflows.
@pytest.mark.parametrize(
    "habit",
    [
        habits.Habit,
        habits.ClampsData,
        habits.ClipsOutside,
        habits.StepsIfSmall,
        habits.StepsItself,
        habits.StepsByHand,
        habits.ZeroesItself,
        habits.UnknownOptimizer,
        habits.SharedParameters,
        habits.OwnOptimizer,
        habits.LooksAhead,
        habits.Sam,
        habits.SamInItsStep,
        habits.ParameterHook,
        habits.AccumulatedHook,
        habits.ModuleHook,
        habits.ActivationHook,
        habits.Penalty,
        habits.SetsGradients,
        habits.SparseEmbedding,
        habits.Complex,
    ],
    ids=lambda habit: habit.__name__,
)
def test_window_that_overflows_changes_nothing(habit: Any, folder: Path) -> None:
    """The others train as in float32 without it."""
    amp = {"precision": "amp_fp16", "init_scale": 2.0**24, "growth_interval": 1000, "audit": False}
    ours = way(habit, folder, amp, batches=16)
    assert 2 < len(ours.still) < 10
    plain = way(habit, folder, None, batches=16, without=ours.still)
    # Where one backward of two overflowed, the step is made with the other.
    assert ours.distance(plain) < (0.02 if issubclass(habit, habits.Sam) else 0.002)


def test_window_of_two_batches_is_lost_if_one_overflows(folder: Path) -> None:
    amp = {"precision": "amp_fp16", "init_scale": 1024.0, "audit": False}
    ours = way(habits.LoudAtFirst, folder, amp, aggregation_frequency=2)
    assert ours.still == [0, 1, 2, 4, 6]
    plain = way(habits.LoudAtFirst, folder, None, aggregation_frequency=2, without=(0, 1))
    assert ours.distance(plain) < 0.002


def test_skipped_step_puts_the_weights_back(folder: Path) -> None:
    amp = {"precision": "amp_fp16", "init_scale": 1024.0, "audit": False}
    ours = way(habits.SamThatOverflows, folder, amp)
    assert ours.still == [4]
    plain = way(habits.SamThatOverflows, folder, None, without=(4,))
    assert ours.distance(plain) < 0.002


@pytest.mark.parametrize("habit", [habits.SamInItsStep, habits.Sam, habits.StepsItself])
def test_replay_in_search_of_the_cause_leaves_the_weights(
    habit: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    amp = {"precision": "amp_fp16", "init_scale": 2.0**24, "on_overflow": "warn", "audit": False}
    quiet = way(habit, folder, {**amp, "max_consecutive_skips": 99}, reporting_period=1)
    assert "in a row were skipped" not in caplog.text
    warned = way(habit, folder, {**amp, "max_consecutive_skips": 1}, reporting_period=1)
    assert "in a row were skipped" in caplog.text
    assert torch.equal(warned.end, quiet.end)


def test_what_is_kept_of_a_window_that_overflows_is_finite(folder: Path) -> None:
    amp = {"precision": "amp_fp16", "init_scale": 2.0**24, "audit": False}
    ours = way(habits.KeepsNorms, folder, amp, batches=16, reporting_period=1)
    assert ours.still
    assert torch.isfinite(ours.end).all()
    assert ours.reports.training[-1]["loss"] < ours.reports.training[0]["loss"]


def test_optimizers_skip_only_their_own_windows(folder: Path) -> None:
    """The gradient of the temperature is in float32: it overflows less often."""
    amp = {"precision": "amp_fp16", "init_scale": 2.0**24, "audit": False}
    ours = way(habits.SecondOptimizer, folder, amp, batches=16)
    assert ours.reports.training[-1]["skipped_steps"] > 5
    assert not ours.still


def test_several_steps_of_a_batch_are_counted(folder: Path) -> None:
    made = way(habits.Wgan, folder, {"precision": "amp_fp16", "init_scale": 1024.0})
    report = made.reports.training[-1]
    assert (report["watch_applied_steps_0"], report["watch_applied_steps_1"]) == (8, 24)


class Sharper(habits.Functional):
    """Clips in the backward of a function of its own."""

    class Clip(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.clamp(-1, 1)

    def loss(self, inputs: torch.Tensor, classes: torch.Tensor) -> Any:
        return functional.cross_entropy(self.Clip.apply(self.model(inputs)), classes)


def test_function_of_the_trials_own_is_named_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    way(Sharper, folder, {"precision": "amp_fp16"})
    (said,) = [it for it in caplog.messages if "gets gradients times the loss scale" in it]
    assert re.match(rf"{__file__}:\d+: the backward of Clip ", said)
    caplog.clear()
    way(Sharper, folder, {"precision": "amp_bf16"})
    assert not [it for it in caplog.messages if "loss scale" in it]


def test_torch_func_without_a_loss_scale_is_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    way(habits.FunctionalPenalty, folder, {"precision": "amp_fp16", "init_scale": 1024.0})
    assert len([it for it in caplog.messages if "torch.func goes backward without" in it]) == 1
    caplog.clear()
    way(habits.Penalty, folder, {"precision": "amp_fp16", "init_scale": 1024.0})
    assert "torch.func" not in caplog.text


class NeverSteps(habits.Habit):
    """Its condition is never met."""

    def step(self) -> None:
        self.optimizer.zero_grad()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_run_without_any_step_is_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture, precision: str
) -> None:
    words = "4 batches went backward, and no optimizer was stepped since the last report"
    way(NeverSteps, folder, {"precision": precision}, batches=16, reporting_period=4)
    assert len([said for said in caplog.messages if words in said]) == 1
    caplog.clear()
    for habit in (habits.OwnAccumulation, habits.UnknownOptimizer, habits.Habit):
        way(habit, folder, {"precision": precision}, aggregation_frequency=2, reporting_period=1)
    assert "no optimizer was stepped" not in caplog.text


def test_callbacks_of_any_name_are_called(folder: Path) -> None:
    called = []

    class Named(pytorch.PyTorchCallback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_training_start(self) -> None:
            called.append(self.name)

    names = ["guard", "mine", "mixed_precision", "portable_checkpoint", "unmodified"]

    class Names(Plain):
        factor = 1.0

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            return super().train_batch([batch[0] * self.factor, batch[1]], epoch_idx, batch_idx)

        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {name: Named(name) for name in names}

    class NamesToo(Names, Converted):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {**self.amp.callbacks(self), **Names.build_callbacks(self)}

    for trial in (Names, NamesToo):
        called.clear()
        trial.factor = 1.0
        run(trial, folder, {"precision": "amp_bf16"}, batches=1)
        assert called == names
        trial.factor = math.nan
        with pytest.raises(GuardError):  # which no name switches off
            run(trial, folder, {"precision": "amp_bf16"})


@pytest.mark.parametrize("trial", [Plain, Converted])
def test_checkpoint_of_other_names_of_callbacks_resumes_bit_for_bit(
    folder: Path, trial: Any
) -> None:
    """Those that they had at first."""
    first = run(trial, folder, FP16, batches=5)
    undisturbed = run(trial, folder, FP16, first_batch=5, resume=first.checkpoint)
    saved = content(folder, first.checkpoint)
    states = saved["callbacks"]
    saved["callbacks"] = {name.removeprefix("determined_amp."): states[name] for name in states}
    assert saved["callbacks"] != states
    torch.save(saved, folder / str(first.checkpoint) / "state_dict.pth")
    again = run(trial, folder, FP16, first_batch=5, resume=first.checkpoint)
    assert trained(again, folder) == trained(undisturbed, folder)
