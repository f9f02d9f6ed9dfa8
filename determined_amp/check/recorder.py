"""Watches a training: what it does with scaler, optimizers, schedulers, gradients and autocast."""

from __future__ import annotations

import gc
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn, overrides
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

from determined_amp.amp.errors import UserError
from determined_amp.amp.patched import patched
from determined_amp.amp.precision import autocast_is_on
from determined_amp.amp.tensors import is_finite, parameters_of, tensors_of
from determined_amp.amp.torch_private import backwards_through, states_of_steps
from determined_amp.check.forwards import Forwards
from determined_amp.check.lines import (
    called_by_library,
    is_users,
    users_line,
    where_in,
    where_raised,
)
from determined_amp.check.losses import loss_of, mark, mark_gradients
from determined_amp.check.record import Record, Scaler, Schedule
from determined_amp.check.scale_moves import Moves, ScaleMoves
from determined_amp.check.step_gradients import StepGradients

Own = Callable[..., Any]  # what a hook is called in place of
Hook = Callable[..., Any]  # called with that and its arguments

# Windows of an optimizer, from 0, in which the doctor makes the gradients overflow.
OVERFLOWS = (5, 8)

_READS = frozenset(
    (
        *("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__"),
        *("__format__", "__repr__", "__array__", "get_scale"),
    )
)
_SCALER = torch.amp.GradScaler
# Those that do not make themselves as the others do.
_SCHEDULERS = ("LRScheduler", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler")


class Recorder:
    """Records what the training in `watching` does.

    Args:
        overflows: Windows of each optimizer in which its gradients are made to overflow.
        moves: How far to move loss scales in some windows; None for not at all.

    Attributes:
        record: What was seen.
        schedules: What is known of each scheduler.
        before_backward: Called before each; it may end the training.
    """

    def __init__(self, overflows: Collection[int] = OVERFLOWS, moves: Moves | None = None) -> None:
        self.record = Record()
        self.schedules: dict[Any, Schedule] = {}
        self.before_backward: Callable[[], None] = lambda: None
        self._scalers: dict[torch.amp.GradScaler, Scaler] = {}
        self._gradients: list[StepGradients] = []
        self._parts: dict[Any, list[StepGradients]] = {}  # see `_parts_of`
        self._overflows = overflows
        self._moves = ScaleMoves(self._rests, moves)
        self._forwards = Forwards(self.record)
        self._disturbed = False  # gradients, since the newest update of a scale
        self._stack = ExitStack()  # of what is watched
        self._hooked: set[tuple[type, str]] = set()
        self._in_batch = False
        self._running: dict[str, Any] = {}  # see `_outermost`
        self._scaler_that_steps: torch.amp.GradScaler | None = None
        self._steps = 0  # of optimizers, nested in each other
        self._products = torch.get_float32_matmul_precision()
        self._ended = False

    # What the loop around the training calls.

    def begin_batch(self) -> None:
        self.record.batches += 1
        self._in_batch = True
        self._moves.begin(self._scalers)

    def end_batch(self) -> None:
        self._in_batch = False

    def take_state(self, moment: str) -> None:
        """Keep the scale of each scaler and the place of each schedule."""
        for scaler, known in self._scalers.items():
            known.states[moment] = self._scale_of(scaler)
        for scheduler, schedule in self.schedules.items():
            schedule.states[moment] = getattr(scheduler, "last_epoch", None)

    def meet_optimizers(self) -> None:
        """Let those that are there already take part."""
        gc.collect()  # not those of a training that is over
        for thing in gc.get_objects():
            kind: Any = type(thing)
            if issubclass(kind, Optimizer) and hasattr(thing, "param_groups"):
                self._parts_of(thing)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what happens in this block."""
        with self._stack as stack:
            for owner, name, hook in self._hooks():
                hooked = self._in_place_of(getattr(owner, name), hook)
                stack.enter_context(patched(owner, name, hooked))
            stack.callback(setattr, self, "_ended", True)
            stack.callback(self._moves.end)
            for handle in (
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
                register_module_forward_pre_hook(self._before_forward),
                register_module_forward_hook(self._forwards.after, always_call=True),
            ):
                stack.callback(handle.remove)
            stack.enter_context(backwards_through(self._backward))
            stack.enter_context(_eager())
            stack.enter_context(_Functions(self._function))
            stack.callback(self._look_at_the_end)
            try:
                yield
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as error:  # some of Determined's are no `Exception`
                self._note_error(error)
                raise

    def _note_error(self, error: BaseException) -> None:
        # A sentence of this library tells what the trial raised.
        cause = error.__cause__ if isinstance(error, UserError) else None
        cause = cause or error
        self.record.error = type(cause).__name__, str(cause)
        self.record.raised = where_raised(cause)
        self.record.disturbed = self._disturbed

    def _look_at_the_end(self) -> None:
        """Note which weights and buffers are not finite."""
        weights = {id(weight): weight for each in self._gradients for weight in each.weights}
        bad = sum(not is_finite(weight) for weight in weights.values() if weight.numel())
        if bad:
            self.record.not_finite.append(f"{bad} of {len(weights)} weights")
        self.record.not_finite += self._forwards.buffers_not_finite()

    # What is watched, and by what.

    def _hooks(self) -> list[tuple[Any, str, Hook]]:
        makes = [getattr(lr_scheduler, name) for name in _SCHEDULERS]
        return [
            (_SCALER, "__init__", self._make),
            (_SCALER, "scale", self._scale),
            (_SCALER, "unscale_", self._unscale),
            (_SCALER, "step", self._scaler_step),
            (_SCALER, "update", self._update),
            (_SCALER, "get_scale", self._read),
            (Optimizer, "__init__", self._make),
            (nn.Module, "zero_grad", self._zero),
            *((kind, "__init__", self._make_schedule) for kind in makes),
            (torch.autocast, "__enter__", self._autocast),
            (torch, "clear_autocast_cache", self._drop_casts),
            (torch, "save", self._save),
            # All of torch's clips sort their gradients by this, however they were imported.
            (clip_grad, "_group_tensors_by_device_and_dtype", self._clip),
        ]

    def _in_place_of(self, own: Own, hook: Hook) -> Callable[..., Any]:
        @wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            # A module that was imported meanwhile may have kept this.
            return own(*args, **kwargs) if self._ended else hook(own, *args, **kwargs)

        return call

    def _hook_into(self, thing: Any, method: str, hook: Hook) -> None:
        """Watch a method in each class of an object that has one of its own."""
        for kind in type(thing).__mro__:
            if method in vars(kind) and (kind, method) not in self._hooked:
                self._hooked.add((kind, method))
                hooked = self._in_place_of(vars(kind)[method], hook)
                self._stack.enter_context(patched(kind, method, hooked))

    @contextmanager
    def _outermost(self, kind: str, it: object = None) -> Iterator[Any]:
        """None for the outermost call of its kind, else what that was called for."""
        before = self._running.get(kind)
        self._running[kind] = before or it or self
        try:
            yield before
        finally:
            self._running[kind] = before

    # Who takes part.

    def _make(self, own: Own, it: Any, *args: Any, **kwargs: Any) -> None:
        own(it, *args, **kwargs)
        if isinstance(it, Optimizer):
            self._parts_of(it)
        else:
            self._known_scaler(it)

    def _parts_of(self, optimizer: Any) -> list[StepGradients]:
        """The gradients that an optimizer steps with: those of all that it holds, if it wraps."""
        if optimizer not in self._parts:
            weights = set(map(id, parameters_of(optimizer)))
            inside = [g for g in self._gradients if weights.issuperset(map(id, g.weights))]
            if weights != {id(weight) for each in inside for weight in each.weights}:
                inside = [StepGradients(optimizer, self.record, self._overflows)]
                self._gradients += inside
            self._parts[optimizer] = inside
            self._hook_into(optimizer, "zero_grad", self._zero)
        return self._parts[optimizer]

    def _rests(self) -> bool:
        """Whether the next window of an optimizer is one to make overflow."""
        return any(each.is_due() for each in self._gradients)

    def _known_scaler(self, scaler: torch.amp.GradScaler) -> Scaler:
        if scaler not in self._scalers:
            ours = "determined_amp" in type(scaler).__module__
            self._scalers[scaler] = Scaler(users_line(), scaler.is_enabled(), ours)
            self.record.scalers.append(self._scalers[scaler])
        return self._scalers[scaler]

    @staticmethod
    def _scale_of(scaler: torch.amp.GradScaler) -> float | None:
        return float(scaler.get_scale()) if scaler.is_enabled() else None

    def _scales(self) -> list[float]:
        """That of each scaler, in the order of their numbers; 0 of one that is switched off."""
        return [self._scale_of(each) or 0.0 for each in self._scalers]

    # Schedules.

    def _make_schedule(self, own: Own, it: Any, *args: Any, **kwargs: Any) -> None:
        self._hook_into(it, "step", self._move_schedule)
        with self._outermost("schedule", it):
            own(it, *args, **kwargs)  # it moves to its first place
        self._known_schedule(it)

    def _move_schedule(self, own: Own, it: Any, *args: Any, **kwargs: Any) -> Any:
        with self._outermost("schedule", it) as outer:
            result = own(it, *args, **kwargs)
        if outer is not None:
            # A class of the user's may call the method that it overrides: that is no inner one.
            if outer is not it and it in self.schedules:
                self.schedules[it].ours = True
        elif called_by_library():
            self._known_schedule(it).ours = True
        else:
            move = self.record.note("move", schedule=self._known_schedule(it))
            self._parts_of(it.optimizer)[0].window.moves.append(move)
        return result

    def _known_schedule(self, it: Any) -> Schedule:
        if it not in self.schedules:
            optimizer = self._parts_of(it.optimizer)[0].number
            self.schedules[it] = Schedule(type(it).__name__, users_line(), optimizer)
            self.record.schedules.append(self.schedules[it])
        return self.schedules[it]

    # Backward, unscale, clip.

    def _scale(self, own: Own, scaler: Any, outputs: Any) -> Any:
        self._moves.begin([scaler])
        scaled = own(scaler, outputs)
        self._moves.has_scaled(scaler)
        scale = self._scale_of(scaler)
        if scale is not None:
            known = self._known_scaler(scaler)
            known.used = True
            known.states.setdefault("resumed", scale)  # of one that is made in the first batch
            mark(scaled, outputs, scale, [*self._scalers].index(scaler))
        return scaled

    def _backward(self, run: Own, *args: Any, **kwargs: Any) -> Any:
        """In place of the engine that all of torch's backwards call."""
        with self._outermost("backward") as outer:
            if outer is not None:
                return run(*args, **kwargs)
            if not kwargs.get("accumulate_grad"):  # `torch.autograd.grad`
                scale = loss_of(args[0], self._scales()).scale
                gradients = run(*args, **kwargs)
                mark_gradients(gradients, scale)
                return gradients
            return self._watch_backward(partial(run, *args, **kwargs), args[0])

    def _watch_backward(self, run: Callable[[], Any], outputs: Any) -> Any:
        self.before_backward()
        self._look_at_switches()
        scales = self._scales()
        loss = loss_of(outputs, scales)
        autocast = autocast_is_on("cpu") or autocast_is_on("cuda")
        finite = all(map(is_finite, tensors_of(outputs)))
        self._forwards.looks = not finite
        before = {}
        for gradients in self._gradients:
            gradients.look()
            gradients.before_backward()
            before[gradients] = gradients.versions()
        result = run()
        reached = [each for each, versions in before.items() if each.versions() != versions]
        event = self.record.note(
            "backward",
            loss=loss,
            autocast=autocast,
            finite=finite,
            reached=len(reached),
            scale=max(scales, default=0.0),
            added=math.hypot(*(gradients.norm_added() for gradients in reached)),
        )
        may_force = not self._moves.is_moved
        for gradients in [each for each in reached if each.add(event, may_force=may_force)]:
            self._disturbed = True
            for sharing in self._of_trainers(gradients.weights):
                sharing.window.forced = sharing.window.forced or 1
        return result

    def _of_trainers(self, parameters: Iterable[torch.Tensor]) -> list[StepGradients]:
        """The gradients of all who train any of these."""
        theirs = set(map(id, parameters))
        return [g for g in self._gradients if not theirs.isdisjoint(map(id, g.weights))]

    def _unscale(self, own: Own, scaler: Any, optimizer: Any) -> None:
        parts = self._parts_of(optimizer)
        for gradients in parts:
            gradients.look()
        own(scaler, optimizer)
        if scaler.is_enabled() and any(gradients.pending for gradients in parts):
            for gradients in parts:
                gradients.unscale(float(scaler.get_scale()))

    def _clip(self, own: Own, lists: Any, *args: Any, **kwargs: Any) -> Any:
        """Before a clip: it gets lists of gradients, and its limit stands in one of its frames."""
        limit = _limit_of_clip()
        given = {id(gradient) for gradients in lists for gradient in gradients}
        pending = [each for each in self._gradients if each.pending]
        clipped = [each for each in pending if not given.isdisjoint(map(id, each.dense()))]
        if limit is not None and clipped:
            for gradients in clipped:
                gradients.look()
                gradients.clipped = True
            norm = math.hypot(*(each.norm for each in clipped))
            factor = max((each.factor for each in clipped if each.factor > 1.5), default=1.0)
            self.record.note("clip", of=limit[0], limit=limit[1], norm=norm, factor=factor)
        return own(lists, *args, **kwargs)

    # Step, update, zero_grad.

    def _scaler_step(self, own: Own, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled():
            self._known_scaler(scaler)
        self._steps = 0  # an earlier one may have raised
        parts, before = self._parts_of(optimizer), len(self.record.of("step"))
        for gradients in parts:
            gradients.look()
        self._scaler_that_steps = scaler
        try:
            result = own(scaler, optimizer, *args, **kwargs)
        finally:
            self._scaler_that_steps = None
        if len(self.record.of("step")) == before:
            found: Any = states_of_steps(scaler)[id(optimizer)]["found_inf_per_device"]
            for gradients in parts:
                self._step(gradients, scaler, skipped=not found or any(map(bool, found.values())))
        return result

    def _before_step(self, optimizer: Optimizer, *call: Any) -> None:
        self._steps += 1
        if self._steps > 1:
            return
        # What a scaler leaves to a fused optimizer.
        scale: Any = getattr(optimizer, "grad_scale", None)
        found_inf: Any = getattr(optimizer, "found_inf", None)
        skipped = found_inf is not None and bool(float(found_inf))
        divisor = 1.0 if scale is None else float(scale)
        for gradients in self._parts_of(optimizer):
            gradients.look()
            self._step(gradients, self._scaler_that_steps, skipped=skipped, divisor=divisor)

    def _step(self, gradients: StepGradients, scaler: Any, *, skipped: bool, **how: Any) -> None:
        scaled = scaler is not None and scaler.is_enabled()
        gradients.step(
            skipped=skipped,
            scaled=scaled,
            scale=self._scale_of(scaler) if scaled else gradients.scale,
            moved=self._moves.is_moved,
            disturbed=self._disturbed,
            after_save=self.record.saved,
            **how,
        )

    def _after_step(self, optimizer: Optimizer, *call: Any) -> None:
        self._steps = max(self._steps - 1, 0)
        if not self._steps:
            for gradients in self._parts_of(optimizer):
                gradients.note_used()

    def _update(self, own: Own, scaler: Any, *args: Any, **kwargs: Any) -> None:
        for gradients in self._gradients:
            gradients.look()
        sets = bool(args) or kwargs.get("new_scale") is not None
        self._moves.update(scaler, partial(own, scaler, *args, **kwargs), sets=sets)
        self._disturbed = False
        if scaler.is_enabled():
            self._known_scaler(scaler)
            self.record.note("update", after=self._scale_of(scaler))

    def _zero(self, own: Own, it: Any, *args: Any, **kwargs: Any) -> Any:
        # Whether it has zeroed something is seen at the next backward.
        with self._outermost("zero") as outer:
            if outer is None and not self._steps:
                self.record.note("zero_grad")
            return own(it, *args, **kwargs)

    # Forwards, and what costs, hides, switches or is saved.

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._moves.begin(self._scalers)
        self._forwards.before(module, inputs)

    def _drop_casts(self, own: Own) -> None:
        self._forwards.drop_casts()
        own()

    def _autocast(self, own: Own, region: Any) -> Any:
        entered = own(region)
        is_enabled = autocast_is_on(region.device)
        if is_enabled:
            self._forwards.enter_autocast()
        made_before = region.device == "cuda" and not self.record.has_cuda
        if is_enabled or made_before or is_users(sys._getframe(2).f_code.co_filename):
            self.record.note(
                "autocast" if is_enabled else "autocast_off",
                dtype=str(region.fast_dtype).removeprefix("torch."),
                explicit=getattr(region, "_given_dtype", True),
                grad=torch.is_grad_enabled(),
                in_batch=self._in_batch,
            )
        return entered

    def _function(self, name: str, args: Any, kwargs: Any) -> None:
        """A function of torch is called, with the caller three frames above."""
        if not self._in_batch:
            return
        if name in _READS:
            self._note_read(name)
        elif name in ("nan_to_num", "nan_to_num_"):
            tensor = args[0] if args else kwargs["input"]
            is_loss = tensor.requires_grad and tensor.numel() == 1
            self.record.note("hide", scalar=is_loss)

    def _read(self, own: Own, scaler: Any) -> Any:
        self._note_read("get_scale")
        return own(scaler)

    def _note_read(self, name: str) -> None:
        """The host reads; what torch and this library read by themselves is not counted."""
        frame: Any = sys._getframe(3)
        if frame.f_code.co_filename == overrides.__file__:  # on its way from a method in Python
            frame = frame.f_back.f_back
        if self._in_batch and is_users(frame.f_code.co_filename):
            where = where_in(frame.f_code.co_filename, frame.f_lineno)
            self.record.syncs[where, name.strip("_")] += 1

    def _look_at_switches(self) -> None:
        """The precision of float32 products, which is one for the whole process."""
        before, self._products = self._products, torch.get_float32_matmul_precision()
        if self._products != before and self._in_batch:
            self.record.note("tf32", value=self._products)

    def _save(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        parts = [*_parts_in(args[0] if args else kwargs["obj"])]
        scales = [scale for scale in self._scales() if scale]
        optimizer = any(isinstance(each, Optimizer) or _is_optimizers(each) for each in parts)
        scale = any(isinstance(each, _SCALER) or _number_of(each) in scales for each in parts)
        self.record.note("save", optimizer=optimizer, scale=scale)
        return own(*args, **kwargs)


class _Functions(TorchFunctionMode):
    """Tells a hook which functions of torch are called, and with what."""

    def __init__(self, hook: Callable[[str, Any, Any], None]) -> None:
        super().__init__()
        self._hook = hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._hook(getattr(func, "__name__", ""), args, kwargs)
        return func(*args, **kwargs)


def _limit_of_clip() -> tuple[str, float] | None:
    """The name and the value of the limit of a clip of torch's that begins now."""
    limit = None
    for frame, _ in traceback.walk_stack(sys._getframe(3)):
        known, name = frame.f_locals, frame.f_code.co_name
        if frame.f_code.co_filename != clip_grad.__file__:
            break
        if name == "clip_grad_norm_" and "total_norm" in known:
            return None  # it began before
        for each in ("max_norm", "clip_value"):
            limit = (each, float(known[each])) if each in known else limit
    return limit


def _parts_in(content: Any) -> Iterator[Any]:
    """An object that is saved, and all that is in its containers."""
    yield content
    if isinstance(content, (dict, list, tuple)):
        for part in content.values() if isinstance(content, dict) else content:
            yield from _parts_in(part)


def _is_optimizers(state: Any) -> bool:
    return isinstance(state, dict) and "param_groups" in state


def _number_of(value: Any) -> float | None:
    is_number = isinstance(value, (int, float, torch.Tensor))
    if not is_number or (isinstance(value, torch.Tensor) and value.numel() != 1):
        return None
    return float(value)


@contextmanager
def _eager() -> Iterator[None]:
    """Let compiled models run as they are written, with all hooks."""
    with ExitStack() as stack:
        if hasattr(torch.compiler, "set_stance"):  # not in torch 2.3
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(warnings.catch_warnings())
        # What reads a number is this file, and not the line that torch would name.
        for words in ("Detected call of `lr_scheduler", "Converting a tensor with requires_grad"):
            warnings.filterwarnings("ignore", words)
        yield
