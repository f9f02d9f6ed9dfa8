"""Every mistake with mixed precision ends with one sentence and the line to write.

In a trial that was written for it, in one that knows nothing of it, and in a loop of
one's own; in every precision, so that none comes to light only when the precision is
switched.
"""

import copy
import math
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from determined import pytorch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from determined_amp import (
    AmpLoop,
    AmpSettings,
    AuditError,
    ConfigError,
    MixedPrecision,
    Precision,
)
from determined_amp.amp.errors import UserError
from determined_amp.amp.settings import Compile
from determined_amp.check.recorder import Recorder
from determined_amp.trial.determined_private import amp_of
from tests import habits
from tests.harness import (
    EVERY_PRECISION,
    Context,
    as_it_is,
    every_precision,
    fit,
    fit_as_it_is,
    refusal,
    same_bits,
)
from tests.loops import BATCH, OneModel, one_model
from tests.trials import FP16_SECTION, FP32_SECTION, Plain, Weights

# A scheduler that Determined moves is moved by a skipped first step, too.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")


def made_after_wrap_model(context):
    context.wrap_model(nn.Linear(1, 1))
    return Weights(context)


def made_twice(context):
    MixedPrecision(context)
    return Weights(context)


def uses_amp_of_determined(context):
    context.experimental.use_amp()
    return Weights(context)


class UsesAmpOfDeterminedLater(Weights):
    def build_training_data_loader(self):
        context = self.context
        context._scaler = torch.amp.GradScaler("cpu")
        return super().build_training_data_loader()


class ForgetsTheCallbacks(Weights):
    def build_callbacks(self):
        return {}


class ForgetsTheUpdate(Weights):
    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.backward(batch)
        self.step()
        return {"loss": loss}


class ForgetsTheScaler(Weights):
    def step(self, which=0):
        self.context.step_optimizer(self.optimizer)


class ForgetsToScale(Weights):
    def backward(self, batch, which=0):
        with self.amp.autocast():
            loss = self.model(batch[0]).float().mean()
        self.context.backward(loss)
        return loss


class ClipsBeforeUnscaling(Weights):
    def step(self, which=0):
        def clip(parameters):
            nn.utils.clip_grad_norm_(parameters, 1.0)

        self.context.step_optimizer(
            self.optimizer, clip_grads=clip, scaler=self.amp.scaler
        )


class StepsOneOptimizerTwice(Weights):
    def step(self, which=0):
        super().step()
        self.backward([torch.ones(2, 1)])
        super().step()


class AsksBeforeTheUpdate(Weights):
    def step(self, which=0):
        super().step(which)
        assert self.amp.last_step_applied


class StepsTheSchedule(Weights):
    def train_batch(self, batch, epoch_idx, batch_idx):
        self.amp.wrap_lr_scheduler(lr_scheduler.StepLR(self.optimizer, 1)).step()


class StepsThePlateau(Weights):
    def train_batch(self, batch, epoch_idx, batch_idx):
        plateau = lr_scheduler.ReduceLROnPlateau(self.optimizer)
        self.amp.wrap_lr_scheduler(plateau).step(1.0)


class HasHalfWeights(Weights):
    def __init__(self, context):
        super().__init__(context)
        self.model.bfloat16()


class ForgetsTheReturn(Weights):
    def train_batch(self, batch, epoch_idx, batch_idx):
        super().train_batch(batch, epoch_idx, batch_idx)


class ReturnsANumber(Weights):
    def train_batch(self, batch, epoch_idx, batch_idx):
        super().train_batch(batch, epoch_idx, batch_idx)
        return 0.5


def has_both_schedules(context):
    trial = Weights(context)
    trial.amp.wrap_lr_scheduler(lr_scheduler.ReduceLROnPlateau(trial.optimizer))
    trial.amp.wrap_lr_scheduler(lr_scheduler.StepLR(trial.optimizer, 1))
    return trial


def has_schedules_of_both_kinds(context):
    trial = Weights(context)
    trial.amp.wrap_lr_scheduler(lr_scheduler.StepLR(trial.optimizer, 1))
    scheduler = lr_scheduler.StepLR(trial.optimizer, 1)
    context.wrap_lr_scheduler(scheduler, pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH)
    return trial


