"""Watches a training: what it does with scaler, optimizers, schedulers, gradients and
autocast.
"""

from __future__ import annotations

import gc
import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn, overrides
from torch.amp import autocast_mode
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
from torch.overrides import TorchFunctionMode

from determined_amp.amp.clips import Clip, listen_to_clips
from determined_amp.amp.errors import UserError
from determined_amp.amp.patched import patched
from determined_amp.amp.precision import autocast_is_on
from determined_amp.amp.tensors import (
    closure_of,
    is_finite,
    parameters_in,
    parameters_of,
    tensors_of,
)
from determined_amp.amp.torch_private import backwards_through, states_of_steps
from determined_amp.amp.users_code import is_users
from determined_amp.check.forwards import Forwards
from determined_amp.check.lines import (
    called_by_library,
    caller,
    users_line,
    where_in,
    where_raised,
)
from determined_amp.check.losses import loss_of, mark, mark_gradients
from determined_amp.check.record import Record, Scaler, Schedule
from determined_amp.check.scale_moves import Moves, ScaleMoves
from determined_amp.check.step_gradients import StepGradients

Run = Callable[..., Any]  # makes the call that a hook is called in place of
Hook = Callable[..., Any]  # called with that and the arguments of the call

# Windows of an optimizer, from 0, in which the doctor makes the gradients overflow.
OVERFLOWS = (5, 8)

