"""`check` of loops and scripts: what holds for every right training, measured."""

from __future__ import annotations

import copy
import json
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from determined import pytorch
from determined.errors import InvalidExperimentException
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from determined_amp.__main__ import main
from determined_amp.amp.plain_data import StateDict
from determined_amp.check import watching
from determined_amp.check.any_loop import NOT_SAVED, TOO_SHORT
from determined_amp.check.finding import CheckFindings, Level
from determined_amp.check.interventions import ScaleMoves
from tests.test_check import Right, examined

pytestmark = pytest.mark.usefixtures("_libraries_are_collected_once")


def net(outputs: int = 4) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, outputs))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def batches(
    count: int = 24, factor: float = 1.0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    points = factor * torch.randn(
        count * 8, 16, generator=torch.Generator().manual_seed(1)
    )
    data = TensorDataset(points, points[:, :4].argmax(1))
    yield from DataLoader(data, batch_size=8)


class Loop:
    """A right loop; the others differ from it in one thing."""

    factor = 1.0
    dtype = torch.float16
    accumulates = 1

    def __init__(self) -> None:
        self.model = self.net()
        self.optimizer = self.optimizer_of(self.model)
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.dtype is torch.float16)

    def net(self) -> Any:
        return net()

    def optimizer_of(self, model: nn.Module) -> Any:
        return sgd(model)

    def batches(self) -> Iterator[Any]:
        yield from batches(24 * self.accumulates, self.factor)

    def train(self) -> None:
        for number, (inputs, labels) in enumerate(self.batches()):
            with torch.autocast("cuda", dtype=self.dtype):
                loss = self.loss(inputs, labels)
            self.before_backward(number)
            torch.autograd.backward(self.scaler.scale(loss / self.accumulates))
            if (number + 1) % self.accumulates == 0:
                self.step()

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(inputs), labels)

    def before_backward(self, number: int) -> None:
        """Nothing."""

    def step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class OverflowsInForward(Loop):
    factor = 3e5


class SumsMillions(Loop):
    """Its scale needs ten steps to settle, which is no fault."""

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return 1000 * super().loss(inputs, labels)


class OutlierInStatistics(Loop):
    def net(self) -> Any:
        return nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
        )

    def batches(self) -> Iterator[Any]:
        for number, (inputs, labels) in enumerate(super().batches()):
            yield inputs * (3e5 if number == 11 else 1), labels


class Statistics(OutlierInStatistics):
    batches = Loop.batches


class CausalMask(Loop):
    """A buffer, and a parameter that is not trained, are not finite from the start."""

    def net(self) -> Any:
        model = net()
        mask = torch.full((4, 4), -torch.inf).triu(1)
        model.register_buffer("mask", mask)
        model.register_parameter("frozen", nn.Parameter(mask, requires_grad=False))
        return model


class OneRegion(Loop):
    """Autocast keeps the casts of the weights of its first forward."""

    def train(self) -> None:
        with torch.autocast("cuda", dtype=self.dtype):
            super().train()

    def step(self) -> None:
        with torch.autocast("cuda", enabled=False):
            super().step()


class OneRegionAroundAll(Loop):
    """Its backward runs under autocast, too, which is the same mistake."""

    def train(self) -> None:
        with torch.autocast("cuda", dtype=self.dtype):
            super().train()


class OneRegionInBfloat16(OneRegion):
    dtype = torch.bfloat16


class OneRegionWithoutCache(OneRegion):
    def train(self) -> None:
        with torch.autocast("cuda", dtype=self.dtype, cache_enabled=False):
            Loop.train(self)


class OneRegionThatDropsCasts(OneRegion):
    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        torch.clear_autocast_cache()
        return super().loss(inputs, labels)


class NeverZeroes(Loop):
    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class ForgetsToZeroOnce(NeverZeroes):
    """Once may be meant."""

    steps = 0

    def step(self) -> None:
        super().step()
        self.steps += 1
        if self.steps != 3:
            self.optimizer.zero_grad()


