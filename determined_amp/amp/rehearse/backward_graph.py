"""Finds the module of each node of the autograd graph, and watches its gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from determined_amp.amp.tensors import numbered, tensors_of
from determined_amp.amp.torch_private import backwards_through

# Names for what no module computes, usually the loss, and for the model itself.
OUTSIDE = "(outside the model)"
WHOLE_MODEL = "(the model)"

Gradients = Sequence["torch.Tensor | None"]
# Called with a node's module, its operation, and the gradients that it made and took.
OnNode = Callable[[str, str, Gradients, Gradients], None]


class BackwardGraph:
    """Watches the backwards in a block node by node, and knows each node's module.

    When a forward begins, the unknown nodes behind its inputs belong to the module
    around it. When the forward ends, the unknown nodes behind its outputs belong to the
    module itself.

    Args:
        models: The models whose modules own the nodes.
        on_node: Called after each node of a backward with the gradients that the node
            made and took.

    Attributes:
        left: The module whose forward ended last.
        in_backward: Whether a backward runs.
    """

    def __init__(self, models: Sequence[nn.Module], on_node: OnNode) -> None:
        self.left = ""
        self.in_backward = False
        self._names = module_names(models)
        self._on_node = on_node
        self._entered: list[str] = []
        self._makers: dict[Any, str] = {}  # the module of each node
        self._hooked: set[Any] = set()
        self._stack = ExitStack()

    @property
    def current(self) -> str:
        """The module whose forward runs; `OUTSIDE` if there is none."""
        return self._entered[-1] if self._entered else OUTSIDE

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch all forwards and backwards in this block."""
        with self._stack as stack:
            for module, name in self._names.items():
                if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                    continue
                enter, leave = self._enter(name), self._leave()
                before = module.register_forward_pre_hook(enter, with_kwargs=True)
                after = module.register_forward_hook(leave, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            stack.enter_context(backwards_through(self._run))
            yield
        self._makers.clear()
        self._hooked.clear()

    def is_followed(self, outputs: Any, *, accumulates: bool) -> bool:
        """Whether to watch the nodes of a backward.

        Args:
            outputs: The tensors that it begins with.
            accumulates: Whether it fills `.grad`, unlike `torch.autograd.grad`.
        """
        return True

    # Closures, not methods: a copy of a model copies its hooks, and would copy the
    # object of a method with them.

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, named_inputs: Any) -> None:
            self._claim((inputs, named_inputs))
            self._entered.append(name)

        return hook

    def _leave(self) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._claim(output)
            self.left = self._entered.pop()

        return hook

    def _claim(self, values: Any) -> None:
        """Assign the unknown nodes behind tensors to the current module."""
        for node in nodes_behind(values, self._makers):
            self._makers[node] = self.current

    def _run(
        self, run: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        is_inner = self.in_backward
        accumulates = bool(kwargs.get("accumulate_grad"))
        self._claim(outputs)
        if self.is_followed(outputs, accumulates=accumulates):
            self._hook_into(outputs)
        self.in_backward = True
        try:
            return run(outputs, *args, **kwargs)
        finally:
            self.in_backward = is_inner

    def _hook_into(self, outputs: Any) -> None:
        """Hook every node of a backward that begins with these outputs."""
        for node in nodes_behind(outputs):
            if node.next_functions and node not in self._hooked:
                hook = self._node_hook(self._makers[node], node.name())
                self._hooked.add(node)
                self._stack.callback(node.register_hook(hook).remove)

    def _node_hook(self, module: str, operation: str) -> Any:
        def hook(made: Gradients, taken: Gradients) -> None:
            self._on_node(module, operation, made, taken)

        return hook


def nodes_behind(values: Any, known: Collection[Any] = ()) -> list[Any]:
    """The autograd nodes that nested tensors depend on, without the known ones."""
    found: dict[Any, None] = {}
    waiting = [tensor.grad_fn for tensor in tensors_of(values)]
    while waiting:
        node: Any = waiting.pop()
        if node is not None and node not in found and node not in known:
            found[node] = None
            waiting.extend(before for before, _ in node.next_functions)
    return list(found)


def module_names(models: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """The names of all modules; with several models the model's number comes first."""
    names: dict[nn.Module, str] = {}
    for prefix, model in numbered(models):
        for name, module in model.named_modules():
            names.setdefault(module, prefix + (name or WHOLE_MODEL))
    return names
