"""Why a batch overflows: train it again with an eye on every module, and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from determined_amp.amp.fp32_modules import as_float32

# The largest finite float16.
FLOAT16_MAX = 65504.0


def find_cause(model: nn.Module, batch: Any, backward: Callable[[], object]) -> str | None:
    """One sentence on the first thing that is not finite, and what to do about it.

    Synchronises. Gradients, buffers and random state are afterwards as before.

    Args:
        model: The model; if it is wrapped in DistributedDataParallel, every rank must call this,
            and each learns about its own batch.
        batch: What `backward` trains, for a look at the input.
        backward: Forward, loss and scaled backward of the batch as in training, without a step.

    Returns:
        None if everything is finite.
    """
    watch = _Watch(model)
    with undisturbed(model), watch.listening():
        backward()
        gradients = [
            name
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and not _finite(parameter.grad)
        ]
    return (
        _bad_input(batch)
        or _bad_parameter(model)
        or watch.forward
        or watch.backward
        # The last one defined is the first one that the backward reaches.
        or (_gradient_sentence(_plain(gradients[-1]).rpartition(".")[0]) if gradients else None)
    )


class _Watch:
    """Notes the first module whose output, and the first whose gradient, is not finite."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.forward: str | None = None
        self.backward: str | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        handles: list[RemovableHandle] = []
        for name, module in self._model.named_modules():
            if not list(module.children()):
                handles.append(module.register_forward_hook(self._on_output(_plain(name))))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _on_output(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if not isinstance(output, torch.Tensor):
                return
            if self.forward is None and not _finite(output):
                self.forward = _forward_sentence(name, module, inputs)
            if output.requires_grad:
                output.register_hook(self._on_gradient(name))  # type: ignore[no-untyped-call]  # torch

        return hook

    def _on_gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            if self.backward is None and not _finite(gradient):
                self.backward = _gradient_sentence(name)

        return hook


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put gradients, buffers and random state back afterwards."""
    gradients = [parameter.grad for parameter in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        if isinstance(model, nn.parallel.DistributedDataParallel):
            stack.enter_context(model.no_sync())
        for parameter in model.parameters():
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, before in zip(model.buffers(), buffers, strict=True):
                    buffer.copy_(before)


def _bad_input(batch: Any) -> str | None:
    for position, tensor in enumerate(_tensors(batch)):
        samples = len(tensor) if tensor.dim() else 1
        rows = torch.isfinite(tensor.float()).reshape(samples, -1)
        bad = (~rows.all(dim=-1)).nonzero().flatten().tolist()
        if bad:
            return (
                f"input {position} of the batch is not finite in samples {bad}; "
                "mend or drop these samples"
            )
    return None


def _bad_parameter(model: nn.Module) -> str | None:
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return (
                f"parameter {_plain(name)} is not finite already; resume from an earlier "
                "checkpoint with a lower learning_rate or a max_grad_norm"
            )
    return None


def _forward_sentence(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> str:
    """What the module would have put out in float32 tells an overflow from a NaN."""
    device = next(_tensors(inputs), torch.empty(0)).device.type
    with torch.no_grad(), torch.autocast(device, enabled=False):
        output = module.forward(*as_float32(inputs))
    largest = float(output.abs().max())
    if largest <= FLOAT16_MAX or not torch.isfinite(output).all():
        return (
            f"the output of module {name} is not finite, in float32 neither "
            f"(largest |activation| {largest:.3g}); lower learning_rate"
        )
    return (
        f"forward overflow in module {name}: largest |activation| {largest:.3g}, float16 ends at "
        f"{FLOAT16_MAX:g}; no loss scale helps. {_yaml_advice(name)}"
    )


def _gradient_sentence(name: str) -> str:
    return (
        f"gradient overflow at module {name or 'the model'}; lower init_scale or learning_rate. "
        f"{_yaml_advice(name)}"
    )


def _yaml_advice(name: str) -> str:
    if not name:  # the model is one module: an island would leave nothing to autocast
        return "Or, in the YAML: precision: amp_bf16"
    pattern = name.replace(".", r"\\.")
    return f'Or, in the YAML: precision: amp_bf16, or fp32_modules: ["^{pattern}$"]'


def _plain(name: str) -> str:
    """The name without the prefix of DistributedDataParallel."""
    return name.removeprefix("module.")


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
