"""`check`: each fault of hand-written AMP is planted in a trial, and found with its
line.
"""

from __future__ import annotations

import copy
import inspect
import json
import signal
import sys
import warnings
from contextlib import closing, suppress
from functools import cache, partial
from graphlib import TopologicalSorter
from typing import Any

import pytest
import torch
import yaml
from determined import pytorch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_ as clip_norm
from torch.optim import lr_scheduler
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils.data import DataLoader, TensorDataset

from determined_amp import AmpLoop, AmpSettings, Precision
from determined_amp import __main__ as door
from determined_amp.amp.errors import UserError
from determined_amp.check import doctor, invariants, rules, watching
from determined_amp.check.finding import ROWS, Level
from determined_amp.check.judge import judge_record
from determined_amp.check.stand_in import ONLY_ON_A_GPU
from determined_amp.check.two_scales import WaitingRuns
from determined_amp.experiment.experiment import experiment_in
from tests import habits, test_amp_examples
from tests.harness import same_bits
from tests.loops import by_hand
from tests.wrong_scripts import WRONG

pytestmark = pytest.mark.usefixtures("_libraries_are_collected_once")

BATCH = pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH
step_lr: Any = lr_scheduler.StepLR
MANUAL = pytorch.LRScheduler.StepMode.MANUAL_STEP


def experiment(**changes):
    return {
        "name": "planted",
        "hyperparameters": {"global_batch_size": 4},
        "searcher": {
            **{
                "name": "single",
                "metric": "validation_loss",
                "smaller_is_better": True,
            },
            "max_length": {"batches": 24},
        },
        **changes,
    }


@cache
def examined(trial, aggregation=1):
    """What the doctor says of a trial, with all of its runs in this process."""
    optimizations = {"aggregation_frequency": aggregation}
    config = (
        experiment(optimizations=optimizations) if aggregation > 1 else experiment()
    )
    name = f"{trial.__module__}:{trial.__qualname__}"
    made = experiment_in(config, "planted.yaml", trial=name)
    return doctor.examine(made, lambda text: None, doctor.run_here)


class Right(pytorch.PyTorchTrial):
    """AMP by hand as it should be; every other trial here differs from it in one
    thing.
    """

    init_scale = 65536.0

    def __init__(self, context):
        self.context = context
        self.wrap_scaler()
        self.model = context.wrap_model(self.net())
        self.optimizer = context.wrap_optimizer(self.optimizer_of(self.model))
        self.schedule()

    def wrap_scaler(self):
        self.scaler = self.context.wrap_scaler(
            torch.cuda.amp.GradScaler(self.init_scale)
        )

    def net(self):
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def optimizer_of(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

    def schedule(self):
        """None."""

    def autocast(self):
        return torch.autocast("cuda", dtype=torch.float16)

    def forward(self, batch):
        inputs, labels = batch
        return functional.cross_entropy(self.model(inputs), labels)

    def train_batch(self, batch, epoch_idx, batch_idx):
        self.batch_idx = batch_idx
        with self.autocast():
            loss = self.forward(batch)
        self.backward(loss)
        self.step()
        self.update()
        return {"loss": loss.detach()}

    def backward(self, loss):
        self.context.backward(self.scaler.scale(loss))

    def clip(self, parameters):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)

    def step(self):
        self.context.step_optimizer(
            self.optimizer, clip_grads=self.clip, scaler=self.scaler
        )

    def ends_window(self):
        return (self.batch_idx + 1) % self.context._aggregation_frequency == 0

    def update(self):
        if self.ends_window():
            self.scaler.update()

    def evaluate_batch(self, batch, batch_idx):
        with self.autocast():
            return {"validation_loss": self.forward(batch)}

    def build_training_data_loader(self):
        points = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
        return pytorch.DataLoader(
            TensorDataset(points, points[:, :3].argmax(1)), batch_size=4
        )

    build_validation_data_loader = build_training_data_loader


# Backward, step, update.


class UnscaledLoss(Right):
    def backward(self, loss):
        self.context.backward(loss)  # HERE
        self.scaler.scale(loss)


