"""Unscales gradients right after the backward of a scaled loss, for code written for float32.

Such code reads, clips and changes `.grad` wherever it likes. So a backward ends by unscaling the
gradients of every leaf that the loss reaches, no matter which optimizer holds it, if any.

* What earlier backwards left in `.grad` is first scaled again in place, because in the last batch
  of a window DistributedDataParallel averages the sums over the window.
* A backward that overflows leaves gradients of 0. So nothing that a trial computes from them
  outlives the step, which is skipped; `found_inf` stays on the device until then.
* The trial's hooks inside the backward, and `torch.autograd.grad`, get and return true gradients.

Nothing here waits for the device.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch.optim import Optimizer

from determined_amp.amp.core import AmpCore
from determined_amp.amp.fp32_modules import as_float32
from determined_amp.amp.tensors import any_gradient, is_batched, parameters_of

logger = logging.getLogger(__name__)

# The optimizers that hold a parameter: all parameters of the same ones share a `found_inf`.
_Owners = tuple[Optimizer, ...]

# Integers as wide as the numbers: times 0 they are 0, which infinity is not.
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


class TrueGradients:
    """Keeps the gradients of everything that is trained true.

    Args:
        amp: The mixed precision of the training, with a loss scale.

    Attributes:
        scale: The loss scale, (), float32, on the device, during a scaled backward; else None.
    """

    def __init__(self, amp: AmpCore) -> None:
        self.scale: torch.Tensor | None = None
        self._amp = amp
        self._scaler = amp.scaler
        self._device = amp.device
        self._groups: dict[_Owners, list[torch.Tensor]] = {}
        self._known: set[int] = set()
        self._lists: list[tuple[int, int]] = []
        self._retained: dict[int, torch.Tensor] = {}
        self._warned: set[object] = set()
        # `found_inf` of each group in the newest backward, the groups that have stepped since, and
        # the groups and optimizers that have ever stepped. A trial moves others by hand.
        self._found_inf: dict[_Owners, torch.Tensor] = {}
        self._closed: set[_Owners] = set()
        self._stepped: set[_Owners] = set()
        self._steppers: set[Optimizer] = set()
        self._versions: dict[_Owners, list[int]] = {}  # of the gradients that it left
        self._in_window = False
        # In this batch:
        self._has_gone_backward = self._has_stepped = False
        # Overflows of this window that no gradient shows any more: of `torch.autograd.grad`, and of
        # backwards whose gradients were dropped. The trial may have kept what it made of them.
        self._inf_of_others: torch.Tensor | None = None

    def begin_batch(self, *, in_window: bool) -> None:
        """Forget what only the last window needed.

        Args:
            in_window: Whether the last batch was in the middle of a window of the context.
        """
        self._retained.clear()
        self._in_window = in_window
        if self._inf_of_others is not None:
            accumulates = in_window or any(map(any_gradient, self._steppers))
            if not (self._has_stepped or accumulates):  # it has left out its step
                self._scaler.note(self, self._inf_of_others)
                self._scaler.update()
            if self._has_stepped or not accumulates:
                self._inf_of_others = None
        self._has_gone_backward = self._has_stepped = False

    def backward(self, loss: torch.Tensor, run: Callable[[torch.Tensor], None]) -> None:
        """Go backward from a loss, and leave true gradients. No synchronisation.

        Args:
            loss: The unscaled loss.
            run: Goes backward from the scaled one.
        """
        groups = self._groups_of(loss)
        left = {owners: by_kind(leaves) for owners, leaves in groups.items()}
        found_inf = self._found_inf_before(left)
        with self.scaled() as scale:
            for kinds in left.values():
                for device, _, gradients in kinds:
                    torch._foreach_mul_(gradients, scale.to(device))
            run(self._scaler.scale(loss))
        made = [by_kind(leaves) for leaves in groups.values()]
        self._unscale(made, found_inf, inverse(scale))
        self._versions = dict(zip(groups, map(_versions_of, made), strict=True))
        self._found_inf = dict(zip(groups, found_inf.unbind(), strict=True))
        self._closed.clear()
        self._has_gone_backward = True

    def close(self, optimizer: Optimizer) -> torch.Tensor:
        """End the window of an optimizer that is about to step.

        Returns:
            Whether a backward of the window overflowed: (), float32, on the device, not 0 if so.
            Its gradients are 0 then.
        """
        found_inf = [] if self._inf_of_others is None else [self._inf_of_others]
        self._has_stepped = True
        self._steppers.add(optimizer)
        for owners in self._groups_with(optimizer):
            found_inf.append(self._found_inf[owners])
            self._closed.add(owners)
            self._stepped.add(owners)
        return torch.stack(found_inf).amax() if found_inf else torch.zeros((), device=self._device)

    def replay(self, loss: torch.Tensor, run: Callable[[torch.Tensor], None]) -> None:
        """Go backward in a batch that is trained again, to see what overflows.

        The gradients of parameters stay scaled, and are not finite if something has overflowed in
        this batch. Those of other leaves, which the batch may go on with, are true.

        Args:
            loss: The unscaled loss.
            run: Goes backward from the scaled one.
        """
        others = [leaf for leaf in self._groups_of(loss)[()] if id(leaf) not in self._known]
        with self.scaled() as scale:
            for device, _, gradients in by_kind(others):
                torch._foreach_mul_(gradients, scale.to(device))
            scaled, found_inf = self._scaler.scale(loss), self._inf_of_others
            if found_inf is not None:
                scaled = scaled * torch.where(found_inf == 0, 1.0, math.nan)
            run(scaled)
        for device, _, gradients in by_kind(others):
            torch._foreach_mul_(gradients, inverse(scale).to(device))

    @contextmanager
    def scaled(self) -> Iterator[torch.Tensor]:
        """Give true gradients to the trial's hooks while a scaled loss goes backward."""
        self.scale = self._amp.loss_scale()
        try:
            # An overflow is no anomaly: its step is skipped.
            with torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False):
                yield self.scale
        finally:
            self.scale = None

    # Calls of the trial inside a backward.

    def grad(
        self,
        run: Callable[..., Any],
        outputs: Sequence[Any],
        gradients: Sequence[torch.Tensor | None],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the engine for `torch.autograd.grad`: scaled, but with true gradients as results.

        Args:
            run: The engine's own `run_backward`.
            outputs: The outputs to go backward from.
            gradients: Their gradients.
            args: Further arguments of the engine.
            kwargs: The same.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self._warn_once(
                "torch.func goes backward without a loss scale in amp_fp16, so small gradients are "
                "0; torch.autograd.grad is scaled, and precision amp_bf16 needs no scale"
            )
            return run(outputs, gradients, *args, **kwargs)
        self._scaler.has_scaled = True
        with self.scaled() as scale, torch.enable_grad():
            outputs, seeds = as_float32(tuple(outputs)), as_float32(tuple(gradients))
            outputs = tuple(self._scaler.scale(output) for output in outputs)
            scaled, batched = _without_batches(run(outputs, seeds, *args, **kwargs))
            finite = are_finite([it for it in scaled if it is not None] or [scale])
            self._keep_inf((~finite).float())
            factor = inverse(scale)
            return batched(
                None if it is None else torch.where(finite, as_float32(it) * factor, 0.0)
                for it in scaled
            )

    def retain(self, tensor: torch.Tensor) -> None:
        """Note that the trial wants the gradient of this tensor, even if it is not a leaf."""
        if not tensor.is_leaf:
            self._retained[id(tensor)] = tensor

    def __deepcopy__(self, memo: object) -> TrueGradients:
        return self  # of a model that is copied, with its hooks

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()  # of a model that is pickled

    # Internals.

    def _groups_of(self, loss: torch.Tensor) -> dict[_Owners, list[torch.Tensor]]:
        """All leaves that may get a gradient, by the optimizers that hold them.

        The graph does not show what a reentrant checkpoint computes again; the models do.
        """
        optimizers = list(self._amp.optimizers)
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        lists = [(id(group["params"]), len(group["params"])) for group in groups]
        if lists != self._lists or not self._known:
            self._lists = lists
            owners: dict[torch.Tensor, list[Optimizer]] = {
                parameter: [] for model in self._amp.models for parameter in model.parameters()
            }
            for optimizer in optimizers:
                for parameter in dict.fromkeys(parameters_of(optimizer)):
                    owners.setdefault(parameter, []).append(optimizer)
            self._groups = {(): []}
            for parameter, its in owners.items():
                self._groups.setdefault(tuple(its), []).append(parameter)
            self._known = {id(parameter) for parameter in owners}
        others = [leaf for leaf in self._leaves_of(loss) if id(leaf) not in self._known]
        return {**self._groups, (): [*self._groups[()], *others, *self._retained.values()]}

    def _groups_with(self, optimizer: Optimizer) -> list[_Owners]:
        if optimizer in self._amp.optimizers:
            return [owners for owners in self._found_inf if optimizer in owners]
        # An optimizer that the training does not know may share parameters with a known one.
        its = {id(parameter) for parameter in parameters_of(optimizer)}
        return [
            owners
            for owners in self._found_inf
            if not owners or not its.isdisjoint(map(id, self._groups.get(owners, ())))
        ]

    def _leaves_of(self, loss: torch.Tensor) -> list[torch.Tensor]:
        if loss.grad_fn is None:
            return [loss]
        seen, waiting = {loss.grad_fn}, [loss.grad_fn]
        leaves = []
        while waiting:
            node = waiting.pop()
            following = node.next_functions
            for other, _ in following:
                if other is not None and other not in seen:
                    seen.add(other)
                    waiting.append(other)
            if not following and (leaf := getattr(node, "variable", None)) is not None:
                leaves.append(leaf)
        for function in {type(node) for node in seen} - self._warned:
            self._warn_of_function(function)
        return leaves

    def _warn_of_function(self, node: Any) -> None:
        """Warn once that the backward of a trial's own function gets scaled gradients."""
        self._warned.add(node)
        function = getattr(node, "_forward_cls", None)
        backward = inspect.unwrap(getattr(function, "backward", _nothing))
        code = getattr(backward, "__code__", None)
        if code is None or backward.__module__.startswith(("torch.", "determined_amp.")):
            return
        if "site-packages" not in code.co_filename:  # those of libraries are linear
            logger.warning(
                "%s:%d: the backward of %s gets gradients times the loss scale in amp_fp16, which "
                "is right if it is linear in them; one that clips or rounds them needs amp_bf16",
                *(code.co_filename, code.co_firstlineno, getattr(function, "__name__", "")),
            )

    def _found_inf_before(self, left: dict[_Owners, list[_Kind]]) -> torch.Tensor:
        """`found_inf` of the earlier backwards of each window, (groups,), on the device."""
        open_ones = {o: one for o, one in self._found_inf.items() if o not in self._closed}
        if self._has_gone_backward:
            dropped = [one for owners, one in open_ones.items() if not left.get(owners)]
            if dropped and not self._closed:
                self._keep_inf(torch.stack(dropped).amax())
        else:
            ended = [owners for owners in open_ones if self._has_ended(owners, left.get(owners))]
            if ended:
                one = torch.stack([open_ones[owners] for owners in ended]).amax()
                if self._closed:  # a step has told the scaler of the same overflow
                    told = torch.stack([self._found_inf[owners] for owners in self._closed]).amax()
                    one = one * (told == 0)
                self._scaler.note(self, one)
                if len(ended) == len(self._found_inf):
                    self._scaler.update()
            for owners in ended:  # what was not zeroed in place, but changed, still counts
                counts = _largest_in(left.get(owners, ())) != 0
                self._found_inf[owners] = open_ones[owners] * counts
        carried = [
            self._found_inf.get(owners) if kinds and owners not in self._closed else None
            for owners, kinds in left.items()
        ]
        found_inf = torch.zeros(len(carried), device=self._device)
        for one, before in zip(found_inf.unbind(), carried, strict=True):
            if before is not None:
                one.copy_(before)
        return found_inf if self._inf_of_others is None else found_inf.maximum(self._inf_of_others)

    def _has_ended(self, owners: _Owners, left: list[_Kind] | None) -> bool:
        """Whether the gradients of an earlier batch were dropped, or used without an optimizer."""
        if not left:
            return True
        if self._in_window or owners in self._stepped:
            return False
        return not owners or _versions_of(left) != self._versions.get(owners)

    def _keep_inf(self, found_inf: torch.Tensor) -> None:
        before = self._inf_of_others
        self._inf_of_others = found_inf if before is None else torch.maximum(found_inf, before)

    def _unscale(
        self, groups: Sequence[list[_Kind]], found_inf: torch.Tensor, inverse: torch.Tensor
    ) -> None:
        for kinds, one in zip(groups, found_inf.unbind(), strict=True):
            for device, dtype, gradients in kinds:
                if device == one.device and dtype in _INTEGERS:
                    torch._amp_foreach_non_finite_check_and_unscale_(gradients, one, inverse)
                else:  # in 16 bits or on another device, as no parameter of a model is
                    one.add_((~are_finite(gradients)).to(one.device))
                    torch._foreach_mul_(gradients, inverse.to(device, dtype))
        if self._amp.slots.size > 1:
            # Without an exchange of gradients in this batch, only this rank knows.
            distributed.all_reduce(found_inf, distributed.ReduceOp.MAX)
        for kinds, one in zip(groups, found_inf.unbind(), strict=True):
            for device, dtype, gradients in kinds:
                integer = _INTEGERS.get(dtype, torch.int16)
                bits = [gradient.view(integer) for gradient in gradients]
                torch._foreach_mul_(bits, (one == 0).to(device, integer))

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s", message)


_Kind = tuple[torch.device, torch.dtype, list[torch.Tensor]]


def by_kind(leaves: Sequence[torch.Tensor]) -> list[_Kind]:
    """The values of the gradients that there are, as real numbers."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for leaf in leaves:
        gradient = leaf.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            gradient = gradient._values()
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient)
        kinds[gradient.device, gradient.dtype].append(gradient)
    return [(device, dtype, values) for (device, dtype), values in kinds.items()]


def _versions_of(kinds: Sequence[_Kind]) -> list[int]:
    return [gradient._version for _, _, gradients in kinds for gradient in gradients]


def _largest_in(kinds: Sequence[_Kind]) -> torch.Tensor:
    """The largest magnitude, (), on the device of the first kind; 0 if there is none."""
    filled = [values for _, _, of_kind in kinds for values in of_kind if values.numel()]
    largest = torch._foreach_norm(filled, math.inf) if filled else [torch.zeros(())]
    return torch.stack([it.to(largest[0].device, torch.float32) for it in largest]).amax()


def are_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether all numbers of all tensors are finite, (), bool, on the device."""
    return torch.stack([torch.isfinite(tensor.detach()).all() for tensor in tensors]).all()


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 over a loss scale, (), float32."""
    return scale.double().reciprocal().float()  # as `GradScaler` does it


def _without_batches(
    gradients: Sequence[torch.Tensor | None],
) -> tuple[Sequence[torch.Tensor | None], Callable[[Iterable[torch.Tensor | None]], Any]]:
    """What many seeds at once have made, as plain tensors with one dimension more.

    That is how `torch.autograd.grad(is_grads_batched=True)` and `jacobian(vectorize=True)` run.

    Returns:
        The plain tensors, and what gives their counterparts the form of `gradients`.
    """
    batched = [it is not None and is_batched(it) for it in gradients]
    if not any(batched):
        return list(gradients), tuple
    level = torch._C._vmapmode_decrement_nesting() + 1
    torch._C._vmapmode_increment_nesting()

    def each(change: Callable[..., Any], values: Iterable[Any], *how: int) -> Any:
        pairs = zip(values, batched, strict=True)
        return tuple(change(it, *how) if is_one else it for it, is_one in pairs)

    plain = each(torch._remove_batch_dim, gradients, level, 1, 0)
    return plain, lambda values: each(torch._add_batch_dim, values, 0, level)


def _nothing() -> None:
    return None
