"""Finds out why a batch does not train: rehearses it, and tries what would help."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from determined_amp.amp.errors import one_line
from determined_amp.amp.rehearse.backward_graph import (
    OUTSIDE,
    WHOLE_MODEL,
    module_names,
)
from determined_amp.amp.rehearse.overflows import Key, OverflowWatch, Place
from determined_amp.amp.rehearse.rehearsal import Rehearsal, Rehearsed
from determined_amp.amp.rehearse.searching import largest_working
from determined_amp.amp.slots import Slots
from determined_amp.amp.tensors import (
    dtype_name,
    has_nan,
    is_finite,
    is_plain,
    named_parameters,
    tensors_of,
)

# No precision helps against activations and a loss this large, or weights that have
# grown by this factor since the start.
_ABSURD, _ABSURD_LOSS = 1.0e9, 1.0e6
_GROWN = 10.0

_MOST_ISLANDS = 3
_LEAST_SCALE_LOG2 = -24


def find_cause(
    rehearsal: Rehearsal, slots: Slots, *, scale: float, grown: float = 1.0
) -> str | None:
    """Name in one sentence the first thing that is not finite, and what helps.

    Synchronises. Everything is put back.

    Args:
        rehearsal: The batch of this slot.
        slots: The processes of the training. All of them must call this, each with its
            own batch.
        scale: The loss scale of the training.
        grown: The factor by which the weights have grown since the start.

    Returns:
        The cause on the first slot in trouble, the same text on all slots; None if
        everything is finite.
    """
    looks = slots.allgather(_first_look(rehearsal, scale))
    rank = next((rank for rank, look in enumerate(looks) if look.is_in_trouble), None)
    if rank is None:
        return None
    first: _Seen = looks[rank]
    return first.known or _Search(rehearsal, slots, rank, first, scale, grown).cause()


@dataclass(frozen=True)
class _Seen:
    """What was seen in one rehearsal."""

    outcome: Rehearsed
    forward: Sequence[Place]  # see `OverflowWatch`
    backward: str | None
    largest: dict[Key, float]
    known: str | None = None  # a cause that needs no search
    bad_input: str | None = None  # what is not finite in the batch

    @property
    def is_in_trouble(self) -> bool:
        return self.known is not None or not self.outcome.is_sound

    @property
    def first_lost(self) -> str:
        """The first module whose backward is not finite."""
        lost = self.outcome.lost
        of_parameter = lost[0].rpartition(".")[0] if lost else ""
        return self.backward or of_parameter or WHOLE_MODEL

    def is_finite_at(self, place: Place) -> bool:
        """Whether a place that overflowed in another run is finite here, or a cast."""
        return place.cast_of is not None or math.isfinite(
            self.largest.get(place.key, math.nan)
        )


def _first_look(rehearsal: Rehearsal, scale: float) -> _Seen:
    """Rehearse this slot's batch as in training, and return what was seen."""
    nothing = Rehearsed(0.0, (), has_gradients=False, uses_float16=False)
    seen, known, bad_input = _Seen(nothing, (), None, {}), None, None
    try:
        bad_input = fault_of_input(rehearsal.batch)
        known = _bad_parameter(rehearsal.models)
        if known and any(map(has_nan, filter(is_plain, tensors_of(rehearsal.batch)))):
            # Without a loss scale, a NaN in the batch makes the parameters NaN.
            known = bad_input
        seen = _see(rehearsal, scale)
    except torch.cuda.OutOfMemoryError:
        known = known or "unknown: there was no memory to look for it"
    except Exception as error:  # from the trial's code; other slots wait for this one
        raised = f"{type(error).__name__}: {one_line(error)}"
        known = known or f"not found: training the batch again raised {raised}"
    return replace(seen, known=known, bad_input=bad_input)


def _see(
    rehearsal: Rehearsal,
    scale: float,
    dtype: torch.dtype | None = None,
    islands: Sequence[nn.Module] = (),
    asked: Sequence[Place] = (),
) -> _Seen:
    keys = {place.key for place in asked}
    watch = OverflowWatch(rehearsal.models, keys)
    outcome = rehearsal.run(scale, dtype, islands=islands, watch=watch.watching())
    return _Seen(outcome, watch.forward, watch.backward, watch.largest)