def schedules_an_unwrapped_optimizer(context):
    trial = Weights(context)
    other = torch.optim.SGD(trial.model.parameters(), lr=1.0)
    trial.amp.wrap_lr_scheduler(lr_scheduler.StepLR(other, 1))
    return trial


class SumsTheGradients(Weights):
    def wrapped(self, optimizer):
        return self.context.wrap_optimizer(
            optimizer, average_aggregated_gradients=False
        )


MISTAKES = {
    made_after_wrap_model: "MixedPrecision: make it before context.wrap_model",
    made_twice: "MixedPrecision: this context has one already",
    ForgetsTheCallbacks: (
        "update: build_callbacks of the trial must return amp.callbacks(self)"
    ),
    ForgetsTheUpdate: "it steps an optimizer, and must end with amp.update(...)",
    ForgetsTheReturn: "train_batch: it returns nothing; allowed: the loss, or metrics",
    ReturnsANumber: "train_batch: it returns a float; allowed: the loss, or metrics",
    ClipsBeforeUnscaling: "it clips gradients that are still scaled",
    AsksBeforeTheUpdate: "last_step_applied: asked between a step and amp.update(...)",
    StepsTheSchedule: "leave StepLR.step() to amp, which calls it for applied steps",
    StepsThePlateau: "leave ReduceLROnPlateau.step() to amp, which calls it after each",
    HasHalfWeights: "the trial: its weights are in bfloat16, as after .half() or",
    has_both_schedules: "its optimizer has a schedule already",
    has_schedules_of_both_kinds: "the trial: wrap_lr_scheduler: ",
    StepsOneOptimizerTwice: "it steps an optimizer again without amp.update",
    ForgetsTheScaler: "allowed: context.step_optimizer(optimizer, scaler=amp.scaler)",
    ForgetsToScale: "allowed: context.backward(amp.scaler.scale(loss))",
    schedules_an_unwrapped_optimizer: "is not one that context.wrap_optimizer returned",
    UsesAmpOfDeterminedLater: "leave out experimental.use_amp() and wrap_scaler()",
}


def test_trial_without_a_mistake_is_trained():
    """The control of all that is refused below: w = 1 - 1/4, then - (3 + 1/2) / 4."""
    trial = fit(Weights, FP16_SECTION, batches=2).trial
    assert trial.weights() == [-0.125]
    assert amp_of(trial.context) is trial.amp


@pytest.mark.parametrize("trial", MISTAKES)
@pytest.mark.parametrize("amp", [FP16_SECTION, FP32_SECTION], ids=["fp16", "fp32"])
def test_mistake_in_a_trial_is_one_sentence(trial, amp):
    assert MISTAKES[trial] in refusal(trial, amp)


@pytest.mark.filterwarnings("ignore:.*GradScaler:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA:UserWarning")
def test_determineds_own_amp_beside_it_is_refused():
    assert "leave out experimental.use_amp()" in refusal(
        uses_amp_of_determined, FP16_SECTION
    )


def test_gradients_of_a_window_are_summed_where_the_trial_asks_for_that():
    """The batches 1 and 3 have the mean gradient 2, so w = 1 - 2 / 4, and the sum 4."""
    two = {"batches": 2, "aggregation_frequency": 2}
    assert fit(Weights, FP16_SECTION, **two).trial.weights() == [0.5]
    assert fit(SumsTheGradients, FP16_SECTION, **two).trial.weights() == [0.0]


def test_refusal_of_the_amp_section_names_every_mistake_in_it():
    assert "amp: missing; allowed: amp: {precision: amp_fp16}" in refusal(Weights, None)
    wrong = {"precision": "fp16", "init_scale": -1, "growth_intervall": 5}
    with pytest.raises(ConfigError) as raised:
        fit(Weights, wrong, batches=2)
    keys = {problem.key.rpartition("amp.")[2] for problem in raised.value.problems}
    assert keys == wrong.keys()


def test_context_without_hyperparameters_needs_settings():
    context: Any = Context()
    context._hparams = None
    with pytest.raises(ConfigError, match=r"amp: missing; .* in pytorch\.init\(hp"):
        MixedPrecision(context)
    settings = AmpSettings(Precision.AMP_BF16)
    assert MixedPrecision(context, settings).settings is settings


