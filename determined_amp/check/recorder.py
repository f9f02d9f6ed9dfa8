"""Watches a training through hooks into torch, and notes what it does.

Scalers, optimizers, schedulers, backwards, clips, autocast, casts and saves become
events of a `Record`. The recorder passes what happens to the gradients of an optimizer
to `step_gradients.py`, and forwards to `forwards.py` and `causes.py`. `any_loop.py` and
`doctor.py` run it.
"""

from __future__ import annotations

import gc
import math
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from determined_amp.amp.clips import Clip, listen_to_clips
from determined_amp.amp.errors import UserError
from determined_amp.amp.patched import patched
from determined_amp.amp.precision import autocast_is_on
from determined_amp.amp.tensors import (
    SIXTEEN_BITS,
    closure_of,
    dtype_name,
    has_numbers,
    is_finite,
    parameters_of,
    tensors_of,
)
from determined_amp.amp.torch_private import backwards_through, states_of_steps
from determined_amp.amp.users_code import is_users
from determined_amp.check.causes import CauseSearch
from determined_amp.check.forwards import Forwards
from determined_amp.check.losses import loss_of, mark, was_scaled
from determined_amp.check.record import (
    Event,
    Record,
    Scaler,
    Schedule,
    called_by_library,
    caller,
    users_line,
    where_raised,
)
from determined_amp.check.stand_in import StandIn
from determined_amp.check.step_gradients import SCALED, StepGradients

Run = Callable[..., Any]  # calls the replaced function with its arguments
Hook = Callable[..., Any]  # called with a `Run` and the arguments of the call

# The windows of each optimizer, counted from 0, whose gradients are made to overflow.
OVERFLOWS = (5, 8)
# How many steps of an optimizer are enough.
STEPS = 20