class StepsWithoutScaler(Right):
    def step(self):
        self.context.step_optimizer(self.optimizer)  # HERE

    def update(self):
        """There is nothing to update by."""


class UpdatesEachMicroBatch(Right):
    def update(self):
        self.scaler.update()  # HERE


# Clipping.


class ClipsScaled(Right):
    def clip(self, parameters):
        nn.utils.clip_grad_norm_(parameters, 1.0)  # HERE


# Schedules.


class Scheduled(Right):
    """Moves on applied steps only: the control of those below."""

    def schedule(self):
        self.scheduler = step_lr(self.optimizer, 4)
        self.context.wrap_lr_scheduler(self.scheduler, MANUAL)

    def update(self):
        before = self.scaler.get_scale()
        self.scaler.update()
        if self.scaler.get_scale() >= before:
            self.scheduler.step()


class MovesOnSkipped(Scheduled):
    def update(self):
        self.scaler.update()
        self.scheduler.step()  # HERE


class DeterminedMovesOnSkipped(Right):
    def schedule(self):
        self.scheduler = step_lr(self.optimizer, 4)  # HERE
        self.context.wrap_lr_scheduler(self.scheduler, BATCH)


class ScheduleNotWrapped(Scheduled):
    def schedule(self):
        self.scheduler = step_lr(self.optimizer, 4)  # HERE


class PlateauNotWrapped(Scheduled):
    """A scheduler that does not make itself as most of torch's do."""

    def schedule(self):
        plateau: Any = lr_scheduler.ReduceLROnPlateau
        self.scheduler = plateau(self.optimizer)  # HERE

    def update(self):
        before = self.scaler.get_scale()
        self.scaler.update()
        if self.scaler.get_scale() >= before:
            self.scheduler.step(1.0)


class Sequence(Scheduled):
    """One scheduler that moves two others."""

    def schedule(self):
        parts = [step_lr(self.optimizer, 2), step_lr(self.optimizer, 3)]
        sequence: Any = lr_scheduler.SequentialLR
        self.scheduler = sequence(self.optimizer, parts, [4])
        self.context.wrap_lr_scheduler(self.scheduler, MANUAL)


class DeterminedMovesSequenceOnSkipped(Right):
    def schedule(self):
        parts = [step_lr(self.optimizer, 2), step_lr(self.optimizer, 3)]
        sequence: Any = lr_scheduler.SequentialLR
        self.scheduler = sequence(self.optimizer, parts, [4])  # HERE
        self.context.wrap_lr_scheduler(self.scheduler, BATCH)


class ScalerNotWrapped(Right):
    def wrap_scaler(self):
        self.scaler = torch.cuda.amp.GradScaler()  # HERE


class MakesScalerInFirstBatch(Right):
    scaler: Any = None

    def wrap_scaler(self):
        """Later."""

    def train_batch(self, batch, epoch_idx, batch_idx):
        if self.scaler is None:
            self.scaler = torch.cuda.amp.GradScaler()  # HERE
        return super().train_batch(batch, epoch_idx, batch_idx)


# Windows of several batches.


class CannotLoad(Right):
    def build_callbacks(self):
        class Counts(pytorch.PyTorchCallback):
            def state_dict(self):
                return {"count": 1}

            def load_state_dict(self, state_dict):
                raise KeyError("count_1")  # HERE

        return {"counts": Counts()}


class ZeroesInTheWindow(Right):
    def backward(self, loss):
        self.optimizer.zero_grad()  # HERE
        super().backward(loss)


class OwnWindow(Right):
    """Three batches a step, divided: the control of the next one."""

    def ends_window(self):
        return self.batch_idx % 3 == 2

    def backward(self, loss):
        super().backward(loss / 3)

    def step(self):
        if self.ends_window():
            super().step()


class UnscalesInTheWindow(Right):
    def backward(self, loss):
        super().backward(loss)
        if not self.ends_window():
            self.scaler.unscale_(self.optimizer)  # HERE

    def step(self):
        self.context.step_optimizer(self.optimizer, scaler=self.scaler)


# What is computed in what.