class ZeroesAppliedSteps(Loop):
    def step(self) -> None:
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.get_scale() >= before:
            self.optimizer.zero_grad()


class Accumulates(Loop):
    accumulates = 4


class ZeroesInLastMicroBatch(Accumulates):
    def before_backward(self, number: int) -> None:
        if number % 4 == 3:
            self.optimizer.zero_grad()


class TwoScalers(Loop):
    """A generator's loss leaves gradients in the discriminator, which is zeroed before
    its own.
    """

    zeroes = True

    def train(self) -> None:
        critic = net(1)
        other = sgd(critic)
        second = torch.amp.GradScaler("cuda", init_scale=256.0)
        for inputs, _ in self.batches():
            with torch.autocast("cuda", dtype=self.dtype):
                outputs = torch.cat([self.model(inputs)] * 4, 1)
                loss = functional.softplus(-critic(outputs)).mean()
            torch.autograd.backward(self.scaler.scale(loss))
            self.step()
            if self.zeroes:
                other.zero_grad()
            with torch.autocast("cuda", dtype=self.dtype):
                loss = functional.softplus(critic(outputs.detach())).mean()
            torch.autograd.backward(second.scale(loss))
            second.step(other)
            second.update()
            if not self.zeroes:
                other.zero_grad()


class MixesScales(TwoScalers):
    zeroes = False


class CachesGradients(Loop):
    """A contrastive loss whose gradient is handed on from representations to the
    encoder.
    """

    scales_twice = False

    def train(self) -> None:
        for number in range(24):
            inputs = torch.randn(
                16, 16, generator=torch.Generator().manual_seed(number)
            )
            with torch.no_grad(), torch.autocast("cuda"):
                made = torch.cat([self.model(chunk) for chunk in inputs.chunk(4)])
            made = made.float().requires_grad_()
            loss = functional.cross_entropy(made @ made.roll(1, 0).T, torch.arange(16))
            torch.autograd.backward(self.scaler.scale(loss))
            assert made.grad is not None
            for chunk, gradient in zip(
                inputs.chunk(4), made.grad.chunk(4), strict=True
            ):
                with torch.autocast("cuda"):
                    outputs = self.model(chunk)
                surrogate = (outputs.float() * gradient).sum()
                scaled = (
                    self.scaler.scale(surrogate) if self.scales_twice else surrogate
                )
                torch.autograd.backward(scaled)
            self.step()


class CachesScaledTwice(CachesGradients):
    scales_twice = True


class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = (
            inner,
            inner.param_groups,
            defaultdict(dict),
        )
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Pair:
    """No `Optimizer`: it steps two."""

    def __init__(self, model: nn.Module) -> None:
        self.inner = [sgd(part) for part in model.children() if [*part.parameters()]]

    @property
    def param_groups(self) -> Any:
        return [group for each in self.inner for group in each.param_groups]

    def step(self) -> None:
        for each in self.inner:
            each.step()

    def zero_grad(self) -> None:
        for each in self.inner:
            each.zero_grad()


class Wrapped(Loop):
    def optimizer_of(self, model: nn.Module) -> Any:
        return Lookahead(sgd(model))


class Paired(Loop):
    def optimizer_of(self, model: nn.Module) -> Any:
        return Pair(model)


class Schedules(Loop):
    """Moves a schedule whose class is made in the loop and has a `step` of its own."""

    def __init__(self) -> None:
        super().__init__()

        class Poly(lr_scheduler.LRScheduler):
            def get_lr(self) -> Any:
                return [0.1 * (1 - min(self.last_epoch, 40) / 40)]

            def step(self, epoch: int | None = None) -> None:
                self.last_epoch += 1
                self.optimizer.param_groups[0]["lr"] = self.get_lr()[0]

        self.schedule = Poly(self.optimizer)

    def step(self) -> None:
        super().step()
        self.schedule.step()


