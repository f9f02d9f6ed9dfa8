"""Trains a batch again without a step, in any precision, and puts everything back."""

from __future__ import annotations

import copy
import logging
import math
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from determined_amp.amp.casts import drop_casts
from determined_amp.amp.compiled import as_written
from determined_amp.amp.fp32_modules import meanwhile_in_float32
from determined_amp.amp.patched import patched
from determined_amp.amp.precision import autocast_is_on
from determined_amp.amp.tensors import (
    SIXTEEN_BITS,
    largest_of,
    named_parameters,
    parameters_in,
    tensors_of,
    values_of,
)
from determined_amp.amp.torch_private import backwards_through

logger = logging.getLogger(__name__)

# Trains the batch at a loss scale, None for the current one: forward, loss and backward
# as in training, without a step.
Train = Callable[["float | None"], object]

_NEVER_COPIED = (Dataset, DataLoader, types.MethodType)

# They are what they are, and cannot be changed in place.
_PLAIN = (bool, int, float, str, type(None))
# What torch keeps of a module: it goes with hooks, which stay.
_OF_TORCH = frozenset(vars(nn.Module()))

# torch's own method, which may be replaced while an unmodified trial trains.
_register_hook = torch.Tensor.register_hook


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal came to."""

    # the largest magnitude of the scaled losses; infinite if one is not finite
    largest_loss: float
    # Names of the parameters whose gradients are not finite, in the order of the
    # backward.
    lost: tuple[str, ...]
    has_gradients: bool  # whether any parameter got one
    uses_float16: (
        bool  # whether a float16 autocast region was entered, in whatever dtype it ran
    )

    @property
    def loss_is_finite(self) -> bool:
        return math.isfinite(self.largest_loss)

    @property
    def is_sound(self) -> bool:
        return self.loss_is_finite and not self.lost


class Rehearsal:
    """A batch that can be trained again and again without a step.

    Everything is put back after a run, see `undisturbed`. The batch is rehearsed on
    this slot alone, unless its forward waits for the others, as SyncBatchNorm does:
    then all slots must make the same runs.

    Args:
        train: Trains the batch.
        models: All models of the training.
        optimizers: Its optimizers, which may hold parameters of no model.
        batch: The batch, for those who look for a fault in it.
    """

    def __init__(
        self,
        train: Train,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer] = (),
        batch: Any = None,
    ) -> None:
        self.models = models
        self.optimizers = optimizers
        self.batch = batch
        self._train = train

    def run(
        self,
        scale: float | None = None,
        dtype: torch.dtype | None = None,
        *,
        islands: Sequence[nn.Module] = (),
        watch: AbstractContextManager[Any] | None = None,
    ) -> Rehearsed:
        """Train the batch once; synchronises.

        Args:
            scale: The loss scale; by default the current one.
            dtype: bfloat16 in place of float16, or float32 for no autocast at all; by
                default as in training.
            islands: Modules to keep in float32.
            watch: Open while the batch is trained.
        """
        parameters = parameters_in(self.models)
        device_type = next((parameter.device.type for parameter in parameters), "cpu")
        results = _Results(self.models, self.optimizers)
        with (
            float16_as(dtype) as regions,
            meanwhile_in_float32(islands, device_type),
            undisturbed(*self.models, optimizers=self.optimizers),
            results.watching(),
            watch or nullcontext(),
        ):
            self._train(scale)
            results.look_at_gradients()
        return results.read(uses_float16=torch.float16 in regions)


class _Results:
    """The losses and the gradients of a rehearsal; nothing waits for the device until
    `read`.
    """

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> None:
        self._parameters: dict[str, torch.Tensor] = dict(named_parameters(models))
        others = set(parameters_in((), optimizers)) - set(self._parameters.values())
        self._parameters |= {
            f"(parameter {i} of no model)": p for i, p in enumerate(others)
        }
        self._losses: list[torch.Tensor] = []
        self._finite: list[tuple[str, torch.Tensor]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at every loss and at every gradient as it arrives: a trial may clip or
        drop it.
        """

        def run_and_note(
            run: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if kwargs.get("accumulate_grad"):
                self._losses += [loss.detach() for loss in tensors_of(outputs)]
            return run(outputs, *args, **kwargs)

        with ExitStack() as stack:
            stack.enter_context(backwards_through(run_and_note))
            for name, parameter in self._parameters.items():
                if parameter.requires_grad and not is_lazy(parameter):
                    hook = partial(self._note, name)
                    handle = _register_hook(parameter, hook)  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)
            yield

    def look_at_gradients(self) -> None:
        """Look at what is left of the gradients: a trial may set them itself."""
        # a backward reaches the last
        for name, parameter in reversed(self._parameters.items()):
            if parameter.grad is not None:  # ones first
                self._note(name, parameter.grad)

    def read(self, *, uses_float16: bool) -> Rehearsed:
        losses = [largest_of(loss) for loss in self._losses]
        # `max` would lose a NaN, which is not larger than any number.
        losses = [loss if math.isfinite(loss) else math.inf for loss in losses]
        lost = dict.fromkeys(name for name, is_finite in self._finite if not is_finite)
        return Rehearsed(
            max(losses, default=0.0), tuple(lost), bool(self._finite), uses_float16
        )

    def _note(self, name: str, gradient: torch.Tensor) -> None:
        self._finite.append((name, torch.isfinite(values_of(gradient)).all()))