class CoversNothing(Right):
    def forward(self, batch):
        inputs, labels = batch
        with torch.autocast("cuda", enabled=False):
            return functional.cross_entropy(self.model(inputs), labels)


class EvaluatesInFloat16(Right):
    """Its validation loss is beyond float16."""

    def evaluate_batch(self, batch, batch_idx):
        with self.autocast():  # HERE
            return {"validation_loss": (self.model(batch[0]) * 1e5).square().mean()}


class EvaluatesInFloat16WithTeacher(EvaluatesInFloat16):
    """Trains with another product without gradients, in autocast."""

    def forward(self, batch):
        with torch.no_grad(), self.autocast():
            batch[0].square() @ batch[0].T
        return super().forward(batch)


class MasksWithTheLeast(Right):
    def forward(self, batch):
        inputs, labels = batch
        logits = self.model(inputs)
        least = torch.finfo(logits.dtype).min
        padded = torch.zeros(len(inputs), 3, dtype=logits.dtype)
        padded[inputs[:, 0] > -9] = logits.masked_fill(inputs[:, :3] < -2, least)
        return functional.cross_entropy(padded, labels)


class RandomSlopes(Right):
    def forward(self, batch):
        logits = self.model(batch[0])
        return functional.rrelu(logits, training=True).sum()  # HERE


# What hides and switches.


class HidesNanAfterUnscale(Right):
    """`unscale_` has found what is not finite before."""

    def clip(self, parameters):
        self.scaler.unscale_(self.optimizer)
        for parameter in parameters:
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)


PLANTED = {
    UnscaledLoss: "unscaled_loss",
    StepsWithoutScaler: "step_without_scaler",
    UpdatesEachMicroBatch: "update_in_window",
    ClipsScaled: "clip_scaled",
    MovesOnSkipped: "schedule_on_skipped",
    DeterminedMovesOnSkipped: "schedule_on_skipped",
    ScheduleNotWrapped: "schedule_not_saved",
    PlateauNotWrapped: "schedule_not_saved",
    DeterminedMovesSequenceOnSkipped: "schedule_on_skipped",
    ScalerNotWrapped: "scaler_not_saved",
    MakesScalerInFirstBatch: "scaler_not_saved",
    ZeroesInTheWindow: "zero_grad_in_window",
    EvaluatesInFloat16: "eval_16_bits",
    EvaluatesInFloat16WithTeacher: "eval_16_bits",
    UnscalesInTheWindow: "unscale_in_window",
}
# These are suspicions: the same form may be right.
SUSPECTED = {
    CannotLoad: "resume_fails",
    RandomSlopes: "no_16_bit_kernel",
    CoversNothing: "autocast_covers_nothing",
}
WINDOWS = {
    UpdatesEachMicroBatch: 2,
    UnscalesInTheWindow: 2,
    ZeroesInTheWindow: 4,
}
CONTROLS = [
    Right,
    Scheduled,
    Sequence,
    OwnWindow,
    MasksWithTheLeast,
]


def planted_line(trial):
    """The line that ends in HERE, of the trial or of the class that it inherits it
    from.
    """
    for each in getattr(trial, "__mro__", [trial])[:2]:
        lines, first = inspect.getsourcelines(each)
        for number, line in enumerate(lines, first):
            if line.endswith("# HERE\n"):
                return number
    return None


@pytest.mark.parametrize("trial", [*PLANTED, *SUSPECTED])
def test_planted_fault_is_found_with_its_line(trial):
    """Lines that do the same rightly are not named."""
    level = Level.FAULT if trial in PLANTED else Level.SUSPICION
    key = {**PLANTED, **SUSPECTED}[trial]
    findings = examined(trial, WINDOWS.get(trial, 1))
    found = {finding.key: finding for finding in findings if finding.level is level}
    assert set(found) == {key}
    assert level is Level.FAULT or not findings.faults
    finding = found[key]
    line = planted_line(trial)
    places = {(where.file.rpartition("/")[2], where.line) for where in finding.where}
    assert line is None or ("test_check.py", line) in places
    assert line is None or len(places) == 1
    assert any(digit.isdecimal() for digit in finding.effect)
    assert finding.write