class SchedulesByHook(Schedules):
    """As the advice of the finding says."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer.register_step_post_hook(lambda *_: self.schedule.step())

    step = Loop.step


class LossIsNewTensor(Loop):
    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.tensor(float(super().loss(inputs, labels)), requires_grad=True)

    step = NeverZeroes.step


class ConstantLossInOneBatch(Loop):
    step = NeverZeroes.step

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        made = getattr(self, "made", 0)
        self.made = made + 1
        zero = torch.zeros((), requires_grad=True)
        return zero if made == 3 else super().loss(inputs, labels)


class LossOfNewTensors(LossIsNewTensor):
    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = [Loop.loss(self, *half).item() for half in ((inputs, labels),) * 2]
        return torch.tensor(losses, requires_grad=True).mean()


class ZeroesBeforeStep(Loop):
    keeps_zeros = False

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.keeps_zeros)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class ZeroesBeforeStepInPlace(ZeroesBeforeStep):
    keeps_zeros = True


class ZeroesBeforeStepInBfloat16(ZeroesBeforeStep):
    dtype = torch.bfloat16


class UpdatesSmallStepsAlone(Loop):
    """The update is left out with the step."""

    def step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        if nn.utils.clip_grad_norm_(self.model.parameters(), 1.0) < 0.1:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()


class UpdatesEveryTenthStep(Loop):
    """Each step has gradients of its own."""

    steps = 0

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        if self.steps % 10 == 0:
            self.scaler.update()
        self.steps += 1
        self.optimizer.zero_grad()


class SetsGradientsAndNeverUpdates(Loop):
    """No backward leaves them."""

    def train(self) -> None:
        weights = [*self.model.parameters()]
        for inputs, labels in self.batches():
            with torch.autocast("cuda", dtype=self.dtype):
                loss = self.loss(inputs, labels)
            gradients = torch.autograd.grad(self.scaler.scale(loss), weights)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
            self.scaler.step(self.optimizer)


class StepsTwiceInThirdBatch(Loop):
    steps = 0

    def step(self) -> None:
        self.steps += 1
        for _ in range(2 if self.steps == 3 else 1):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class MakesScalersAnew(SumsMillions):
    def before_backward(self, number: int) -> None:
        self.scaler = torch.amp.GradScaler("cuda")


class OnlyValidates(Loop):
    def train(self) -> None:
        with torch.no_grad(), torch.autocast("cuda"):
            for inputs, labels in self.batches():
                self.loss(inputs, labels)


class NeverSteps(Loop):
    def step(self) -> None:
        self.optimizer.zero_grad()


class UnscalesByHand(Loop):
    def step(self) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(self.scaler.get_scale())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class HalfWithoutAutocast(Loop):
    def net(self) -> Any:
        return net().half()

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            return functional.cross_entropy(self.model(inputs.half()).float(), labels)


class HalfAlone(HalfWithoutAutocast):
    def train(self) -> None:
        for inputs, labels in self.batches():
            loss = functional.cross_entropy(self.model(inputs.half()).float(), labels)
            torch.autograd.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()


class Checkpoints(Loop):
    """A backward computes the forward of its middle again, in the dtypes of the first
    time.
    """

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first, middle, last = self.model
        inner = nn.Sequential(middle, nn.LayerNorm(32, elementwise_affine=False))
        hidden = checkpoint(inner, first(inputs), use_reentrant=False)
        return functional.cross_entropy(last(hidden), labels)


class OptimizesCopy(Loop):
    step = NeverZeroes.step

    def optimizer_of(self, model: nn.Module) -> Any:
        return sgd(copy.deepcopy(model))


class OptimizesCopyInBfloat16(OptimizesCopy):
    """Nothing raises without a scaler."""

    dtype = torch.bfloat16


class SparseGradients(Loop):
    """All that its optimizer has are sparse."""

    def net(self) -> Any:
        torch.manual_seed(0)
        return nn.EmbeddingBag(16, 4, sparse=True)

    def optimizer_of(self, model: nn.Module) -> Any:
        return torch.optim.SparseAdam(model.parameters(), lr=0.1)

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().loss(inputs.topk(3).indices, labels)

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class ZeroesInPlace(NeverZeroes):
    def before_backward(self, number: int) -> None:
        self.optimizer.zero_grad(set_to_none=False)


class HoldsHeadForLater(Loop):
    """The head has not run yet, and no layer of the model was left out."""

    def optimizer_of(self, model: nn.Module) -> Any:
        self.later = net()
        return sgd(nn.Sequential(model, self.later))


class SkipsLast(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs
        for layer in [*self][:-1]:
            outputs = layer(outputs)
        return outputs


class TrainsPartOfModel(Loop):
    """No layer was replaced: the optimizer lacks the first, and its last does not
    run.
    """

    def net(self) -> Any:
        return SkipsLast(*net(), nn.Linear(4, 4))

    def optimizer_of(self, model: Any) -> Any:
        return torch.optim.SGD([*model[2].parameters(), *model[3].parameters()], lr=0.1)

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.model.zero_grad()


class LearnsTemperature(TrainsPartOfModel):
    """It is of no module, and has a gradient."""

    def optimizer_of(self, model: Any) -> Any:
        self.temperature = nn.Parameter(torch.ones(()))
        return torch.optim.SGD([*model[2].parameters(), self.temperature], lr=0.1)

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(inputs) * self.temperature, labels)

    def step(self) -> None:
        super().step()
        self.optimizer.zero_grad()


class KeepsEarlierOptimizer(LearnsTemperature):
    """That of a training which is over."""

    def optimizer_of(self, model: nn.Module) -> Any:
        self.earlier = sgd(net())
        return super().optimizer_of(model)


class StepsCopies(Loop):
    """Gradients are copied to weights of no module, as where those of the model have 16
    bits.
    """

    def optimizer_of(self, model: nn.Module) -> Any:
        self.copies = [
            nn.Parameter(weight.detach().clone()) for weight in model.parameters()
        ]
        return torch.optim.SGD(self.copies, lr=0.1)

    def step(self) -> None:
        pairs = [*zip(self.copies, self.model.parameters(), strict=True)]
        for copied, weight in pairs:
            copied.grad, weight.grad = weight.grad, None
        self.scaler.step(self.optimizer)
        self.scaler.update()
        for copied, weight in pairs:
            weight.data.copy_(copied.data)


class Averages(Loop):
    """An average moves in each batch, on skipped steps, too."""

    def step(self) -> None:
        super().step()
        average = getattr(self, "average", None) or copy.deepcopy(self.model)
        with torch.no_grad():
            for old, new in zip(
                average.parameters(), self.model.parameters(), strict=True
            ):
                old.lerp_(new, 0.1)
        self.average = average


FAULTY: dict[type[Loop], str] = {
    OverflowsInForward: "no_steps",
    OutlierInStatistics: "not_finite",
    OneRegion: "stale_casts",
    OneRegionAroundAll: "stale_casts",
    OneRegionInBfloat16: "stale_casts",
    NeverZeroes: "not_zeroed",
    ZeroesAppliedSteps: "not_zeroed",
    ZeroesInLastMicroBatch: "zero_grad_in_window",
    MixesScales: "scales_mixed",
    CachesScaledTwice: "depends_on_scale",
    Schedules: "schedule_on_skipped",
    LossIsNewTensor: "loss_cut_off",
    ConstantLossInOneBatch: "constant_loss",
    LossOfNewTensors: "loss_cut_off",
    OptimizesCopy: "other_parameters",
    OptimizesCopyInBfloat16: "other_parameters",
    ZeroesBeforeStep: "zero_grad_in_window",
    ZeroesBeforeStepInPlace: "zero_grad_in_window",
    ZeroesBeforeStepInBfloat16: "zero_grad_in_window",
    UpdatesSmallStepsAlone: "update_missing",
    UpdatesEveryTenthStep: "update_missing",
    SetsGradientsAndNeverUpdates: "update_missing",
    StepsTwiceInThirdBatch: "step_twice",
    NeverSteps: "step_missing",
    MakesScalersAnew: "scaler_made_anew",
    UnscalesByHand: "unscaled_twice",
    HalfWithoutAutocast: "half_weights",
}
RIGHT = [
    *(Loop, SumsMillions, Statistics, CausalMask, Accumulates, TwoScalers),
    *(CachesGradients, Wrapped, Paired, SchedulesByHook, Averages, Checkpoints),
    *(
        ForgetsToZeroOnce,
        SparseGradients,
        ZeroesInPlace,
        HoldsHeadForLater,
        TrainsPartOfModel,
    ),
    *(LearnsTemperature, KeepsEarlierOptimizer, StepsCopies),
]


@cache
def watched(loop: type[Loop]) -> CheckFindings:
    kept: list[CheckFindings] = []
    try:
        with watching() as findings:
            kept.append(findings)
            loop().train()
    except (AssertionError, RuntimeError, ValueError):  # of GradScaler
        pass
    return kept[0]


@pytest.mark.parametrize("loop", FAULTY)
def test_fault_of_a_loop_is_the_only_one_that_is_found(loop: Any) -> None:
    (fault,) = watched(loop).faults
    assert fault.key == FAULTY[loop]
    assert fault.write
    assert fault.effect


@pytest.mark.parametrize("loop", RIGHT)
def test_right_loop_has_no_finding(loop: Any) -> None:
    findings = watched(loop)
    assert [each.text() for each in findings] == []


def test_float16_weights_without_amp_are_suspected() -> None:
    found = [(each.key, each.level) for each in watched(HalfAlone)]
    assert found == [("half_weights", Level.SUSPICION)]


def test_loop_that_only_validates_is_not_called_right() -> None:
    said = "nothing was trained, nothing was examined"
    assert str(watched(OnlyValidates)).startswith(said)
    assert not watched(OnlyValidates).are_right
    assert watched(Loop).are_right


@pytest.mark.parametrize("loop", [OneRegionWithoutCache, OneRegionThatDropsCasts])
def test_casts_that_a_loop_does_not_keep_are_not_called_stale(loop: Any) -> None:
    assert "stale_casts" not in {finding.key for finding in watched(loop)}


@pytest.mark.parametrize("loop", [Loop, Wrapped, Paired, TwoScalers])
def test_two_steps_of_each_optimizer_are_made_to_overflow(loop: Any) -> None:
    optimizers = 2 if loop in (Paired, TwoScalers) else 1
    assert f", {2 * optimizers} skipped" in watched(loop).seen


@pytest.mark.parametrize("loop", [Loop, ZeroesInPlace])
def test_note_numbers_the_steps_that_were_made_to_overflow(loop: Any) -> None:
    note = "the doctor made an overflow in these steps of an optimizer: 6, 9"
    assert note in watched(loop).notes


def test_overflow_in_a_forward_is_told_with_its_module_and_what_helps() -> None:
    (fault,) = watched(OverflowsInForward).faults
    assert "first: a cast in 0 (Linear), beyond float16" in fault.effect
    assert "tried: the loss is finite in float32 and in bfloat16" in fault.effect
    assert not fault.orders  # a cast by hand stays in float16
    assert "dtype=torch.bfloat16" in fault.write


def test_error_keeps_its_traceback_and_findings_are_printed_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train() -> None:
        with watching():
            net()(torch.zeros(3, 3))

    with pytest.raises(RuntimeError) as raised:
        train()
    files = {frame.filename for frame in traceback.extract_tb(raised.tb)}
    assert not any("determined_amp/check" in file for file in files)
    assert capsys.readouterr().err.startswith(
        "nothing was trained, nothing was examined, 1 suspicion"
    )


class Counts:
    """A schedule of the trial's own, which no checkpoint has."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.steps)


