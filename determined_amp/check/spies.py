"""Watches a training: what it does with scaler, optimizers, schedulers, gradients and autocast."""

from __future__ import annotations

import gc
import linecache
import math
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
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

from determined_amp.amp.errors import UserError
from determined_amp.amp.origin import backwards_through
from determined_amp.amp.patched import patched
from determined_amp.amp.precision import autocast_is_on
from determined_amp.amp.tensors import parameters_of
from determined_amp.check.averages import Averages
from determined_amp.check.graph import Loss, loss_of, mark, mark_gradients
from determined_amp.check.record import (
    Event,
    Record,
    Window,
    is_users,
    passes,
    users_line,
    where_in,
    where_of,
)

# Windows of an optimizer, from 0, in which the doctor makes the gradients overflow.
OVERFLOWS = (5, 8)

_SETS_A_RATE = re.compile(r"""\[["']lr["']\][ \t]*[-+*/]?=[^=]""")

_READS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__")


class _Tracked:
    """An optimizer, and what its gradients are at the moment.

    Args:
        number: Its place among all.
        optimizer: The optimizer.

    Attributes:
        factor: What its gradients are multiplied by; NaN if that is not known.
        pending: Whether there are gradients that no step has used.
        norm: Of the gradients, when they were looked at last.
        peak: Largest size of an element of theirs, at that time.
        used: Versions of the gradients that the newest step has used.
        emptied: Whether the gradients were zeroed after the newest backward.
        updates: Updates of the scale since the newest backward.
        windows: Windows that have begun.
        window: The newest one.
    """

    def __init__(self, number: int, optimizer: Optimizer) -> None:
        self.number = number
        self.optimizer = optimizer
        self.factor = 1.0
        self.pending = False
        self.norm = self.peak = math.nan
        self.used: list[tuple[int, int]] | None = None
        self.emptied = False
        self.updates = 0
        self.windows = 0
        self.window = Window(number)

    def gradients(self) -> list[torch.Tensor]:
        """The dense gradients there are."""
        gradients = (p.grad for p in parameters_of(self.optimizer) if p.grad is not None)
        return [g._values() if g.is_sparse else g for g in gradients]

    def versions(self) -> list[tuple[int, int]]:
        gradients = (p.grad for p in parameters_of(self.optimizer))
        return [(0, 0) if g is None else (id(g), g._version) for g in gradients]

    def measure(self) -> None:
        """Take norm and peak of the gradients."""
        gradients = [gradient.detach().float() for gradient in self.gradients()]
        with torch.no_grad():
            norms = [torch.linalg.vector_norm(g).cpu() for g in gradients]
            peaks = [g.abs().max().cpu() for g in gradients if g.numel()]
            self.norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
            self.peak = float(torch.stack(peaks).max()) if peaks else 0.0


