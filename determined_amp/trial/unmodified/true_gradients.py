"""Unscales gradients right after each backward, for code written for float32.

Such code reads, clips and changes `.grad` wherever it likes. So each backward of a
scaled loss ends by unscaling the gradients of all parameters, and of every other leaf
that the loss reaches.

* Before a backward, the gradients that earlier ones left in `.grad` are scaled again in
  place, because in the last batch of a window DistributedDataParallel averages the sums
  over the window.
* A backward that overflows leaves gradients of 0, so that nothing that a trial computes
  from them outlives the step.
* Each optimizer has a window, which ends with its step. An overflow in a window skips
  the step. Any step also ends the windows of optimizers without gradients. `found_inf`
  stays on the device.

Nothing here waits for the device, except with an optimizer class that is not torch's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from determined_amp.amp.core import AmpCore
from determined_amp.amp.errors import ConfigError
from determined_amp.amp.mistakes import Stage
from determined_amp.amp.patched import patched
from determined_amp.amp.tensors import parameters_in, parameters_of
from determined_amp.amp.torch_private import NODE_HOOKS
from determined_amp.trial.unmodified.autocast import (
    UnmodifiedAutocast,
    calling_first,
    has_hook_of_trial,
    is_the_trials,
    refuse_in_float16,
)

# Integers of the same width. An integer times 0 is always 0; infinity times 0 is NaN.
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}

# The methods that register backward hooks or keep the gradient of a non-leaf tensor.
# `Module.register_backward_hook` registers its hooks at nodes, in the next forward.
_OF_BACKWARDS: dict[Any, tuple[str, ...]] = {
    nn.Module: ("register_full_backward_pre_hook", "register_full_backward_hook"),
    torch.Tensor: (
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
    ),
    NODE_HOOKS[0]: (NODE_HOOKS[1],),
}

_OF_LEAVES = (
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
)


class TrueGradients:
    """Keeps all gradients true, that is, unscaled, outside of the backward itself.

    Backward hooks would see scaled gradients, so they are refused. A backward also
    finds hooks of modules that were registered before.

    Args:
        amp: The mixed precision of the training, with a loss scale.
        autocast: Knows whether a batch is trained.
    """

    def __init__(self, amp: AmpCore, autocast: UnmodifiedAutocast) -> None:
        self._amp = amp
        self._autocast = autocast
        self._scaler = amp.scaler
        self._scaler.stop_listening()
        self._known: list[torch.Tensor] = []  # parameters
        self._sizes: list[tuple[int, int]] = []  # id and length of each parameter list
        self._norms: dict[Optimizer, torch.Tensor] = {}

    @contextmanager
    def refusing_hooks(self) -> Iterator[None]:
        """Refuse backward hooks in this block, and those that parameters already have.

        Raises:
            ConfigError: if there is such a hook.
        """
        for parameter in self._parameters():
            if parameter.requires_grad:
                _refuse_hooks_of(parameter)
        with ExitStack() as stack:
            for owner, names in _OF_BACKWARDS.items():
                for name in names:
                    refusing = calling_first(self._refuse_hook, getattr(owner, name))
                    stack.enter_context(patched(owner, name, refusing))
            yield

    def note_dropped(self) -> None:
        """Count the outcomes of gradients that the trial dropped without a step.

        Called before a batch, unless the context still accumulates.
        """
        windows = self._amp.windows.values()
        if any(window.gradients_used for window in windows):
            return
        for window in windows:
            # Unchanged gradients mean that the trial accumulates by itself.
            if window.found_inf is not None and window.has_other_gradients():
                self._scaler.note(window, window.found_inf)
                window.drop()
        if any(window.stage is Stage.DROPPED for window in windows):
            self._scaler.update()

    def backward(self, loss: torch.Tensor, run: Callable[[torch.Tensor], None]) -> None:
        """Run the backward of a loss, and leave true gradients.

        Synchronises only with an optimizer class that is not torch's.

        Args:
            loss: The unscaled loss.
            run: Runs the backward of the scaled loss.
        """
        windows = self._amp.windows.values()
        if any(window.gradients_used for window in windows):
            self._norms.clear()
            for window in windows:
                window.begin_backward()
        self._refuse_moved_weights()
        parameters = self._parameters()
        leaves = [*parameters, *self._other_leaves_of(loss, parameters)]
        found_inf = torch.zeros((), device=self._amp.device)
        with self._scaled(leaves) as inverse:
            run(self._scaler.scale(loss))
        kinds = by_kind(leaves)
        for device, dtype, gradients in kinds:
            torch._foreach_mul_(gradients, inverse.to(device, dtype))
            largest = torch.stack(torch._foreach_norm(gradients, math.inf))
            found_inf += (~torch.isfinite(largest).all()).to(found_inf.device)
        if self._amp.slots.size > 1:
            # If this batch exchanges no gradients, only this rank knows its overflow.
            distributed.all_reduce(found_inf, distributed.ReduceOp.MAX)
        for device, dtype, gradients in kinds:
            integer = _INTEGERS.get(dtype, torch.int16)
            bits = [gradient.view(integer) for gradient in gradients]
            torch._foreach_mul_(bits, (found_inf == 0).to(device, integer))
        for window in windows:
            window.note_backward(found_inf)

    def rehearse(self, loss: torch.Tensor, run: Callable[[torch.Tensor], None]) -> None:
        """Run the backward of a rehearsal, which looks for what overflows.

        The gradients of parameters stay scaled, and are not finite after an overflow.
        Those of other leaves are true, because the batch may use them.

        Args:
            loss: The unscaled loss.
            run: Runs the backward of the scaled loss.
        """
        others = self._other_leaves_of(loss, self._parameters())
        with self._scaled(others) as inverse:
            run(self._scaler.scale(loss))
        _multiply(others, inverse)

    # Internals.

    @contextmanager
    def _scaled(self, leaves: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Scale the gradients that leaves already have; yield 1/scale, (), float32."""
        scale = self._scaler.loss_scale()
        _multiply(leaves, scale)
        # An overflow is no anomaly: its step is skipped.
        with torch.autograd.set_detect_anomaly(
            torch.is_anomaly_enabled(), check_nan=False
        ):
            yield scale.double().reciprocal().float()  # as `GradScaler` does it

    def _parameters(self) -> list[torch.Tensor]:
        """All parameters, collected again when a group is new or has grown."""
        optimizers = self._amp.optimizers
        groups = [group["params"] for each in optimizers for group in each.param_groups]
        sizes = [(id(group), len(group)) for group in groups]
        if sizes != self._sizes or not self._known:
            self._sizes = sizes
            self._known = parameters_in(self._amp.models, optimizers)
        return self._known

    def _other_leaves_of(
        self, loss: torch.Tensor, parameters: Collection[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Search the graph of a loss for leaves that are not parameters.

        This costs the host a microsecond per node, far less than to make and run it.

        Raises:
            ConfigError: if a node or a leaf has a hook of the trial.
        """
        leaves: list[Any] = [loss]
        waiting: list[Any] = [loss.grad_fn] if loss.grad_fn else []
        seen = {None, *waiting}
        while waiting:
            node = waiting.pop()
            before = node.next_functions
            if not before:
                leaves.append(getattr(node, "variable", None))
            for each, _ in before:
                if each not in seen:
                    seen.add(each)
                    waiting.append(each)
        # This node calls the backward hooks of one module, or of all modules.
        if "BackwardHookFunctionBackward" in {type(node).__name__ for node in seen}:
            raise _refusal()
        known = {None, *parameters}
        others = [leaf for leaf in leaves if not (leaf in known or leaf.grad_fn)]
        for leaf in others:
            _refuse_hooks_of(leaf)
        return others

    def _refuse_moved_weights(self) -> None:
        """Refuse optimizers that move weights between backwards, and back in the step.

        Only classes that are not torch's own do that. With such a class the step waits
        for the device anyway, so comparing here may wait, too.
        """
        for optimizer in self._amp.optimizers:
            if type(optimizer).__module__.startswith("torch."):
                continue
            weights = [parameter.detach() for parameter in parameters_of(optimizer)]
            norms = torch.stack(torch._foreach_norm(weights))
            before = self._norms.setdefault(optimizer, norms)
            if before is not norms and not torch.equal(before, norms):
                name = type(optimizer).__name__
                raise refuse_in_float16(
                    f"{name} moves the weights between two backwards, and a skipped "
                    "step would not put them back"
                )

    def _refuse_hook(self, owner: Any, hook: Any = None, *_: Any, **__: Any) -> None:
        if hook is not None and not is_the_trials(hook):  # such as a compiler's
            return
        if hook is None and owner.is_leaf:  # a leaf retains its gradient anyway
            return
        outlives_the_batch = isinstance(owner, (nn.Module, nn.Parameter))
        if outlives_the_batch or self._autocast.training:
            raise _refusal()


def _refuse_hooks_of(leaf: torch.Tensor) -> None:
    """Refuse a leaf with hooks of the trial. The leaf may be in no model."""
    for register in _OF_LEAVES:
        if has_hook_of_trial(partial(register, leaf)):
            raise _refusal()


def _refusal() -> ConfigError:
    return refuse_in_float16(
        "it has a hook in the backward or calls retain_grad, which would see scaled "
        "gradients"
    )


_Kind = tuple[torch.device, torch.dtype, list[torch.Tensor]]


def by_kind(leaves: Sequence[torch.Tensor]) -> list[_Kind]:
    """The non-empty gradients of some leaves as real numbers, by device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(
        list
    )
    for leaf in leaves:
        if leaf.grad is not None and leaf.grad.is_sparse:
            # `values()` of a coalesced tensor can be changed in place
            leaf.grad = leaf.grad.coalesce()
    gradients = (leaf.grad for leaf in leaves if leaf.grad is not None)
    for gradient in dict.fromkeys(gradients):  # two leaves may share one
        values = gradient.values() if gradient.is_sparse else gradient
        if values.is_complex():
            values = torch.view_as_real(values.conj() if values.is_conj() else values)
        if values.numel():
            kinds[values.device, values.dtype].append(values)
    return [(device, dtype, values) for (device, dtype), values in kinds.items()]


def _multiply(leaves: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    for device, _, gradients in by_kind(leaves):
        torch._foreach_mul_(gradients, factor.to(device))