class OwnScheduleIsLost(Right):
    def schedule(self) -> None:
        self.rates = Counts(self.optimizer)
        self.optimizer.register_step_post_hook(lambda *_: self.rates.step())


class OwnScheduleIsSaved(OwnScheduleIsLost):
    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        rates = self.rates

        class Keep(pytorch.PyTorchCallback):
            def state_dict(self) -> StateDict:
                return {"steps": rates.steps}

            def load_state_dict(self, state_dict: StateDict) -> None:
                rates.steps = state_dict["steps"]

        return {"rates": Keep()}


def test_schedule_of_the_trials_own_is_a_fault_if_a_resume_has_other_rates() -> None:
    (fault,) = examined(OwnScheduleIsLost).faults
    assert fault.key == "schedule_not_saved"
    assert not examined(OwnScheduleIsSaved).faults


class DeterminedRefuses(Right):
    def step(self) -> None:
        raise InvalidExperimentException("Determined says no")  # HERE


def test_error_of_determined_is_a_fault_with_its_line() -> None:
    (fault,) = examined(DeterminedRefuses).faults
    assert fault.key == "raised"
    assert "Determined says no" in fault.effect
    assert fault.where[0].file.endswith("test_check_invariants.py")


class TestScaleMoves:
    def windows(self, scaler: Any, count: int) -> list[float]:
        """The scale in each window; what the training sees around `update` never
        decreases.
        """
        moves = ScaleMoves(lambda: False)
        used = []
        for _ in range(count):
            moves.begin([scaler])
            scaler.scale(torch.ones(()))
            used.append(scaler.get_scale())
            gradient = torch.nn.Parameter(torch.ones(1))
            gradient.grad = torch.ones(1)
            optimizer = torch.optim.SGD([gradient], lr=0.1)
            scaler.step(optimizer)
            before = scaler.get_scale()
            moves.update(scaler, scaler.update, sets=False)
            assert scaler.get_scale() >= before
            assert not moves.is_moved
        return used

    def test_half_of_the_windows_have_another_scale_and_none_is_left_moved(
        self,
    ) -> None:
        scaler = torch.amp.GradScaler("cpu")
        used = self.windows(scaler, 16)
        assert sorted(used) == [256.0] * 8 + [65536.0] * 8
        assert scaler.get_scale() == 65536.0

    def test_growth_of_the_scale_in_a_moved_window_stays(self) -> None:
        scaler = torch.amp.GradScaler("cpu", growth_interval=8)
        self.windows(scaler, 16)
        assert scaler.get_scale() == 4 * 65536.0

    def test_small_scale_is_not_moved(self) -> None:
        assert set(self.windows(torch.amp.GradScaler("cpu", init_scale=32.0), 8)) == {
            32.0
        }


