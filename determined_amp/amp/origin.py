"""Attributes the operations of a pass to the modules whose forwards they belong to."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from determined_amp.amp.patched import patched
from determined_amp.amp.tensors import numbered

# Names for what no module computes, usually the loss, and for the model itself.
OUTSIDE = "(outside the model)"
WHOLE_MODEL = "(the model)"


class Origin:
    """Finds the module whose forward made a node of the autograd graph.

    Autograd numbers its nodes in the order of creation. So the numbers at which the forward of each
    module begins and ends tell which module made a node.

    Args:
        models: The models whose modules are distinguished.

    Attributes:
        left: The module whose forward ended last.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._names = module_names(models)
        self._starts: list[int] = [0]
        self._modules: list[str] = [OUTSIDE]
        self._entered: defaultdict[int, list[str]] = defaultdict(list)  # by thread
        self._thread = threading.get_ident()
        self._probe = torch.zeros((), requires_grad=True)
        self.left = ""

    @property
    def current(self) -> str:
        """The module whose forward this thread is in; `OUTSIDE` if there is none."""
        entered = self._entered[threading.get_ident()]
        return entered[-1] if entered else OUTSIDE

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Record when the forwards of modules begin and end inside this block."""
        with ExitStack() as stack:
            for module, name in self._names.items():
                if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                    continue
                before = module.register_forward_pre_hook(self._enter(name))
                after = module.register_forward_hook(self._leave, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def of(self, node: Any) -> str:
        """The module whose forward made a node."""
        return self._modules[bisect_right(self._starts, node._sequence_nr()) - 1]

    def __deepcopy__(self, memo: object) -> Origin:
        return self  # of a module that is copied, with its hooks

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            self._entered[threading.get_ident()].append(name)
            self._mark(name)

        return hook

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        entered = self._entered[threading.get_ident()]
        self.left = entered.pop()
        self._mark(self.current)

    def _mark(self, name: str) -> None:
        # Each thread numbers its own nodes. Checkpointing makes nodes on another thread, and their
        # numbers mean nothing here.
        if torch.is_grad_enabled() and threading.get_ident() == self._thread:
            with torch._C._DisableTorchDispatch():
                node: Any = self._probe.clone().grad_fn
            if node is not None:  # it is None under torch.func
                self._starts.append(node._sequence_nr())
                self._modules.append(name)


def module_names(models: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """Names of all modules, prefixed with the model's number if there are several models."""
    names: dict[nn.Module, str] = {}
    for prefix, model in numbered(models):
        for name, module in model.named_modules():
            names.setdefault(module, prefix + (name or WHOLE_MODEL))
    return names


# torch's own method, which may be replaced while a trial trains as it is.
_register_hook = torch.Tensor.register_hook


@contextmanager
def hooked(tensors: Iterable[torch.Tensor], hook: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `hook` with the gradient of each tensor that gets one."""
    with ExitStack() as stack:
        for tensor in tensors:
            if tensor.requires_grad:
                handle = _register_hook(tensor, hook)  # type: ignore[no-untyped-call]  # torch
                stack.callback(handle.remove)
        yield


@cache
def only_views(func: Any) -> bool:
    """Whether every result is a view of an input, so that its values have already been seen."""
    if not isinstance(func, torch._ops.OpOverload):
        return False  # a higher-order operator, such as flex_attention
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


@contextmanager
def backwards_through(run: Callable[..., Any]) -> Iterator[None]:
    """Call a function in place of every backward of torch in this block.

    Args:
        run: Gets the engine's `run_backward` and its arguments: the outputs first, and
            `accumulate_grad`, which is false for `torch.autograd.grad`.
    """
    engine = _Engine(torch.autograd.Variable._execution_engine, run)
    with patched(torch.autograd.Variable, "_execution_engine", engine):
        yield


class _Engine:
    """torch's autograd engine with another `run_backward`.

    Args:
        engine: torch's own engine.
        run_backward: Called with the engine's own `run_backward` as its first argument.
    """

    def __init__(self, engine: Any, run_backward: Callable[..., Any]) -> None:
        self._engine = engine
        self.run_backward = partial(run_backward, engine.run_backward)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