_SCALER = torch.amp.GradScaler
# Functions that have no 16-bit kernel on CUDA, or only a restricted one.
_WITHOUT_16_BITS = re.compile(
    "fft_|linalg_|i?stft$|(nan)?quantile$|lstsq|svd|qr$|inverse$|det$"
)
# The methods that turn a tensor into a Python number.
_READS = ("item", "__float__", "tolist")
# The constructors that are watched: each other scheduler calls one of these.
_SCHEDULERS = ("LRScheduler", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler")


class Recorder:
    """Records what the training in the block of `watching` does.

    Args:
        overflows: The windows of each optimizer, counted from 0, in which its gradients
            are made to overflow.
        looks_anyway: Whether to watch two forwards operation by operation.

    Attributes:
        record: What the training did.
        schedules: What is known of each scheduler.
        before_backward: Called before each backward. It may end the training.
    """

    def __init__(
        self, overflows: Collection[int] = OVERFLOWS, *, looks_anyway: bool = True
    ) -> None:
        self.record = Record()
        self.schedules: dict[Any, Schedule] = {}
        self.before_backward: Callable[[], None] = lambda: None
        self._scalers: dict[torch.amp.GradScaler, Scaler] = {}
        self._gradients: list[StepGradients] = []
        self._by_optimizer: dict[Any, list[StepGradients]] = {}
        self._windows_to_force = [*overflows]
        self._forwards = Forwards(self.record)
        self._cause_search = CauseSearch(
            self.record, self._forwards.roots, looks_anyway=looks_anyway
        )
        # Whether gradients were made to overflow since the last update of a scale.
        self._disturbed = False
        self._stack = ExitStack()  # undoes the hooks
        self._hooked: set[tuple[type, str]] = set()
        self._in_batch = False
        self._running: set[Hook] = set()
        self._backward_now: tuple[Event, dict[StepGradients, Any]] | None = None
        self._scaler_that_steps: torch.amp.GradScaler | None = None
        # Whether an optimizer has stepped since that scaler's `step` began.
        self._has_stepped = False
        self._stepping: FrameType | None = None  # the frame of the outermost step
        self._stand_in = StandIn(self._see_function)
        self._ended = False

    # Calls from the code that runs the training.

    def begin_batch(self, batch: Any = None) -> None:
        """Note that a training batch begins."""
        self.record.batches += 1
        self._in_batch = True
        self._cause_search.begin_batch(batch)

    def end_batch(self) -> None:
        """Note that the training batch is over."""
        self._in_batch = False
        self._cause_search.end_forward()
        self._cause_search.stop_watching()

    def take_state(self, moment: str) -> None:
        """Keep the scale of each scaler and the place of each schedule.

        Args:
            moment: The key in `states`: "saved" or "resumed".
        """
        for scaler, known in self._scalers.items():
            known.states[moment] = _scale_of(scaler)
        for scheduler, schedule in self.schedules.items():
            schedule.states[moment] = getattr(scheduler, "last_epoch", None)

    def meet_optimizers(self) -> None:
        """Find the optimizers that exist already, so that they are watched."""
        gc.collect()  # drops optimizers of a training that is over
        for thing in gc.get_objects():
            kind: Any = type(thing)
            if issubclass(kind, Optimizer) and hasattr(thing, "param_groups"):
                self._gradients_of(thing)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what happens in this block."""
        with self._stack as stack:
            stack.enter_context(self._stand_in.standing_in())
            for owner, name, hook in self._hooks():
                hooked = self._in_place_of(getattr(owner, name), hook)
                stack.enter_context(patched(owner, name, hooked))
            stack.callback(setattr, self, "_ended", True)
            for handle in (
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
                register_module_forward_pre_hook(self._before_forward),
                register_module_forward_hook(self._forwards.after, always_call=True),
            ):
                stack.callback(handle.remove)
            stack.callback(listen_to_clips(self._clip))
            backward = partial(self._call_hook, self._backward)
            stack.enter_context(backwards_through(backward))
            stack.enter_context(eager())
            stack.callback(self._cause_search.stop_watching)
            stack.callback(self._cause_search.end_forward)
            stack.callback(self._look_at_the_end)
            try:
                yield
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as error:  # some of Determined's are no `Exception`
                self._note_error(error)
                raise

    def _note_error(self, error: BaseException) -> None:
        """Record the error that ended the training."""
        if isinstance(error, SystemExit) and not self._disturbed:
            return  # e.g. wrong options
        # An error of this library may report what the trial raised.
        cause = error.__cause__ if isinstance(error, UserError) else None
        cause = cause or error
        self.record.error = f"{type(cause).__name__}: {cause}"
        self.record.raised = where_raised(cause)
        self.record.error_after_overflow = self._disturbed

    def _look_at_the_end(self) -> None:
        """Record what is not finite, and the weights that got no gradient."""
        self.record.lacks_cuda |= self._stand_in.is_asked
        reached = [each for each in self._gradients if each.window.place]
        given = (weight for each in reached for weight in each.weights)
        weights = {weight for weight in given if weight.requires_grad}
        bad = sum(not is_finite(weight) for weight in weights)
        if bad:
            self.record.not_finite.append(f"{bad} of {len(weights)} weights")
        self.record.not_finite += self._forwards.buffers_not_finite()
        trained = {weight for each in reached for weight in each.trained_weights}
        self.record.cut_off = [*self._forwards.holders_of(weights - trained)]

    # Install hooks.

    def _hooks(self) -> Iterator[tuple[Any, str, Hook]]:
        """Yield the owner and the name of each replaced function, with its hook."""
        yield _SCALER, "__init__", self._meet
        yield _SCALER, "scale", self._scale
        yield _SCALER, "unscale_", self._unscale
        yield _SCALER, "step", self._scaler_step
        yield _SCALER, "update", self._update
        yield Optimizer, "__init__", self._meet
        for name in _SCHEDULERS:
            yield getattr(lr_scheduler, name), "__init__", self._schedule
        yield nn.Module, "zero_grad", self._zero
        for name in ("half", "bfloat16", "to"):
            yield nn.Module, name, self._cast
        yield torch.autocast, "__enter__", self._autocast
        yield torch, "clear_autocast_cache", self._drop_casts
        yield torch, "save", self._save
        yield torch, "load", self._load
        for kind in (_SCALER, Optimizer):
            yield kind, "load_state_dict", self._restore
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            yield torch.Tensor, name, self._watch_hook

    def _in_place_of(self, own: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        """The function that replaces another one, and calls a hook with it."""

        @wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call_hook(hook, own, *args, **kwargs)

        return call

    def _call_hook(self, hook: Hook, own: Run, *args: Any, **kwargs: Any) -> Any:
        """Call a hook in place of a function.

        If the hook runs already, the replaced function has called itself, or that of a
        base class. Then call the function without the hook.
        """
        run = partial(own, *args, **kwargs)
        # After the end, a module may still hold the replacement.
        if self._ended or hook in self._running:
            return run()
        self._running.add(hook)
        try:
            return hook(run, *args, **kwargs)
        finally:
            self._running.discard(hook)

    def _hook_into(self, thing: Any, method: str, hook: Hook) -> None:
        """Watch a method in each class of an object that defines it."""
        for kind in type(thing).__mro__:
            if method in vars(kind) and (kind, method) not in self._hooked:
                self._hooked.add((kind, method))
                hooked = self._in_place_of(vars(kind)[method], hook)
                self._stack.enter_context(patched(kind, method, hooked))

    # Optimizers and scalers.

    def _meet(self, run: Run, it: Any, *args: Any, **kwargs: Any) -> None:
        """Meet a new scaler or optimizer."""
        run()
        known = self._gradients_of if isinstance(it, Optimizer) else self._known_scaler
        known(it)

    def _gradients_of(self, optimizer: Any) -> list[StepGradients]:
        """The gradients that an optimizer steps with.

        A wrapper's are those of the optimizers that it wraps, if these hold all of its
        weights.
        """
        if optimizer not in self._by_optimizer:
            weights = set(parameters_of(optimizer))
            inside = [g for g in self._gradients if weights.issuperset(g.weights)]
            if weights != {weight for each in inside for weight in each.weights}:
                new = StepGradients(optimizer, self.record, self._windows_to_force)
                inside = [new]
                self._gradients += inside
            self._by_optimizer[optimizer] = inside
            self._hook_into(optimizer, "zero_grad", self._zero)
        return self._by_optimizer[optimizer]

    def _measured_gradients_of(self, optimizer: Any) -> list[StepGradients]:
        """The same, after noting what the user's code did to them."""
        its = self._gradients_of(optimizer)
        for gradients in its:
            gradients.note_changes()
        return its

    def _known_scaler(self, scaler: torch.amp.GradScaler) -> Scaler:
        if scaler not in self._scalers:
            ours = "determined_amp" in type(scaler).__module__ or called_by_library()
            self._scalers[scaler] = Scaler(users_line(), scaler.is_enabled(), ours)
            self.record.scalers.append(self._scalers[scaler])
        return self._scalers[scaler]

    def _scales(self) -> list[float]:
        """The scale of each scaler, in the order of their numbers; 0 if disabled."""
        return [_scale_of(each) for each in self._scalers]

    # Schedules.

    def _schedule(self, run: Run, it: Any, *args: Any, **kwargs: Any) -> None:
        """Meet a new scheduler, or note a move; it may move others inside it."""
        before = _place_of(it) if it in self.schedules else None
        run()
        if it not in self.schedules:
            self._hook_into(it, "step", self._schedule)
            optimizer = self._gradients_of(it.optimizer)[0].number
            self.schedules[it] = Schedule(type(it).__name__, users_line(), optimizer)
            self.record.schedules.append(self.schedules[it])
            return
        schedule = self.schedules[it]
        schedule.ours = called_by_library()
        place = any(each is not None for each in [*args, *kwargs.values()])
        place = place or _place_of(it) == before
        move = self.record.note("move", schedule=schedule, place=place)
        move.where = move.where or schedule.where
        self._gradients_of(it.optimizer)[0].window.moves.append(move)

    # Backward, unscale, clip.

    def _scale(self, run: Run, scaler: Any, outputs: Any) -> Any:
        """Note that a scaler scales a loss, and mark the loss in the graph."""
        scaled = run()
        scale = _scale_of(scaler)
        if scale:
            known = self._known_scaler(scaler)
            known.used = True
            # for a scaler that is made in the first batch of a resumed run
            known.states.setdefault("resumed", scale)
            mark(scaled, scale=scale, dtype=tensors_of(outputs)[0].dtype)
        return scaled

    def _backward(self, run: Run, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the engine that all of torch's backwards call."""
        if kwargs.get("accumulate_grad"):
            result = self._note_backward(run, outputs)
        else:  # `torch.autograd.grad`
            self.record.note("grad", loss=loss_of(outputs, self._scales()))
            result = run()
            mark(result, gradient=True)
        for each in self._gradients:
            each.computed_since_step = True
        return result

    def _note_backward(self, run: Run, outputs: Any) -> Any:
        """Note a backward that adds to gradients."""
        self.before_backward()
        losses = tensors_of(outputs)
        event = self.record.note(
            "backward",
            loss=loss_of(outputs, self._scales()),
            autocast=autocast_is_on("cpu") or autocast_is_on("cuda"),
            in_step=self._is_stepping(),
            finite=all(map(is_finite, losses)),
            reached=0,
            added=0.0,
            divided=False,
        )
        versions = {}
        for gradients in self._gradients:
            gradients.note_changes()
            gradients.before_backward()
            versions[gradients] = gradients.versions()
        self._backward_now = event, versions
        try:
            result = run()
        finally:
            self._note_arrivals()
            self._backward_now = None
        self._cause_search.end_backward(losses, event.added)
        return result

    def _watch_hook(self, run: Run, tensor: Any, hook: Hook) -> Any:
        """Measure the gradient of a weight before a hook of the user's changes it."""

        @wraps(hook)
        def watched(given: Any) -> Any:
            gradient = given.grad if given is tensor else given
            for gradients in self._gradients:
                gradients.note_arrival(tensor, gradient)
            return hook(given)

        own: Any = run
        return own.func(tensor, watched if tensor.is_leaf else hook)

    def _note_arrivals(self, *, may_force: bool = True) -> None:
        """Note which gradients the running backward has changed so far.

        Args:
            may_force: Whether they may be made to overflow now.
        """
        if self._backward_now is None:
            return
        event, before = self._backward_now
        changed = [each for each in before if each.versions() != before[each]]
        due = []
        for gradients in changed:
            del before[gradients]
            event.reached += 1
            if gradients.note_backward(event, may_force=may_force):
                due.append(gradients)
        for gradients in due:
            self._disturb(gradients)

    def _disturb(self, forced: StepGradients) -> None:
        """Make gradients overflow.

        All optimizers that train one of the same weights share the overflow.
        """
        self._disturbed = True
        forced.force_overflow()
        theirs = set(forced.weights)
        for gradients in self._gradients:
            gradients.share_overflow(theirs)

    def _unscale(self, run: Run, scaler: Any, optimizer: Any) -> None:
        """Note that a scaler unscales an optimizer's gradients."""
        its = self._measured_gradients_of(optimizer)
        run()
        for gradients in its:
            if scaler.is_enabled() and gradients.is_open:
                gradients.unscale(float(scaler.get_scale()))

    def _clip(self, clip: Clip) -> None:
        """Note a clip before torch clips; torch's frames show the limit."""
        known = _locals_of(clip)
        given = {*clip.gradients}
        clipped = [each for each in self._gradients if each.has_any_of(given)]
        for gradients in clipped:
            gradients.note_changes()
        factors = [each.factor for each in clipped if each.is_open]
        if self._backward_now is not None:  # a hook of the backward clips
            factors = [self._backward_now[0].loss.scale or 1.0]
        if not factors:
            return
        factor = max((each for each in factors if each > SCALED), default=1.0)
        for of in {"max_norm", "clip_value"} & known.keys():
            if known.get("error_if_nonfinite"):
                self._windows_to_force.clear()
                for gradients in self._gradients:
                    gradients.take_overflow_back()
            for gradients in clipped:
                gradients.clipped = True
            norms = (each.detach().float().norm() for each in clip.gradients)
            norm = math.hypot(*map(float, norms))
            if math.isfinite(norm):
                limit = float(known[of])
                self.record.note("clip", of=of, limit=limit, norm=norm, factor=factor)

    # Step, update, zero_grad.

    def _scaler_step(
        self, run: Run, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Note the step of a scaler, also if it does not call the optimizer."""
        if closure_of(args, kwargs) is not None:
            self.record.note("closure")
        its = self._measured_gradients_of(optimizer)
        self._scaler_that_steps, self._has_stepped = scaler, False
        try:
            result = run()
            if not self._has_stepped:
                found: Any = states_of_steps(scaler)[id(optimizer)]
                known = found["found_inf_per_device"].values()
                for gradients in its:
                    gradients.begin_step(skipped=not known or any(map(bool, known)))
                    self._end_step(gradients)
            return result
        finally:
            self._scaler_that_steps = None

    def _is_stepping(self) -> bool:
        """Whether an optimizer steps. After an error in a step, its frame is gone."""
        frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
        return any(frame is self._stepping for frame in frames)

    def _before_step(self, optimizer: Any, *call: Any) -> None:
        """A hook of torch before each optimizer step."""
        if self._is_stepping():
            return
        self._stepping = sys._getframe(1)
        if self._backward_now is None:
            self._cause_search.stop_watching()
        # A hook that steps in a backward may have looked for an overflow already.
        self._note_arrivals(may_force=False)
        skipped = bool(getattr(optimizer, "found_inf", None) or False)
        # A fused optimizer divides the gradients itself.
        divisor = float(getattr(optimizer, "grad_scale", None) or 1.0)
        for gradients in self._gradients_of(optimizer):
            gradients.begin_step(skipped=skipped, divisor=divisor)

    def _after_step(self, optimizer: Optimizer, *call: Any) -> None:
        """A hook of torch after each optimizer step."""
        if self._stepping is sys._getframe(1):
            self._stepping = None
            for gradients in self._gradients_of(optimizer):
                self._end_step(gradients)
            self._watch_forward()

    def _end_step(self, gradients: StepGradients) -> None:
        """Note the step of one optimizer, with what the recorder knows of it."""
        self._has_stepped = True
        scaler = self._scaler_that_steps
        scaled = scaler is not None and scaler.is_enabled()
        gradients.end_step(
            scaled=scaled,
            scaler=self._known_scaler(scaler) if scaler and scaled else None,
            scale=_scale_of(scaler) if scaler and scaled else 0.0,
            disturbed=self._disturbed,
            in_backward=self._backward_now is not None,
            after_save=self.record.saved,
        )

    def _update(self, run: Run, scaler: Any, *args: Any, **kwargs: Any) -> None:
        """Note the update of a scaler."""
        for gradients in self._gradients:
            gradients.update()
        run()
        self._disturbed = False
        if scaler.is_enabled():
            self.record.note("update", after=_scale_of(scaler))
        self._watch_forward()

    def _zero(self, run: Run, *args: Any, **kwargs: Any) -> Any:
        """Note a `zero_grad`, but not one inside a step."""
        if self._is_stepping():
            return run()
        self.record.note("zero_grad")
        run()
        for gradients in self._gradients:
            gradients.note_zeros()
        self._watch_forward()
        return None

    def _watch_forward(self) -> None:
        """Watch the next forward, if there is a reason to."""
        # torch drops a mode that a hook enters during a backward.
        if self._backward_now is None:
            self._cause_search.watch_if_due()

    # Forwards, casts and saves.

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        """A hook of torch before the forward of each module."""
        is_trained = torch.is_grad_enabled() and not self._in_batch
        if is_trained and self._forwards.begins_again(module):
            self._cause_search.end_forward()
        self._forwards.before(module, inputs)

    def _drop_casts(self, run: Run) -> None:
        """Note that autocast drops its casts of weights."""
        self._forwards.drop_casts()
        run()

    def _autocast(self, run: Run, region: Any) -> Any:
        """Note that an autocast region is entered."""
        entered = run()
        is_enabled = autocast_is_on(region.device)
        if is_enabled:
            self._forwards.enter_autocast()
        made_before = region.device == "cuda" and not torch.cuda.is_available()
        if is_enabled or made_before or is_users(caller().f_code.co_filename):
            self.record.note(
                "autocast" if is_enabled else "autocast_off",
                dtype=dtype_name(region.fast_dtype),
                grad=torch.is_grad_enabled(),
                in_batch=self._in_batch,
            )
        return entered

    def _cast(self, run: Run, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Note that a module's weights are cast to 16 bits."""
        before = _dtypes_of(module)
        result = run()
        for dtype in _dtypes_of(module) - before:
            self.record.note("cast", dtype=dtype)
        return result

    def _see_function(self, name: str, given: Any, result: Any) -> None:
        """Note a call of a torch function, after it returned."""
        if (
            self._stand_in.applies
            and _WITHOUT_16_BITS.match(name)
            and autocast_is_on("cpu")
        ):
            dtypes = {each.dtype for each in tensors_of(given)}
            if dtypes.intersection(SIXTEEN_BITS):
                self.record.note("gpu_refuses", operation=name)
        if name in _READS and any(map(was_scaled, tensors_of(given))):
            self.record.note("read")
        is_trained = isinstance(result, torch.Tensor) and result.requires_grad
        if name.startswith("nan_to_num") and not is_trained:
            self.record.note("hide")
        is_number = is_trained and result.numel() == 1 and result.is_floating_point()
        if is_number and has_numbers(result):
            self._cause_search.loss = result.detach()
            self._cause_search.line = users_line()

    def _save(self, run: Run, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Note whether `torch.save` gets an optimizer's state and a loss scale."""
        scales = [scale for scale in self._scales() if scale]
        values = [*_values_in(obj)]
        optimizer = any(
            isinstance(each, Optimizer) or each == "param_groups" for each in values
        )
        scale = any(isinstance(each, _SCALER) or each in scales for each in values)
        scalers = _scalers_in(values)
        self.record.note("save", optimizer=optimizer, scale=scale, scalers=scalers)
        return run()

    def _load(self, run: Run, *args: Any, **kwargs: Any) -> Any:
        """Note how many scalers' states `torch.load` returns."""
        loaded = run()
        self.record.note("load", scalers=_scalers_in([*_values_in(loaded)]))
        return loaded

    def _restore(self, run: Run, whose: Any, *args: Any, **kwargs: Any) -> Any:
        """Note that a scaler or an optimizer loads a state."""
        self.record.note("restore", scaler=isinstance(whose, _SCALER))
        return run()


def _dtypes_of(module: nn.Module) -> set[str]:
    """The 16-bit dtypes of a module's parameters."""
    dtypes = {parameter.dtype for parameter in module.parameters()}
    return {dtype_name(dtype) for dtype in dtypes.intersection(SIXTEEN_BITS)}


def _scale_of(scaler: torch.amp.GradScaler) -> float:
    """The loss scale of a scaler; 0 if it is disabled."""
    return float(scaler.get_scale()) if scaler.is_enabled() else 0.0


def _place_of(scheduler: Any) -> Any:
    """A value that changes whenever a scheduler moves."""
    rates = [group.get("lr") for group in scheduler.optimizer.param_groups]
    return getattr(scheduler, "last_epoch", None), rates


def _locals_of(clip: Clip) -> dict[str, Any]:
    """The local variables of the torch functions that clip.

    Empty if `clip_grad_norm_` has measured the norm: that was reported before.
    """
    known: dict[str, Any] = {}
    for frame in clip.frames:
        known |= frame.f_locals
        if frame.f_code.co_name == "clip_grad_norm_" and "total_norm" in known:
            return {}
    return known


def _scalers_in(values: Iterable[Any]) -> int:
    """How many scalers, or states of them, are among some values."""
    # A state of a scaler has this key.
    return sum(isinstance(each, _SCALER) or each == "growth_factor" for each in values)


def _values_in(content: Any) -> Iterator[Any]:
    """Yield the strings, numbers, optimizers and scalers in containers of any depth."""
    if isinstance(content, torch.Tensor) and content.numel() == 1:
        yield content.item()
    elif isinstance(content, dict):
        yield from _values_in([*content.keys(), *content.values()])
    elif isinstance(content, (list, tuple)):
        for part in content:
            yield from _values_in(part)
    elif isinstance(content, (str, int, float, Optimizer, _SCALER)):
        yield content


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled models as they are written, with all hooks."""
    with ExitStack() as stack:
        if hasattr(torch.compiler, "set_stance"):  # not in torch 2.3
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(warnings.catch_warnings())
        # These warnings would be about calls of this file, not of the user's code.
        for words in (
            "Detected call of `lr_scheduler",
            "Converting a tensor with requires_grad",
        ):
            warnings.filterwarnings("ignore", words)
        yield