SCRIPT = """
import argparse
import shutil
import sys

import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from helper import data, net


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="")
    fault = parser.parse_args().fault
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    loader = torch.utils.data.DataLoader(data(), batch_size=8, num_workers=1)
    try:
        for number, (inputs, labels) in enumerate(loader):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = functional.cross_entropy(model(inputs), labels)
            scaler.scale(loss).backward()
            if fault != "clip":
                scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)  # CLIP
            scaler.step(optimizer)
            scaler.update()
            if number == 3:
                torch.save(model.state_dict(), "checkpoint.pt")
                shutil.copyfile("checkpoint.pt", "best.pt")
                model.load_state_dict(torch.load("best.pt"))
            if number == 7 and fault == "error":
                raise ValueError("the script's own")
    except KeyboardInterrupt:
        torch.save(model.state_dict(), "checkpoint.pt")
        sys.exit(1)


if __name__ == "__main__":
    main()
"""
HELPER = """
import torch
from torch import nn


def net():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def data():
    points = torch.randn(4000, 16)
    return torch.utils.data.TensorDataset(points, points[:, :4].argmax(1))
"""


def write_script(folder: Path) -> None:
    """`train.py`, which trains rightly, or wrongly with `--fault clip`."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "helper.py").write_text(HELPER)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a script is that the user starts."""
    write_script(tmp_path)
    (tmp_path / "checkpoint.pt").write_text("the user's")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    return tmp_path


