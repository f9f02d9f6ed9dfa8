"""Mixed precision for a float32 `PyTorchTrial` whose code knows nothing of it.

Determined's context sees all that is needed: the forward of each wrapped model runs under autocast,
`context.backward` scales the loss and leaves true gradients, a step of any optimizer is skipped if
they overflowed, and the batch ends with one `update`. Everything else is `MixedPrecision`, as in a
trial that was written for it.

What a model returns is cast to float32, and so is what its hooks see and what it keeps in
attributes, so a loss computed outside the model is not in 16 bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from determined import pytorch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from determined_amp.amp.fields import ConfigError
from determined_amp.amp.fp32_modules import as_float32
from determined_amp.amp.gradients import TrueGradients
from determined_amp.amp.origin import backwards_through
from determined_amp.amp.patched import patched
from determined_amp.amp.scaler import parameters_of
from determined_amp.amp.settings import AmpSettings
from determined_amp.experiment.experiment import Experiment, parse
from determined_amp.trial.determined_0_38 import (
    ends_step,
    forget_scaler,
    has_amp_of_its_own,
    scaler_of,
)
from determined_amp.trial.mixed_precision import MixedPrecision

logger = logging.getLogger(__name__)

_CONVERT = "or write the AMP in the trial itself: docs/your_trial.md shows the ten lines"
_NO_AMP = "neither autocast nor a GradScaler: here both come from outside"

# The attributes of every module, among them its parameters, buffers and hooks.
_OF_MODULES = frozenset(vars(nn.Module()))

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
    adapter = _Unmodified(settings)
    view = AmpContext(context, adapter)
    trial = make_trial(view)
    if adapter.amp is not None:
        adapter.attach(trial)
    else:
        view.hand_over()
    if MixedPrecision.of(context) is None:
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
        )
        return trial_of(experiment, context)


class _Autocast:
    """Runs a model's forward under autocast, and hands on what it returns in float32.

    A copy of the model, such as an average of its weights, shares it. A pickled one is left
    without: it is not in the training.

    Args:
        amp: Gives the autocast of a training batch and that of a validation batch.

    Attributes:
        casts: Whether there is an autocast in 16 bits.
        training: Whether `train_batch` is running.
        in_backward: Whether a backward is running.
    """

    def __init__(self, amp: MixedPrecision) -> None:
        self._amp = amp
        self.casts = amp.settings.precision.autocast_dtype is not None
        self._inside = False
        self._forwards = 0
        self._kept: list[tuple[dict[str, Any], str]] = []
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
        if not self.casts:
            return output
        if self.training:
            self._cast_kept()
        return as_float32(output)

    def _cast_kept(self) -> None:
        """Cast what the models keep in attributes of their own, such as features for the loss.

        What they keep is looked for in the first two forwards, and in ever fewer later ones.
        """
        self._forwards += 1
        if self._forwards & (self._forwards - 1) == 0:
            modules = (m for model in self._amp.models for m in model.modules())
            self._kept = [
                (attributes, name)
                for attributes in map(vars, modules)
                for name, value in attributes.items()
                if name not in _OF_MODULES
                and isinstance(value, (torch.Tensor, list, tuple, dict))
                and as_float32(value) is not value
            ]
        for attributes, name in self._kept:
            if name in attributes:
                attributes[name] = as_float32(attributes[name])

    def __deepcopy__(self, memo: object) -> _Autocast:
        return self

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _no_autocast, ()


class AmpContext(pytorch.PyTorchTrialContext):
    """The context of a trial as the trial sees it: the same one, but for three methods.

    It shares all attributes with the context that Determined's loop has.

    Args:
        context: That one.
        adapter: What the three methods do more.
    """

    _adapter: _Unmodified

    def __init__(self, context: pytorch.PyTorchTrialContext, adapter: _Unmodified) -> None:
        self.__dict__ = context.__dict__
        self._adapter = adapter

    def hand_over(self) -> None:
        """Be the context and no more, for a trial with a `MixedPrecision` of its own."""
        self.__class__ = pytorch.PyTorchTrialContext  # type: ignore[assignment]

    def wrap_model(self, model: nn.Module) -> nn.Module:
        self._adapter.prepare(self, model)
        return super().wrap_model(model)

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        def run(scaled: torch.Tensor) -> None:
            super(AmpContext, self).backward(scaled, gradient, retain_graph, create_graph)

        self._adapter.backward(loss, run, create_graph=create_graph)

    def step_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grads: Callable[[Any], Any] | None = None,
        auto_zero_grads: bool = True,
        scaler: Any = None,
    ) -> None:
        def run(clip: Callable[[Any], Any] | None, scaler: Any) -> None:
            super(AmpContext, self).step_optimizer(optimizer, clip, auto_zero_grads, scaler)

        self._adapter.step(optimizer, run, clip_grads, scaler, zero_grad=auto_zero_grads)


class _FromOutside(MixedPrecision):
    """That of a trial which knows nothing of it, whose clip gets gradients that are unscaled."""

    def _note_clips(self) -> None:
        """`AmpContext` has told the scaler that it may clip."""


class _Unmodified(pytorch.PyTorchCallback):
    """What happens between a trial and its context.

    Args:
        settings: The `amp` section.

    Attributes:
        amp: Made when the trial wraps its first model without one of its own.
    """

    def __init__(self, settings: AmpSettings) -> None:
        self.amp: MixedPrecision | None = None
        self._settings = settings
        self._is_attached = False
        self._losses: list[torch.Tensor] = []
        self._gradients: TrueGradients | None = None
        # Of optimizers that may keep weights aside: norms of their weights where a window began.
        self._weights: dict[torch.optim.Optimizer, torch.Tensor] = {}
        self._drops_gradients = False
        # The optimizer that the trial steps itself, just now.
        self._own: torch.optim.Optimizer | None = None
        self._own_skipped = False
        self._patches = ExitStack()

    # What the trial's constructor calls.

    def prepare(self, context: pytorch.PyTorchTrialContext, model: nn.Module) -> None:
        """Let a model that is about to be wrapped run under autocast."""
        if self.amp is None and MixedPrecision.of(context) is None:
            theirs = scaler_of(context)
            if theirs is not None and not theirs.is_enabled():
                forget_scaler(context)  # a trial whose own AMP is switched off
                theirs = None
            if theirs is not None or has_amp_of_its_own(context):
                raise _wrong("it has a GradScaler of its own", _NO_AMP)
            self.amp = _FromOutside(context, self._settings)
            self._context = context
            self._autocast = _Autocast(self.amp)
        if self.amp is not None:
            self.amp.prepare(model)
            # On the instance: names, state_dict keys and types stay.
            model.forward = partial(self._autocast, model.forward)

    def attach(self, trial: pytorch.PyTorchTrial) -> None:
        """From now on what `trial` asks of its context, and its batches, come through here."""
        assert self.amp is not None
        self._is_attached = True
        amp, build_callbacks = self.amp, trial.build_callbacks
        self._train_batch = trial.train_batch

        def build_all_callbacks() -> dict[str, pytorch.PyTorchCallback]:
            first = {"determined_amp.unmodified": self}
            return {**first, **build_callbacks(), **amp.callbacks(trial)}

        replacements: dict[str, object] = {
            "build_callbacks": build_all_callbacks,
            "train_batch": self.train_batch,
        }
        for name, replacement in replacements.items():
            setattr(trial, name, replacement)

    # What the trial's `train_batch` calls, and it itself.

    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        assert self.amp is not None
        self._losses.clear()
        if self._gradients is not None:
            self._gradients.begin_batch()
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
        self, loss: torch.Tensor, backward: Callable[[torch.Tensor], None], *, create_graph: bool
    ) -> None:
        """Go backward from a loss, and leave true gradients.

        Args:
            loss: Unscaled.
            backward: That of the context.
            create_graph: Whether the trial wants gradients of gradients.
        """
        amp, gradients = self.amp, self._gradients
        if amp is None or not self._is_attached:
            backward(loss)
            return
        if create_graph and amp.scaler.is_enabled():
            raise _wrong(
                "it calls context.backward(create_graph=True), whose gradients would be scaled",
                "precision amp_bf16, which needs no scale",
            )
        if loss.dtype in (torch.float16, torch.bfloat16):
            raise _wrong(
                f"its loss is in {str(loss.dtype).removeprefix('torch.')}: the model's output "
                "is no tensor, list, tuple, dictionary or dataclass, so it was not cast to float32",
                "a model that returns one of these, or .float() on what is taken out of it",
            )
        if loss.numel() == 1:
            kept = loss.detach().reshape(())
            # A CUDA graph that is replayed writes the next loss over this one.
            self._losses.append(kept.clone() if amp.settings.compile.replays_graphs else kept)

        def run(scaled: torch.Tensor) -> None:
            with self._in_backward():
                backward(scaled)

        if gradients is None:
            run(amp.scaler.scale(loss))
        elif amp.is_replaying:  # in search of what overflows: it must be seen
            with gradients.scaled():
                run(amp.scaler.scale(loss))
        else:
            self._remember_weights()
            gradients.backward(loss, run)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[[Callable[[Any], Any] | None, Any], None],
        clip_grads: Callable[[Any], Any] | None,
        scaler: Any,
        *,
        zero_grad: bool,
    ) -> None:
        """Step an optimizer whose gradients are true.

        Args:
            optimizer: The one to be stepped.
            step: That of the context, with a function that clips, and a scaler.
            clip_grads: The trial's.
            scaler: The trial's.
            zero_grad: Whether the gradients are zeroed afterwards.
        """
        amp = self.amp
        if amp is None or not self._is_attached:
            step(clip_grads, scaler)
            return
        if scaler is not None and scaler.is_enabled():
            raise _wrong("it has a GradScaler of its own", _NO_AMP)
        measure = amp.clip(optimizer)

        def clip(parameters: Iterable[torch.Tensor]) -> None:
            parameters = list(parameters)
            measure(parameters)
            assert clip_grads is not None
            clip_grads(parameters)

        if ends_step(self._context):
            amp.scaler.has_unscaled(optimizer, self._begin_step(optimizer))
        step(clip if clip_grads else None, amp.scaler)
        skipped = amp.scaler.outcomes.get(optimizer)
        if skipped is True and optimizer in self._weights:
            self._let_put_back(optimizer, zero_grad)
        if skipped is not None:
            self._weights.pop(optimizer, None)

    @contextmanager
    def _in_backward(self) -> Iterator[None]:
        before, self._autocast.in_backward = self._autocast.in_backward, True
        try:
            yield
        finally:
            self._autocast.in_backward = before

    def _begin_step(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """End its window; returns `found_inf` of it if there is a loss scale."""
        assert self.amp is not None
        scaler = self.amp.scaler
        if self._counted_as(optimizer) in scaler.outcomes:  # a second step in a batch
            self.amp.finish_steps()
        scaler.has_scaled = True
        return None if self._gradients is None else self._gradients.close(optimizer)

    # An optimizer whose class is not torch's may have moved its weights away, and put them back in
    # its step, as sharpness-aware minimisation does. Then a skipped step must still do that.

    def _remember_weights(self) -> None:
        for optimizer in self._context.optimizers:
            is_torchs = type(optimizer).__module__.startswith("torch.")
            if not is_torchs and optimizer not in self._weights:
                norms = torch._foreach_norm([p.detach() for p in parameters_of(optimizer)])
                self._weights[optimizer] = torch.stack(norms)

    def _let_put_back(self, optimizer: torch.optim.Optimizer, zero_grad: bool) -> None:
        parameters = parameters_of(optimizer)
        norms = torch.stack(torch._foreach_norm([p.detach() for p in parameters]))
        if torch.equal(norms, self._weights[optimizer]):
            return
        assert self.amp is not None
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self._drops_gradients = self.amp.scaler.stepping = True
        try:
            optimizer.step()
        finally:
            self._drops_gradients = self.amp.scaler.stepping = False
        if zero_grad:
            optimizer.zero_grad()

    # What torch calls in the training.

    def _before_step(self, optimizer: torch.optim.Optimizer, given: Any, named: Any) -> None:
        """Before each step of any optimizer, through the context or not."""
        amp = self.amp
        assert amp is not None
        if not self._autocast.training:
            return
        drops = self._drops_gradients and optimizer not in self._weights
        if amp.is_replaying:
            drops = True
        elif not amp.scaler.stepping:
            self._own = optimizer
            has_closure = len(given) > 1 or named.get("closure") is not None
            self._refuse_own_step(optimizer, has_closure=has_closure)
            found = self._begin_step(optimizer)
            if found is not None:
                amp.scaler.note(optimizer, found)
                drops = bool(found)
            self._own_skipped = drops
            amp.scaler.stepping = True
        if drops:  # a step without gradients changes nothing
            for parameter in parameters_of(optimizer):
                parameter.grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, *call: Any) -> None:
        if optimizer is self._own:
            self._own = None
            assert self.amp is not None
            scaler = self.amp.scaler
            counted = self._counted_as(optimizer)
            scaler.stepping = False
            scaler.has_stepped(counted, self._own_skipped)
            self._weights.pop(counted, None)

    def _counted_as(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer of the context with the same parameters, if there is one."""
        if optimizer in self._context.optimizers:
            return optimizer
        its = set(map(id, parameters_of(optimizer)))
        same = (o for o in self._context.optimizers if set(map(id, parameters_of(o))) == its)
        return next(same, optimizer)

    def _refuse_own_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        assert self.amp is not None
        scaled = self._gradients is not None
        if (scaled and has_closure) or (
            isinstance(optimizer, torch.optim.LBFGS) and self._autocast.casts
        ):
            raise ConfigError(
                "the trial",
                [
                    f"train_batch: it steps {type(optimizer).__name__} with a closure, for which "
                    "no line helps in 16 bits: it compares losses and gradients of several "
                    "backwards that must not be skipped; allowed: precision fp32 or tf32"
                ],
            )
        if self._gradients is not None and self._gradients.scale is not None:
            raise _wrong(
                "it steps an optimizer inside the backward, where gradients are still scaled",
                "the step after context.backward, or precision amp_bf16, which needs no scale",
            )

    def _run_backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of the engine that all of torch's backwards call."""
        if not self._autocast.training or self._autocast.in_backward or _are_traced(args[0]):
            return run(*args, **kwargs)
        if kwargs.get("accumulate_grad"):
            raise _wrong("it calls loss.backward() itself", "self.context.backward(loss)")
        with self._in_backward():
            if self._gradients is None:
                return run(*args, **kwargs)
            return self._gradients.grad(run, *args, **kwargs)

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
        _refuse_16_bit_weights(self._context)
        if self.amp.scaler.is_enabled():
            self._gradients = TrueGradients(
                self._context.models,
                self._context.optimizers,
                self.amp.scaler,
                device=self._context.device,
                slots=self._context.distributed.size,
            )
        for handle in (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            self._patches.callback(handle.remove)
        self._patches.enter_context(backwards_through(self._run_backward))
        self._convert_hooks()

    def on_trial_shutdown(self) -> None:
        self._patches.close()

    def _convert_hooks(self) -> None:
        """Let the trial's hooks see what they see in float32, those there are and later ones."""
        modules = [module for model in self._context.models for module in model.modules()]
        groups = (o.param_groups for o in self._context.optimizers)
        parameters = [p for module in modules for p in module.parameters(recurse=False)]
        parameters += [p for its in groups for group in its for p in group["params"]]
        found: list[tuple[Any, str, str, Any]] = []
        if self._autocast.casts:
            to_float32 = partial(partial, _in_float32)
            for kind in ("forward", "forward_pre"):
                found.append((nn.Module, f"register_{kind}_hook", f"_{kind}_hooks", to_float32))
        if self._gradients is not None:
            true, of_leaf = self._gradients.hooked, self._gradients.hooked_leaf
            found += [
                (nn.Module, "register_full_backward_hook", "_backward_hooks", true),
                (nn.Module, "register_full_backward_pre_hook", "_backward_pre_hooks", true),
                (torch.Tensor, "register_hook", "_backward_hooks", true),
                (
                    torch.Tensor,
                    "register_post_accumulate_grad_hook",
                    "_post_accumulate_grad_hooks",
                    of_leaf,
                ),
            ]
            retain_grad = torch.Tensor.retain_grad

            def retain(tensor: torch.Tensor) -> None:
                retain_grad(tensor)
                if self._autocast.training and self._gradients is not None:
                    self._gradients.retain(tensor)

            self._patches.enter_context(patched(torch.Tensor, "retain_grad", retain))
        for owner, register, attribute, convert in found:
            for it in modules if owner is nn.Module else parameters:
                hooks = getattr(it, attribute, None) or {}
                for key, hook in hooks.items():
                    hooks[key] = convert(hook) if _is_the_trials(hook) else hook
            method = _registering(getattr(owner, register), convert)
            self._patches.enter_context(patched(owner, register, method))


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
    if own_hooks or _has_own_step(optimizer) or not sparse.isdisjoint(parameters_of(optimizer)):
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


def _registering(register: Callable[..., Any], convert: Callable[..., Any]) -> Callable[..., Any]:
    def method(it: Any, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return register(it, convert(hook) if _is_the_trials(hook) else hook, *args, **kwargs)

    return method


def _is_the_trials(hook: Callable[..., Any]) -> bool:
    """Whether neither torch, Determined nor this library has made a hook, which they want as is."""
    function = hook.func if isinstance(hook, partial) else hook
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.partition(".")[0] not in ("torch", "determined", "determined_amp")


def _are_traced(outputs: Iterable[Any]) -> bool:
    """Whether a compiler looks at a backward, with stand-ins for tensors."""
    dispatch = torch.Tensor.__torch_dispatch__
    return any(getattr(type(it), "__torch_dispatch__", dispatch) is not dispatch for it in outputs)


def _in_float32(hook: Callable[..., Any], /, *given: Any) -> Any:
    """Call a hook of a forward; what it changes in place is changed."""
    cast = as_float32(given)
    result = hook(*cast)
    if result is None:
        for old, new in zip(tree_leaves(given), tree_leaves(cast), strict=True):
            if new is not old and isinstance(new, torch.Tensor) and new._version:
                old.copy_(new)
    return result


def _refuse_16_bit_weights(context: pytorch.PyTorchTrialContext) -> None:
    parameters = [p for optimizer in context.optimizers for p in parameters_of(optimizer)]
    parameters += [p for model in context.models for p in model.parameters()]
    dtypes = {p.dtype for p in parameters if p.requires_grad}
    for dtype in dtypes & {torch.float16, torch.bfloat16}:
        raise ConfigError(
            "the trial",
            [
                f"its weights are in {str(dtype).removeprefix('torch.')}, as after .half() or "
                ".bfloat16(); autocast computes in 16 bits with weights in float32: leave that out"
            ],
        )


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