_READS = frozenset(
    (
        *(
            "item",
            "tolist",
            "cpu",
            "numpy",
            "__float__",
            "__int__",
            "__bool__",
            "__index__",
        ),
        *("__format__", "__repr__", "__array__", "get_scale"),
    )
)
_SCALER = torch.amp.GradScaler
# Those that do not make themselves as the others do.
_SCHEDULERS = ("LRScheduler", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler")


class Recorder:
    """Records what the training in `watching` does.

    Args:
        overflows: Windows of each optimizer in which its gradients are made to
            overflow.
        moves: How far to move loss scales in some windows; None for not at all.

    Attributes:
        record: What was seen.
        schedules: What is known of each scheduler.
        before_backward: Called before each; it may end the training.
    """

    def __init__(
        self, overflows: Collection[int] = OVERFLOWS, moves: Moves | None = None
    ) -> None:
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
        # weights that had a gradient at a step
        self._stepped: set[torch.Tensor] = set()
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
            known.states[moment] = _scale_of(scaler)
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
            stack.callback(listen_to_clips(self._clip))
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
        self.record.error = f"{type(cause).__name__}: {cause}"
        self.record.raised = where_raised(cause)
        self.record.disturbed = self._disturbed

    def _look_at_the_end(self) -> None:
        """Note which weights and buffers are not finite, and which weights were
        replaced.
        """
        reached = [each for each in self._gradients if each.window.place]
        given = (weight for each in reached for weight in each.weights)
        weights = {weight for weight in given if weight.requires_grad}
        bad = sum(not is_finite(weight) for weight in weights)
        if bad:
            self.record.not_finite.append(f"{bad} of {len(weights)} weights")
        self.record.not_finite += self._forwards.buffers_not_finite()
        used = {
            weight
            for weight in parameters_in(self._forwards.met)
            if weight.requires_grad
        }
        if used - weights:
            self.record.replaced = len(weights - used - self._stepped)

    # What is watched, and by what.

    def _hooks(self) -> list[tuple[Any, str, Hook]]:
        """The owner and the name of each function, and what is called in place of
        it.
        """
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
        ]

    def _in_place_of(self, own: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        @wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            run = partial(own, *args, **kwargs)
            # A module that was imported meanwhile may have kept this.
            return run() if self._ended else hook(run, *args, **kwargs)

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

    def _make(self, run: Run, it: Any, *args: Any, **kwargs: Any) -> None:
        run()
        known = self._parts_of if isinstance(it, Optimizer) else self._known_scaler
        known(it)

    def _parts_of(self, optimizer: Any) -> list[StepGradients]:
        """The gradients that an optimizer steps with: those of all that it holds, if it
        wraps.
        """
        if optimizer not in self._parts:
            weights = set(parameters_of(optimizer))
            inside = [g for g in self._gradients if weights.issuperset(g.weights)]
            if weights != {weight for each in inside for weight in each.weights}:
                inside = [StepGradients(optimizer, self.record, self._overflows)]
                self._gradients += inside
            self._parts[optimizer] = inside
            self._hook_into(optimizer, "zero_grad", self._zero)
        return self._parts[optimizer]

    def _seen_parts_of(self, optimizer: Any) -> list[StepGradients]:
        """The same, after a look at each."""
        parts = self._parts_of(optimizer)
        for gradients in parts:
            gradients.look()
        return parts

    def _rests(self) -> bool:
        """Whether the next window of an optimizer is one to make overflow."""
        return any(each.is_due() for each in self._gradients)

    def _known_scaler(self, scaler: torch.amp.GradScaler) -> Scaler:
        if scaler not in self._scalers:
            ours = "determined_amp" in type(scaler).__module__
            self._scalers[scaler] = Scaler(users_line(), scaler.is_enabled(), ours)
            self.record.scalers.append(self._scalers[scaler])
        return self._scalers[scaler]

    def _scales(self) -> list[float]:
        """That of each scaler, in the order of their numbers; 0 of one that is switched
        off.
        """
        return [_scale_of(each) for each in self._scalers]

    # Schedules.

    def _make_schedule(self, run: Run, it: Any, *args: Any, **kwargs: Any) -> None:
        self._hook_into(it, "step", self._move_schedule)
        with self._outermost("schedule", it):
            run()  # it moves to its first place
        self._known_schedule(it)

    def _move_schedule(self, run: Run, it: Any, *args: Any, **kwargs: Any) -> Any:
        with self._outermost("schedule", it) as outer:
            result = run()
        # A class of the user's may call the method that it overrides: that is no inner
        # one.
        if outer not in (None, it) or (outer is None and called_by_library()):
            self._known_schedule(it).ours = True
        elif outer is None:
            schedule = self._known_schedule(it)
            move = self.record.note("move", schedule=schedule)
            move.where = move.where or schedule.where
            self._parts_of(it.optimizer)[0].window.moves.append(move)
        return result

    def _known_schedule(self, it: Any) -> Schedule:
        if it not in self.schedules:
            optimizer = self._parts_of(it.optimizer)[0].number
            self.schedules[it] = Schedule(type(it).__name__, users_line(), optimizer)
            self.record.schedules.append(self.schedules[it])
        return self.schedules[it]

    # Backward, unscale, clip.

    def _scale(self, run: Run, scaler: Any, outputs: Any) -> Any:
        self._moves.begin([scaler])
        scaled = run()
        self._moves.has_scaled(scaler)
        scale = _scale_of(scaler)
        if scale:
            known = self._known_scaler(scaler)
            known.used = True
            # of one that is made in the first batch
            known.states.setdefault("resumed", scale)
            mark(scaled, outputs, scale)
        return scaled

    def _backward(self, own: Run, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of the engine that all of torch's backwards call."""
        run = partial(own, outputs, *args, **kwargs)
        with self._outermost("backward") as outer:
            if outer is not None:
                return run()
            if kwargs.get("accumulate_grad"):
                return self._watch_backward(run, outputs)
            scale = loss_of(outputs, self._scales()).scale  # `torch.autograd.grad`
            gradients = run()
            mark_gradients(gradients, scale)
            return gradients

    def _watch_backward(self, run: Run, outputs: Any) -> Any:
        self.before_backward()
        self._look_at_switches()
        scales = self._scales()
        event = self.record.note(
            "backward",
            loss=loss_of(outputs, scales),
            autocast=autocast_is_on("cpu") or autocast_is_on("cuda"),
            finite=all(map(is_finite, tensors_of(outputs))),
            scale=max(scales, default=0.0),
            reached=0,
            added=0.0,
            divided=False,
        )
        self._forwards.looks = not event.finite
        before = {}
        for gradients in self._gradients:
            gradients.look()
            gradients.before_backward()
            before[gradients] = gradients.versions()
        result = run()
        reached = [
            each for each, versions in before.items() if each.versions() != versions
        ]
        event.reached = len(reached)
        may_force = not self._moves.is_moved
        for gradients in reached:
            if gradients.add(event, may_force=may_force):
                self._disturb(gradients)
        return result

    def _disturb(self, forced: StepGradients) -> None:
        """Gradients were made to overflow: those of all who train any of the same
        weights.
        """
        self._disturbed = True
        theirs = set(forced.weights)
        for gradients in self._gradients:
            if not theirs.isdisjoint(gradients.weights):
                gradients.window.forced = True

    def _unscale(self, run: Run, scaler: Any, optimizer: Any) -> None:
        parts = self._seen_parts_of(optimizer)
        run()
        for gradients in parts:
            if scaler.is_enabled() and gradients.pending:
                gradients.unscale(float(scaler.get_scale()))

    def _clip(self, clip: Clip) -> None:
        """Before a clip by torch, whose limit stands in one of its frames."""
        known = _locals_of(clip)
        given = set(clip.gradients)
        pending = [each for each in self._gradients if each.pending]
        clipped = [each for each in pending if not given.isdisjoint(each.dense())]
        for of in {"max_norm", "clip_value"} & known.keys() if clipped else ():
            for gradients in clipped:
                gradients.look()
                gradients.clipped = True
            norm = math.hypot(*(each.norm for each in clipped))
            factor = max(
                (each.factor for each in clipped if each.factor > 1.5), default=1.0
            )
            self.record.note(
                "clip", of=of, limit=float(known[of]), norm=norm, factor=factor
            )

    # Step, update, zero_grad.

    def _scaler_step(
        self, run: Run, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._steps = 0  # an earlier one may have raised
        if closure_of(args, kwargs) is not None:
            self.record.note("closure")
        parts, before = self._seen_parts_of(optimizer), self.record.of("step")
        self._scaler_that_steps = scaler
        try:
            result = run()
        finally:
            self._scaler_that_steps = None
        if len(self.record.of("step")) == len(before):
            found: Any = states_of_steps(scaler)[id(optimizer)]["found_inf_per_device"]
            for gradients in parts:
                self._step(
                    gradients,
                    scaler,
                    skipped=not found or any(map(bool, found.values())),
                )
        return result

    def _before_step(self, optimizer: Any, *call: Any) -> None:
        self._steps += 1
        if self._steps > 1:
            return
        # What a scaler leaves to a fused optimizer.
        divisor = float(getattr(optimizer, "grad_scale", None) or 1.0)
        skipped = bool(getattr(optimizer, "found_inf", None) or False)
        for gradients in self._seen_parts_of(optimizer):
            self._step(
                gradients, self._scaler_that_steps, skipped=skipped, divisor=divisor
            )

    def _step(
        self, gradients: StepGradients, scaler: Any, *, skipped: bool, **how: Any
    ) -> None:
        self._stepped.update(
            weight for weight in gradients.weights if weight.grad is not None
        )
        scaled = scaler is not None and scaler.is_enabled()
        gradients.step(
            skipped=skipped,
            scaled=scaled,
            scale=_scale_of(scaler) if scaled else gradients.scale,
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

    def _update(self, run: Run, scaler: Any, new_scale: Any = None) -> None:
        for gradients in self._gradients:
            gradients.look()
        self._moves.update(scaler, run, sets=new_scale is not None)
        self._disturbed = False
        if scaler.is_enabled():
            self.record.note("update", after=_scale_of(scaler))

    def _zero(self, run: Run, *args: Any, **kwargs: Any) -> Any:
        with self._outermost("zero") as outer:
            is_a_call = outer is None and not self._steps
            if is_a_call:
                self.record.note("zero_grad")
            result = run()
        for gradients in self._gradients if is_a_call else ():
            gradients.look_for_zeros()
        return result

    # Forwards, and what costs, hides, switches or is saved.

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._moves.begin(self._scalers)
        self._forwards.before(module, inputs)

    def _drop_casts(self, run: Run) -> None:
        self._forwards.drop_casts()
        run()

    def _autocast(self, run: Run, region: Any) -> Any:
        entered = run()
        is_enabled = autocast_is_on(region.device)
        if is_enabled:
            self._forwards.enter_autocast()
        made_before = region.device == "cuda" and not self.record.has_cuda
        file = caller().f_code.co_filename
        if is_enabled or made_before or is_users(file):
            self.record.note(
                "autocast" if is_enabled else "autocast_off",
                dtype=str(region.fast_dtype).removeprefix("torch."),
                explicit=getattr(region, "_given_dtype", True),
                grad=torch.is_grad_enabled(),
                in_batch=self._in_batch,
                by_library=not (is_users(file) or file == autocast_mode.__file__),
            )
        return entered

    def _function(self, name: str, tensor: torch.Tensor | None) -> None:
        """A function of torch is called, with the caller three frames above."""
        if self._in_batch and name in _READS:
            self._note_read(name)
        elif (
            self._in_batch
            and tensor is not None
            and name in ("nan_to_num", "nan_to_num_")
        ):
            self.record.note(
                "hide", scalar=tensor.requires_grad and tensor.numel() == 1
            )

    def _read(self, run: Run, scaler: Any) -> Any:
        self._note_read("get_scale")
        return run()

    def _note_read(self, name: str) -> None:
        """The host reads; what torch and this library read by themselves is not
        counted.
        """
        frame: Any = sys._getframe(3)
        # on its way from a method in Python
        if frame.f_code.co_filename == overrides.__file__:
            frame = frame.f_back.f_back
        if self._in_batch and is_users(frame.f_code.co_filename):
            where = where_in(frame.f_code.co_filename, frame.f_lineno)
            self.record.syncs[where, name.strip("_")] += 1

    def _look_at_switches(self) -> None:
        """The precision of float32 products, which is one for the whole process."""
        before, self._products = self._products, torch.get_float32_matmul_precision()
        if self._products != before and self._in_batch:
            self.record.note("tf32", value=self._products)

    def _save(self, run: Run, obj: Any, *args: Any, **kwargs: Any) -> Any:
        scales = [scale for scale in self._scales() if scale]
        parts = [*_parts_in(obj)]
        optimizer = any(
            isinstance(each, Optimizer) or each == "param_groups" for each in parts
        )
        scale = any(isinstance(each, _SCALER) or each in scales for each in parts)
        self.record.note("save", optimizer=optimizer, scale=scale)
        return run()


class _Functions(TorchFunctionMode):
    """Tells a hook which functions of torch are called, and with which tensor."""

    def __init__(self, hook: Callable[[str, Any], None]) -> None:
        super().__init__()
        self._hook = hook

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._hook(
            getattr(func, "__name__", ""), args[0] if args else kwargs.get("input")
        )
        return func(*args, **kwargs)


def _scale_of(scaler: torch.amp.GradScaler) -> float:
    return float(scaler.get_scale()) if scaler.is_enabled() else 0.0


def _locals_of(clip: Clip) -> dict[str, Any]:
    """What torch knows of a clip, by its own names; nothing if it has begun before."""
    known: dict[str, Any] = {}
    for frame in clip.frames:
        known |= frame.f_locals
    return {} if "total_norm" in known else known


def _parts_in(content: Any) -> Iterator[Any]:
    """Words, numbers, optimizers and scalers that are saved, in containers of any
    depth.
    """
    if isinstance(content, torch.Tensor) and content.numel() == 1:
        yield content.item()
    elif isinstance(content, dict):
        yield from _parts_in([*content.keys(), *content.values()])
    elif isinstance(content, (list, tuple)):
        for part in content:
            yield from _parts_in(part)
    elif isinstance(content, (str, int, float, Optimizer, _SCALER)):
        yield content


@contextmanager
def _eager() -> Iterator[None]:
    """Let compiled models run as they are written, with all hooks."""
    with ExitStack() as stack:
        if hasattr(torch.compiler, "set_stance"):  # not in torch 2.3
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(warnings.catch_warnings())
        # What reads a number is this file, and not the line that torch would name.
        for words in (
            "Detected call of `lr_scheduler",
            "Converting a tensor with requires_grad",
        ):
            warnings.filterwarnings("ignore", words)
        yield
