"""A CUDA device without a GPU, and a count of what makes the host wait for it.

The tensors of `fake_cuda` have shape, dtype and device, and no values: torch's own
`FakeTensorMode` takes the place of every kernel, so autocast, `GradScaler`, fused
optimizers and pinned loaders go the way they go on a GPU. Above it `Syncs` sees every
call and counts those that would wait.
"""

from collections import Counter, defaultdict
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# Autograd asks CUDA for a stream for every tensor it records. Without a driver that
# call aborts the process, unless torch can put a device guard that does nothing in
# place of CUDA's.
LACKING = (
    None
    if hasattr(torch._C, "_ensureCUDADeviceGuardSet")
    else (
        "fake CUDA tensors of this torch need a driver: it has no"
        " _ensureCUDADeviceGuardSet"
    )
)

needs_fake_cuda = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))


def _call(func, args, kwargs):
    return func(*args, **kwargs)


class Syncs(TorchDispatchMode):
    """Counts what makes the host wait for a device, by phase and kind.

    Kinds: read: The host asks for values: `item`, `bool`, `cpu`, `nonzero`, a mask as
        index. copy: To the device, without `non_blocking` or from memory that is not
        pinned. wait: `synchronize`.

    Args:
        device_type: Whose syncs count.
        answer: Does what was called; by default the operator itself.

    Attributes:
        waits: Phase -> kind -> how often; only what happens `during` a phase counts.
        calls: Phase -> operator -> how often, whether it waits or not.
    """

    def __init__(self, device_type, answer=_call):
        super().__init__()
        self._answer = answer
        self.waits = defaultdict(Counter)
        self.calls = defaultdict(Counter)
        self._device_type = device_type
        self._phase = None

    @contextmanager
    def during(self, phase):
        """Count under this name."""
        outer, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = outer

    def add(self, kind):
        if self._phase is not None:
            self.waits[self._phase][kind] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        names = (argument.name for argument in func._schema.arguments)
        kind = self._kind(func, {**dict(zip(names, args, strict=False)), **kwargs})
        if kind is not None:
            self.add(kind)
        if self._phase is not None:
            self.calls[self._phase][func.overloadpacket.__name__] += 1
        return self._answer(func, args, kwargs)

    def _kind(self, func, given):
        if func is aten._to_copy.default:
            target = given.get("device") or given["self"].device
            return self._kind_of_copy(given["self"], target, given)
        if func is aten.copy_.default:
            return self._kind_of_copy(given["src"], given["self"].device, given)
        if any(map(self._holds, given.values())) and _asks_for_values(func, given):
            return "read"
        return None

    def _kind_of_copy(self, source, target, given):
        if self._holds(source) == (target.type == self._device_type):
            return None
        if self._holds(source):
            return "read"
        return None if given.get("non_blocking") and _is_pinned(source) else "copy"

    def _holds(self, value):
        return (
            isinstance(value, torch.Tensor) and value.device.type == self._device_type
        )


def _asks_for_values(func, given):
    """Whether the result or its shape depends on values: torch tags these operators
    itself.
    """
    # numbers are looked up on the device, a mask must be counted
    if func is aten.index.Tensor:
        return any(
            index.dtype is torch.bool for index in given["indices"] if index is not None
        )
    return bool(
        {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        & set(func.tags)
    )


@contextmanager
def fake_cuda():
    """Let torch believe in one CUDA device, of fake tensors; its syncs are counted."""
    syncs = Syncs("cuda", _answer)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _CUDA.items():
            patch.setattr(torch.cuda, name, value)
        for name, value in _ACCELERATOR.items():
            patch.setattr(torch.accelerator, name, value)
        patch.setattr(torch.cuda, "Event", partial(_Event, syncs))
        patch.setattr(torch.cuda, "synchronize", lambda device=None: syncs.add("wait"))
        patch.setattr(torch.Tensor, "backward", backward)
        # Outside of autograd's engine, checkpointing recomputes a block for each of its
        # tensors.
        patch.setattr(torch._C, "_current_graph_task_id", lambda: _backwards)
        patch.setattr(nn.Module, "to", _to)
        # Otherwise torch concludes from `is_available` that it may initialise the
        # device.
        patch.setattr(fake_tensor.FakeTensorMode, "avoid_device_init", True)
        patch.setattr(fake_tensor, "init_gpu_context", lambda device: None)
        patch.setattr(fake_tensor.FakeTensor, "tolist", _tolist)
        patch.setattr(fake_tensor.FakeTensor, "numpy", _numpy, raising=False)
        for module in (_foreach_utils, optimizer):
            patch.setattr(
                module,
                "_foreach_supported_types",
                [torch.Tensor, fake_tensor.FakeTensor],
            )
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), syncs:
            yield syncs