@dataclass
class _Search:
    """Searches for the cause on one slot by rehearsals on all slots.

    A forward may wait for the other slots, as SyncBatchNorm does. So all slots make the
    same runs, exchange what they saw after each one, and come to the same cause.
    """

    rehearsal: Rehearsal
    slots: Slots
    rank: int  # of the slot in trouble
    first: _Seen  # what that slot saw in its first rehearsal
    scale: float
    grown: float

    def cause(self) -> str:
        seen = self.first
        # The scale comes before the forward: there a mask of -inf, or a large value
        # that is masked later, is not a fault.
        lower = self._largest_sound_scale_log2()
        if lower is not None:
            return self._gradient_sentence(seen, lower)
        exact = self._run(1.0, torch.float32, asked=seen.forward)[self.rank]
        if exact is not None and not exact.outcome.is_sound:
            return self._float32_sentence(exact)
        overflow = next(
            (p for p in seen.forward if exact is None or exact.is_finite_at(p)), None
        )
        if overflow is not None:
            return self._forward_sentence(overflow, exact)
        return self._gradient_sentence(seen, None)

    def _run(
        self,
        scale: float,
        dtype: torch.dtype | None = None,
        islands: Sequence[nn.Module] = (),
        asked: Sequence[Place] = (),
    ) -> list[_Seen | None]:
        """What each slot saw in a run; None for a slot where the run failed."""
        here = None
        # The trial's own code can raise anything on an unexpected dtype, and memory can
        # run out.
        with suppress(Exception):
            here = _see(self.rehearsal, scale, dtype, islands, asked)
        return self.slots.allgather(here)

    def _is_sound(self, scale: float, dtype: torch.dtype | None = None) -> bool:
        seen = self._run(scale, dtype)
        return all(each is not None and each.outcome.is_sound for each in seen)

    def _largest_sound_scale_log2(self) -> int | None:
        """log2 of the largest power of two below the scale that keeps all finite."""
        highest = math.ceil(math.log2(self.scale)) - 1
        if highest < _LEAST_SCALE_LOG2 or not self._is_sound(2.0**_LEAST_SCALE_LOG2):
            return None
        return largest_working(
            lambda log2: not self._is_sound(2.0**log2),
            guess=(highest + _LEAST_SCALE_LOG2) // 2,
            least=_LEAST_SCALE_LOG2 + 1,
            most=highest,
        )

    def _islands_from(self, name: str, scale: float) -> Sequence[str]:
        """Up to three modules, `name` first, that avoid the overflow if in float32.

        Empty if there are none, or if they hold all parameters of a model.
        """
        names = module_names(self.rehearsal.models)
        islands: list[str] = []
        while (
            len(islands) < _MOST_ISLANDS
            and name in names.values()
            and name not in islands
        ):
            islands.append(name)
            plain = set(map(_plain_name, islands))  # a pattern matches in all models
            modules = [
                module for module, full in names.items() if _plain_name(full) in plain
            ]
            inside = {
                parameter for module in modules for parameter in module.parameters()
            }
            if any(
                inside.issuperset(model.parameters()) for model in self.rehearsal.models
            ):
                return []  # nothing would be left to autocast
            seen = self._run(scale, islands=modules)[self.rank]
            if seen is None or seen.outcome.is_sound:
                return islands if seen else []
            name = seen.forward[0].module if seen.forward else seen.backward or ""
        return []

    # The sentences.

    def _forward_sentence(self, place: Place, exact: _Seen | None) -> str:
        largest = place.cast_of
        if largest is None and exact is not None:
            largest = exact.largest[place.key]
        limit, name = torch.finfo(place.dtype).max, dtype_name(place.dtype)
        size = "" if largest is None else f"largest |{place.kind}| {largest:.3g}, "
        overflow = (
            f"forward overflow in {_where(place)}: {size}{name}'s maximum is {limit:g}"
        )
        # for example 0 / 0, where float16 rounds an eps to 0
        if largest is not None and largest < limit:
            overflow = (
                f"the output of {_where(place)} is not finite in {name}, and at most "
                f"{largest:.3g} in float32: its inputs exceed the range of {name}"
            )
        if self.grown >= _GROWN:
            return f"{overflow}; {self._too_fast()}"
        loss = 0.0 if exact is None else exact.outcome.largest_loss
        if loss >= _ABSURD_LOSS and largest is not None and largest >= _ABSURD:
            return (
                f"{overflow}; so far above it, and with a loss of {loss:.3g} in "
                "float32, the precision is not the cause: look at the inputs and the "
                "initial weights, and lower learning_rate"
            )
        return (
            f"{overflow}; no loss scale helps. {self._advice(place.module, 1.0, exact)}"
        )

    def _float32_sentence(self, exact: _Seen) -> str:
        """The cause if the batch is not finite even without autocast."""
        not_float32 = (
            place for place in exact.forward if place.dtype is not torch.float32
        )
        by_hand = next(not_float32, None)
        if by_hand is not None and by_hand.dtype is not torch.float64:
            return (
                f"forward overflow in {_where(by_hand)}, which the trial itself "
                f"computes in {dtype_name(by_hand.dtype)}: remove that cast"
            )
        if self.first.bad_input is not None:
            return self.first.bad_input
        what, where = "gradient", _module(exact.first_lost)
        if exact.forward:
            what, where = "output", _where(exact.forward[0])
        remedy = "look at the inputs and at this operation there"
        if self.grown >= _GROWN:
            remedy = self._too_fast()
        return f"the {what} of {where} is not finite, not even in float32; {remedy}"

    def _gradient_sentence(self, seen: _Seen, lower: int | None) -> str:
        module = seen.first_lost
        overflow = f"gradient overflow at {_module(module)}"
        if lower is None:
            return f"{overflow} at every loss scale. {self._advice(module, 1.0)}"
        keys = "init_scale" if lower >= 0 else "init_scale and min_scale"
        return (
            f"{overflow} at a loss scale of {self.scale:g}; at 2^{lower} nothing "
            f"overflows: lower {keys}. {self._advice(module, self.scale)}"
        )

    def _advice(self, module: str, scale: float, exact: _Seen | None = None) -> str:
        """The settings that helped at a loss scale, as lines for the YAML."""
        helps = ["precision: amp_bf16"] if self._is_sound(scale, torch.bfloat16) else []
        islands = self._islands_from(module, scale)
        if islands:
            patterns = [f"^{re.escape(_plain_name(name))}$" for name in islands]
            helps.append(f"fp32_modules: {json.dumps(patterns)}")
        if helps:
            return f"Settings that help: {', or '.join(helps)}"
        in_fp32 = (
            ": train it in fp32" if exact is not None and exact.outcome.is_sound else ""
        )
        return f"Neither amp_bf16 nor fp32_modules was seen to help{in_fp32}"

    def _too_fast(self) -> str:
        return (
            f"the weights are {self.grown:.3g} times as large as at the start: lower "
            "learning_rate, or clip the gradients; no precision helps"
        )


def _where(place: Place) -> str:
    """A place of the forward in words: a module, or an operation between modules."""
    if place.between is None:
        return _module(place.module)
    where = (
        "outside the model"
        if place.module == OUTSIDE
        else f"of {_module(place.module)}"
    )
    after = f", after {_module(place.between)}" if place.between else ""
    return f"{place.key[1]} {where}{after}"


def _module(name: str) -> str:
    if name == OUTSIDE:
        return "the loss, outside the model"
    return f"module {name.replace(WHOLE_MODEL, 'the model')}"


def _plain_name(name: str) -> str:
    """The name without the number of its model."""
    return name.rpartition(": ")[2]


def fault_of_input(batch: Any) -> str | None:
    """A sentence that names the samples that are not finite; None if all are finite."""
    for position, tensor in enumerate(tensors_of(batch)):
        if not is_plain(tensor):
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
    for name, parameter in named_parameters(models):
        # A parameter that is not trained, such as a mask, may be infinite on purpose.
        if parameter.requires_grad and not is_finite(parameter):
            return (
                f"parameter {name} is already not finite; resume from an earlier "
                "checkpoint with a lower learning rate or a clip"
            )
    return None