def test_right_trial_that_steps_every_second_batch_has_no_finding():
    findings = examined(Right, 2)
    assert [finding.text() for finding in findings] == []


class Automatic(Right):
    """Determined's own AMP, which does all of it."""

    def wrap_scaler(self):
        self.context.experimental.use_amp()

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.forward(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=self.clip)
        return {"loss": loss}

    def clip(self, parameters):
        nn.utils.clip_grad_norm_(parameters, 1.0)

    def evaluate_batch(self, batch, batch_idx):
        return {"validation_loss": self.forward(batch)}


class SavedByCallback(ScalerNotWrapped):
    def build_callbacks(self):
        scaler = self.scaler

        class Keep(pytorch.PyTorchCallback):
            def state_dict(self):
                return dict(scaler.state_dict())

            def load_state_dict(self, state):
                scaler.load_state_dict(state)

        return {"scaler": Keep()}


class EnabledOnCuda(Right):
    """Switched on where there is a GPU."""

    def wrap_scaler(self):
        scaler = torch.cuda.amp.GradScaler(enabled=torch.cuda.is_available())
        self.scaler = self.context.wrap_scaler(scaler)

    def autocast(self):
        return torch.cuda.amp.autocast(enabled=torch.cuda.is_available())


class EnabledByDevice(Right):
    """As most scripts do."""

    def __init__(self, context):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(context)

    def wrap_scaler(self):
        scaler = torch.amp.GradScaler("cuda", enabled=self.device.type == "cuda")
        self.scaler = self.context.wrap_scaler(scaler)

    def autocast(self):
        return torch.autocast(self.device.type, enabled=self.device.type == "cuda")

    def forward(self, batch):
        return super().forward(batch) * torch.ones((), device=self.device)


class ExitsOnOverflow(Right):
    def clip(self, parameters):
        self.scaler.unscale_(self.optimizer)
        if not nn.utils.clip_grad_norm_(parameters, max_norm=1.0).isfinite():
            sys.exit("the gradients are not finite")


class LimitTimesScale(Right):
    def clip(self, parameters):
        nn.utils.clip_grad_norm_(parameters, 1.0 * self.scaler.get_scale())


class UnscalesByHand(Right):
    def step(self):
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(self.scaler.get_scale())
        if nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).isfinite():
            self.context.step_optimizer(self.optimizer)
        else:
            self.optimizer.zero_grad()

    def update(self):
        """The scale stays."""


class LossInFloat32OnCuda(Right):
    """On a GPU autocast computes the square and the logarithm in float32, on a CPU it
    does not.
    """

    def forward(self, batch):
        inputs, labels = batch
        logits = self.model(inputs)
        likelihood = logits.log_softmax(1).gather(1, labels[:, None])
        return (functional.softplus(logits) ** 2).mean() - likelihood.mean()


UNUSUAL = [
    *(
        Automatic,
        SavedByCallback,
        EnabledOnCuda,
        EnabledByDevice,
        ExitsOnOverflow,
    ),
    *(HidesNanAfterUnscale, LimitTimesScale, UnscalesByHand),
    LossInFloat32OnCuda,
]
WITHOUT_AMP = [
    *(habits.Habit, habits.ClipsOutside, habits.OwnAccumulation, habits.Sam),
    *(habits.Wgan, habits.LineSearch, habits.Penalty, habits.HalfWeights),
    *(habits.Adversarial, habits.SharedParameters, habits.AlternatingHeads),
]


@pytest.mark.parametrize("trial", [*CONTROLS, *UNUSUAL, *WITHOUT_AMP])
def test_right_trial_has_no_finding(trial):
    findings = examined(trial)
    assert [finding.text() for finding in findings] == []


class ClipsTrueGradients(habits.Habit):
    """Gets true gradients to clip in float16, too, although its loss is scaled."""

    def step(self):
        clip: Any = partial(clip_norm, max_norm=1e-3)
        self.context.step_optimizer(self.optimizer, clip_grads=clip)