# What torch asks of a device that is there. Ampere has all four precisions.
_CUDA = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": lambda device=None: "a fake device",
    "get_device_capability": lambda device=None: (8, 0),
    "is_bf16_supported": lambda *_: True,
    "is_current_stream_capturing": lambda: False,
    "max_memory_allocated": lambda device=None: 0,
    "max_memory_reserved": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
    "get_rng_state": lambda device=None: torch.random.get_rng_state(),
}
# Loaders pin memory for it, and optimizers ask whether its stream is being captured in
# a graph.
_ACCELERATOR = {
    "is_available": lambda: True,
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "current_stream": lambda device=None: SimpleNamespace(is_capturing=lambda: False),
}


def _answer(func, args, kwargs):
    """Call the operator, unless `FakeTensorMode` has no answer of its own."""
    name = func.overloadpacket.__name__
    if name.startswith("_fused_") and name.endswith("_"):
        return None  # an optimizer's kernel, in place: there is nothing to compute
    return _ANSWERS.get(func, func)(*args, **kwargs)


def _pin_memory(tensor, device=None):
    pinned = tensor.clone()
    setattr(pinned, _PINNED, True)
    return pinned


def _is_pinned(tensor, device=None):
    return hasattr(tensor, _PINNED)


_PINNED = "in_pinned_memory"
_ANSWERS = {
    aten._local_scalar_dense.default: lambda tensor: 1.0,  # finite, true and not zero
    aten._pin_memory.default: _pin_memory,
    aten.is_pinned.default: _is_pinned,
}


def _tolist(tensor):
    """One copy to the host, as of a real tensor; that of a fake one reads the values in
    turn.
    """
    return [1.0] * tensor.cpu().numel()


def _numpy(tensor):
    """Of a tensor on the host, so this waits for nothing."""
    return np.ones(tensor.shape)


class _Event:
    def __init__(self, syncs, enable_timing=False):
        self.synchronize = partial(syncs.add, "wait")

    def record(self):
        """Nothing has begun."""

    def query(self):
        return True

    def elapsed_time(self, end):
        return 1.0


def _to(
    module,
    device=None,
    *,
    memory_format=None,
):
    """`nn.Module.to` with new parameters: its own swap refuses fake ones, which are
    weakly held.
    """
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                child._parameters[name] = nn.Parameter(
                    _moved(parameter, device, memory_format)
                )
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = _moved(buffer, device, memory_format)
    return module


def _moved(tensor, device, memory_format):
    layout = memory_format if tensor.dim() == 4 else None
    return tensor.detach().to(
        device or tensor.device, memory_format=layout or torch.preserve_format
    )


_backwards = 0


def backward(loss, gradient=None, **_):
    """`Tensor.backward` on this thread: autograd's own, one per device, ask CUDA for
    streams.

    The nodes are autograd's; only the order in which they are called is found here.
    """
    global _backwards  # noqa: PLW0603
    _backwards += 1
    root: Any = loss.grad_fn
    missing = _edges_into(root)
    received = defaultdict(dict)
    received[root][0] = torch.ones_like(loss) if gradient is None else gradient
    ready = [root]
    while ready:
        node = ready.pop()
        for (following, index), value in _apply(node, received.pop(node, {})):
            if value is not None:
                there = received[following]
                there[index] = there[index] + value if index in there else value
            missing[following] -= 1
            if not missing[following]:
                ready.append(following)


def _edges_into(root):
    """How many gradients each node of the graph waits for."""
    edges = Counter()
    seen, left = {root}, [root]
    while left:
        following = [node for node, _ in left.pop().next_functions if node is not None]
        edges.update(following)
        left.extend(dict.fromkeys(node for node in following if node not in seen))
        seen.update(following)
    return edges


@torch.no_grad()
def _apply(node, received):
    """The edges out of a node and the gradients along them."""
    inputs = []
    for index, metadata in enumerate(node._input_metadata):
        gradient = received.get(index)
        # What was broadcast in the forward is summed: the engine leaves that to the
        # edges.
        inputs.append(
            None if gradient is None else gradient.sum_to_size(metadata.shape)
        )
    outputs = node(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    edges = zip(node.next_functions, outputs, strict=False)
    return [(edge, gradient) for edge, gradient in edges if edge[0] is not None]