def largest_working(
    fails: Callable[[int], bool], guess: int, least: int, most: int
) -> int:
    """The largest number that does not fail, if everything above one that fails does,
    too.

    It goes from the guess in steps that double, then halves.

    Args:
        fails: Tries a number.
        guess: The number to try first.
        least: The smallest number to try.
        most: The largest.

    Returns:
        `least - 1` if all of them fail.
    """
    works, broken = least - 1, most + 1
    tried, step = min(max(guess, least), most), 1
    while broken - works > 1:
        if fails(tried):
            broken = tried
        else:
            works = tried
        if works < least:
            tried = max(broken - step, least)
        elif broken > most:
            tried = min(works + step, most)
        else:
            tried = (works + broken) // 2
        step *= 2
    return works


# What a rehearsal leaves out, and what it puts back.


@contextmanager
def without_steps(
    scaler: torch.amp.GradScaler,
    optimizers: Sequence[Optimizer],
    others: Iterable[tuple[object, str]] = (),
    *,
    scale: float | None = None,
) -> Iterator[None]:
    """Let no step, zero_grad or unscale_ have any effect in this block.

    Args:
        scaler: The scaler; its scale is restored.
        optimizers: The optimizers that do nothing.
        others: Other objects, each with the name of a method that does nothing either.
        scale: The loss scale in this block; by default the current one.
    """
    still: list[tuple[object, str]] = [
        (scaler, name) for name in ("step", "update", "unscale_")
    ]
    still += [
        (optimizer, name) for optimizer in optimizers for name in ("step", "zero_grad")
    ]
    with ExitStack() as stack:
        for owner, name in (*still, *others):
            stack.enter_context(patched(owner, name, _do_nothing))
        if scale is not None and scaler.is_enabled():
            before = scaler.state_dict()
            stack.callback(scaler.load_state_dict, before)
            scaler.load_state_dict({**before, "scale": scale})
        yield


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


@contextmanager
def undisturbed(
    *models: nn.Module, optimizers: Sequence[Optimizer] = ()
) -> Iterator[None]:
    """Train a batch in this block, then restore all state.

    Gradients are enabled and the models are in training mode, even during a validation.
    Weights (some trials clip or average them themselves), gradients, buffers, modes,
    settings of the optimizers and random state are restored. DistributedDataParallel
    exchanges nothing.
    """
    parameters = parameters_in(models, optimizers)
    modules = [module for model in models for module in model.modules()]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    with ExitStack() as stack:
        _keep_random_state(stack, parameters)
        for model in models:
            for buffer in model.buffers():
                stack.callback(_put_back, buffer, buffer.clone())
        for module in modules:
            stack.callback(setattr, module, "training", module.training)
            if not isinstance(module, LazyModuleMixin):  # which learns its sizes
                stack.callback(_put_back_plain_values, module, _plain_values(module))
            # which keeps its own buffers
            if not isinstance(module, torch.jit.ScriptModule):
                stack.callback(
                    _put_back_buffers, module, _own_buffers(module), dir(module)
                )
        _keep_weights(stack, parameters)
        for group in groups:
            stack.callback(group.update, dict(group))
        stack.enter_context(as_written())
        stack.enter_context(torch.enable_grad())
        for model in models:
            if isinstance(model, nn.parallel.DistributedDataParallel):
                stack.enter_context(model.no_sync())
            if not model.training:
                model.train()
        yield


def _keep_random_state(stack: ExitStack, parameters: Sequence[torch.Tensor]) -> None:
    devices = {
        parameter.device for parameter in parameters if parameter.device.type == "cuda"
    }
    stack.enter_context(torch.random.fork_rng(devices=list(devices)))
    stack.callback(random.setstate, random.getstate())
    numpy: Any = sys.modules.get("numpy")  # a batch that draws from it has imported it
    if numpy:
        stack.callback(numpy.random.set_state, numpy.random.get_state())


