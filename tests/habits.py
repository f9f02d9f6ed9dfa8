"""Float32 trials with habits of their own, as people write them; none knows of mixed
precision.

They differ in what they do with gradients, optimizers, hooks and graphs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from determined import pytorch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

FEATURES, CLASSES, SAMPLES = 6, 3, 32


def random(*shape):
    """The same numbers each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


class Habit(pytorch.PyTorchTrial):
    """A classifier of points without a habit; smooth, so that rounding stays small."""

    def __init__(self, context):
        self.context = context
        self.model: Any = context.wrap_model(self.net())
        self.optimizer = context.wrap_optimizer(
            self.optimizer_of(list(self.model.parameters()))
        )

    def net(self):
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def optimizer_of(self, parameters):
        return torch.optim.SGD(parameters, lr=0.3, momentum=0.5)

    def loss(self, inputs, classes):
        return functional.cross_entropy(self.model(inputs), classes)

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss(*batch)
        self.context.backward(loss)
        self.step()
        return {"loss": loss}

    def step(self):
        self.context.step_optimizer(self.optimizer)

    def evaluate_batch(self, batch, batch_idx):
        with torch.enable_grad():  # some differentiate by their inputs
            return {"validation_loss": self.loss(*batch).detach()}

    def data(self):
        points = random(SAMPLES, FEATURES)
        return TensorDataset(points, points[:, :CLASSES].argmax(1))

    def build_training_data_loader(self):
        return pytorch.DataLoader(self.data(), self.context.get_per_slot_batch_size())

    build_validation_data_loader = build_training_data_loader

    def gradients(self):
        return [p.grad for p in self.model.parameters() if p.grad is not None]


# What they do between the backward and the step.


class ClampsData(Habit):
    """The line of PyTorch's older DQN tutorial."""

    def step(self):
        for gradient in self.gradients():
            gradient.data.clamp_(-0.01, 0.01)
        self.context.step_optimizer(self.optimizer)


class LoudAtFirst(ClampsData):
    """The first loss is beyond float16 on the first rank; clamped, its gradients look
    harmless.
    """

    def train_batch(self, batch, epoch_idx, batch_idx):
        self.is_loud = batch_idx == self.context.distributed.get_rank() == 0
        return super().train_batch(batch, epoch_idx, batch_idx)

    def loss(self, inputs, classes):
        loss = super().loss(inputs, classes)
        return loss * 1e6 if self.model.training and self.is_loud else loss


class ClipsOutside(Habit):
    """Clips before the step, not in it."""

    def step(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.context.step_optimizer(self.optimizer)


class StepsItself(Habit):
    """Goes past the context, with a closure of None."""

    def step(self):
        self.optimizer.step(None)
        self.optimizer.zero_grad()


class StepsByHand(Habit):
    """No optimizer takes part; the context wants to know one."""

    set_to_none = True

    def step(self):
        with torch.no_grad():
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.3)
        self.model.zero_grad(self.set_to_none)


class StepsByHandInPlace(StepsByHand):
    """The same as in the first tutorials, which leave gradients of 0."""

    set_to_none = False


class OwnAccumulation(Habit):
    """Two batches a step, counted by the trial."""

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss(*batch)
        self.context.backward(loss / 2)
        if batch_idx % 2:
            self.step()
        return {"loss": loss}


class ProjectsGradients(Habit):
    """Two tasks: takes the gradients of each, drops them, and sets what it makes of
    both.
    """

    def train_batch(self, batch, epoch_idx, batch_idx):
        logits, parameters = self.model(batch[0]), list(self.model.parameters())
        loss, taken = functional.cross_entropy(logits, batch[1]), []
        for task in (loss, 0.01 * logits.pow(2).mean()):
            self.optimizer.zero_grad()
            self.context.backward(task, retain_graph=True)
            taken.append([gradient.clone() for gradient in self.gradients()])
        for parameter, first, second in zip(parameters, *taken, strict=True):
            parameter.grad = torch.maximum(first, second)
        self.step()
        return {"loss": loss}


class SetsGradients(Habit):
    """Needs no backward."""

    def train_batch(self, batch, epoch_idx, batch_idx):
        for parameter in self.model.parameters():
            parameter.grad = 0.1 * parameter.detach()
        self.step()
        return {"loss": self.loss(*batch).detach()}


