"""Why a batch overflows: replays a batch with hooks, then restores all state."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from determined import pytorch
from torch import nn
from torch.utils.hooks import RemovableHandle

from determined_amp.amp.checkpoint import patched
from determined_amp.amp.compiled import as_written
from determined_amp.amp.fp32_modules import as_float32
from determined_amp.amp.metrics import FLOAT16_MAX


def find_cause(
    models: Sequence[nn.Module],
    batch: Any,
    backward: Callable[[], object],
    *,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> str | None:
    """One sentence on the first thing that is not finite, and what to do about it.

    Synchronises. Gradients, buffers, modes and random state are afterwards as before.

    Args:
        models: All models of the trial. If one is wrapped in DistributedDataParallel, every rank
            must call this, and each examines its own batch.
        batch: What `backward` trains; its tensors are checked.
        backward: Forward, loss and scaled backward of the batch as in training, without a step.
        optimizers: Those of the trial. They may hold parameters that are in no model.

    Returns:
        None if everything is finite.
    """
    watch = _Watch(models)
    try:
        with undisturbed(*models, optimizers=optimizers), watch.listening():
            backward()
            gradients = [
                name
                for name, parameter in _named_parameters(models)
                if parameter.grad is not None and not _finite(parameter.grad)
            ]
    except torch.cuda.OutOfMemoryError:
        return watch.forward or watch.backward or "unknown: there was no memory to look for it"
    return (
        _bad_input(batch)
        or _bad_parameter(models)
        or watch.forward
        or watch.backward
        # The backward reaches the module that is defined last first.
        or (_gradient_sentence(gradients[-1].rpartition(".")[0]) if gradients else None)
    )


def _prefixes(models: Sequence[nn.Module]) -> list[str]:
    """Names of several models begin with their number, as in the finder."""
    return [f"model {i}: " for i in range(len(models))] if len(models) > 1 else [""]


def _named_parameters(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, model in zip(_prefixes(models), models, strict=False):
        for name, parameter in model.named_parameters():
            yield prefix + _plain(name), parameter


class _Watch:
    """Notes the first module whose output, and the first whose gradient, is not finite."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self.forward: str | None = None
        self.backward: str | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        handles: list[RemovableHandle] = []
        for prefix, model in zip(_prefixes(self._models), self._models, strict=False):
            for name, module in model.named_modules():
                if not list(module.children()):
                    hook = self._on_output(prefix + _plain(name))
                    handles.append(module.register_forward_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _on_output(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            for tensor in tensors_of(output):
                if self.forward is None and not _finite(tensor):
                    self.forward = _forward_sentence(name, module, inputs)
                if tensor.requires_grad:
                    tensor.register_hook(self._on_gradient(name))  # type: ignore[no-untyped-call]  # torch

        return hook

    def _on_gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            if self.backward is None and not _finite(gradient):
                self.backward = _gradient_sentence(name)

        return hook


@contextmanager
def without_steps(context: pytorch.PyTorchTrialContext, scaler: Any) -> Iterator[None]:
    """Inside this block no step, zero_grad or unscale_ has any effect.

    Args:
        context: The trial's context; its optimizers and schedulers stand still.
        scaler: The trial's `GradScaler`; its scale stays.
    """
    still = [(scaler, name) for name in ("step", "update", "unscale_")]
    still.append((context, "step_optimizer"))
    still += [(optimizer, name) for optimizer in context.optimizers for name in _STEPPING]
    still += [(wrapped._scheduler, "step") for wrapped in context.lr_schedulers]
    with ExitStack() as stack:
        for owner, name in still:
            stack.enter_context(patched(owner, name, _do_nothing))
        yield


_STEPPING = ("step", "zero_grad")


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


@contextmanager
def undisturbed(
    *models: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()
) -> Iterator[None]:
    """Train a batch in this block, then restore all state.

    Gradients are enabled and the models are in training mode, also during a validation. Gradients,
    buffers, modes and random state are restored. DistributedDataParallel exchanges nothing.
    """
    parameters = {p: p.grad for model in models for p in model.parameters()}
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    parameters |= {p: p.grad for group in groups for p in group["params"]}
    owned = [(m, dict(m._buffers)) for model in models for m in model.modules()]
    buffers = {b: b.clone() for model in models for b in model.buffers()}
    modes = {module: module.training for model in models for module in model.modules()}
    devices = {p.device for p in parameters if p.device.type == "cuda"}
    ours, numpys = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(as_written())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        for model in models:
            if isinstance(model, nn.parallel.DistributedDataParallel):
                stack.enter_context(model.no_sync())
            if not model.training:
                model.train()
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in parameters.items():
                parameter.grad = gradient
            for module, training in modes.items():
                module.training = training
            for module, own in owned:  # a module may have put others in their place
                module._buffers.update(own)
            with torch.no_grad():
                for buffer, before in buffers.items():
                    if not _same(buffer, before):
                        buffer.copy_(before)
            random.setstate(ours)
            np.random.set_state(numpys)


def _same(buffer: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether there is nothing to restore. A buffer that is not strided cannot be restored."""
    return buffer.layout is not torch.strided or torch.equal(buffer, before)


def _bad_input(batch: Any) -> str | None:
    for position, tensor in enumerate(tensors_of(batch)):
        if not tensor.numel():
            continue
        samples = len(tensor) if tensor.dim() else 1
        rows = torch.isfinite(tensor.float()).reshape(samples, -1)
        bad = (~rows.all(dim=-1)).nonzero().flatten().tolist()
        if bad:
            return (
                f"input {position} of the batch is not finite in samples {bad}; "
                "fix or remove these samples"
            )
    return None


def _bad_parameter(models: Sequence[nn.Module]) -> str | None:
    for name, parameter in _named_parameters(models):
        if not _finite(parameter):
            return (
                f"parameter {name} is already not finite; resume from an earlier "
                "checkpoint with a lower learning rate or a clip"
            )
    return None


def _forward_sentence(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> str:
    """The module's output in float32 tells an overflow from a NaN."""
    outputs = [t for t in tensors_of(_in_float32(module, inputs)) if t.is_floating_point()]
    largest = max((float(output.abs().max()) for output in outputs), default=math.nan)
    if all(torch.isfinite(output).all() for output in outputs) and largest > FLOAT16_MAX:
        return (
            f"forward overflow in module {name}: largest |activation| {largest:.3g}, float16 ends "
            f"at {FLOAT16_MAX:g}; no loss scale helps. {_yaml_advice(name)}"
        )
    return (
        f"the output of module {name} is not finite, not even in float32 "
        f"(largest |activation| {largest:.3g}); lower the learning rate"
    )


def _in_float32(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Its output; None if it needs more than the positional arguments that a hook sees."""
    device = next(tensors_of(inputs), torch.empty(0)).device.type
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return module.forward(*as_float32(inputs))
    except (TypeError, RuntimeError):
        return None


def _gradient_sentence(name: str) -> str:
    return (
        f"gradient overflow at module {name or 'the model'}; lower init_scale or learning_rate. "
        f"{_yaml_advice(name)}"
    )


def _yaml_advice(name: str) -> str:
    name = name.rpartition(": ")[2]  # without the number of its model
    if not name:  # the model is one module: nothing would be left to autocast
        return "Or, in the YAML: precision: amp_bf16"
    pattern = name.replace(".", r"\\.")
    return f'Or, in the YAML: precision: amp_bf16, or fp32_modules: ["^{pattern}$"]'


def _plain(name: str) -> str:
    """The name without the prefix of DistributedDataParallel."""
    return name.removeprefix("module.")


def _finite(tensor: torch.Tensor) -> bool:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return bool(torch.isfinite(values).all())


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested lists, tuples and mappings, in their order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


def own_copy(batch: Any, *, shared: bool = False) -> Any:
    """A batch that a trial may take apart and change in place, as if nobody else had it.

    Args:
        batch: Tensors in anything that can be copied. What cannot be is handed on itself.
        shared: Whether to copy containers only, and share the tensors.
    """
    tensors = {id(tensor): tensor for tensor in tensors_of(batch)}
    # Not torch's own deepcopy, which copies all of the memory that a view is a part of.
    own = tensors if shared else {i: tensor.detach().clone() for i, tensor in tensors.items()}
    try:
        return copy.deepcopy(batch, {**own})
    except Exception:  # copying runs code of the batch's own, which can raise anything
        return batch
