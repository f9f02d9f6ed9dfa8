"""What is done to the models of a training before it begins."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from determined_amp.amp.compiled import compile_forward
from determined_amp.amp.fp32_modules import keep_in_float32, matching
from determined_amp.amp.settings import AmpSettings, Compile


class Preparation:
    """Keeps modules of the models in float32, and compiles their forwards.

    Args:
        settings: The `amp` section: its `fp32_modules` and its `compile`.
        device_type: Where the models compute: "cpu" or "cuda".
    """

    def __init__(self, settings: AmpSettings, device_type: str) -> None:
        self._patterns = settings.fp32_modules
        self._compile = settings.compile
        self._device_type = device_type
        self._unmatched = list(settings.fp32_modules)
        self._first: nn.Module | None = None

    def prepare(self, model: nn.Module) -> None:
        """Change a model in place.

        Raises:
            IslandError: if a pattern is no regular expression, or the patterns match all of it.
        """
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        here = matching(inner, self._patterns)
        is_compiled = self._compile is not Compile.OFF
        keep_in_float32(inner, here, self._device_type, compiled=is_compiled)
        compile_forward(inner, self._compile)
        self._unmatched = [pattern for pattern in self._unmatched if pattern not in here]
        self._first = self._first or inner

    def check(self) -> str | None:
        """The setting that needs a model and has got none; None if all is well.

        Raises:
            IslandError: if a pattern has matched in no model.
        """
        if self._first is not None:
            keep_in_float32(self._first, self._unmatched, self._device_type)  # raises, with names
            return None
        if self._unmatched:
            return "fp32_modules"
        return None if self._compile is Compile.OFF else "compile"
