"""The stages of a window, which calls change them, and which calls are mistakes."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from determined_amp.amp.errors import ConfigError


class Stage(str, enum.Enum):  # strings hash faster
    """The stage of one optimizer between the backward and the end of its step."""

    SCALED = "its gradients may be scaled"
    UNSCALED = "its gradients are divided by the scale"
    DROPPED = "they were dropped without a step, and the scale has not been updated"
    STEPPED = "it has stepped, and the scale has not been updated"
    UPDATED = "the scale has been updated after its step, which is not counted"


# In these stages the gradients may be scaled.
MAY_BE_SCALED = (Stage.SCALED, Stage.DROPPED)

# In these stages overflows were looked for, and the scale does not know the result yet.
AWAITS_UPDATE = (Stage.UNSCALED, Stage.DROPPED, Stage.STEPPED)

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


# What a training asks of a window.
Call = Literal[
    "unscale",
    "clip",
    "begin_step",
    "step",
    "drop",
    "update",
    "count",
    "end_batch",
]

_BEFORE_A_STEP: Mapping[Call, Stage | Mistake] = {
    "unscale": Stage.UNSCALED,
    "step": Stage.STEPPED,
    "drop": Stage.DROPPED,
    "update": Stage.SCALED,
}
_STILL_SCALED = {**_BEFORE_A_STEP, "clip": Mistake.CLIPS_SCALED}
_AFTER_A_STEP: Mapping[Call, Stage | Mistake] = {
    "unscale": Mistake.STEPS_TWICE,
    "clip": Mistake.STEPS_TWICE,
    "begin_step": Mistake.STEPS_TWICE,
    "step": Mistake.STEPS_TWICE,
    "update": Stage.UPDATED,
    "end_batch": Mistake.UPDATES_NOTHING,
}

# Where each call leads from each stage; a call that is not here changes nothing.
# `Window.move` looks it up. Mistakes that are possible in every stage are not here: a
# step that bypasses the scaler, takes a closure, or has no scaled loss since the last
# update, and a copy.
TRANSITIONS: Mapping[Stage, Mapping[Call, Stage | Mistake]] = {
    Stage.SCALED: _STILL_SCALED,
    Stage.UNSCALED: _BEFORE_A_STEP,  # an enabled GradScaler refuses a second `unscale_`
    Stage.DROPPED: _STILL_SCALED,
    Stage.STEPPED: _AFTER_A_STEP,
    Stage.UPDATED: {**_AFTER_A_STEP, "count": Stage.SCALED},
}


@dataclass(frozen=True)
class Wording:
    """How the errors of one kind of training speak.

    Args:
        source: How they begin.
        place: Where in the user's code the mistake is; empty if that is clear.
        remedies: What to write instead of each mistake.
    """

    source: str
    place: str
    remedies: Mapping[Mistake, str]

    def error_of(self, mistake: Mistake) -> ConfigError:
        """The error for a mistake."""
        remedy = self.remedies.get(mistake)
        allowed = f"; allowed: {remedy}" if remedy else ""
        return ConfigError(self.source, [f"{self.place}{mistake.value}{allowed}"])


_TWICE = (
    "amp.update(...) at the end of each batch, with amp.finish_steps() between two"
    " steps of a batch"
)
_NO_SCALE = "precision amp_bf16, tf32 or fp32"

# A loop of the user's own.
IN_A_LOOP = Wording(
    "the loop",
    "",
    {
        Mistake.CLIPS_SCALED: "amp.clip_gradients(optimizer, max_norm=...)",
        Mistake.STEPS_TWICE: _TWICE,
        Mistake.STEPS_ITSELF: "amp.scaler.step(optimizer)",
        Mistake.TAKES_CLOSURE: _NO_SCALE,
        Mistake.SCALES_NO_LOSS: "amp.scaler.scale(loss).backward()",
        Mistake.COPIES: (
            "an AmpLoop for each training; amp.state_dict() for a checkpoint"
        ),
    },
)

IN_A_TRIAL = Wording(
    "the trial",
    "train_batch: ",
    {
        Mistake.CLIPS_SCALED: (
            "clip_grads=amp.clip(optimizer, max_norm=...), or a function that calls "
            "amp.scaler.unscale_(optimizer) first"
        ),
        Mistake.STEPS_TWICE: _TWICE,
        Mistake.TAKES_CLOSURE: _NO_SCALE,
        Mistake.STEPS_ITSELF: "context.step_optimizer(optimizer, scaler=amp.scaler)",
        Mistake.SCALES_NO_LOSS: "context.backward(amp.scaler.scale(loss))",
        Mistake.COPIES: (
            "a MixedPrecision for each context; its checkpoints have the state"
        ),
    },
)