# Trials that know nothing of mixed precision.


class CallsBackwardItself(Plain):
    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss(*batch)
        loss.backward()
        self.context.step_optimizer(self.optimizer)
        return loss


class CallsBackwardBesideTheRightOne(Plain):
    def train_batch(self, batch, epoch_idx, batch_idx):
        super().train_batch(batch, epoch_idx, batch_idx)
        torch.autograd.backward(self.model(batch[0]).sum())


class EntersAutocast(Plain):
    def train_batch(self, batch, epoch_idx, batch_idx):
        with torch.autocast("cpu", torch.bfloat16):
            return super().train_batch(batch, epoch_idx, batch_idx)


class WrapsAScaler(Plain):
    def __init__(self, context):
        self.scaler = context.wrap_scaler(torch.amp.GradScaler("cpu"))
        super().__init__(context)


class ScalesByItself(Plain):
    def train_batch(self, batch, epoch_idx, batch_idx):
        scaler = torch.amp.GradScaler("cpu")
        self.context.backward(scaler.scale(self.model(batch[0]).sum()))
        self.context.step_optimizer(self.optimizer, scaler=scaler)


class CreatesAGraph(Plain):
    def train_batch(self, batch, epoch_idx, batch_idx):
        self.context.backward(self.model(batch[0]).sum(), create_graph=True)


class StepsInsideTheBackward(habits.Habit):
    def __init__(self, context):
        super().__init__(context)
        self.own = torch.optim.SGD(self.model.parameters(), lr=0.1)
        first = next(iter(self.model.parameters()))
        first.register_post_accumulate_grad_hook(lambda _: self.own.step())


class Boxed(habits.Net):
    def forward(self, inputs):
        return SimpleNamespace(logits=super().forward(inputs))


class ReturnsUnknownContainer(habits.Habit):
    """Its logits come in what nobody knows how to cast."""

    def net(self):
        return Boxed()

    def loss(self, inputs, classes):
        # torch 2.3 has no cross-entropy of float16 on a CPU
        return self.model(inputs).logits.square().mean()


class ReturnsItsLossAsANumber(Plain):
    def train_batch(self, batch, epoch_idx, batch_idx):
        return super().train_batch(batch, epoch_idx, batch_idx)["loss"].item()


class WrapsNoModel(Plain):
    def __init__(self, context):
        self.context = context


FP16_ONLY, IN_16_BITS = ("amp_fp16",), ("amp_fp16", "amp_bf16")
ITS_OWN_AMP = (
    "check examines AMP of the trial's own if its YAML has no hyperparameters.amp"
)
ITS_OWN_BACKWARD = (
    "calls loss.backward() itself; write instead: self.context.backward(loss)"
)
REFUSED = {
    CallsBackwardItself: (EVERY_PRECISION, ITS_OWN_BACKWARD),
    CallsBackwardBesideTheRightOne: (FP16_ONLY, ITS_OWN_BACKWARD),
    EntersAutocast: (FP16_ONLY, ITS_OWN_AMP),
    WrapsAScaler: (FP16_ONLY, "GradScaler of its own"),
    ScalesByItself: (FP16_ONLY, "GradScaler of its own"),
    CreatesAGraph: (FP16_ONLY, "create_graph"),
    WrapsNoModel: (FP16_ONLY, "context.wrap_model(model)"),
    ReturnsItsLossAsANumber: (EVERY_PRECISION, "train_batch: it returns a float"),
    ReturnsUnknownContainer: (FP16_ONLY, "its loss is in float16"),
    habits.HalfWeights: (
        EVERY_PRECISION,
        "are in bfloat16, as after .half() or .bfloat16()",
    ),
    habits.LineSearch: (
        IN_16_BITS,
        "LBFGS with a closure, for which no line helps in 16 bits",
    ),
    StepsInsideTheBackward: (FP16_ONLY, "it has a hook in the backward"),
}


@pytest.mark.parametrize(
    ("trial", "precision"),
    [(trial, precision) for trial in REFUSED for precision in REFUSED[trial][0]],
)
def test_trial_that_cannot_be_trained_as_it_is_gets_one_sentence(trial, precision):
    """In the first batch at the latest."""
    amp = {"precision": precision}
    _, words = REFUSED[trial]
    said = refusal(as_it_is(trial, amp), amp)
    assert said.startswith("the trial: ")
    assert words in said