class OffAutocast(Habit):
    """Has AMP that is switched off, around several steps and a forward without
    gradients.

    In torch 2.3 autocast would keep the casts of that forward, which have no gradients.
    """

    def loss(self, inputs, classes):
        with torch.no_grad():
            self.model(inputs)
        return super().loss(inputs, classes)

    def train_batch(self, batch, epoch_idx, batch_idx):
        with torch.autocast("cpu", enabled=False):
            super().train_batch(batch, epoch_idx, batch_idx)
            return super().train_batch(batch, epoch_idx, batch_idx)


# Whose optimizers they are.


class SecondOptimizer(Habit):
    """A temperature with an optimizer that the context does not know."""

    def __init__(self, context):
        super().__init__(context)
        self.temperature = nn.Parameter(torch.zeros(()))
        self.own = torch.optim.SGD([self.temperature], lr=0.3)

    def loss(self, inputs, classes):
        return functional.cross_entropy(
            self.model(inputs) * self.temperature.exp(), classes
        )

    def step(self):
        self.context.step_optimizer(self.optimizer)
        self.own.step()
        self.own.zero_grad()


class SharedParameters(Habit):
    """Two optimizers of the same parameters after one backward."""

    def __init__(self, context):
        super().__init__(context)
        self.second = context.wrap_optimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.1)
        )

    def step(self):
        self.context.step_optimizer(self.optimizer, auto_zero_grads=False)
        self.context.step_optimizer(self.second)


class GoesBackwardForEach(SharedParameters):
    """The same with a backward for each."""

    def train_batch(self, batch, epoch_idx, batch_idx):
        for optimizer in (self.optimizer, self.second):
            loss = self.loss(*batch)
            self.context.backward(loss)
            self.context.step_optimizer(optimizer)
        return {"loss": loss}


class AlternatingHeads(Habit):
    """A batch has a loss for one of two heads, and both optimizers are stepped."""

    def __init__(self, context):
        self.context = context
        self.heads = [
            context.wrap_model(nn.Linear(FEATURES, CLASSES)) for _ in range(2)
        ]
        self.optimizers = [
            context.wrap_optimizer(self.optimizer_of(list(head.parameters())))
            for head in self.heads
        ]

    def train_batch(self, batch, epoch_idx, batch_idx):
        self.model = self.heads[batch_idx % 2]
        return super().train_batch(batch, epoch_idx, batch_idx)

    def step(self):
        for optimizer in self.optimizers:
            self.context.step_optimizer(optimizer, self.clip)

    def clip(self, parameters):
        nn.utils.clip_grad_norm_(parameters, 1.0)

    def loss(self, inputs, classes):
        self.model = getattr(self, "model", self.heads[0])
        return super().loss(inputs, classes)


class Shrinking(torch.optim.Optimizer):
    """A wrapper that never calls `Optimizer.__init__`; its state holds that of
    another. Its third step shrinks the weights.
    """

    def __init__(self, inner):
        self.inner, self.steps = inner, torch.tensor(0)
        self.param_groups, self.state = inner.param_groups, inner.state

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.steps += 1
        if self.steps % 3 == 0:
            torch._foreach_mul_(self.param_groups[0]["params"], 0.5)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def state_dict(self):
        return {"steps": self.steps, "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict):
        self.steps = state_dict["steps"]
        self.inner.load_state_dict(state_dict["inner"])


class WrapsItsOptimizer(Habit):
    """Steps with an optimizer around another one."""

    def optimizer_of(self, parameters):
        return Shrinking(super().optimizer_of(parameters))


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimisation around another optimizer."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.3, momentum=0.5)
        self.param_groups = self.base_optimizer.param_groups
        self.weights = self.param_groups[0]["params"]

    @torch.no_grad()
    def first_step(self):
        self.moves = [weight.grad * 0.05 for weight in self.weights]
        torch._foreach_add_(self.weights, self.moves)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        torch._foreach_sub_(self.weights, self.moves)
        self.base_optimizer.step()
        self.zero_grad()


class Sam(Habit):
    """The step of the wrapped optimizer is never called; that of the one in it is."""

    def optimizer_of(self, parameters):
        return Sharpness(parameters)

    def train_batch(self, batch, epoch_idx, batch_idx):
        optimizer: Any = self.optimizer
        loss = self.loss(*batch)
        self.context.backward(loss)
        optimizer.first_step()
        self.context.backward(self.loss(*batch))
        optimizer.second_step()
        return {"loss": loss}


class Wgan(AlternatingHeads):
    """The critic is stepped three times a batch, and its weights are clamped."""

    def train_batch(self, batch, epoch_idx, batch_idx):
        critic, generator = self.heads
        for which in (0, 0, 0, 1):
            made = generator(batch[0]).repeat(1, 2)
            loss = -critic(made).mean()
            if which == 0:
                loss = critic(made.detach()).mean() - critic(batch[0]).mean()
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizers[which])
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.2, 0.2)
        self.optimizers[0].zero_grad()
        return {"loss": loss}


