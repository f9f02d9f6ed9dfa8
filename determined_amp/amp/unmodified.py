"""Mixed precision for a float32 `PyTorchTrial` whose code knows nothing of it.

Determined's context sees all that is needed: the forward of each wrapped model runs under autocast,
`context.backward` scales the loss, `context.step_optimizer` unscales before the trial's own
`clip_grads` and steps with the scaler, and the batch ends with one `update`. Everything else is
`MixedPrecision`, as in a trial that was written for it.

What a model returns is cast to float32, so a loss computed outside the model is not in 16 bits.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from determined import pytorch
from torch import nn

from determined_amp.amp.checkpoint import patched
from determined_amp.amp.fp32_modules import as_float32
from determined_amp.amp.mixed_precision import MixedPrecision
from determined_amp.config.amp_settings import AmpSettings
from determined_amp.config.experiment import Experiment, parse
from determined_amp.config.settings import ConfigError

logger = logging.getLogger(__name__)

_CONVERT = "or write the AMP in the trial itself: docs/your_trial.md shows the ten lines"
_NO_AMP = "neither autocast nor a GradScaler: here both come from outside"

MakeTrial = Callable[[pytorch.PyTorchTrialContext], pytorch.PyTorchTrial]


def trial_of(
    experiment: Experiment[Any],
    context: pytorch.PyTorchTrialContext,
) -> pytorch.PyTorchTrial:
    """The trial of an experiment, in the precision of its section `amp`, if it has one.

    Args:
        experiment: Names the trial.
        context: Made for this experiment.

    Raises:
        ConfigError: see `make_with_amp`.
    """
    if experiment.amp is None:
        return experiment.make(context)
    return make_with_amp(experiment.make, context, experiment.amp)


def make_with_amp(
    make_trial: MakeTrial, context: pytorch.PyTorchTrialContext, settings: AmpSettings
) -> pytorch.PyTorchTrial:
    """Make a trial, and train it in mixed precision even if its code is plain float32.

    A trial that makes a `MixedPrecision` itself is left alone.

    Args:
        make_trial: Its class, or a function that makes it.
        context: Its context.
        settings: The precision, and all else of the `amp` section.

    Raises:
        ConfigError: if the trial cannot be trained that way, saying why and what to write. Some
            reasons show in the first batch only.
    """
    adapter = _Unmodified(context, settings)
    with patched(context, "wrap_model", adapter.wrap_model):
        trial = make_trial(context)
    if adapter.amp is not None:
        adapter.attach(trial)
    elif MixedPrecision.of(context) is None:
        raise _wrong("it wraps no model", "self.model = context.wrap_model(model)")
    return trial


class TrialAsItIs(pytorch.PyTorchTrial):
    """For Determined's own entrypoint of a class: `entrypoint: determined_amp:TrialAsItIs`.

    Makes the trial that `hyperparameters.trial` names, in the precision of `hyperparameters.amp`.

    Args:
        context: The trial's context.

    Raises:
        ConfigError: if the configuration is wrong; and see `make_with_amp`.
    """

    def __new__(cls, context: pytorch.PyTorchTrialContext) -> Any:
        experiment = parse(
            context.get_experiment_config(),
            "experiment",
            hyperparameters=context.get_hparams(),
            completed_by_master=True,
        )
        return trial_of(experiment, context)


class _Autocast:
    """Runs a model's forward under autocast, and hands on what it returns in float32.

    A copy of the model, such as an average of its weights, shares it. A pickled one is left
    without: it is not in the training.

    Args:
        amp: Gives the autocast of a training batch and that of a validation batch.

    Attributes:
        training: Whether `train_batch` is running.
        in_backward: Whether `context.backward` is running.
    """

    def __init__(self, amp: MixedPrecision) -> None:
        self._amp = amp
        self._casts = amp.settings.precision.autocast_dtype is not None
        self._inside = False
        self.training = False
        self.in_backward = False

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        is_on = _autocast_is_on(self._amp.device.type)
        # One wrapped model calls another, or a checkpoint computes that call again.
        if self._inside or (self.in_backward and is_on):
            return forward(*args, **kwargs)
        if self.training and is_on:
            raise _wrong("it enters autocast itself", _NO_AMP)
        amp, self._inside = self._amp, True
        try:
            with amp.autocast() if self.training else amp.eval_autocast():
                output = forward(*args, **kwargs)
        finally:
            self._inside = False
        return as_float32(output) if self._casts else output

    def __deepcopy__(self, memo: object) -> _Autocast:
        return self

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _no_autocast, ()


class _Unmodified(pytorch.PyTorchCallback):
    """Stands between a trial and its context.

    Args:
        context: The trial's context.
        settings: The `amp` section.

    Attributes:
        amp: Made when the trial wraps its first model without one of its own.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext, settings: AmpSettings) -> None:
        self.amp: MixedPrecision | None = None
        self._context = context
        self._settings = settings
        self._wrap_model = context.wrap_model
        self._losses: list[torch.Tensor] = []
        # Parameters of several optimizers, and those that a step has unscaled since the backward.
        self._shared: set[torch.Tensor] = set()
        self._unscaled: set[torch.Tensor] = set()
        # Steps of each optimizer, and its gradients as the last backward left them.
        self._steps: dict[torch.optim.Optimizer, int] = {}
        self._left: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        self._patches = ExitStack()

    # What the trial's constructor calls.

    def wrap_model(self, model: nn.Module) -> nn.Module:
        context = self._context
        if self.amp is None and MixedPrecision.of(context) is None:
            theirs: Any = context._scaler
            if theirs is not None and not theirs.is_enabled():
                context._scaler = theirs = None  # a trial whose own AMP is switched off
            if theirs is not None or context._use_apex or context.experimental._auto_amp:
                raise _wrong("it has a GradScaler of its own", _NO_AMP)
            self.amp = MixedPrecision(context, self._settings)
            self._autocast = _Autocast(self.amp)
        if self.amp is not None:
            self.amp.prepare(model)
            # On the instance: names, state_dict keys and types stay.
            model.forward = partial(self._autocast, model.forward)
        return self._wrap_model(model)

    def attach(self, trial: pytorch.PyTorchTrial) -> None:
        """From now on the calls of `trial` to its context, and its batches, come through here."""
        assert self.amp is not None
        amp, build_callbacks = self.amp, trial.build_callbacks
        self._train_batch = trial.train_batch
        self._backward = self._context.backward
        self._step_optimizer = self._context.step_optimizer

        def build_all_callbacks() -> dict[str, pytorch.PyTorchCallback]:
            return {"unmodified": self, **build_callbacks(), **amp.callbacks(trial)}

        replacements: dict[str, object] = {
            "build_callbacks": build_all_callbacks,
            "train_batch": self.train_batch,
        }
        for name, replacement in replacements.items():
            setattr(trial, name, replacement)
        self._context.backward = self.backward  # type: ignore[method-assign]
        self._context.step_optimizer = self.step_optimizer  # type: ignore[method-assign]

    # What the trial's `train_batch` calls, and it itself.

    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        assert self.amp is not None
        self._losses.clear()
        self._autocast.training = True
        try:
            result = self._train_batch(*args, **kwargs)
        finally:
            self._autocast.training = False
        losses = self._losses
        metrics = self.amp.update(sum(losses[1:], losses[0]) if losses else None)
        if not metrics:
            return result
        named = {"loss": result} if isinstance(result, torch.Tensor) else result
        return {**named, **metrics}

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        assert self.amp is not None
        if create_graph and self.amp.scaler.is_enabled():
            raise _wrong(
                "it calls context.backward(create_graph=True), whose gradients would be scaled",
                "precision amp_bf16, which needs no scale",
            )
        if loss.dtype in (torch.float16, torch.bfloat16):
            raise _wrong(
                f"its loss is in {str(loss.dtype).removeprefix('torch.')}: the model's output "
                "is no tensor, list, tuple, dictionary or dataclass, so it was not cast to float32",
                "a model that returns one of these",
            )
        if loss.numel() == 1:
            self._losses.append(loss.detach().reshape(()))
        self._unscaled.clear()
        self._autocast.in_backward = True
        try:
            scaled = self.amp.scaler.scale(loss)
            self._backward(scaled, gradient, retain_graph, create_graph)
        finally:
            self._autocast.in_backward = False
        self._left = {
            parameter: (parameter.grad, parameter.grad._version)
            for optimizer in self._steps
            if self._is_due(optimizer)
            for parameter in _parameters(optimizer)
            if parameter.grad is not None
        }

    def step_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grads: Callable[[Any], Any] | None = None,
        auto_zero_grads: bool = True,
        scaler: Any = None,
    ) -> None:
        assert self.amp is not None
        if scaler is not None and scaler.is_enabled():
            raise _wrong("it has a GradScaler of its own", _NO_AMP)
        if not self.amp.scaler.has_scaled:
            raise _wrong("it does not call context.backward", "self.context.backward(loss)")
        if optimizer in self.amp.scaler.stepped:
            raise _wrong(
                "it steps an optimizer twice in a batch",
                "one context.step_optimizer for each optimizer and batch",
            )
        self._look_for_changes(optimizer)
        shared = self._shared_by(optimizer)
        unscale_and_measure = self.amp.clip(optimizer)

        def clip(parameters: Iterable[torch.Tensor]) -> None:
            parameters = list(parameters)
            unscale_and_measure(parameters)
            assert clip_grads is not None
            clip_grads(parameters)

        self._step_optimizer(
            optimizer, clip if clip_grads else None, auto_zero_grads, self.amp.scaler
        )
        if optimizer in self.amp.scaler.stepped:
            self._unscaled |= shared

    def _shared_by(self, optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
        """Parameters that another optimizer has, too; refuses to unscale their gradients twice."""
        shared = self._shared.intersection(_parameters(optimizer)) if self._shared else set()
        if any(parameter.grad is not None for parameter in shared & self._unscaled):
            raise _wrong(
                "it steps two optimizers with the same parameters after one context.backward, and "
                "the second one would divide their gradients by the scale again",
                "one backward for each of the two, or precision amp_bf16, which needs no scale",
            )
        return shared

    def _look_for_changes(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a trial that changes scaled gradients, outside `clip_grads`.

        In the batch that is audited torch does not count the changes that foreach kernels make.
        """
        for parameter in _parameters(optimizer) if self._is_due(optimizer) else ():
            if _has_hooks(parameter):
                raise _wrong(
                    "it registers hooks on parameters, which would get scaled gradients",
                    "step_optimizer(optimizer, clip_grads=...), which gets them unscaled, or "
                    "precision amp_bf16, which needs no scale",
                )
            left, gradient = self._left.pop(parameter, None), parameter.grad
            if left is None or gradient is None:  # one that is dropped has no scale
                continue
            if gradient is not left[0] or gradient._version != left[1]:
                raise _wrong(
                    "it changes gradients after context.backward, where they are scaled",
                    "step_optimizer(optimizer, clip_grads=lambda parameters: "
                    "torch.nn.utils.clip_grad_norm_(parameters, 1.0)), or precision amp_bf16, "
                    "which needs no scale",
                )
        if self._context._should_communicate_and_update():
            self._steps[optimizer] = self._steps.get(optimizer, 0) + 1

    def _is_due(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether to look at the next step: at the first two, and at ever fewer later ones.

        Looking costs time, and a clip may begin after a warm-up. Without a loss scale there is
        nothing to look for.
        """
        assert self.amp is not None
        steps = self._steps.get(optimizer, 0)
        is_power_of_two = steps & (steps - 1) == 0
        return self.amp.scaler.is_enabled() and (steps < 2 or is_power_of_two)

    # What Determined's loop calls.

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Make optimizers fused, now that all models and hooks are there, and no state yet."""
        assert self.amp is not None
        for optimizer in self._context.optimizers if self.amp.fused else ():
            if not fuse(optimizer, self._context.models) and self.amp.scaler.is_enabled():
                name = type(optimizer).__name__
                logger.info("%s cannot be fused, so each step waits for the device", name)

    def on_training_start(self) -> None:
        assert self.amp is not None
        self._steps = dict.fromkeys(self._context.optimizers, 0)
        if self.amp.scaler.is_enabled():
            owned = Counter(p for o in self._context.optimizers for p in set(_parameters(o)))
            self._shared = {parameter for parameter, owners in owned.items() if owners > 1}
        for optimizer in self._context.optimizers:
            handle = optimizer.register_step_pre_hook(self._refuse_own_step)
            self._patches.callback(handle.remove)
        backward = torch.Tensor.backward

        def refuse(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if self._autocast.training and not self._autocast.in_backward:
                raise _wrong("it calls loss.backward() itself", "self.context.backward(loss)")
            backward(loss, *args, **kwargs)  # type: ignore[no-untyped-call]  # torch

        self._patches.enter_context(patched(torch.Tensor, "backward", refuse))

    def on_trial_shutdown(self) -> None:
        self._patches.close()

    def _refuse_own_step(self, *call: Any) -> None:
        assert self.amp is not None
        if not self.amp.scaler.stepping:
            raise _wrong(
                "it calls optimizer.step() itself", "self.context.step_optimizer(optimizer)"
            )


def fuse(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module] = ()) -> bool:
    """Make an optimizer fused that was made without `fused`; returns whether it is.

    On CUDA a fused optimizer takes scale and overflow flag as device tensors. With any other,
    `GradScaler.step` waits for the device. Only before its first step, and only where nothing but
    its speed changes: a fused one takes no sparse gradients, and hooks of the trial's would be
    called for skipped steps, too.

    Args:
        optimizer: Any of torch.
        models: Those of the trial, whose modules tell which gradients are sparse.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return False
    groups = optimizer.param_groups
    if all(group.get("fused") for group in groups):
        return True
    own_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    modules = (module for model in models for module in model.modules())
    sparse = {p for m in modules if getattr(m, "sparse", False) is True for p in m.parameters()}
    if own_hooks or _has_own_step(optimizer) or not sparse.isdisjoint(_parameters(optimizer)):
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
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # GradScaler asks
    return True


def _has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody else than a scheduler of torch has replaced its method."""
    step: Any = vars(optimizer).get("step")
    while hasattr(step, "_wrapped_by_lr_sched") or hasattr(step, "_with_counter"):  # torch 2.3
        step = step.__wrapped__
    return step is not None and step is not type(optimizer).step


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _has_hooks(parameter: torch.Tensor) -> bool:
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(parameter, name, None) for name in names)


def _autocast_is_on(device_type: str) -> bool:
    try:
        return torch.is_autocast_enabled(device_type)
    except TypeError:  # torch 2.3 has one question for each device
        return (
            torch.is_autocast_enabled()
            if device_type == "cuda"
            else torch.is_autocast_cpu_enabled()
        )


def _no_autocast() -> Callable[..., Any]:
    return _call


def _call(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _wrong(problem: str, instead: str) -> ConfigError:
    return ConfigError(
        "the trial", [f"train_batch: {problem}; write instead: {instead}; {_CONVERT}"]
    )
