"""Finds out why a batch does not train: replays it, and tries what would help."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from determined_amp.amp.origin import OUTSIDE, WHOLE_MODEL
from determined_amp.amp.passes import Pass, Replays, Train, plain_name
from determined_amp.amp.slots import OneSlot, Slots
from determined_amp.amp.tensors import has_nan, is_finite, is_plain, named_parameters, tensors_of
from determined_amp.amp.watch import Place, Seen

# No precision helps against activations and a loss this large, or weights that have grown by this
# factor since the start.
_ABSURD, _ABSURD_LOSS = 1.0e9, 1.0e6
_GROWN = 10.0


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
    """Say in one sentence what is the first thing that is not finite, and what helps.

    Synchronises. Gradients, buffers, modes and random state are restored.

    Args:
        models: All models of the trial.
        batch: The batch; its tensors are checked, too.
        train: Trains the batch at a loss scale.
        scale: The loss scale of the training.
        optimizers: Its optimizers, which may hold parameters of no model.
        grown: The factor by which the weights have grown since the start.
        slots: The processes of the training. All of them must call this, each with its own batch;
            by default there is only this one.

    Returns:
        None if everything is finite here, or if another slot has found a cause first.
    """
    replays = Replays(models, train, optimizers, slots or OneSlot())
    known = _bad_parameter(models)
    if known and any(map(has_nan, filter(is_plain, tensors_of(batch)))):
        known = _bad_input(batch)  # which, without a loss scale, has made the parameters NaN
    seen, error = None, None
    try:
        seen = replays.run(Pass(scale))
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
        return known or _cause(seen or Seen(), batch, replays, scale, grown)
    finally:
        replays.end()


def _cause(seen: Seen, batch: Any, replays: Replays, scale: float, grown: float) -> str:
    # First the scale: a mask of -inf, or a large value that is masked later, is not a fault.
    lower = replays.largest_sound_scale_log2(scale)
    if lower is not None:
        return _gradient_sentence(seen, replays, scale, lower)
    exact = replays.try_out(Pass(1.0, compute=torch.float32, asked=tuple(seen.forward)))
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


def _forward_sentence(place: Place, exact: Seen | None, replays: Replays, grown: float) -> str:
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


def _float32_sentence(seen: Seen, grown: float) -> str:
    """The cause if a pass is not finite without autocast either."""
    if seen.forward:
        what, where = "output", _where(seen.forward[0])
    else:
        what, where = "gradient", _module(_first_lost(seen))
    remedy = (
        _too_fast(grown) if grown >= _GROWN else "look at the inputs and at this operation there"
    )
    return f"the {what} of {where} is not finite, not even in float32; {remedy}"


def _gradient_sentence(seen: Seen, replays: Replays, scale: float, lower: int | None) -> str:
    module = _first_lost(seen)
    overflow = f"gradient overflow at {_module(module)}"
    if lower is None:
        return f"{overflow} at every loss scale. {_advice(module, replays, 1.0, None)}"
    keys = "init_scale" if lower >= 0 else "init_scale and min_scale"
    return (
        f"{overflow} at a loss scale of {scale:g}; at 2^{lower} nothing overflows: lower {keys}. "
        f"{_advice(module, replays, scale, None)}"
    )


def _advice(module: str, replays: Replays, scale: float, exact: Seen | None) -> str:
    """What has helped at a loss scale, as lines for the YAML."""
    in_bfloat16 = Pass(scale, compute=torch.bfloat16)
    helps = ["precision: amp_bf16"] if replays.is_sound(in_bfloat16) else []
    islands = replays.islands_from(module, scale)
    if islands:
        patterns = (f"^{re.escape(plain_name(name))}$" for name in islands)
        quoted = ", ".join(json.dumps(pattern) for pattern in patterns)
        helps.append(f"fp32_modules: [{quoted}]")
    if helps:
        return f"Settings that help: {', or '.join(helps)}"
    in_fp32 = ": train it in fp32" if exact is not None and exact.is_sound else ""
    return f"Neither amp_bf16 nor fp32_modules was seen to help{in_fp32}"


def _too_fast(grown: float) -> str:
    return (
        f"the weights are {grown:.3g} times as large as at the start: lower learning_rate, or clip "
        "the gradients; no precision helps"
    )


def _where(place: Place) -> str:
    """The place in the forward: a module, or an operation between modules."""
    if place.between is None:
        return _module(place.module)
    where = "outside the model" if place.module == OUTSIDE else f"of {_module(place.module)}"
    after = f", after {_module(place.between)}" if place.between else ""
    return f"{place.operation} {where}{after}"


def _module(name: str) -> str:
    if name == OUTSIDE:
        return "the loss, outside the model"
    return f"module {name.replace(WHOLE_MODEL, 'the model')}"


def _first_lost(seen: Seen) -> str:
    """The first module whose backward is not finite."""
    if seen.backward:
        return seen.backward.module
    return (seen.lost[0].rpartition(".")[0] if seen.lost else "") or WHOLE_MODEL


def _bad_input(batch: Any) -> str | None:
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
        if not is_finite(parameter):
            return (
                f"parameter {name} is already not finite; resume from an earlier "
                "checkpoint with a lower learning rate or a clip"
            )
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