class LineSearch(Habit):
    """LBFGS evaluates the loss as often as it likes."""

    def optimizer_of(self, parameters):
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)

    def train_batch(self, batch, epoch_idx, batch_idx):
        def closure():
            self.optimizer.zero_grad()
            loss = self.loss(*batch)
            self.context.backward(loss)
            return loss

        return {"loss": self.optimizer.step(closure)}


# What is called inside the backward.


def clamp(gradient):
    """As recipes for recurrent nets have it."""
    return gradient.clamp(-0.003, 0.003)


class Hooked(Habit):
    """Registers its hook in each batch."""

    def loss(self, inputs, classes):
        logits = self.model(inputs)
        if self.model.training:
            self.register(logits)
        return functional.cross_entropy(logits, classes)

    def register(self, logits):
        """This one registers none."""


class ActivationHook(Hooked):
    """Clamps the gradient of what the model returns."""

    def register(self, logits):
        logits.register_hook(clamp)


class NodeHook(Hooked):
    """Has its hook at a node of the graph, not at a tensor."""

    def register(self, logits):
        assert logits.grad_fn is not None
        logits.grad_fn.register_prehook(lambda gradients: None)


class GradientsHook(Hooked):
    """Is called once for all gradients."""

    def register(self, logits):
        parameters = list(self.model.parameters())
        torch.autograd.graph.register_multi_grad_hook(
            parameters, lambda gradients: None
        )


class RetainedGradient(Hooked):
    """Needs no hook."""

    def register(self, logits):
        logits.retain_grad()


class OldModuleHook(Hooked):
    """That of old recipes."""

    def register(self, logits):
        self.model[2].register_backward_hook(lambda module, into, out: None)


class ParameterHook(Habit):
    """Registers its hook, a function of torch, before the training."""

    def net(self):
        model = super().net()
        hook = partial(functional.hardtanh, min_val=-0.003, max_val=0.003)
        model[0].weight.register_hook(hook)
        return model


class LoneModuleHook(Habit):
    """A hook of a module that nobody has wrapped."""

    def __init__(self, context):
        super().__init__(context)
        self.last = nn.Tanh()
        self.last.register_full_backward_hook(
            lambda module, into, out: tuple(map(clamp, into))
        )

    def loss(self, inputs, classes):
        return functional.cross_entropy(self.last(self.model(inputs)), classes)