@pytest.mark.parametrize("trial", [habits.Habit, ClipsTrueGradients])
def test_unmodified_trial_in_float16_has_no_fault(trial):
    values = {"global_batch_size": 8, "amp": {"precision": "amp_fp16"}}
    name = f"{trial.__module__}:{trial.__qualname__}"
    config = experiment(hyperparameters=values)
    made = experiment_in(config, "x.yaml", trial=name)
    said = doctor.examine(made, lambda text: None, doctor.run_here)
    assert said.faults == []
    assert "a GradScaler" in str(said)


class Trainer:
    """A loop in the form of well-known trainers: two micro-batches, a schedule, a
    checkpoint.
    """

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1 / (1 + step)
        )
        self.scaler = torch.amp.GradScaler("cuda")

    batches = 32

    def train(self, file):
        points = torch.randn(4 * self.batches, 6)
        data = TensorDataset(points, points[:, :3].argmax(1))
        for batch, (inputs, labels) in enumerate(DataLoader(data, batch_size=4)):
            loss = functional.cross_entropy(self.forward(inputs), labels)
            self.backward(loss / 2)
            if batch % 2:
                self.step()
        torch.save(self.state(), file)

    def forward(self, inputs):
        with torch.autocast("cuda", dtype=torch.float16):
            return self.model(inputs).float()

    def backward(self, loss):
        torch.autograd.backward(self.scaler.scale(loss))

    def step(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.get_scale() >= before:
            self.scheduler.step()
        self.model.zero_grad()

    def state(self):
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }


class SavesAnotherScale(Trainer):
    def state(self):
        self.scaler.state_dict()
        state = self.optimizer.state_dict()
        return {"optimizer": state, "args": {"image_scale": 1.5}}


class SavesScaleAlone(Trainer):
    def state(self):
        scale = torch.tensor(self.scaler.get_scale())
        return {"optimizer": self.optimizer.state_dict(), "scale": scale}


class SavesModelAlone(Trainer):
    def state(self):
        self.optimizer.state_dict()
        return self.model.state_dict()


class CallsByKeyword(Trainer):
    """What the doctor watches is called by the names of torch's arguments."""

    def step(self):
        for parameter in self.model.parameters():
            torch.nan_to_num(input=parameter)
        super().step()

    def train(self, file):
        super().train(file)
        torch.save(obj=self.state(), f=file)


class ClipsInTrainer(Trainer):
    """By a name of its own module."""

    def step(self):
        clip_norm(parameters=self.model.parameters(), max_norm=1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class ClippingSgd(torch.optim.SGD):
    """Clips each parameter in its own step, as the optimizers of detection libraries
    do.
    """

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                clip_norm(parameter, max_norm=1.0)
        return super().step(closure)


class MovesWithClippingOptimizer(Trainer):
    def __init__(self):
        super().__init__()
        self.optimizer: Any = ClippingSgd(self.model.parameters(), lr=0.1)
        self.scheduler = lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1 / (1 + step)
        )

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()


