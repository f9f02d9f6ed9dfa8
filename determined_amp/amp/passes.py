"""Trains one batch again in different ways, on all processes of a training together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import nn

from determined_amp.amp.fp32_modules import meanwhile_in_float32
from determined_amp.amp.origin import module_names
from determined_amp.amp.replay import float16_as, undisturbed
from determined_amp.amp.slots import Slots
from determined_amp.amp.watch import Place, Seen, Watch

# Trains the batch at this loss scale: forward, loss and backward as in training, without a step.
Train = Callable[[float], object]

_MOST_ISLANDS = 3
_LEAST_SCALE_LOG2 = -24


class Pass(NamedTuple):
    """A way to run the batch.

    Args:
        scale: The loss scale.
        compute: float32: without autocast; bfloat16: in place of float16; None: as in training.
        islands: Modules to keep in float32.
        asked: Operations whose largest result is recorded.
    """

    scale: float
    compute: torch.dtype | None = None
    islands: tuple[str, ...] = ()
    asked: tuple[Place, ...] = ()


class Replays:
    """Runs one batch in different ways.

    A forward may wait for the other slots, as SyncBatchNorm does. So all slots make the same
    passes, and the first slot in trouble says which.

    Args:
        models: All models of the trial.
        train: Trains the batch at a loss scale.
        optimizers: Its optimizers.
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
        """Whether this slot is the first in trouble. The others make its passes until `end`."""
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

    def try_out(self, asked: Pass) -> Seen | None:
        """Run a pass on all slots; None if the trial fails in it."""
        self._slots.allgather(asked)
        return self._run_safely(asked)

    def is_sound(self, asked: Pass) -> bool:
        """Whether a pass is finite."""
        seen = self.try_out(asked)
        return seen is not None and seen.is_sound

    def islands_from(self, name: str, scale: float) -> tuple[str, ...]:
        """Up to three modules, `name` first, with which in float32 nothing overflows.

        Empty if there are none, or if they hold all parameters of a model.
        """
        islands: tuple[str, ...] = ()
        while len(islands) < _MOST_ISLANDS and name in self._modules and name not in islands:
            islands += (name,)
            inside = {p for m in self._named_alike(islands) for p in m.parameters()}
            if any(inside.issuperset(model.parameters()) for model in self._models):
                return ()  # which nothing would be left of to autocast
            seen = self.try_out(Pass(scale, islands=islands))
            if seen is None or seen.is_sound:
                return islands if seen else ()
            places = [*seen.forward, *([seen.backward] if seen.backward else [])]
            name = places[0].module if places else ""
        return ()

    def largest_sound_scale_log2(self, below: float) -> int | None:
        """log2 of the largest power of two below a scale at which the pass is finite."""
        sound, fails = _LEAST_SCALE_LOG2, math.ceil(math.log2(below))
        if sound >= fails or not self.is_sound(Pass(2.0**sound)):
            return None
        while fails - sound > 1:
            middle = (sound + fails) // 2
            is_sound = self.is_sound(Pass(2.0**middle))
            sound, fails = (middle, fails) if is_sound else (sound, middle)
        return sound

    def run(self, asked: Pass) -> Seen:
        """Run a pass on this slot alone."""
        watch = Watch(self._models, {place.key for place in asked.asked}, self._optimizers)
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
        """The modules that a pattern for these names matches, in all models."""
        plain = set(map(plain_name, names))
        return [module for name, module in self._modules.items() if plain_name(name) in plain]

    def _run_safely(self, asked: Pass) -> Seen | None:
        try:
            return self.run(asked)
        # The trial's own code can raise anything on an unexpected dtype, and memory can run out.
        except Exception:
            return None


def plain_name(name: str) -> str:
    """The name without the number of its model."""
    return name.rpartition(": ")[2]