def _keep_weights(stack: ExitStack, parameters: Sequence[torch.Tensor]) -> None:
    """Keep weights and gradients; from now on there are no gradients."""
    stack.callback(drop_casts)
    for parameter in parameters:
        if not is_lazy(parameter):
            stack.callback(_put_back_weight, parameter, parameter.detach().clone())
        stack.callback(setattr, parameter, "grad", parameter.grad)
        parameter.grad = None


def _put_back_weight(weight: torch.Tensor, before: torch.Tensor) -> None:
    weight.data.copy_(before)


def _put_back(buffer: torch.Tensor, before: torch.Tensor) -> None:
    # One that is not strided cannot be restored.
    if buffer.layout is torch.strided and not torch.equal(buffer, before):
        with torch.no_grad():
            buffer.copy_(before)


def _put_back_buffers(
    module: nn.Module, own: Mapping[str, torch.Tensor], names: Sequence[str]
) -> None:
    """Put back the buffers that a module had; it may have put others in their place."""
    made = [name for name in _own_buffers(module) if name in names]  # which were None
    for name in dict.fromkeys([*own, *made]):
        setattr(module, name, own.get(name))


def _put_back_plain_values(module: nn.Module, before: Mapping[str, Any]) -> None:
    for name in _plain_values(module).keys() - before.keys():
        del vars(module)[name]
    vars(module).update(before)


def _plain_values(module: nn.Module) -> dict[str, Any]:
    """The numbers and words that a module keeps, such as a count of its forwards."""
    return {
        name: each
        for name, each in vars(module).items()
        if isinstance(each, _PLAIN) and name not in _OF_TORCH
    }


def _own_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


@contextmanager
def attributes_apart(owner: object, shared: Iterable[object]) -> Iterator[None]:
    """Give an object copies of its attributes in this block, and its own attributes
    after it.

    So a counter or a queue that it keeps does not see a batch that is trained in the
    block.

    Args:
        owner: Whose attributes are copied, such as a trial.
        shared: Objects that are not copied, wherever they are met. Neither are data
            sets, methods, and what cannot be copied.
    """
    attributes = vars(owner)
    own = dict(attributes)
    memo = {id(each): each for each in (owner, *shared)}
    moves_on = []
    for name, value in own.items():
        if not isinstance(value, _NEVER_COPIED):
            try:
                attributes[name] = copy.deepcopy(value, memo)
            except Exception:  # copying runs code of the attribute's own
                if isinstance(value, (Iterator, torch.Generator)):
                    moves_on.append(name)
    if moves_on:
        logger.warning(
            "the audit trains the first batch once more, on copies of what the trial "
            "keeps; it cannot copy %s, which the training finds as that batch has left "
            "it; amp.audit: false trains without an audit",
            ", ".join(moves_on),
        )
    try:
        yield
    finally:
        attributes.clear()
        attributes.update(own)


@contextmanager
def float16_as(dtype: torch.dtype | None) -> Iterator[set[torch.dtype]]:
    """Make the autocast regions in this block compute in another dtype.

    Args:
        dtype: bfloat16, in which float16 regions compute then, or float32, which
            switches float16 and bfloat16 regions off; None changes nothing.

    Yields:
        The dtypes of the regions that are entered, as they are in training.
    """
    in_float32 = dtype is torch.float32
    replaced: Sequence[torch.dtype] = ()
    if dtype is not None:
        replaced = SIXTEEN_BITS if in_float32 else (torch.float16,)
    enter = torch.autocast.__enter__
    entered: set[torch.dtype] = set()

    def enter_as(region: Any) -> Any:
        enter(region)  # type: ignore[no-untyped-call]  # torch has no types here
        if not autocast_is_on(region.device):
            return region
        entered.add(region.fast_dtype)
        if region.fast_dtype in replaced:
            keeps_casts = torch.is_autocast_cache_enabled()
            region.__exit__(None, None, None)
            other: Any = torch.autocast(
                region.device,
                dtype=None if in_float32 else dtype,
                enabled=not in_float32,
                cache_enabled=keeps_casts,
            )
            enter(other)  # type: ignore[no-untyped-call]
            before = {
                name: value for name, value in vars(other).items() if "prev" in name
            }
            vars(region).update(before)  # what its exit puts back
        return region

    with patched(torch.autocast, "__enter__", enter_as):
        yield entered