class SwitchesItsScalerOff(habits.Habit):
    def __init__(self, context):
        self.scaler = context.wrap_scaler(torch.amp.GradScaler("cpu", enabled=False))
        super().__init__(context)

    def train_batch(self, batch, epoch_idx, batch_idx):
        with torch.autocast("cpu", enabled=False):
            loss = self.loss(*batch)
        self.context.backward(self.scaler.scale(loss))
        self.scaler.unscale_(self.optimizer)
        self.context.step_optimizer(self.optimizer, scaler=self.scaler)
        self.scaler.update()
        return {"loss": loss}


class FrozenHalf(habits.Habit):
    """Its first layer is in 16 bits, and is not trained."""

    def net(self):
        model = super().net()
        model[0].bfloat16().requires_grad_(False)
        return model

    def loss(self, inputs, classes):
        return super().loss(inputs.bfloat16(), classes).float()


@pytest.mark.parametrize("trial", [FrozenHalf, StepsInsideTheBackward])
def test_trial_that_needs_no_loss_scale_trains_in_bfloat16(trial):
    amp = {"precision": "amp_bf16", "eval_precision": "same"}
    fit_as_it_is(trial, amp, batches=2)


def test_trial_whose_own_amp_is_switched_off_trains_as_one_without():
    amp = {"precision": "amp_fp16", "init_scale": 2.0**24, "growth_interval": 2}
    states = [
        fit_as_it_is(trial, amp).checkpoint["models_state_dict"]
        for trial in (SwitchesItsScalerOff, habits.Habit)
    ]
    assert same_bits(*states)


class ComputesByItself(habits.Habit):
    """With the weights of its model, which it never calls."""

    def loss(self, inputs, classes):
        for weight in self.model.parameters():
            inputs = inputs @ weight.T if weight.dim() == 2 else inputs + weight
        return functional.cross_entropy(inputs, classes)


def test_trial_that_never_calls_its_model_fails_the_audit():
    with pytest.raises(AuditError, match=r"model\(inputs\)"):
        fit_as_it_is(ComputesByItself, {"precision": "amp_bf16"})


# A loop of one's own.


class MovesByHand:
    """No optimizer of torch, so torch has no hooks for it."""

    def __init__(self, model):
        self.param_groups = [{"params": list(model.parameters())}]

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data -= 0.5 * parameter.grad


def steps_twice(loop):
    for _ in range(2):
        loop.backward()
        loop.step()


def steps_the_optimizer(loop):
    loop.backward()
    loop.step()
    loop.optimizer.step()


def steps_an_unknown_optimizer(loop):
    torch.autograd.backward(loop.amp.scaler.scale(loop.loss_fn()))
    loop.optimizer.step()


def steps_another_model_itself(loop):
    """As the generator of a GAN, whose discriminator is stepped by the scaler."""
    generator = loop.amp.prepare(nn.Linear(1, 1))
    loop.backward()
    loop.step()
    torch.optim.SGD(generator.parameters()).step()


def steps_inside_a_wrapper(loop):
    loop.amp.start()
    habits.Shrinking(loop.optimizer).step()


def steps_a_wrapper_without_hooks(loop):
    by_hand = MovesByHand(loop.model)
    loop.backward()
    loop.amp.scaler.step(by_hand)
    loop.amp.update()
    by_hand.step()


def forgets_the_update(loop):
    for _ in range(2):
        loop.backward()
        loop.step()
        loop.amp.scaler.update()


def scales_no_loss(loop):
    torch.autograd.backward(loop.loss())
    loop.step()


def schedules_twice(loop):
    for _ in range(2):
        loop.amp.wrap_lr_scheduler(lr_scheduler.ExponentialLR(loop.optimizer, 0.9))


def schedules_after_a_step(loop):
    loop.backward()
    loop.step()
    loop.amp.update()
    loop.amp.wrap_lr_scheduler(lr_scheduler.LinearLR(loop.optimizer, 0.01))


def copies_its_scaler(loop):
    copy.copy(loop.amp.scaler)


def prepares_twice(loop):
    loop.amp.prepare(loop.model)