class Spies:
    """Records what the training in `watching` does.

    Args:
        overflows: Windows of each optimizer in which its gradients are made to overflow.
        meets: Whether optimizers that are there already may take part.
    """

    def __init__(self, overflows: Collection[int] = OVERFLOWS, *, meets: bool = False) -> None:
        self.record = Record()
        self.in_batch = False
        self.scalers: list[torch.amp.GradScaler] = []
        self.schedulers: list[Any] = []
        self._overflows = overflows
        self._meets = meets
        self._batch = -1
        self._optimizers: dict[int, _Tracked] = {}
        self._depth = 0
        self._moving = 0
        self._forwards = 0
        self._in_backward = False
        self._scaler: torch.amp.GradScaler | None = None
        self._clipping = False
        self._ended = False
        self._averages = Averages(self)

    # What the loop around the training calls.

    def begin_batch(self) -> None:
        self._averages.compare()
        self._batch += 1
        self.record.batches += 1
        self.in_batch = True

    def end_batch(self) -> None:
        self.in_batch = False

    def take_state(self, moment: str) -> None:
        """Keep the scale of each scaler and the place of each schedule."""
        self.record.states[moment] = {
            "scale": [_scale_of(scaler) for scaler in self.scalers],
            "place": [getattr(each, "last_epoch", None) for each in self.schedulers],
        }

    def trained(self) -> Iterator[torch.Tensor]:
        """The weights of all optimizers."""
        for tracked in self._optimizers.values():
            yield from parameters_of(tracked.optimizer)

    @property
    def optimizers(self) -> list[Optimizer]:
        return [tracked.optimizer for tracked in self._optimizers.values()]

    def note(self, kind: str, **data: Any) -> Event:
        """Add an event."""
        event = Event(len(self.record.events), kind, users_line(), self._batch, data)
        self.record.events.append(event)
        return event

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what happens in this block."""
        with ExitStack() as stack:
            if self._meets:
                self._meet_those_there_are()
            for owner, name, spy in self._spies():
                own = getattr(owner, name)
                stack.enter_context(patched(owner, name, self._in_place_of(own, spy)))
            spies = dict(self._functions())
            for owner, name, own in _names_of(spies):
                stack.enter_context(patched(owner, name, self._in_place_of(own, spies[own])))
            stack.callback(setattr, self, "_ended", True)
            for handle in (
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
                register_module_forward_pre_hook(self._forward),
                register_module_forward_hook(self._after_forward, always_call=True),
            ):
                stack.callback(handle.remove)
            stack.enter_context(backwards_through(self._backward))
            stack.enter_context(_eager())
            stack.callback(self._averages.compare)
            stack.callback(self._note_moves)
            try:
                yield
            except BaseException as error:
                self._keep_error(error)
                raise

    # Who takes part.

    def of(self, optimizer: Optimizer) -> _Tracked:
        key = id(optimizer)
        if key not in self._optimizers:
            self._optimizers[key] = _Tracked(len(self._optimizers), optimizer)
            self.record.optimizers.append(type(optimizer).__name__)
        return self._optimizers[key]

    def _trainers_of(self, parameters: Iterable[torch.Tensor]) -> list[_Tracked]:
        """Who trains any of these."""
        theirs = set(map(id, parameters))
        return [
            tracked
            for tracked in self._optimizers.values()
            if not theirs.isdisjoint(map(id, parameters_of(tracked.optimizer)))
        ]

    def number_of(self, scaler: torch.amp.GradScaler) -> int:
        for number, known in enumerate(self.scalers):
            if known is scaler:
                return number
        self.scalers.append(scaler)
        where = users_line()
        line = linecache.getline(where.file, where.line) if where else ""
        self.record.scalers.append(
            {
                "enabled": scaler.is_enabled(),
                "where": where,
                "ours": "determined_amp" in type(scaler).__module__,
                "used": False,
                "by_device": "device" in line or "is_available" in line,
            }
        )
        return len(self.scalers) - 1

    def _place_of(self, scheduler: Any) -> int:
        for number, known in enumerate(self.schedulers):
            if known is scheduler:
                return number
        self.schedulers.append(scheduler)
        self.record.schedulers.append(
            {
                "kind": type(scheduler).__name__,
                "where": users_line(),
                "ours": False,
                "inner": False,
                "optimizer": self.of(scheduler.optimizer).number,
            }
        )
        return len(self.schedulers) - 1

    def _meet_those_there_are(self) -> None:
        gc.collect()  # not those of a training that is over
        for thing in gc.get_objects():
            kind: Any = type(thing)
            if issubclass(kind, Optimizer) and hasattr(thing, "param_groups"):
                self.of(thing)

    def _note_moves(self) -> None:
        """Note which lines of the user's set a rate, and whether one could move each scheduler."""
        files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
        theirs = (file for file in sorted(files) if file.endswith(".py") and is_users(file))
        sources = {file: "".join(linecache.getlines(file)) for file in theirs}
        lines = {
            (file, source.count("\n", 0, found.start()) + 1): None
            for file, source in sources.items()
            for found in _SETS_A_RATE.finditer(source)
        }
        self.record.rates_set_at = [where_in(*line) for line in lines]
        for scheduler, known in zip(self.schedulers, self.record.schedulers, strict=True):
            where = known["where"]
            line = linecache.getline(where.file, where.line) if where else ""
            names = re.findall(r"(\w+)\s*=[^=]", line.split("(")[0])
            for holder in gc.get_referrers(scheduler):
                if isinstance(holder, dict):
                    names += [str(key) for key, value in holder.items() if value is scheduler]
            name = "|".join(map(re.escape, names)) or r"\w*sched\w*"
            moves = re.compile(rf"(?:{name})\b[\w.\[\]]*\.step\(")
            known["never_named"] = not any(map(moves.search, sources.values()))

    # The spies: what is watched, and by what. Each is called with the original and its arguments.

    def _in_place_of(self, own: Callable[..., Any], spy: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            # A module that was imported meanwhile may have kept this.
            return own(*args, **kwargs) if self._ended else spy(own, *args, **kwargs)

        return call

    def _spies(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        scaler = torch.amp.GradScaler
        yield scaler, "__init__", self._meet(self.number_of)
        yield scaler, "scale", self._scale
        yield scaler, "unscale_", self._unscale
        yield scaler, "step", self._scaler_step
        yield scaler, "update", self._update
        yield Optimizer, "__init__", self._meet(self.of)
        yield torch, "save", self._save
        for kind in {Optimizer, nn.Module, *_with_own(Optimizer, "zero_grad")}:
            yield kind, "zero_grad", self._zero
        yield lr_scheduler.LRScheduler, "__init__", self._make_scheduler
        for kind in {lr_scheduler.LRScheduler, *_with_own(lr_scheduler.LRScheduler, "step")}:
            yield kind, "step", self._move
        if not issubclass(lr_scheduler.ReduceLROnPlateau, lr_scheduler.LRScheduler):  # torch 2.3
            yield lr_scheduler.ReduceLROnPlateau, "step", self._move
        yield torch.autocast, "__enter__", self._autocast
        for name in _READS:
            yield torch.Tensor, name, self._read(name)
        for name in ("nan_to_num", "nan_to_num_"):
            yield torch.Tensor, name, self._hide
            yield torch, name, self._hide
        yield torch, "set_float32_matmul_precision", self._switch("float32_matmul_precision")
        yield type(torch.backends.cuda.matmul), "__setattr__", self._switch(None)
        yield type(torch.backends.cudnn), "__setattr__", self._switch(None)

    def _functions(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        yield nn.utils.clip_grad_norm_, self._clip("norm")
        yield nn.utils.clip_grad_value_, self._clip("value")
        if hasattr(nn.utils, "clip_grads_with_norm_"):
            yield nn.utils.clip_grads_with_norm_, self._clip("norm")

    def _save(self, own: Callable[..., Any], content: Any, *args: Any, **kwargs: Any) -> Any:
        has_optimizer, has_scale = _states_in(content)
        self.note("save", optimizer=has_optimizer, scale=has_scale)
        return own(content, *args, **kwargs)

    def _meet(self, known_as: Callable[[Any], Any]) -> Callable[..., None]:
        def make(own: Callable[..., Any], it: Any, *args: Any, **kwargs: Any) -> None:
            own(it, *args, **kwargs)
            known_as(it)

        return make

    def _make_scheduler(
        self, own: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any
    ) -> None:
        self._moving += 1
        try:
            own(scheduler, *args, **kwargs)
        finally:
            self._moving -= 1
        self._place_of(scheduler)

    # Loss and backward.

    def _scale(self, own: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = own(scaler, outputs)
        if scaler.is_enabled():
            self.record.scalers[self.number_of(scaler)]["used"] = True
            mark(scaled, outputs, float(scaler.get_scale()))
        return scaled

    def _backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of the engine that all of torch's backwards call."""
        if self._in_backward:
            return run(*args, **kwargs)
        outputs, creates_graph = args[0], len(args) > 3 and bool(args[3])
        if not kwargs.get("accumulate_grad"):
            scale = loss_of(outputs).scale
            gradients = run(*args, **kwargs)
            if creates_graph:
                mark_gradients(gradients, scale)
            for gradient in gradients:
                if isinstance(gradient, torch.Tensor):
                    gradient._scaled_by = scale or 1.0  # type: ignore[attr-defined]
            return gradients
        self._averages.compare()
        loss, around = loss_of(outputs), _any_autocast()
        before = [(tracked, tracked.versions()) for tracked in self._optimizers.values()]
        for tracked, _ in before:
            self._note_changes(tracked)
            if tracked.pending and tracked.norm == 0 and not tracked.emptied:
                self._empty([tracked])  # by hand
        self._in_backward = True
        try:
            result = run(*args, **kwargs)
        finally:
            self._in_backward = False
        reached = [tracked for tracked, versions in before if tracked.versions() != versions]
        mixed = [
            tracked.number
            for tracked, versions in before
            if tracked in reached
            and tracked.pending
            and any(version != (0, 0) for version in versions)
            and loss.scale
            and tracked.factor == 1.0 != loss.scale
            and tracked.norm > 0
        ]
        faint = [
            tracked.number
            for tracked in reached
            if tracked.pending and not (loss.scale or loss.has_gradient) and tracked.factor > 1
        ]
        event = self.note(
            "backward",
            loss=loss,
            autocast=around,
            mixed=mixed,
            faint=faint,
            optimizers=[tracked.number for tracked in reached],
        )
        for tracked in reached:
            self._count_backward(tracked, event, loss)
        return result

    def _count_backward(self, tracked: _Tracked, event: Event, loss: Loss) -> None:
        if tracked.window.steps or not tracked.window.backwards:
            self._open_window(tracked)
        first = tracked.emptied or not tracked.window.backwards
        tracked.window.backwards.append(event)
        if first and loss.scale and tracked.windows - 1 in self._overflows:
            for gradient in tracked.gradients():
                gradient.detach().fill_(math.inf)
            tracked.window.forced = True
        if loss.has_gradient and not loss.scale:
            tracked.factor = math.nan  # that of the gradient it was given
        elif not (tracked.pending and loss.scale is None and tracked.factor != 1.0):
            tracked.factor = loss.scale or 1.0
        tracked.pending, tracked.emptied, tracked.updates = True, False, 0
        tracked.measure()

    def _open_window(self, tracked: _Tracked) -> None:
        tracked.window = Window(tracked.number)
        tracked.windows += 1
        self.record.windows.append(tracked.window)

    def _note_changes(self, tracked: _Tracked) -> None:
        """Note what was done to its gradients by hand since they were looked at last."""
        if not tracked.pending:
            self._note_assigned(tracked)
            return
        before, peak = tracked.norm, tracked.peak
        tracked.measure()
        if math.isfinite(tracked.norm) and not math.isfinite(before):
            tracked.factor = math.nan  # somebody has taken an overflow out of them
        if not (math.isfinite(before) and math.isfinite(tracked.norm) and before * tracked.norm):
            return
        ratio = tracked.norm / before
        if abs(ratio - 1) <= 1e-3:
            return
        if tracked.factor > 1:
            if abs(ratio * tracked.factor - 1) < 1e-2:
                tracked.factor = 1.0  # divided by the scale
            elif ratio * tracked.factor < 1:
                tracked.factor = math.nan  # divided by the scale and clipped, or clipped to little
        self.note(
            "changed",
            factor=tracked.factor,
            before=(before, peak),
            after=(tracked.norm, tracked.peak),
        )

    def _note_assigned(self, tracked: _Tracked) -> None:
        """Gradients that no backward has left were set by the training, as `p.grad = g`."""
        gradients = tracked.gradients()
        if not gradients or tracked.used is None or tracked.versions() == tracked.used:
            return
        tracked.measure()
        if tracked.norm == 0:
            return
        factors = {getattr(gradient, "_scaled_by", math.nan) for gradient in gradients}
        tracked.factor = factors.pop() if len(factors) == 1 else math.nan
        tracked.pending = True
        self._open_window(tracked)

    def _empty(self, dropped: list[_Tracked]) -> None:
        """Their gradients were zeroed before any step has used them."""
        event = self.note("zero_grad", optimizers=[tracked.number for tracked in dropped])
        for tracked in dropped:
            tracked.window.dropped.append(event)
            tracked.factor, tracked.norm, tracked.peak = 1.0, 0.0, 0.0
            tracked.emptied = True

    # Gradients and steps.

    def _unscale(self, own: Callable[..., Any], scaler: Any, optimizer: Any) -> None:
        tracked = self.of(optimizer)
        self._note_changes(tracked)
        own(scaler, optimizer)
        if not scaler.is_enabled() or not tracked.pending:
            return
        scale = float(scaler.get_scale())
        self.note(
            "unscale",
            optimizer=tracked.number,
            factor=tracked.factor,
            scale=scale,
            updates=tracked.updates,
            in_step=self._scaler is not None,
        )
        tracked.factor /= scale
        tracked.measure()

    def _clip(self, kind: str) -> Callable[..., Any]:
        def spy(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._clipping:
                return own(*args, **kwargs)
            call = signature(own).bind(*args, **kwargs)
            name, what = next(iter(call.arguments.items()))
            it = [what] if isinstance(what, torch.Tensor) else list(what)
            call.arguments[name] = it
            limit = float([*call.arguments.values()][1])
            clipped = self._trainers_of(it)
            for tracked in clipped:
                self._note_changes(tracked)
            clipped = [tracked for tracked in clipped if tracked.pending]
            self._clipping = True
            try:
                result = own(*call.args, **call.kwargs)
            finally:
                self._clipping = False
            self.note(
                "clip",
                of=kind,
                limit=limit,
                norm=float(result) if isinstance(result, torch.Tensor) else math.nan,
                factors={t.number: t.factor for t in clipped if math.isfinite(t.norm)},
            )
            for tracked in clipped:
                tracked.measure()
            return result

        return spy

    def _scaler_step(
        self, own: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        tracked, before, outer = self.of(optimizer), len(self.record.events), self._scaler
        self._note_changes(tracked)
        self._scaler = scaler
        try:
            result = own(scaler, optimizer, *args, **kwargs)
        finally:
            self._scaler = outer
        if not any(e.kind == "step" for e in self.record.events[before:]):
            self._stepped(tracked, scaler, divisor=1.0, skipped=True)
        return result

    def _before_step(self, optimizer: Optimizer, *call: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        tracked = self.of(optimizer)
        self._note_changes(tracked)
        scale: Any = getattr(optimizer, "grad_scale", None)
        divisor = 1.0 if scale is None else float(scale)
        found_inf: Any = getattr(optimizer, "found_inf", None)
        skipped = found_inf is not None and bool(float(found_inf))
        self._stepped(tracked, self._scaler, divisor=divisor, skipped=skipped)

    def _after_step(self, optimizer: Optimizer, *call: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if not self._depth:
            tracked = self.of(optimizer)
            tracked.used = tracked.versions()

    def _stepped(self, tracked: _Tracked, scaler: Any, *, divisor: float, skipped: bool) -> None:
        for dtype in {p.dtype for p in parameters_of(tracked.optimizer) if p.requires_grad}:
            self.record.weights[str(dtype).removeprefix("torch.")] += 1
        tracked.measure()
        norm = tracked.norm
        event = self.note(
            "step",
            optimizer=tracked.number,
            via=None if scaler is None or not scaler.is_enabled() else self.number_of(scaler),
            factor=tracked.factor / divisor,
            skipped=skipped,
            again=not tracked.pending and norm > 0,
            losses=[backward.loss.scale for backward in tracked.window.backwards],
            updates=tracked.updates,
            norm=norm / divisor,
            autocast=_any_autocast(),
            rates=[group.get("lr") for group in tracked.optimizer.param_groups],
        )
        if tracked.pending or norm:  # it has gradients
            tracked.window.steps.append(event)
        tracked.pending, tracked.factor, tracked.used = False, 1.0, tracked.versions()
        self._averages.leave()
        if skipped:
            self._averages.begin(tracked.windows > 2)

    def _update(self, own: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> None:
        before = _scale_of(scaler)
        for tracked in self._optimizers.values():
            self._note_changes(tracked)
        own(scaler, *args, **kwargs)
        if not scaler.is_enabled():
            return
        pending = [t for t in self._optimizers.values() if t.pending and t.factor != 1.0]
        for tracked in pending:
            tracked.updates += 1
        self.note(
            "update",
            scaler=self.number_of(scaler),
            before=before,
            after=_scale_of(scaler),
            pending=[tracked.number for tracked in pending],
        )

    def _zero(self, own: Callable[..., Any], it: Any, *args: Any, **kwargs: Any) -> Any:
        theirs = parameters_of(it) if isinstance(it, Optimizer) else it.parameters()
        waiting = [
            tracked
            for tracked in self._trainers_of(theirs)
            if tracked.pending and self._depth == 0 and tracked.gradients()
        ]
        result = own(it, *args, **kwargs)
        # A wrapper around an optimizer may have done nothing.
        dropped = [t for t in waiting if not any(bool(g.any()) for g in t.gradients())]
        if dropped:
            self._empty(dropped)
        return result

    # Schedules, autocast, and what costs or hides.

    def _move(self, own: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if self._moving:
            if any(known is scheduler for known in self.schedulers):  # another one moves it
                self.record.schedulers[self._place_of(scheduler)]["inner"] = True
            return own(scheduler, *args, **kwargs)
        self._moving += 1
        try:
            result = own(scheduler, *args, **kwargs)
        finally:
            self._moving -= 1
        number = self._place_of(scheduler)
        if passes("amp/schedules.py"):
            self.record.schedulers[number]["ours"] = True
            return result
        event = self.note("move", scheduler=number)
        tracked = self._optimizers.get(id(getattr(scheduler, "optimizer", None)))
        if tracked is not None:
            tracked.window.moves.append(event)
        return result

    def _autocast(self, own: Callable[..., Any], region: Any) -> Any:
        if region._enabled and self._forwards and torch.is_grad_enabled():
            self.record.forwards[True] += 1  # the module of this forward may enter it itself
        made_before = region.device == "cuda" and not self.record.has_cuda
        if region._enabled or made_before or is_users(sys._getframe(2).f_code.co_filename):
            self.note(
                "autocast" if region._enabled else "autocast_off",
                device=region.device,
                dtype=str(region.fast_dtype).removeprefix("torch."),
                explicit=getattr(region, "_given_dtype", True),
                grad=torch.is_grad_enabled(),
            )
        return own(region)

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._forwards = max(self._forwards - 1, 0)

    def _forward(self, module: nn.Module, inputs: Any) -> None:
        self._forwards += 1
        if not torch.is_grad_enabled():
            return
        weight = next((p for p in module.parameters(recurse=False) if p.requires_grad), None)
        if weight is not None:
            self.record.forwards[autocast_is_on(weight.device.type)] += 1

    def _read(self, name: str) -> Callable[..., Any]:
        def spy(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(2)
            if self.in_batch and is_users(caller.f_code.co_filename):
                self.record.syncs[where_of(caller), name.strip("_")] += 1
            return own(*args, **kwargs)

        return spy

    def _hide(self, own: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = int((~torch.isfinite(tensor.detach())).sum()) if tensor.numel() else 0
        of_gradient = any(
            p.grad is not None and p.grad.data_ptr() == tensor.data_ptr() for p in self.trained()
        )
        trains = of_gradient or (torch.is_tensor(tensor) and tensor.requires_grad)
        if trains and self.in_batch:
            self.note("hide", hidden=hidden, of_gradient=of_gradient, scalar=tensor.numel() == 1)
        return own(tensor, *args, **kwargs)

    def _switch(self, switch: str | None) -> Callable[..., Any]:
        def spy(own: Callable[..., Any], *args: Any) -> Any:
            name, value = (switch, args[0]) if switch else args[1:3]
            if "tf32" in str(name) or "precision" in str(name):
                by = sys._getframe(2).f_code.co_filename
                self.note("tf32", name=str(name), value=str(value), in_batch=self.in_batch, by=by)
            return own(*args)

        return spy

    def _keep_error(self, error: BaseException) -> None:
        if not isinstance(error, (Exception, SystemExit)):
            return
        if isinstance(error, UserError):  # a sentence of this library about what the trial raised
            error = error.__cause__ or error
        trace, where = error.__traceback__, None
        while trace is not None:
            if is_users(trace.tb_frame.f_code.co_filename):
                where = where_in(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
            trace = trace.tb_next
        self.record.error, self.record.raised = (type(error).__name__, str(error)), where


def _names_of(
    functions: Iterable[Callable[..., Any]],
) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Every module and name that has one of these: the user's modules may have imported it.

    They are looked for in one pass, since there are a hundred thousand names, and by `id`, since
    a value of any kind may have one.
    """
    wanted = set(map(id, functions))
    spaces = ((module, getattr(module, "__dict__", {})) for module in list(sys.modules.values()))
    return [
        (module, name, value)
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


def _states_in(content: Any) -> tuple[bool, bool]:
    """Whether an object that is saved has the state of an optimizer, and a loss scale."""
    if isinstance(content, (Optimizer, torch.amp.GradScaler)):
        return isinstance(content, Optimizer), not isinstance(content, Optimizer)
    if isinstance(content, dict):
        if "param_groups" in content:
            return True, False
        scale = any("scale" in str(k) and isinstance(v, (int, float)) for k, v in content.items())
        below = [(False, scale), *map(_states_in, content.values())]
    else:
        below = [*map(_states_in, content)] if isinstance(content, (list, tuple)) else []
    return any(optimizer for optimizer, _ in below), any(scale for _, scale in below)


def _scale_of(scaler: Any) -> float | None:
    return float(scaler.get_scale()) if scaler.is_enabled() else None


def _any_autocast() -> bool:
    return autocast_is_on("cpu") or autocast_is_on("cuda")


@contextmanager
def _eager() -> Iterator[None]:
    """Let compiled models run as they are written, with all hooks."""
    stance = getattr(torch.compiler, "set_stance", None)
    with ExitStack() as stack:
        if stance is not None:
            stack.enter_context(stance("force_eager"))
        stack.enter_context(warnings.catch_warnings())
        with suppress(AttributeError):
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler")
        yield