class Wrapper(torch.optim.Optimizer):
    """Zeroes nothing inside a window, as the optimizers of well-known libraries do."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.ends_window = False

    def zero_grad(self, set_to_none=True):
        if self.ends_window:
            self.optimizer.zero_grad(set_to_none)


class WrapsOptimizer(Trainer):
    def __init__(self):
        super().__init__()
        self.wrapper = Wrapper(self.optimizer)

    def backward(self, loss):
        super().backward(loss)
        self.wrapper.zero_grad()

    def step(self):
        self.wrapper.ends_window = True
        super().step()
        self.wrapper.zero_grad()
        self.wrapper.ends_window = False


class ZeroesByHand(Trainer):
    def backward(self, loss):
        for parameter in self.model.parameters():
            parameter.grad = None
        super().backward(loss)


class SetsGradients(Trainer):
    """Without a backward, as training by functional gradients does."""

    def backward(self, loss):
        parameters = list(self.model.parameters())
        scaled = self.scaler.scale(loss * 2)
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(scaled, parameters), strict=True
        ):
            parameter.grad = gradient


class SetsGradientsAndClips(SetsGradients):
    step = ClipsInTrainer.step


class ScalesSecondOfTwoLosses(Trainer):
    def backward(self, loss):
        torch.autograd.backward(loss * 0.1, retain_graph=True)
        torch.autograd.backward(self.scaler.scale(loss))


class StartsAtUnscaledLossToo(Trainer):
    def backward(self, loss):
        torch.autograd.backward([self.scaler.scale(loss), 0.1 * loss])


class AddsScaledLosses(Trainer):
    """One by the scaler, one by its number, and one that was divided before."""

    def backward(self, loss):
        by_hand = loss * self.scaler.get_scale()
        torch.autograd.backward(
            self.scaler.scale(loss) + by_hand - 2 * self.scaler.scale(loss / 2)
        )


class TwoScalers(Trainer):
    """A scaler for each of two networks; both backwards come before the steps."""

    def __init__(self):
        super().__init__()
        self.second = copy.deepcopy(self.model)
        self.other = torch.optim.SGD(self.second.parameters(), lr=0.1)
        self.scalers = [self.scaler, torch.amp.GradScaler("cuda", init_scale=1024.0)]

    def forward(self, inputs):
        with torch.autocast("cuda", dtype=torch.float16):
            self.loss = self.second(inputs).float().square().mean()
            return self.model(inputs).float()

    def backward(self, loss):
        for scaler, each in zip(self.scalers, (loss, self.loss / 2), strict=True):
            torch.autograd.backward(scaler.scale(each))

    def step(self):
        for scaler, optimizer in zip(
            self.scalers, (self.optimizer, self.other), strict=True
        ):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    def state(self):
        scalers = [scaler.state_dict() for scaler in self.scalers]
        return {**super().state(), "scaler": scalers}


class SavesOneOfTwoScalers(TwoScalers):
    def state(self):
        return Trainer.state(self)


class BackwardFromGradient(Trainer):
    """As contrastive learning does: the gradient of the representations comes first."""

    def forward(self, inputs):
        self.graph = super().forward(inputs)
        self.leaf = self.graph.detach().requires_grad_()
        return self.leaf

    def backward(self, loss):
        gradient = torch.autograd.grad(self.scaler.scale(loss), self.leaf)
        torch.autograd.backward(self.graph, gradient)


class SurvivesFailedStep(Trainer):
    """The first step raises an error, and the training goes on."""

    failed = False

    def step(self):
        if not self.failed:
            self.failed = True
            optimizer: Any = self.optimizer
            with suppress(TypeError):
                optimizer.step("no closure")
        super().step()


class LeavesOutOverflows(Trainer):
    """It unscales, looks, and steps only if the gradients are finite."""

    def step(self):
        self.scaler.unscale_(self.optimizer)
        if clip_norm(self.model.parameters(), 1.0).isfinite():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.model.zero_grad()


class OneStepAnEpoch(Trainer):
    """Moves its schedule after each epoch, of which each has one step."""

    batches = 2

    def train(self, file):
        schedule = step_lr(self.optimizer, 4)
        for _ in range(16):
            super().train(file)
            schedule.step()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # without a GPU it is off
    MADE_BEFORE = torch.autocast("cuda", dtype=torch.float16)


class DecoratedBefore(Trainer):
    """Its autocast was made before the doctor came."""

    def forward(self, inputs):
        return MADE_BEFORE(self.model)(inputs).float()


FAULTY_TRAINERS = {
    SavesAnotherScale: "scaler_not_saved",
    ClipsInTrainer: "clip_scaled",
    SavesOneOfTwoScalers: "scaler_not_saved",
    MovesWithClippingOptimizer: "schedule_on_skipped",
    ZeroesByHand: "zero_grad_in_window",
    SetsGradientsAndClips: "depends_on_scale",
    ScalesSecondOfTwoLosses: "unscaled_loss",
    StartsAtUnscaledLossToo: "unscaled_loss",
}
RIGHT_TRAINERS = [
    *(
        Trainer,
        SavesScaleAlone,
        SavesModelAlone,
        CallsByKeyword,
        WrapsOptimizer,
        SetsGradients,
    ),
    *(AddsScaledLosses, TwoScalers, BackwardFromGradient, OneStepAnEpoch),
    DecoratedBefore,
]


@pytest.mark.parametrize("trainer", [*FAULTY_TRAINERS, *RIGHT_TRAINERS])
def test_fault_of_a_trainer_is_found_and_a_right_trainer_has_none(trainer, tmp_path):
    # of an update that follows no step
    file = tmp_path / "checkpoint.pt"
    with closing(WaitingRuns(lambda: trainer().train(file))) as again:
        with suppress(AssertionError), watching() as findings:
            trainer().train(file)
        if trainer is SetsGradientsAndClips:
            findings.record.at_two_scales = again.compare(16, 60.0)
            findings = judge_record(findings.record)
    keys = {finding.key for finding in findings.faults}
    assert keys == ({FAULTY_TRAINERS[trainer]} if trainer in FAULTY_TRAINERS else set())


@pytest.mark.parametrize(
    ("trainer", "seen"),
    [(SurvivesFailedStep, "14 steps, 2"), (LeavesOutOverflows, "14 steps, 0")],
)
def test_steps_are_counted_after_one_that_raised_or_was_left_out(
    trainer, seen, tmp_path
):
    with watching() as findings:
        trainer().train(tmp_path / "checkpoint.pt")
    assert findings.seen.startswith(f"32 batches, {seen} skipped")


def test_loop_without_a_loader_is_only_suspected_of_zeroes_in_its_windows():
    """Nobody can tell there whether each of its backwards is of another batch."""
    inputs = torch.randn(4, 6)
    with watching() as findings:
        trainer = Trainer()
        for number in range(24):
            trainer.model.zero_grad()
            loss = functional.cross_entropy(
                trainer.forward(inputs), inputs[:, :3].argmax(1)
            )
            trainer.backward(loss)
            if number % 3 == 2:
                trainer.step()
    found = [(each.key, each.level) for each in findings]
    assert found == [("zero_grad_in_window", Level.SUSPICION)]


def train_critic(weight):
    """A critic whose loss is a mean of its outputs, which autocast computes in
    float16.
    """
    torch.manual_seed(0)
    critic = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(critic.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for _ in range(16):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = -critic(weight * torch.randn(4, 6)).half().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize(
    ("weight", "level"),
    [(1.0, Level.SUSPICION), (1e7, Level.FAULT)],
    ids=["finite losses", "infinite losses"],
)
def test_float16_loss_is_a_fault_only_where_most_losses_are_not_finite(weight, level):
    with watching() as findings:
        train_critic(weight)
    assert [each.level for each in findings if each.key == "loss_16_bits"] == [level]
    assert (level is Level.FAULT) == bool(findings.faults)


def test_watching_leaves_torch_as_it_was_and_a_training_undisturbed():
    owners = [
        torch.amp.GradScaler,
        torch.Tensor,
        torch.optim.Optimizer,
        nn.Module,
    ]
    before = [dict(vars(owner)) for owner in owners]
    plain = by_hand(test_amp_examples.CLIPPED)
    with watching(overflows=()):
        watched = by_hand(test_amp_examples.CLIPPED)
    assert [dict(vars(owner)) for owner in owners] == before
    assert not function_modes()
    assert same_bits(plain, watched)


def test_each_rule_stands_in_the_row_of_one_finding():
    rows = [{**row.get("seen", {}), **row.get("resumed", {})} for row in ROWS.values()]
    here = [
        name
        for module in (invariants, rules)
        for name, thing in inspect.getmembers(module, inspect.isfunction)
        if inspect.signature(thing).return_annotation == "Found"
    ]
    public = [name for name in here if not name.startswith("_")]
    assert sorted(name for row in rows for name in row) == sorted(public)


def test_each_finding_but_that_of_an_error_is_told_of_a_script_or_a_trial():
    scripts = {key for each in WRONG.values() for key in each.findings.split("|")}
    assert scripts <= ROWS.keys()
    trials = {*PLANTED.values(), *SUSPECTED.values()}
    assert ROWS.keys() - scripts - trials == {"raised"}


def test_finding_explains_findings_that_do_not_explain_it():
    of = {key: row.get("explains", []) for key, row in ROWS.items()}
    TopologicalSorter(of).prepare()
    assert set().union(*of.values()) <= ROWS.keys()


def test_error_of_a_run_in_its_own_process_is_told_by_its_last_line(monkeypatch):
    def fail(probe):
        raise KeyError("weights")

    monkeypatch.setattr(doctor, "run_here", fail)
    monkeypatch.setattr(signal, "alarm", lambda seconds: None)
    probe: Any = None
    with pytest.raises(
        UserError, match="a run of the trial failed: KeyError: 'weights'"
    ):
        doctor._run(probe)


class TestCommand:
    @pytest.fixture
    def config(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "planted.yaml").write_text(yaml.safe_dump(experiment()))
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "of the user").touch()
        return tmp_path / "planted.yaml"

    @pytest.fixture
    def _in_this_process(self, monkeypatch):
        def here(job, probe, *others):
            return doctor.run_here(probe) if job is doctor._run else None

        monkeypatch.setattr(doctor, "_afresh", here)

    @pytest.mark.usefixtures("_workers_are_forks")
    def test_fault_is_counted_in_the_first_line_and_ends_with_status_1(
        self, config, capsys
    ):
        given = ["--trial", "tests.test_check:MovesOnSkipped"]
        assert door.main(["check", config.name, *given]) == 1
        shown = capsys.readouterr()
        assert shown.out.startswith("1 fault: 20 batches, ")
        assert "2 of 2 skipped steps moved the schedule" in shown.out
        assert "twice in float32, at two loss scales" in shown.err
        assert "not compared" not in shown.out
        assert shown.err.startswith("at most ")
        assert {path.name for path in config.parent.iterdir()} == {"data", config.name}

    @pytest.mark.usefixtures("_in_this_process")
    def test_trial_without_amp_is_told_how_to_ask_for_it_and_is_examined_with_it(
        self, config, capsys
    ):
        given = ["check", config.name, "--trial", "tests.habits:Habit"]
        assert door.main(given) == 0
        plain = capsys.readouterr().out
        assert plain.startswith("no AMP was used: ")
        assert f"\nnote: {doctor.ASK_FOR_AMP}\n" in plain
        assert door.main([*given, "--precision", "amp_fp16"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith("0 faults: 20 batches, 18 steps, 2 skipped, autocast")
        assert doctor.ASK_FOR_AMP not in shown
        assert f"\nnote: {ONLY_ON_A_GPU}\n" in plain
        assert f"\nnote: {ONLY_ON_A_GPU}\n" in shown

    @pytest.mark.usefixtures("_in_this_process")
    def test_trial_without_a_fault_ends_with_status_0_and_is_told_in_json(
        self, config, capsys
    ):
        assert (
            door.main(["check", config.name, "--trial", "tests.habits:Habit", "--json"])
            == 0
        )
        assert json.loads(capsys.readouterr().out)["faults"] == 0

    def test_finding_is_explained_by_its_row_and_all_are_listed(self, capsys):
        assert door.main(["check", "--explain", "clip_scaled"]) == 0
        shown = capsys.readouterr().out
        row = ROWS["clip_scaled"]
        assert shown.startswith(f"clip_scaled (fault): {row['sentence']}\n")
        said = " ".join(shown.split())
        told = [row["evidence"], row["means"], *row["in_a_loop_write"]]
        assert [each for each in told if each not in said] == []
        assert door.main(["check", "--explain"]) == 0
        listed = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in listed] == [*ROWS]


def test_right_amp_loop_has_no_fault_and_no_warning_of_a_forced_overflow(caplog):
    amp = AmpLoop(AmpSettings(Precision.AMP_FP16), "cpu")
    model = amp.prepare(nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watching() as findings:
        for _ in range(12):
            with amp.autocast():
                loss = model(torch.randn(4, 8)).float().square().mean()
            amp.scaler.scale(loss).backward()
            amp.clip_gradients(optimizer)
            amp.scaler.step(optimizer)
            optimizer.zero_grad()
            amp.update(loss, samples=4)
    assert not findings.faults
    assert "the doctor made an overflow" in str(findings)
    assert not any("scaled gradients were changed" in text for text in caplog.messages)