Shown = pytest.CaptureFixture[str]


# It has no loader, which would give batches to count.
SAVES = """
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--saved", type=int, default=400)
parser.add_argument("--fp32", action="store_true")
parser.add_argument("--json", action="store_true")
given = parser.parse_args()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cuda", enabled=not given.fp32)
for number in range(1000):
    optimizer.zero_grad()
    with torch.autocast("cuda", enabled=not given.fp32):
        loss = model(torch.randn(4, 8)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if number == given.saved:
        torch.save(optimizer.state_dict(), "checkpoint.pt")
"""


class TestScript:
    """Without Determined it is in `test_torch_alone.py`."""

    @pytest.mark.usefixtures("folder")
    def test_fault_of_a_script_is_found_with_its_line(self, capsys: Shown) -> None:
        assert main(["check", "--json", "train.py", "--fault", "clip"]) == 1
        findings = json.loads(capsys.readouterr().out)["findings"]
        (fault,) = (finding for finding in findings if finding["level"] == "fault")
        assert fault["key"] == "clip_scaled"
        (line,) = [
            n for n, text in enumerate(SCRIPT.splitlines(), 1) if "# CLIP" in text
        ]
        assert fault["where"] == [{"file": "train.py", "line": line}]

    @pytest.mark.parametrize(
        ("saved", "steps"),
        [(0, 20), (60, 61), (400, 100)],
        ids=["at once", "later", "never"],
    )
    def test_script_goes_on_to_its_first_checkpoint_for_a_hundred_steps(
        self, folder: Path, capsys: Shown, saved: int, steps: int
    ) -> None:
        (folder / "train.py").write_text(SAVES)
        main(["check", "train.py", "--saved", str(saved)])
        shown = capsys.readouterr().out
        assert f": {steps} backwards, " in shown
        assert ("the scale is not in the checkpoint" in shown) is (saved < 400)
        assert (NOT_SAVED in shown) is (saved == 400)

    def test_script_without_amp_is_told_so_first(
        self, folder: Path, capsys: Shown
    ) -> None:
        (folder / "train.py").write_text(SAVES)
        assert main(["check", "train.py", "--fp32", "--json"]) == 0
        shown = capsys.readouterr()
        assert shown.out.startswith("no AMP was used: 100 backwards, 100 steps, ")
        assert shown.err.startswith(
            "train.py gets --json: options of check stand before"
        )
        assert main(["check", "--json", "train.py", "--fp32"]) == 0
        shown = capsys.readouterr()
        assert json.loads(shown.out)["amp"] is False
        assert "train.py gets" not in shown.err

    def test_right_script_is_stopped_early_and_replaces_no_file(
        self, folder: Path, capsys: Shown
    ) -> None:
        assert main(["check", "train.py"]) == 0
        assert capsys.readouterr().out.startswith("0 faults: ")
        assert (folder / "checkpoint.pt").read_text() == "the user's"
        assert not (folder / "best.pt").exists()

    def test_error_of_a_script_has_its_own_traceback_after_the_findings(
        self, folder: Path, capsys: Shown
    ) -> None:
        assert main(["check", "--in-place", "train.py", "--fault", "error"]) == 1
        shown = capsys.readouterr()
        assert shown.out.startswith("0 faults, 1 suspicion: 8 batches")
        trace = shown.err.partition("Traceback")[2]
        assert trace.rstrip().endswith("ValueError: the script's own")
        assert "determined_amp" not in trace
        assert (folder / "checkpoint.pt").read_bytes()[:2] == b"PK"

    @pytest.mark.parametrize(
        ("script", "status", "end"),
        [
            ("import time\nimport torch\ntime.sleep(10_000)", 1, "\n"),
            ("raise KeyboardInterrupt", 130, "\ninterrupted\n"),
        ],
        ids=["waits for hours", "is interrupted"],
    )
    def test_script_that_is_stopped_shows_no_traceback(
        self, folder: Path, capsys: Shown, script: str, status: int, end: str
    ) -> None:
        (folder / "train.py").write_text(script)
        assert main(["check", "--minutes", "0.02", "train.py"]) == status
        shown = capsys.readouterr()
        assert shown.out.startswith("nothing was trained, nothing was examined")
        assert (f"\nnote: {TOO_SHORT}\n" in shown.out) is (status == 1)
        assert shown.err.endswith(end)
        assert "Traceback" not in shown.err