class Net(nn.Module):
    """The same as a module of its own, which can do more in its forward."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)

    def forward(self, inputs):
        return self.last(self.hidden(inputs))

    def hidden(self, inputs):
        return torch.tanh(self.first(inputs))


class Penalty(Habit):
    """A penalty of small gradients by the inputs, as of a critic."""

    def loss(self, inputs, classes):
        inputs = inputs.clone().requires_grad_()
        logits = self.model(inputs)
        (gradient,) = torch.autograd.grad(
            (logits * 1e-6).sum(), inputs, create_graph=True
        )
        return (
            functional.cross_entropy(logits, classes) + (gradient * 1e6).pow(2).mean()
        )


class FunctionalPenalty(Habit):
    """The same by torch.func."""

    def loss(self, inputs, classes):
        gradient = torch.func.grad(lambda points: self.model(points).sum())(inputs)
        return super().loss(inputs, classes) + gradient.pow(2).mean()


class Adversarial(Habit):
    """Trains on what it makes of the gradient of its inputs, which are in no model."""

    def train_batch(self, batch, epoch_idx, batch_idx):
        inputs = batch[0].clone().requires_grad_()
        inputs.retain_grad()  # which a leaf does anyway
        self.context.backward(self.loss(inputs, batch[1]))
        self.optimizer.zero_grad()
        moved = inputs.detach() + inputs.grad
        return super().train_batch((moved, batch[1]), epoch_idx, batch_idx)


class LooksForAnomalies(Habit):
    """Raises an error for NaN in the backward."""

    def train_batch(self, batch, epoch_idx, batch_idx):
        with torch.autograd.set_detect_anomaly(True):
            return super().train_batch(batch, epoch_idx, batch_idx)


# What their models hand out, and what their weights are.


class Features(Habit):
    """A loss of what a hook sees, whose squares are beyond float16."""

    seen: torch.Tensor

    def net(self):
        model = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, CLASSES)
        )
        model[0].register_forward_hook(self.keep)
        return model

    def keep(self, module, inputs, output):
        self.seen = output

    def loss(self, inputs, classes):
        loss = super().loss(inputs * 300, classes)
        return loss + 1e-8 * (self.seen * self.seen).sum()


class HalfWeights(Habit):
    """Trains in bfloat16 without autocast."""

    def net(self):
        return super().net().bfloat16()

    def loss(self, inputs, classes):
        return super().loss(inputs.bfloat16(), classes).float()


# Models and losses.


class SparseEmbedding(Habit):
    """Predicts the next word; the gradient of its embedding is sparse."""

    def net(self):
        embedding = nn.Embedding(16, 8, sparse=True)
        return nn.Sequential(embedding, nn.Linear(8, 16))

    def data(self):
        words = random(SAMPLES, 8).mul(8).abs().long().clamp_(max=15)
        return TensorDataset(words[:, :-1], words[:, 1:])

    def loss(self, inputs, classes):
        return functional.cross_entropy(
            self.model(inputs).flatten(0, 1), classes.flatten()
        )


class Coder(nn.Module):
    """A model without a forward, as of a VAE or a flow: its methods call its
    members.
    """

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(FEATURES, 16), nn.Tanh()])
        self.decoder = nn.Sequential(
            nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)
        )

    def encode(self, inputs):
        for part in self.parts:
            inputs = part(inputs)
        return inputs


class Methods(Habit):
    """Calls a method and a member of its model, and never the model."""

    def net(self):
        return Coder()

    def loss(self, inputs, classes):
        return functional.cross_entropy(
            self.model.decoder(self.model.encode(inputs)), classes
        )


class CheckpointingNet(Net):
    def hidden(self, inputs):
        return checkpoint(super().hidden, inputs.requires_grad_(), use_reentrant=True)


class Checkpointing(Habit):
    """Recomputes in the backward what the graph of the loss does not show."""

    def net(self):
        return CheckpointingNet()


class Spectral(Net):
    """Has a complex parameter, and one without a number."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.ones(9, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.zeros(0))

    def hidden(self, inputs):
        hidden = super().hidden(inputs).float() + self.nothing.sum()
        return torch.fft.irfft(torch.fft.rfft(hidden) * self.filter.conj())


class Complex(Habit):
    def net(self):
        return Spectral()


# What an unmodified trial of each class meets. `REFUSED_IN_FP16` trains as in float32
# in all other precisions; the words are a part of the sentence that refuses it.
_HOOK, _GRAD = (
    "it has a hook in the backward",
    "it calls torch.autograd.grad or torch.func",
)
_OWN_STEP, _MOVES = (
    "itself, which no overflow could skip",
    "moves the weights between two backwards",
)
REFUSED_IN_FP16: dict[type[Habit], str] = {
    **dict.fromkeys((StepsItself, SecondOptimizer), _OWN_STEP),
    Sam: _MOVES,
    **dict.fromkeys((ActivationHook, NodeHook, GradientsHook, OldModuleHook), _HOOK),
    **dict.fromkeys((RetainedGradient, ParameterHook), _HOOK),
    LoneModuleHook: _HOOK,
    **dict.fromkeys((Penalty, FunctionalPenalty), _GRAD),
}
# One is the base of others, and one overflows.
NO_HABITS = {Hooked, LoudAtFirst}
REFUSED_IN_16_BITS = {LineSearch, HalfWeights}
# Do something with the gradients of a window that overflows.
USE_GRADIENTS = (
    *(Habit, ClampsData, ClipsOutside, StepsByHand),
    *(ProjectsGradients, StepsByHandInPlace, SharedParameters, WrapsItsOptimizer),
    *(LooksForAnomalies, SparseEmbedding, Complex),
)
