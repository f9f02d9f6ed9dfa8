"""Why a batch does not train: replays it, operation by operation, and tries what would help."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from determined_amp.amp.fp32_modules import meanwhile_in_float32
from determined_amp.amp.origin import (
    OUTSIDE,
    WHOLE_MODEL,
    Origin,
    backwards_through,
    hooked,
    module_names,
    only_views,
)
from determined_amp.amp.replay import float16_as, parameters_in, tensors_of, undisturbed
from determined_amp.amp.slots import OneSlot, Slots

# Trains the batch at this loss scale: forward, loss and backward as in training, without a step.
Train = Callable[[float], object]

# Activations and a loss from here on, or weights that have grown so many times since the training
# began, are beyond what a precision mends.
_ABSURD, _ABSURD_LOSS = 1.0e9, 1.0e6
_GROWN = 10.0

# A mask may be -inf; what is made of it is judged where it is computed.
_MASKS = {"fill", "fill_", "full_like", "index_fill", "index_fill_", "masked_fill", "masked_fill_"}
_UNINITIALISED = {"empty_like", "new_empty", "new_empty_strided"}

_MOST_PLACES = 16
_MOST_ISLANDS = 3
_LEAST_SCALE_LOG2 = -24


def find_cause(
    models: Sequence[nn.Module],
    batch: Any,
    train: Train,
    *,
    scale: float = 1.0,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    grown: float = 1.0,
    slots: Slots | None = None,
) -> str | None:
    """One sentence on the first thing that is not finite, and what was seen to help.

    Synchronises. Gradients, buffers, modes and random state are afterwards as before.

    Args:
        models: All models of the trial.
        batch: What `train` trains; its tensors are checked.
        train: Trains the batch at a loss scale.
        scale: The loss scale of the training.
        optimizers: Those of the trial. They may hold parameters that are in no model.
        grown: How many times as large the weights are as when the training began.
        slots: The processes of the training. All of them must call this, each with its own batch;
            by default this is the only one.

    Returns:
        None if everything is finite here, or another slot is the first that has a cause.
    """
    replays = _Replays(models, train, optimizers, slots or OneSlot())
    known = _bad_parameter(models)
    if known and any(map(_has_nan, filter(_is_plain, tensors_of(batch)))):
        known = _bad_input(batch)  # without a loss scale it has made them so
    seen, error = None, None
    try:
        seen = replays.run(_Pass(scale))
    except torch.cuda.OutOfMemoryError:
        known = known or "unknown: there was no memory to look for it"
    except Exception as raised:
        error = raised
    trouble = known is not None or error is not None or (seen is not None and not seen.is_sound)
    if not replays.lead(trouble):
        return None
    try:
        if known is None and error is not None:
            raise error
        return known or _cause(seen or _Seen(), batch, replays, scale, grown)
    finally:
        replays.end()


def _cause(seen: _Seen, batch: Any, replays: _Replays, scale: float, grown: float) -> str:
    # First the scale: a mask of -inf, or a large value that is masked later, is no fault.
    lower = replays.largest_sound_scale_log2(scale)
    if lower is not None:
        return _gradient_sentence(seen, replays, scale, lower)
    exact = replays.try_out(_Pass(1.0, compute=torch.float32, asked=tuple(seen.forward)))
    if exact is not None and not exact.is_sound:
        by_hand = next((p for p in exact.forward if p.dtype is not torch.float32), None)
        if by_hand is not None and by_hand.dtype is not torch.float64:
            return (
                f"forward overflow in {_where(by_hand)}, which the trial itself computes in "
                f"{_name(by_hand.dtype)}: leave that cast out"
            )
        return _bad_input(batch) or _float32_sentence(exact, grown)
    overflow = next((p for p in seen.forward if exact is None or exact.is_finite_at(p)), None)
    if overflow is not None:
        return _forward_sentence(overflow, exact, replays, grown)
    return _gradient_sentence(seen, replays, scale, None)


class _Place(NamedTuple):
    """An operation of a forward or backward.

    Args:
        module: The module whose forward it belongs to.
        operation: Its name.
        number: How many of that name that module has called before.
        between: Of an operation between modules, the module whose forward ended last.
        cast_of: Of a cast, the largest value that was cast.
        kind: What it was made of: "activation", or "weight" if a parameter was cast.
        dtype: The dtype of its result.
    """

    module: str
    operation: str
    number: int
    between: str | None
    cast_of: float | None
    kind: str
    dtype: torch.dtype

    @property
    def key(self) -> tuple[str, str, int]:
        return self.module, self.operation, self.number


@dataclass
class _Seen:
    """What one pass showed.

    Args:
        forward: The first operations of the forward whose results are not finite though what they
            got is.
        backward: The first such operation of the backward.
        largest_loss: The largest magnitude of the scaled losses.
        lost: Names of the parameters whose gradients are not finite, in the order of the backward.
        largest: The largest magnitudes of the results that were asked for, by `_Place.key`.
    """

    forward: list[_Place] = field(default_factory=list)
    backward: _Place | None = None
    largest_loss: float = 0.0
    lost: list[str] = field(default_factory=list)
    largest: dict[tuple[str, str, int], float] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        return math.isfinite(self.largest_loss) and not self.lost

    def is_finite_at(self, place: _Place) -> bool:
        """Whether an operation that overflowed in another pass is finite here, or a mere cast."""
        return place.cast_of is not None or math.isfinite(self.largest.get(place.key, math.nan))


class _Pass(NamedTuple):
    """A way to run the batch.

    Args:
        scale: The loss scale.
        compute: float32: without autocast; bfloat16: in place of float16; None: as in training.
        islands: Modules to keep in float32.
        asked: Operations whose largest result is to be noted.
    """

    scale: float
    compute: torch.dtype | None = None
    islands: tuple[str, ...] = ()
    asked: tuple[_Place, ...] = ()


class _Replays:
    """Runs one batch in different ways.

    A forward may wait for those on other slots, as SyncBatchNorm does. So all slots make the same
    passes: those that the first one in trouble asks for.

    Args:
        models: All models of the trial.
        train: Trains the batch at a loss scale.
        optimizers: Those of the trial.
        slots: The processes of the training.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        train: Train,
        optimizers: Sequence[torch.optim.Optimizer],
        slots: Slots,
    ) -> None:
        self._models = models
        self._train = train
        self._optimizers = optimizers
        self._slots = slots
        self._modules = {name: module for module, name in module_names(models).items()}
        parameters = (p for model in models for p in model.parameters())
        self._device_type = next((p.device.type for p in parameters), "cpu")

    def lead(self, in_trouble: bool) -> bool:
        """Whether this slot is the first one in trouble; the others make its passes until `end`."""
        troubles = self._slots.allgather(in_trouble)
        if True not in troubles:
            return False
        if troubles.index(True) == self._slots.rank:
            return True
        while asked := next(filter(None, self._slots.allgather(None)), None):
            self._run_safely(asked)
        return False

    def end(self) -> None:
        """Let the other slots go."""
        self._slots.allgather(None)

    def try_out(self, asked: _Pass) -> _Seen | None:
        """Run a pass on all slots; None if the trial cannot run so."""
        self._slots.allgather(asked)
        return self._run_safely(asked)

    def is_sound(self, asked: _Pass) -> bool:
        """Whether a pass is finite."""
        seen = self.try_out(asked)
        return seen is not None and seen.is_sound

    def islands_from(self, name: str, scale: float) -> tuple[str, ...]:
        """Modules, `name` the first, that leave nothing to overflow if they compute in float32.

        Empty if three do not, or if they hold all parameters of a model.
        """
        islands: tuple[str, ...] = ()
        while len(islands) < _MOST_ISLANDS and name in self._modules and name not in islands:
            islands += (name,)
            inside = {p for m in self._named_alike(islands) for p in m.parameters()}
            if any(inside.issuperset(model.parameters()) for model in self._models):
                return ()  # which nothing would be left of to autocast
            seen = self.try_out(_Pass(scale, islands=islands))
            if seen is None or seen.is_sound:
                return islands if seen else ()
            places = [*seen.forward, *([seen.backward] if seen.backward else [])]
            name = places[0].module if places else ""
        return ()

    def largest_sound_scale_log2(self, below: float) -> int | None:
        """log2 of the largest power of two below a scale at which the pass is finite."""
        sound, fails = _LEAST_SCALE_LOG2, math.ceil(math.log2(below))
        if sound >= fails or not self.is_sound(_Pass(2.0**sound)):
            return None
        while fails - sound > 1:
            middle = (sound + fails) // 2
            is_sound = self.is_sound(_Pass(2.0**middle))
            sound, fails = (middle, fails) if is_sound else (sound, middle)
        return sound

    def run(self, asked: _Pass) -> _Seen:
        """Run a pass on this slot alone."""
        watch = _Watch(self._models, {place.key for place in asked.asked}, self._optimizers)
        islands = self._named_alike(asked.islands)
        with ExitStack() as stack:
            if asked.compute is torch.float32:
                stack.enter_context(float16_as(None, bfloat16_too=True))
            elif asked.compute is not None:
                stack.enter_context(float16_as(asked.compute))
            stack.enter_context(meanwhile_in_float32(islands, self._device_type))
            stack.enter_context(undisturbed(*self._models, optimizers=self._optimizers))
            stack.enter_context(watch.watching())
            self._train(asked.scale)
        return watch.seen

    def _named_alike(self, names: Sequence[str]) -> list[nn.Module]:
        """The modules that a pattern for these names means, in all models."""
        plain = set(map(_plain, names))
        return [module for name, module in self._modules.items() if _plain(name) in plain]

    def _run_safely(self, asked: _Pass) -> _Seen | None:
        try:
            return self.run(asked)
        # The trial's own code can raise anything on an unexpected dtype, and memory can be short.
        except Exception:
            return None


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Looks at every result of a pass.

    Args:
        models: The models whose modules name the places, and whose parameters must get finite
            gradients.
        asked: `_Place.key` of the operations whose largest result is noted.
        optimizers: Those of the trial; so must parameters of theirs that are in no model.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        models: Sequence[nn.Module],
        asked: set[tuple[str, str, int]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = _Seen()
        self._asked = asked
        self._origin = Origin(models)
        self._leaves = {n for m, n in module_names(models).items() if not list(m.children())}
        self._parameters: dict[str, torch.Tensor] = dict(_named_parameters(models))
        others = set(parameters_in((), optimizers)) - set(self._parameters.values())
        self._parameters |= {f"(parameter {i} of no model)": p for i, p in enumerate(others)}
        self._calls: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at all that is computed in this block."""

        def watched(run: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("accumulate_grad"):
                losses = [_largest(loss) for loss in tensors_of(outputs)]
                # A NaN is larger than nothing, so it would be lost.
                losses = [loss if math.isfinite(loss) else math.inf for loss in losses]
                self.seen.largest_loss = max(self.seen.largest_loss, *losses)
            return run(outputs, *args, **kwargs)

        with ExitStack() as stack:
            for name, parameter in self._parameters.items():
                stack.enter_context(hooked([parameter], partial(self._judge, name)))
            stack.enter_context(backwards_through(watched))
            stack.enter_context(self._origin.tracking())
            stack.enter_context(self)
            yield
        # Of a trial that sets them itself; the backward reaches what is defined last first.
        for name, parameter in reversed(self._parameters.items()):
            if parameter.grad is not None:
                self._judge(name, parameter.grad)

    def _judge(self, name: str, gradient: torch.Tensor) -> None:
        if not _finite(gradient) and name not in self.seen.lost:
            self.seen.lost.append(name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = str(getattr(func, "overloadpacket", func)).rpartition(".")[2]
        node: Any = torch._C._current_autograd_node()
        results = [tensor for tensor in tensors_of(result) if tensor.is_floating_point()]
        is_repeated = node is not None and self._origin.current != OUTSIDE  # by a checkpoint
        if is_repeated or not results or operation in _UNINITIALISED or only_views(func):
            return result
        is_cast = operation == "_to_copy"
        module = self._origin.current if node is None else self._origin.of(node)
        key = module, operation, self._calls[module, operation]
        if node is None and not is_cast:  # casts differ between the precisions
            self._calls[module, operation] += 1
            if key in self._asked:
                self.seen.largest[key] = max(map(_largest, results))
        if all(map(_finite, results)) or operation in _MASKS:
            return result
        inputs = [t for t in tensors_of((args, kwargs or {})) if t.is_floating_point()]
        # A softmax over masks of -inf alone is NaN, and the first that is.
        makes_nan = any(map(_has_nan, results)) and not any(map(_has_nan, inputs))
        if inputs and (makes_nan or all(map(_finite, inputs))):
            cast_of = max(map(_largest, inputs)) if is_cast else None
            between = None if module in self._leaves else self._origin.left
            kind = "weight" if is_cast and isinstance(inputs[0], nn.Parameter) else "activation"
            place = _Place(*key, between, cast_of, kind, results[0].dtype)
            if node is not None:
                self.seen.backward = self.seen.backward or place
            elif len(self.seen.forward) < _MOST_PLACES:
                self.seen.forward.append(place)
        return result


def _forward_sentence(place: _Place, exact: _Seen | None, replays: _Replays, grown: float) -> str:
    largest = place.cast_of
    if largest is None and exact is not None:
        largest = exact.largest[place.key]
    limit, name = torch.finfo(place.dtype).max, _name(place.dtype)
    size = "" if largest is None else f"largest |{place.kind}| {largest:.3g}, "
    overflow = f"forward overflow in {_where(place)}: {size}{name} ends at {limit:g}"
    if largest is not None and largest < limit:  # such as 0 / 0, of an eps that float16 rounds to 0
        overflow = (
            f"the output of {_where(place)} is not finite in {name}, and at most {largest:.3g} in "
            f"float32: what it is made of is beyond {name}"
        )
    if grown >= _GROWN:
        return f"{overflow}; {_too_fast(grown)}"
    absurd = exact is not None and exact.largest_loss >= _ABSURD_LOSS
    if absurd and largest is not None and largest >= _ABSURD:
        return (
            f"{overflow}; that far beyond it, with a loss of {exact.largest_loss:.3g} in float32, "  # type: ignore[union-attr]
            "the precision is not the cause: look at the inputs and the initial weights, and lower "
            "learning_rate"
        )
    return f"{overflow}; no loss scale helps. {_advice(place.module, replays, 1.0, exact)}"


def _float32_sentence(seen: _Seen, grown: float) -> str:
    """Of a pass that is not finite without autocast either."""
    if seen.forward:
        what, where = "output", _where(seen.forward[0])
    else:
        what, where = "gradient", _module(_first_lost(seen))
    remedy = (
        _too_fast(grown) if grown >= _GROWN else "look at the inputs and at this operation there"
    )
    return f"the {what} of {where} is not finite, not even in float32; {remedy}"


def _gradient_sentence(seen: _Seen, replays: _Replays, scale: float, lower: int | None) -> str:
    module = _first_lost(seen)
    overflow = f"gradient overflow at {_module(module)}"
    if lower is None:
        return f"{overflow} at every loss scale. {_advice(module, replays, 1.0, None)}"
    keys = "init_scale" if lower >= 0 else "init_scale and min_scale"
    return (
        f"{overflow} at a loss scale of {scale:g}; at 2^{lower} nothing overflows: lower {keys}. "
        f"{_advice(module, replays, scale, None)}"
    )


def _advice(module: str, replays: _Replays, scale: float, exact: _Seen | None) -> str:
    """What was seen to help at a loss scale, as lines for the YAML."""
    in_bfloat16 = _Pass(scale, compute=torch.bfloat16)
    helps = ["precision: amp_bf16"] if replays.is_sound(in_bfloat16) else []
    islands = replays.islands_from(module, scale)
    if islands:
        patterns = (f"^{re.escape(_plain(name))}$" for name in islands)
        quoted = ", ".join(json.dumps(pattern) for pattern in patterns)
        helps.append(f"fp32_modules: [{quoted}]")
    if helps:
        return f"What helps, in the YAML: {', or '.join(helps)}"
    in_fp32 = ": train it in fp32" if exact is not None and exact.is_sound else ""
    return f"Neither amp_bf16 nor fp32_modules was seen to help{in_fp32}"


def _plain(name: str) -> str:
    """The name without the number of its model."""
    return name.rpartition(": ")[2]


def _too_fast(grown: float) -> str:
    return (
        f"the weights are {grown:.3g} times as large as at the start: lower learning_rate, or clip "
        "the gradients; no precision helps"
    )


def _where(place: _Place) -> str:
    """Where in the forward: the module, and the operation if it is one between modules."""
    if place.between is None:
        return _module(place.module)
    where = "outside the model" if place.module == OUTSIDE else f"of {_module(place.module)}"
    after = f", after {_module(place.between)}" if place.between else ""
    return f"{place.operation} {where}{after}"


def _module(name: str) -> str:
    if name == OUTSIDE:
        return "the loss, outside the model"
    return f"module {name.replace(WHOLE_MODEL, 'the model')}"


def _first_lost(seen: _Seen) -> str:
    """The module whose backward is the first that is not finite."""
    if seen.backward:
        return seen.backward.module
    return (seen.lost[0].rpartition(".")[0] if seen.lost else "") or WHOLE_MODEL


def _bad_input(batch: Any) -> str | None:
    for position, tensor in enumerate(tensors_of(batch)):
        if not _is_plain(tensor):
            continue
        samples = len(tensor) if tensor.dim() else 1
        rows = torch.isfinite(tensor).reshape(samples, -1)
        bad = (~rows.all(dim=-1)).nonzero().flatten().tolist()
        if bad:
            return (
                f"input {position} of the batch is not finite in samples {bad}; "
                "fix or remove these samples"
            )
    return None


def _bad_parameter(models: Sequence[nn.Module]) -> str | None:
    for name, parameter in _named_parameters(models):
        if not _finite(parameter):
            return (
                f"parameter {name} is already not finite; resume from an earlier "
                "checkpoint with a lower learning rate or a clip"
            )
    return None


def _named_parameters(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for number, model in enumerate(models):
        prefix = f"model {number}: " if len(models) > 1 else ""
        for name, parameter in model.named_parameters():
            yield prefix + name.removeprefix("module."), parameter  # of DistributedDataParallel


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has rows of numbers."""
    is_strided = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    return is_strided and tensor.numel() > 0


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(_values(tensor)).all())


def _has_nan(tensor: torch.Tensor) -> bool:
    return bool(torch.isnan(_values(tensor)).any())


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor of any kind."""
    if tensor.is_nested:
        return torch.cat([part.detach().flatten() for part in tensor.unbind()])
    return tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _largest(tensor: torch.Tensor) -> float:
    return float(_values(tensor).abs().max()) if tensor.numel() else 0.0
