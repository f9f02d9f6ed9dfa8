"""`torch.compile` for the forward and backward of training only.

The audit watches torch's dispatch. The guard and the finder watch the nodes of the
autograd graph. Compiled code bypasses both, so a rehearsal runs the uncompiled forward.
So does everything without gradients, such as a validation. Training compiles one graph
per batch shape, and validation gives the same numbers as without compilation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from determined_amp.amp.errors import UserError, one_line
from determined_amp.amp.settings import Compile

# How many `as_written` blocks are open. One count for all threads, because autograd's
# threads rerun a checkpointed forward.
_as_written = 0


class CompileError(UserError):
    """torch cannot compile the model's forward, at least not on this machine."""


@contextmanager
def as_written() -> Iterator[None]:
    """Run no compiled code in this block."""
    global _as_written  # noqa: PLW0603
    _as_written += 1
    try:
        yield
    finally:
        _as_written -= 1


def compile_forward(model: nn.Module, mode: Compile) -> None:
    """Compile the forward of a model for training. The first batch starts the compiler.

    `forward` is replaced on the instance, so names, `state_dict` keys, types and hooks
    stay as they are.

    Args:
        model: The model, before `context.wrap_model`; changed in place.
        mode: The mode of `torch.compile`; `OFF` changes nothing.
    """
    if mode is not Compile.OFF and not isinstance(model.forward, _Compiled):
        model.forward = _Compiled(model.forward, mode)


class _Compiled:
    """A forward that runs compiled, unless gradients are off or a rehearsal watches it.

    A copy of the model, such as a frozen teacher, compiles its own forward.
    """

    def __init__(self, forward: Callable[..., Any], mode: Compile) -> None:
        self._forward = forward
        self._mode = mode
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        by_another = torch.compiler.is_compiling()  # a compiled model calls this one
        if by_another or _as_written or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        try:
            if self._compiled is None:
                self._compiled = torch.compile(self._forward, mode=self._mode.value)
            return self._compiled(*args, **kwargs)
        except RuntimeError as error:
            if not _is_from_compiler(error):
                raise
            # the rest of the text explains torch's own settings
            text, _, _ = str(error).partition("\n\n")
            raise CompileError(
                f"amp.compile: got {self._mode.value}, and torch.compile failed with "
                f"{type(error).__name__}: {one_line(text)}; allowed: compile: false"
            ) from error

    def __deepcopy__(self, memo: dict[int, Any]) -> _Compiled:
        return _Compiled(copy.deepcopy(self._forward, memo), self._mode)

    def __reduce__(self) -> tuple[type[_Compiled], tuple[Callable[..., Any], Compile]]:
        return _Compiled, (self._forward, self._mode)


def _is_from_compiler(error: RuntimeError) -> bool:
    """Whether the compiler raised an error, not the model."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    if "TorchRuntimeError" in kinds:  # the forward itself would raise it, too
        return False
    return "TorchDynamoException" in kinds or "Dynamo is not supported" in str(error)
