"""Watches a training: what it does with scaler, optimizers, schedulers, gradients and autocast."""

from __future__ import annotations

import gc
import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from inspect import signature
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

from determined_amp.amp.backward_graph import backwards_through
from determined_amp.amp.errors import UserError
from determined_amp.amp.patched import patched
from determined_amp.amp.precision import autocast_is_on
from determined_amp.amp.tensors import is_finite, parameters_of, tensors_of
from determined_amp.check.forwards import Forwards
from determined_amp.check.gradients import Gradients
from determined_amp.check.graph import loss_of, mark, mark_gradients
from determined_amp.check.lines import is_users, users_line, where_of, where_raised
from determined_amp.check.record import Record, Scaler
from determined_amp.check.scale_moves import Moves, ScaleMoves
from determined_amp.check.schedules import Schedules

Own = Callable[..., Any]  # what a spy is called in place of
Spy = Callable[..., Any]  # called with that and its arguments

# Windows of an optimizer, from 0, in which the doctor makes the gradients overflow.
OVERFLOWS = (5, 8)

_READS = (
    *("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__"),
    *("__format__", "__repr__", "__array__"),  # torch does the reading in these
)
_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")  # torch 2.3 has two


class Spies:
    """Records what the training in `watching` does.

    Args:
        overflows: Windows of each optimizer in which its gradients are made to overflow.
        moves: How far to move loss scales in some windows; None for not at all.

    Attributes:
        record: What was seen.
        schedules: What is known of the schedulers.
        before_backward: Called before each; it may end the training.
    """

    def __init__(self, overflows: Collection[int] = OVERFLOWS, moves: Moves | None = None) -> None:
        self.record = Record()
        self._scalers: dict[torch.amp.GradScaler, Scaler] = {}
        self._gradients: list[Gradients] = []
        self._parts: dict[Any, list[Gradients]] = {}  # see `_parts_of`
        self._overflows = overflows
        self._moves = ScaleMoves(self._rests, moves)
        self._forwards = Forwards(self.record)
        self._disturbed = False  # gradients, since the newest update of a scale
        self._stack = ExitStack()  # of what is watched
        self._spied: set[tuple[type, str]] = set()
        self.schedules = Schedules(self.record, self._first_part_of, self._spy_on)
        self.before_backward: Callable[[], None] = lambda: None
        self._in_batch = False
        self._running: set[str] = set()  # see `_outermost`
        self._scaler_that_steps: torch.amp.GradScaler | None = None
        self._steps = 0  # of optimizers, nested in each other
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
        self.record.saved = True
        for scaler, known in self._scalers.items():
            known.scales[moment] = float(scaler.get_scale()) if scaler.is_enabled() else None
        self.schedules.take_places(moment)

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
            for owner, name, spy in [*self._spies()]:
                spied = self._in_place_of(getattr(owner, name), spy)
                stack.enter_context(patched(owner, name, spied))
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
            stack.callback(self._look_at_the_end)
            try:
                yield
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as error:  # some of Determined's are no `Exception`
                # A sentence of this library tells what the trial raised.
                cause = error.__cause__ if isinstance(error, UserError) else None
                cause = cause or error
                self.record.error = type(cause).__name__, str(cause)
                self.record.raised = where_raised(cause)
                self.record.disturbed = self._disturbed
                raise

    # What is watched, and by what.

    def _spies(self) -> Iterator[tuple[Any, str, Spy]]:
        scaler, scheduler = torch.amp.GradScaler, lr_scheduler.LRScheduler
        yield scaler, "__init__", self._make
        yield scaler, "scale", self._scale
        yield scaler, "unscale_", self._unscale
        yield scaler, "step", self._scaler_step
        yield scaler, "update", self._update
        yield scaler, "get_scale", self._read
        yield Optimizer, "__init__", self._make
        yield nn.Module, "zero_grad", self._zero
        schedulers = {scheduler, lr_scheduler.ReduceLROnPlateau}  # which is another in torch 2.3
        for kind in schedulers.union(_with_own(scheduler, "__init__")):
            yield kind, "__init__", self.schedules.spy_on_making
        yield torch.autocast, "__enter__", self._autocast
        yield torch, "clear_autocast_cache", self._drop_casts
        yield torch, "save", self._save
        for name in _READS:
            yield torch.Tensor, name, self._read
        for name in ("nan_to_num", "nan_to_num_"):
            yield torch.Tensor, name, self._hide
            yield torch, name, self._hide
        yield torch, "set_float32_matmul_precision", self._switch
        yield type(torch.backends.cuda.matmul), "__setattr__", self._switch
        yield type(torch.backends.cudnn), "__setattr__", self._switch
        clips = [getattr(nn.utils, name) for name in _CLIPS if hasattr(nn.utils, name)]
        for owner, name in _names_of(clips):
            yield owner, name, self._clip

    def _in_place_of(self, own: Own, spy: Spy) -> Callable[..., Any]:
        @wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            # A module that was imported meanwhile may have kept this.
            return own(*args, **kwargs) if self._ended else spy(own, *args, **kwargs)

        return call

    def _spy_on(self, thing: Any, method: str, spy: Spy) -> None:
        """Watch a method in each class of an object that has one of its own."""
        for kind in type(thing).__mro__:
            if method in vars(kind) and (kind, method) not in self._spied:
                self._spied.add((kind, method))
                spied = self._in_place_of(vars(kind)[method], spy)
                self._stack.enter_context(patched(kind, method, spied))

    @contextmanager
    def _outermost(self, kind: str) -> Iterator[bool]:
        """Whether this call is in no other of its kind: torch calls its own functions, too."""
        outermost = kind not in self._running
        self._running.add(kind)
        try:
            yield outermost
        finally:
            if outermost:
                self._running.remove(kind)

    # Who takes part.

    def _make(self, own: Own, it: Any, *args: Any, **kwargs: Any) -> None:
        own(it, *args, **kwargs)
        if isinstance(it, Optimizer):
            self._parts_of(it)
        else:
            self._known_scaler(it)

    def _parts_of(self, optimizer: Any) -> list[Gradients]:
        """The gradients that an optimizer steps with: those of all that it holds, if it wraps."""
        if optimizer not in self._parts:
            weights = set(map(id, parameters_of(optimizer)))
            inside = [g for g in self._gradients if weights.issuperset(map(id, g.weights))]
            if weights != {id(weight) for each in inside for weight in each.weights}:
                inside = [Gradients(optimizer, self.record, self._overflows)]
                self._gradients += inside
            self._parts[optimizer] = inside
            self._spy_on(optimizer, "zero_grad", self._zero)
        return self._parts[optimizer]

    def _first_part_of(self, optimizer: Any) -> Gradients:
        return self._parts_of(optimizer)[0]

    def _of_trainers(self, parameters: Iterable[torch.Tensor]) -> list[Gradients]:
        """The gradients of all who train any of these."""
        theirs = set(map(id, parameters))
        return [g for g in self._gradients if not theirs.isdisjoint(map(id, g.weights))]

    def _rests(self) -> bool:
        """Whether the next window of an optimizer is one to make overflow."""
        return any(each.is_due() for each in self._gradients)

    def _known_scaler(self, scaler: torch.amp.GradScaler) -> Scaler:
        if scaler not in self._scalers:
            self._scalers[scaler] = Scaler(
                where=users_line(),
                enabled=scaler.is_enabled(),
                ours="determined_amp" in type(scaler).__module__,
            )
            self.record.scalers.append(self._scalers[scaler])
        return self._scalers[scaler]

    def _number_of(self, scaler: torch.amp.GradScaler) -> int:
        return [*self._scalers].index(scaler)

    def _scales(self) -> list[float]:
        """That of each scaler, in the order of their numbers; 0 of one that is switched off."""
        scalers = self._scalers
        return [float(each.get_scale()) if each.is_enabled() else 0.0 for each in scalers]

    # Backward, unscale, clip.

    def _scale(self, own: Own, scaler: Any, outputs: Any) -> Any:
        self._moves.begin([scaler])
        scaled = own(scaler, outputs)
        self._moves.has_scaled(scaler)
        if scaler.is_enabled():
            known, scale = self._known_scaler(scaler), float(scaler.get_scale())
            known.used = True
            known.scales.setdefault("start", scale)  # of one that is made in the first batch
            mark(scaled, outputs, scale, self._number_of(scaler))
        return scaled

    def _backward(self, run: Own, *args: Any, **kwargs: Any) -> Any:
        """In place of the engine that all of torch's backwards call."""
        with self._outermost("backward") as outermost:
            if not outermost:
                return run(*args, **kwargs)
            if not kwargs.get("accumulate_grad"):
                return self._gradients_alone(run, *args, **kwargs)
            self.before_backward()
            loss, autocast = loss_of(args[0], self._scales()), _any_autocast()
            before = []
            for gradients in self._gradients:
                gradients.look()
                gradients.before_backward()
                before.append((gradients, gradients.versions()))
            finite = all(map(is_finite, tensors_of(args[0])))
            self._forwards.looks = not finite
            result = run(*args, **kwargs)
            reached = [each for each, versions in before if each.versions() != versions]
            onto = [each.factor for each in reached if each.pending and each.norm != 0]
            known = {"loss": loss, "autocast": autocast, "onto": onto, "finite": finite}
            known["scale"] = max(self._scales(), default=0.0)
            known["added"] = math.hypot(*(gradients.norm_added() for gradients in reached))
            event = self.record.note("backward", reached=len(reached), **known)
            may_force = not self._moves.is_moved
            forced = [each for each in reached if each.add(event, may_force=may_force)]
            self._disturbed = self._disturbed or bool(forced)
            for gradients in forced:
                for sharing in self._of_trainers(gradients.weights):
                    sharing.window.forced = True
            return result

    def _gradients_alone(self, run: Own, *args: Any, **kwargs: Any) -> Any:
        """`torch.autograd.grad`."""
        outputs, creates_graph = args[0], len(args) > 3 and bool(args[3])
        scale = loss_of(outputs, self._scales()).scale
        gradients = run(*args, **kwargs)
        if creates_graph:
            mark_gradients(gradients, scale)
        for gradient in gradients:
            if isinstance(gradient, torch.Tensor):
                gradient._scaled_by = scale or 1.0  # type: ignore[attr-defined]
        return gradients

    def _unscale(self, own: Own, scaler: Any, optimizer: Any) -> None:
        parts = self._parts_of(optimizer)
        for gradients in parts:
            gradients.look()
        with self._noting_refusal():
            own(scaler, optimizer)
        if scaler.is_enabled() and any(gradients.pending for gradients in parts):
            self.record.note("unscale", in_step=self._scaler_that_steps is not None)
            for gradients in parts:
                gradients.unscale(float(scaler.get_scale()))

    @contextmanager
    def _noting_refusal(self) -> Iterator[None]:
        try:
            yield
        except (AssertionError, RuntimeError) as error:  # the training may catch it, and go on
            self.record.note("refusal", text=str(error))
            raise

    def _clip(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        with self._outermost("clip") as outermost:
            if not outermost:
                return own(*args, **kwargs)
            call = signature(own).bind(*args, **kwargs)
            name, limit = [*call.arguments][:2]
            what = call.arguments[name]
            parameters = [what] if isinstance(what, torch.Tensor) else list(what)
            call.arguments[name] = parameters
            clipped = self._of_trainers(parameters)
            for gradients in clipped:
                if gradients.pending or not self._steps:  # else its own step clips them
                    gradients.look()
            clipped = [gradients for gradients in clipped if gradients.pending]
            result = own(*call.args, **call.kwargs)
            self.record.note(
                "clip",
                of="value" if "value" in own.__name__ else "norm",
                limit=float(call.arguments[limit]),
                norm=float(result.detach()) if isinstance(result, torch.Tensor) else math.nan,
                factors=[each.factor for each in clipped if math.isfinite(each.norm)],
            )
            for gradients in clipped:
                gradients.measure()
            return result

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
            with self._noting_refusal():
                result = own(scaler, optimizer, *args, **kwargs)
        finally:
            self._scaler_that_steps = None
        if len(self.record.of("step")) == before:
            found: Any = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            skipped = not found or any(map(bool, found.values()))
            for gradients in parts:
                self._step(gradients, scaler, skipped=skipped)
        return result

    def _before_step(self, optimizer: Optimizer, *call: Any) -> None:
        self._steps += 1
        if self._steps == 1:
            # What a scaler leaves to a fused optimizer.
            scale: Any = getattr(optimizer, "grad_scale", None)
            found_inf: Any = getattr(optimizer, "found_inf", None)
            for gradients in self._parts_of(optimizer):
                gradients.look()
                self._step(
                    gradients,
                    self._scaler_that_steps,
                    skipped=found_inf is not None and bool(float(found_inf)),
                    divisor=1.0 if scale is None else float(scale),
                )

    def _step(self, gradients: Gradients, scaler: Any, *, skipped: bool, **how: Any) -> None:
        scaled = scaler is not None and scaler.is_enabled()
        scale = float(scaler.get_scale()) if scaled else gradients.scale
        moment = {"moved": self._moves.is_moved, "disturbed": self._disturbed}
        moment["after_save"] = self.record.saved
        gradients.step(skipped=skipped, scaled=scaled, scale=scale, **moment, **how)

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
            theirs = (None, self._number_of(scaler))
            every = [each for each in self._gradients if each.scaler in theirs]
            waiting = [each for each in every if each.pending and each.factor != 1.0]
            for gradients in waiting:
                gradients.updates += 1
            self.record.note("update", after=float(scaler.get_scale()), early=bool(waiting))

    def _zero(self, own: Own, it: Any, *args: Any, **kwargs: Any) -> Any:
        with self._outermost("zero") as outermost:
            if not outermost or self._steps:
                return own(it, *args, **kwargs)
            theirs = parameters_of(it) if hasattr(it, "param_groups") else it.parameters()
            waiting = [each for each in self._of_trainers(theirs) if each.pending and each.dense()]
            result = own(it, *args, **kwargs)
            for gradients in waiting:  # a wrapper around an optimizer may have done nothing
                if not any(bool(gradient.any()) for gradient in gradients.dense()):
                    gradients.empty()
            return result

    # Autocast, and what costs, hides or is saved.

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._moves.begin(self._scalers)
        self._forwards.before(module, inputs)

    def _drop_casts(self, own: Own) -> None:
        self._forwards.drop_casts()
        own()

    def _look_at_the_end(self) -> None:
        """Note which weights and buffers are not finite."""
        weights = {id(weight): weight for each in self._gradients for weight in each.weights}
        bad = sum(not is_finite(weight) for weight in weights.values() if weight.numel())
        if bad:
            self.record.not_finite.append(f"{bad} of {len(weights)} weights")
        self.record.not_finite += self._forwards.buffers_not_finite()

    def _autocast(self, own: Own, region: Any) -> Any:
        if region._enabled and self._forwards.inside and torch.is_grad_enabled():
            self.record.forwards[True] += 1  # the module of this forward may enter it itself
        made_before = region.device == "cuda" and not self.record.has_cuda
        if region._enabled or made_before or is_users(sys._getframe(2).f_code.co_filename):
            self.record.note(
                "autocast" if region._enabled else "autocast_off",
                dtype=str(region.fast_dtype).removeprefix("torch."),
                explicit=getattr(region, "_given_dtype", True),
                grad=torch.is_grad_enabled(),
                in_batch=self._in_batch,
            )
        return own(region)

    def _read(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(2)
        if self._in_batch and is_users(caller.f_code.co_filename):
            self.record.syncs[where_of(caller), own.__name__.strip("_")] += 1
        return own(*args, **kwargs)

    def _hide(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs["input"]
        optimizer = self._whose_gradient(tensor)
        if self._in_batch and (optimizer is not None or tensor.requires_grad):
            hidden = int((~torch.isfinite(tensor.detach())).sum())
            self.record.note(
                "hide", hidden=hidden, of_gradient=optimizer, scalar=tensor.numel() == 1
            )
        return own(*args, **kwargs)

    def _whose_gradient(self, tensor: torch.Tensor) -> int | None:
        """The number of the optimizer whose gradient this is."""
        for each in self._gradients if tensor.numel() else ():
            if tensor.data_ptr() in [gradient.data_ptr() for gradient in each.dense()]:
                return each.number
        return None

    def _switch(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        *owner_and_name, value = *args, *kwargs.values()
        name = str(owner_and_name[1] if owner_and_name else own.__name__.removeprefix("set_"))
        if "tf32" in name or "precision" in name:
            by = sys._getframe(2).f_code.co_filename
            self.record.note("tf32", name=name, value=str(value), in_batch=self._in_batch, by=by)
        return own(*args, **kwargs)

    def _save(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        scales = [scale for scale in self._scales() if scale]
        optimizer, scale = _states_in(args[0] if args else kwargs["obj"], scales)
        self.record.note("save", optimizer=optimizer, scale=scale)
        return own(*args, **kwargs)


def _names_of(functions: Iterable[Callable[..., Any]]) -> list[tuple[Any, str]]:
    """Every module and name that has one of these: the user's modules may have imported it.

    They are looked for in one pass, since there are a hundred thousand names, and by `id`, since
    a value of any kind may have one.
    """
    wanted = set(map(id, functions))
    spaces = ((module, getattr(module, "__dict__", {})) for module in list(sys.modules.values()))
    return [
        (module, name)
        for module, space in spaces
        if not wanted.isdisjoint(map(id, list(space.values())))
        for name, value in list(space.items())
        if id(value) in wanted
    ]


def _with_own(base: type, method: str) -> Iterable[type]:
    kind: type
    for kind in base.__subclasses__():
        if method in vars(kind):
            yield kind
        yield from _with_own(kind, method)


def _states_in(content: Any, scales: Sequence[float]) -> tuple[bool, bool]:
    """Whether an object that is saved has the state of an optimizer, and a loss scale.

    Args:
        content: The object.
        scales: The present loss scales.
    """
    if isinstance(content, (Optimizer, torch.amp.GradScaler)):
        return isinstance(content, Optimizer), not isinstance(content, Optimizer)
    if isinstance(content, dict):
        if "param_groups" in content:
            return True, False
        scale = any("scale" in str(k) and _is_one_of(scales, v) for k, v in content.items())
        below = [(False, scale), *(_states_in(value, scales) for value in content.values())]
    else:
        parts = content if isinstance(content, (list, tuple)) else []
        below = [_states_in(part, scales) for part in parts]
    return any(optimizer for optimizer, _ in below), any(scale for _, scale in below)


def _is_one_of(scales: Sequence[float], value: Any) -> bool:
    is_one = isinstance(value, torch.Tensor) and value.numel() == 1
    return (is_one or isinstance(value, (int, float))) and float(value) in scales


def _any_autocast() -> bool:
    return autocast_is_on("cpu") or autocast_is_on("cuda")


@contextmanager
def _eager() -> Iterator[None]:
    """Let compiled models run as they are written, with all hooks."""
    with ExitStack() as stack:
        if hasattr(torch.compiler, "set_stance"):  # not in torch 2.3
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(warnings.catch_warnings())
        # The reader of a number is a spy here, and not the line that torch would name.
        for words in ("Detected call of `lr_scheduler", "Converting a tensor with requires_grad"):
            warnings.filterwarnings("ignore", words)
        yield