MISTAKES_IN_A_LOOP = {
    steps_the_optimizer: r"the loop: it steps .* amp\.scaler\.step\(optim",
    steps_an_unknown_optimizer: r"the loop: it steps .* amp\.scaler\.step\(optim",
    steps_another_model_itself: r"the loop: it steps .* amp\.scaler\.step\(optim",
    steps_inside_a_wrapper: r"the loop: it steps .* amp\.scaler\.step\(optim",
    steps_a_wrapper_without_hooks: r"the loop: it steps .* amp\.scaler\.step\(optim",
    forgets_the_update: (
        r"amp\.update\(\.\.\.\) at the end of each batch, with amp\.fin"
    ),
    steps_twice: "the loop: it steps an optimizer again without amp.update",
    scales_no_loss: r"it does not scale the loss; .*\.backward\(\)",
    copy.deepcopy: "the loop: it copies .* an AmpLoop for each training",
    copies_its_scaler: "the loop: it copies .* an AmpLoop for each training",
    pickle.dumps: r"the loop: it copies .* amp\.state_dict\(\) for a checkpoint",
    prepares_twice: "^the loop: prepare: got a model a second time; allowed: once",
    schedules_twice: (
        "^the loop: wrap_lr_scheduler: its optimizer has a schedule already; join"
    ),
    schedules_after_a_step: (
        "^the loop: wrap_lr_scheduler: its optimizer has stepped already, .* before its"
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES_IN_A_LOOP)
@every_precision
def test_mistake_in_a_loop_is_one_sentence(mistake, precision):
    with pytest.raises(ConfigError, match=MISTAKES_IN_A_LOOP[mistake]):
        mistake(one_model(precision))


BEFORE_ANY_BACKWARD = {
    "step": OneModel.step,
    "unscale": lambda loop: loop.amp.scaler.unscale_(loop.optimizer),
    "clip": lambda loop: loop.amp.clip_gradients(loop.optimizer, 1.0),
}


@pytest.mark.parametrize("call", BEFORE_ANY_BACKWARD)
def test_call_before_any_loss_was_scaled_is_one_sentence(call):
    with pytest.raises(ConfigError, match=r"it does not scale the loss; .*backward"):
        BEFORE_ANY_BACKWARD[call](one_model("amp_fp16"))


def rehearses(loop):
    with loop.amp.without_steps():
        steps_twice(loop)
        loop.optimizer.step()


def has_not_begun(loop):
    torch.autograd.backward(loop.loss_fn())
    loop.optimizer.step()


def steps_a_model_of_its_own(loop):
    loop.amp.start()
    loop.backward()
    torch.optim.SGD(nn.Linear(1, 1).parameters()).step()


def trains_two_loops_in_turn(loop):
    other = one_model()
    other.amp.prepare(loop.model)
    other.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.5)
    other.model = loop.model
    loop.amp.start()
    other.amp.start()
    for each in (loop, other, loop, other):
        each.backward()
        each.step()
        each.amp.update()
        loop.model.zero_grad()


