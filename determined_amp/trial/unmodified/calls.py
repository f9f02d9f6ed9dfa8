"""Trains a float32 trial in mixed precision, between the trial and its context.

The forward of each wrapped model, and of its members, runs under autocast.
`context.backward` scales the loss and leaves true gradients. A step of any optimizer is
skipped if its gradients overflowed, and each batch ends with one `update`. Everything
else is `MixedPrecision`, as in a trial that was written for it.

A model's results, and what its forward hooks see, are cast to float32, so a loss that
is computed from them is never in 16 bits. What the model keeps in an attribute stays in
16 bits, and a loss that is in 16 bits because of it is refused.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from determined import pytorch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from determined_amp.amp.errors import ConfigError
from determined_amp.amp.fp32_modules import as_float32
from determined_amp.amp.settings import AmpSettings, Compile
from determined_amp.amp.tensors import (
    SIXTEEN_BITS,
    closure_of,
    dtype_name,
    is_fake_tensor,
    parameters_of,
)
from determined_amp.amp.torch_private import (
    backwards_through,
    give_found_inf,
    is_compiled,
)
from determined_amp.amp.window import RUNNING, Window
from determined_amp.trial.determined_private import (
    ends_step,
    forget_scaler,
    has_amp_of_its_own,
    scaler_of,
)
from determined_amp.trial.mixed_precision import LOOP, MixedPrecision
from determined_amp.trial.unmodified.autocast import (
    NO_AMP,
    ForwardHooks,
    UnmodifiedAutocast,
    refusal,
    refuse_in_float16,
)
from determined_amp.trial.unmodified.true_gradients import TrueGradients

logger = logging.getLogger(__name__)


def _called(model: nn.Module, *, with_members: bool) -> Iterator[nn.Module]:
    """The modules that a trial may call: the model, and its members with parameters.

    A trial may call a member in its own code, as in `model.decoder(z)`, or by a method
    of the model, as in `model.encode(x)`. A module without a forward is replaced by its
    members.
    """
    # TorchScript's classes have no `forward`, but their models do.
    has_forward = getattr(type(model), "forward", None) is not nn.Module.forward
    if has_forward:
        yield model
    if with_members or not has_forward:
        for member in model.children():
            if any(True for _ in member.parameters()):
                yield from _called(
                    member, with_members=with_members and not has_forward
                )


class UnmodifiedTraining(MixedPrecision):
    """Adds mixed precision to the calls between a trial and its context.

    Args:
        context: The trial's context.
        settings: The `amp` section.
    """

    is_unmodified = True

    def __init__(
        self, context: pytorch.PyTorchTrialContext, settings: AmpSettings
    ) -> None:
        theirs = scaler_of(context)
        if theirs is not None and not theirs.is_enabled():
            forget_scaler(context)  # the trial's own AMP is switched off
            theirs = None
        if theirs is not None or has_amp_of_its_own(context):
            raise refusal("it has a GradScaler of its own", NO_AMP)
        super().__init__(context, settings)
        self._autocast = UnmodifiedAutocast(self)
        self._losses: list[torch.Tensor] = []
        self._gradients: TrueGradients | None = None
        # The optimizer that steps without the context.
        self._stepping_itself: Optimizer | None = None
        self._original_backward, self._original_step = (
            context.backward,
            context.step_optimizer,
        )

    # Calls of the trial's constructor.

    def prepare(self, model: nn.Module) -> nn.Module:
        """Let a model that is about to be wrapped run under autocast."""
        super().prepare(model)
        # A compiled model or a script is called as a whole.
        compiled = is_compiled(model) or self.settings.compile is not Compile.OFF
        whole = compiled or isinstance(model, torch.jit.ScriptModule)
        for part in _called(model, with_members=not whole):
            # On the instance, so names, state_dict keys and types stay.
            part.forward = partial(self._autocast, part.forward)
        return model

    def attach(self, trial: Any) -> None:
        """Handle the trial's batches and its calls of the context from now on.

        Until then the context works as usual.
        """
        context: Any = self._context
        context.backward, context.step_optimizer = self.backward, self.step_optimizer
        self._original_train_batch = trial.train_batch
        build_callbacks = trial.build_callbacks

        def build_all_callbacks() -> dict[str, pytorch.PyTorchCallback]:
            # This object comes first, because the trial's callbacks may add hooks.
            return {LOOP: self, **build_callbacks(), **self.callbacks(trial)}

        trial.build_callbacks, trial.train_batch = build_all_callbacks, self.train_batch

    # `train_batch` of the trial, and its calls.

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self._losses.clear()
        accumulates = batch_idx % self._aggregation_frequency > 0
        is_first = not accumulates and not self.is_rehearsing
        if self._gradients is not None and is_first:
            self._gradients.note_dropped()
        self._autocast.training = True
        given = {"batch": batch, "epoch_idx": epoch_idx, "batch_idx": batch_idx}
        try:
            # Determined converts metrics to numpy, which has no bfloat16.
            result = as_float32(self._original_train_batch(**given))
        finally:
            self._autocast.training = False
            if self._stepping_itself is not None:  # its step has raised an error
                self._stepping_itself = RUNNING.window = None
        losses = self._losses
        metrics = self.update(sum(losses[1:], losses[0]) if losses else None)
        if isinstance(result, torch.Tensor):
            result = {"loss": result}
        return {**result, **metrics} if isinstance(result, Mapping) else result

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Run the backward of an unscaled loss, and leave true gradients."""
        gradients = self._gradients
        if create_graph and self.scaler.is_enabled():
            raise refuse_in_float16(
                "it calls context.backward(create_graph=True), whose gradients would "
                "be scaled"
            )
        if loss.dtype in SIXTEEN_BITS:
            raise refusal(
                f"its loss is in {dtype_name(loss.dtype)}: it is computed from a "
                "tensor that the model keeps, or returns in another container than a "
                "tuple, list, dict or dataclass, so the tensor was not cast to float32",
                ".float() on the tensor",
            )
        if loss.numel() == 1:
            # the trial may change it
            self._losses.append(loss.detach().clone().reshape(()))

        def run(scaled: torch.Tensor) -> None:
            before, self._autocast.in_backward = self._autocast.in_backward, True
            try:
                self._original_backward(scaled, gradient, retain_graph, create_graph)
            finally:
                self._autocast.in_backward = before

        if gradients is None:
            run(self.scaler.scale(loss))
        elif self.is_rehearsing:  # an overflow must show, and not be set to 0
            gradients.rehearse(loss, run)
        else:
            gradients.backward(loss, run)

    def step_optimizer(
        self,
        optimizer: Optimizer,
        clip_grads: Callable[[Any], Any] | None = None,
        auto_zero_grads: bool = True,
        scaler: Any = None,
    ) -> None:
        """Step an optimizer whose gradients are true."""
        if scaler is not None and scaler.is_enabled():
            raise refusal("it has a GradScaler of its own", NO_AMP)
        window = self.windows[optimizer]

        def clip(parameters: Iterable[torch.Tensor]) -> None:
            parameters = list(parameters)
            window.clip(parameters, math.inf, self.loss_scale)
            assert clip_grads is not None
            clip_grads(parameters)

        if ends_step(self._context):
            self.scaler.take_true_gradients(window)
        its_clip = clip if clip_grads else None
        self._original_step(optimizer, its_clip, auto_zero_grads, self.scaler)

    # Calls of torch.

    def on_step_without_scaler(
        self, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> None:
        """Take over a step of any optimizer that no scaler makes; called before it."""
        if not self._autocast.training:
            return
        window = self._window_of(optimizer)
        self._refuse_own_step(optimizer, closure_of(args[1:], kwargs))
        self.scaler.take_true_gradients(window)
        window.begin_step()
        self._stepping_itself, RUNNING.window = optimizer, window

    def _after_step(self, optimizer: Optimizer, *call: Any) -> None:
        window = RUNNING.window
        if window is None or optimizer is not self._stepping_itself:
            return
        self._stepping_itself = RUNNING.window = None
        window.move("step")
        torch.clear_autocast_cache()

    def _window_of(self, optimizer: Optimizer) -> Window:
        """The window of an optimizer, or of the context's one with equal parameters."""
        windows = self.windows
        if optimizer not in windows:
            its = set(parameters_of(optimizer))
            for each in self._context.optimizers:
                if set(parameters_of(each)) == its:
                    return windows[each]
        return windows[optimizer]

    def _refuse_own_step(self, optimizer: Optimizer, closure: object) -> None:
        scaled, name = self.scaler.is_enabled(), type(optimizer).__name__
        searches = isinstance(optimizer, torch.optim.LBFGS) and self._autocast.casts
        if searches or (scaled and closure is not None):
            raise ConfigError(
                "the trial",
                [
                    f"train_batch: it steps {name} with a closure, for which "
                    "no line helps in 16 bits: it compares losses and gradients of "
                    "several backwards that must not be skipped; allowed: precision "
                    "fp32 or tf32"
                ],
            )
        if scaled:
            raise refusal(
                f"it steps {name} itself, which no overflow could skip",
                "self.context.step_optimizer(optimizer) with an optimizer of "
                "context.wrap_optimizer, or precision amp_bf16, which needs no loss "
                "scale",
            )

    def _run_backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Check a backward, then run it; called in place of torch's autograd engine."""
        is_inside = not self._autocast.training or self._autocast.in_backward
        # a compiler traces this backward
        if is_inside or any(map(is_fake_tensor, args[0])):
            return run(*args, **kwargs)
        if kwargs.get("accumulate_grad"):
            raise refusal(
                "it calls loss.backward() itself", "self.context.backward(loss)"
            )
        if self._gradients is not None:
            raise refuse_in_float16(
                "it calls torch.autograd.grad or torch.func, whose gradients would be "
                "without a loss scale"
            )
        return run(*args, **kwargs)

    # Calls of Determined's loop.

    def on_trial_startup(
        self, first_batch_idx: int, checkpoint_uuid: str | None
    ) -> None:
        """Make optimizers fused, after models are complete and before a state loads."""
        for optimizer in self._context.optimizers if self.fused else ():
            if not fuse(optimizer, self._context.models) and self.scaler.is_enabled():
                name = type(optimizer).__name__
                logger.info(
                    "%s cannot be fused, so each step waits for the device", name
                )

    def on_training_start(self) -> None:
        handle = register_optimizer_step_post_hook(self._after_step)
        self._patches.callback(handle.remove)
        self._patches.enter_context(backwards_through(self._run_backward))
        if self._autocast.casts:
            hooks = ForwardHooks(self.models)
            self._patches.enter_context(hooks.shown_in_float32())
        if self.scaler.is_enabled():
            self._gradients = TrueGradients(self, self._autocast)
            self._patches.enter_context(self._gradients.refusing_hooks())
        super().on_training_start()


def fuse(optimizer: Optimizer, models: Iterable[nn.Module] = ()) -> bool:
    """Make an optimizer fused, before its first step; returns whether it is fused now.

    On CUDA a fused optimizer reads loss scale and `found_inf` on the device. With any
    other, `GradScaler.step` waits for the device. An optimizer stays as it is if more
    than its speed would change: for example, a fused one takes no sparse gradients.

    Args:
        optimizer: Any optimizer.
        models: The trial's models. Their modules tell which gradients are sparse.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return False
    groups = optimizer.param_groups
    if all(group.get("fused") for group in groups):
        return True
    modules = (module for model in models for module in model.modules())
    sparse = {
        p
        for m in modules
        if getattr(m, "sparse", False) is True
        for p in m.parameters()
    }
    if _has_own_step(optimizer) or not sparse.isdisjoint(parameters_of(optimizer)):
        return False
    if optimizer.state or any(
        group.get("foreach")
        or group.get("differentiable")
        or group.get("dampening")
        or not all(torch.is_floating_point(parameter) for parameter in group["params"])
        for group in groups
    ):
        return False
    for settings in (optimizer.defaults, *groups):
        settings.update(fused=True, foreach=False)
    give_found_inf(optimizer)
    return True


def _has_own_step(optimizer: Optimizer) -> bool:
    """Whether the instance overrides `step`, not counting wrappers as of schedulers."""
    step, of_class = (
        inspect.unwrap(optimizer.step),
        inspect.unwrap(type(optimizer).step),
    )
    return getattr(step, "__func__", step) is not of_class
