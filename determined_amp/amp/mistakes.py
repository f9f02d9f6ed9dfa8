"""The stages of a window, which calls change them, and which calls are mistakes."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from determined_amp.amp.errors import ConfigError


class Stage(str, enum.Enum):  # strings hash faster
    """The stage of one optimizer between the backward and the end of its step."""

    SCALED = "its gradients may be scaled"
    UNSCALED = "its gradients are divided by the scale"
    LEFT_OUT = "they were dropped without a step, and the scale has not been updated"
    STEPPED = "it has stepped, and the scale has not been updated"
    UPDATED = "the scale has been updated after its step, which is not counted"


# In these stages the gradients may be scaled.
MAY_BE_SCALED = (Stage.SCALED, Stage.LEFT_OUT)

# In these stages overflows were looked for, and the scale does not know the result yet.
AWAITS_UPDATE = (Stage.UNSCALED, Stage.LEFT_OUT, Stage.STEPPED)

# In these stages there is a step that is not counted.
HAS_STEPPED = (Stage.STEPPED, Stage.UPDATED)


class Mistake(enum.Enum):
    """A mistake, with the words that describe it."""

    CLIPS_SCALED = "it clips gradients that are still scaled"
    STEPS_TWICE = (
        "it steps an optimizer again without amp.update(...) after the first step"
    )
    STEPS_ITSELF = "it steps an optimizer whose gradients may still be scaled"
    SCALES_NO_LOSS = "it does not scale the loss"
    TAKES_CLOSURE = "it steps with a closure, which a loss scale does not allow"
    COPIES = "it copies or pickles amp or its scaler, which belong to one training"
    UPDATES_NOTHING = "it steps an optimizer, and must end with amp.update(...)"


_AFTER_A_STEP: Mapping[str, Stage | Mistake] = {
    "unscale": Mistake.STEPS_TWICE,
    "clip": Mistake.STEPS_TWICE,
    "begin_step": Mistake.STEPS_TWICE,
    "step": Mistake.STEPS_TWICE,
    "update": Stage.UPDATED,
    "count": Stage.SCALED,
    "end_batch": Mistake.UPDATES_NOTHING,
}

# Where each call leads from each stage; `Window.move` looks it up. Mistakes that are
# possible in every stage are not here: a step that bypasses the scaler, takes a
# closure, or has no scaled loss since the last update.
TRANSITIONS: Mapping[Stage, Mapping[str, Stage | Mistake]] = {
    Stage.SCALED: {
        "unscale": Stage.UNSCALED,
        "clip": Mistake.CLIPS_SCALED,
        "begin_step": Stage.SCALED,
        "step": Stage.STEPPED,
        "leave_out": Stage.LEFT_OUT,  # an unmodified trial calls no `unscale_`
        "update": Stage.SCALED,
        "end_batch": Stage.SCALED,
    },
    Stage.UNSCALED: {
        "unscale": Stage.UNSCALED,  # an enabled GradScaler refuses it itself
        "clip": Stage.UNSCALED,
        "begin_step": Stage.UNSCALED,
        "step": Stage.STEPPED,
        "leave_out": Stage.LEFT_OUT,
        "update": Stage.SCALED,
        "end_batch": Stage.UNSCALED,
    },
    Stage.LEFT_OUT: {
        "unscale": Stage.UNSCALED,
        "clip": Mistake.CLIPS_SCALED,
        "begin_step": Stage.LEFT_OUT,
        "step": Stage.STEPPED,
        "update": Stage.SCALED,
        "end_batch": Stage.LEFT_OUT,
    },
    Stage.STEPPED: _AFTER_A_STEP,
    Stage.UPDATED: _AFTER_A_STEP,
}

_TWICE = (
    "amp.update(...) at the end of each batch, with amp.finish_steps() between two"
    " steps of a batch"
)
_NO_SCALE = "precision amp_bf16, tf32 or fp32"

# What to write instead in a loop of your own.
IN_A_LOOP: Mapping[Mistake, str] = {
    Mistake.CLIPS_SCALED: "amp.clip_gradients(optimizer, max_norm=...)",
    Mistake.STEPS_TWICE: _TWICE,
    Mistake.STEPS_ITSELF: "amp.scaler.step(optimizer)",
    Mistake.TAKES_CLOSURE: _NO_SCALE,
    Mistake.SCALES_NO_LOSS: "amp.scaler.scale(loss).backward()",
    Mistake.COPIES: "an AmpLoop for each training; amp.state_dict() for a checkpoint",
}

# The same in the `train_batch` of a trial.
IN_A_TRIAL: Mapping[Mistake, str] = {
    Mistake.CLIPS_SCALED: (
        "clip_grads=amp.clip(optimizer, max_norm=...), or a function that calls "
        "amp.scaler.unscale_(optimizer) first"
    ),
    Mistake.STEPS_TWICE: _TWICE,
    Mistake.TAKES_CLOSURE: _NO_SCALE,
    Mistake.STEPS_ITSELF: "context.step_optimizer(optimizer, scaler=amp.scaler)",
    Mistake.SCALES_NO_LOSS: "context.backward(amp.scaler.scale(loss))",
    Mistake.COPIES: "a MixedPrecision for each context; its checkpoints have the state",
}


def error_of(mistake: Mistake, remedies: Mapping[Mistake, str]) -> ConfigError:
    """The error for a mistake.

    Args:
        mistake: The mistake.
        remedies: `IN_A_LOOP` or `IN_A_TRIAL`.
    """
    source, place = (
        ("the trial", "train_batch: ") if remedies is IN_A_TRIAL else ("the loop", "")
    )
    remedy = f"; allowed: {remedies[mistake]}" if mistake in remedies else ""
    return ConfigError(source, [f"{place}{mistake.value}{remedy}"])