class Outer(torch.optim.Optimizer):
    """An optimizer as torch makes them, which steps another one."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


def steps_with(loop, optimizer):
    loss = loop.backward()
    loop.amp.scaler.step(optimizer)
    assert loop.loss() != loss
    loop.amp.update()
    assert loop.amp.attempted_steps == int(loop.amp.applied_steps) == 1


def steps_an_optimizer_inside_another(loop):
    steps_with(loop, Outer(loop.optimizer))


def steps_a_wrapper(loop):
    steps_with(loop, habits.Shrinking(loop.optimizer))


NO_MISTAKES_IN_A_LOOP = [
    rehearses,
    has_not_begun,
    steps_a_model_of_its_own,
    trains_two_loops_in_turn,
    steps_an_optimizer_inside_another,
    steps_a_wrapper,
]


@pytest.mark.parametrize("way", NO_MISTAKES_IN_A_LOOP)
@every_precision
def test_step_that_uses_no_scaled_gradient_is_not_refused(way, precision):
    way(one_model(precision))


@every_precision
def test_loop_that_is_over_keeps_nothing_and_refuses_nothing(precision):
    loop = one_model(precision)
    loop.amp.start()
    for _ in range(2):
        loop.backward()
        loop.step()
        loop.amp.update()
    loop.amp.report(BATCH, loop.loss_fn)
    amp, model = weakref.ref(loop.amp), weakref.ref(loop.model)
    optimizer = loop.optimizer
    with pytest.raises(ConfigError, match="it steps an optimizer whose gradients"):
        optimizer.step()
    loop = None
    assert amp() is None  # at once: nothing waits for Python to collect it
    optimizer.step()
    del optimizer
    assert model() is None


def test_loop_that_comes_or_goes_while_another_training_steps_leaves_its_step_alone():
    loops, optimizer = [one_model()], torch.optim.SGD([nn.Parameter(torch.ones(1))])
    loops[0].amp.start()

    def replace(*_):
        loops[:] = [one_model()]

    # torch goes on to the second one
    handles = [register_optimizer_step_pre_hook(replace) for _ in range(2)]
    hooks: Any = handles[0].hooks_dict_ref()
    try:
        registered = len(hooks)
        optimizer.step()
        assert len(hooks) <= registered
        loops[0].amp.start()  # removes the hook of the first
        assert len(hooks) == registered
    finally:
        for handle in handles:
            handle.remove()


def test_step_that_is_refused_is_none_for_the_doctor():
    recorder = Recorder()
    with recorder.watching():
        loop = one_model()
        loop.backward()
        loop.step()
        with pytest.raises(ConfigError, match="it steps an optimizer whose gradients"):
            loop.optimizer.step()
    assert len(recorder.record.of("step")) == 1


@pytest.mark.parametrize("given", [{"closure": float}, {}], ids=["name", "place"])
def test_step_with_a_closure_and_a_loss_scale_is_refused(given):
    loop, args = one_model(), () if given else (float,)
    with pytest.raises(
        ConfigError, match="steps with a closure, which a loss scale does not"
    ):
        loop.amp.scaler.step(loop.optimizer, *args, **given)


@pytest.mark.parametrize("first_use", ["wrap_optimizer", "clip_gradients"])
def test_optimizer_of_16_bit_weights_is_refused_by_a_loop_and_a_teacher_is_not(
    first_use,
):
    loop = one_model()
    teacher = loop.amp.prepare(nn.Linear(1, 1).half())
    loop.backward()
    loop.step()
    of_teacher = torch.optim.SGD(teacher.parameters(), lr=0.1)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"^the loop: its weights are in float16"):
            getattr(loop.amp, first_use)(of_teacher)
    assert [*loop.amp.windows] == [loop.optimizer]


def test_what_is_no_scheduler_of_torch_is_refused_by_a_loop():
    words = r"^the loop: wrap_lr_scheduler: got a SGD; allowed: one of torch\.optim"
    loop = one_model()
    with pytest.raises(ConfigError, match=words):
        loop.amp.wrap_lr_scheduler(loop.optimizer)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan, None])
def test_max_norm_that_is_no_number_above_0_is_refused(max_norm):
    context: Any = Context()
    amp, loop = MixedPrecision(context, AmpSettings(Precision.FP32)), one_model()
    optimizer = context.wrap_optimizer(loop.optimizer)
    words = f": got max_norm {max_norm}; allowed: a number above 0"
    with pytest.raises(ConfigError, match=words):
        amp.clip(optimizer, max_norm)
    with pytest.raises(ConfigError, match=f"^the loop: clip_gradients{words}"):
        loop.amp.clip_gradients(loop.optimizer, max_norm)
    amp.clip(optimizer, 1.0e-30)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fp32_modules": ("0", "head")}, "got 'head', which matches no module"),
        (
            {"fp32_modules": ("0",)},
            "^the loop: fp32_modules: given, but no model was given to amp",
        ),
        (
            {"compile": Compile.DEFAULT},
            "^the loop: compile: given, but no model was given to amp",
        ),
    ],
    ids=["no such module", "no model for fp32_modules", "no model for compile"],
)
def test_setting_for_modules_that_a_loop_has_not_is_refused_at_its_first_batch(
    settings, words
):
    amp = AmpLoop(AmpSettings(Precision.AMP_FP16, **settings), "cpu")
    if "no model" not in words:
        amp.prepare(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    with pytest.raises(UserError, match=words):
        amp.autocast()
