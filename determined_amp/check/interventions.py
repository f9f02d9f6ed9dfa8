"""Disturbs a training on purpose: makes gradients overflow.

A correct training skips these steps, and all its other updates are the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch

from determined_amp.amp.torch_private import version_of

# The identity of a gradient tensor, and the version of its values.
Key = tuple[int, int]


class ForcedOverflows:
    """Makes gradients overflow in some windows, and keeps the true gradients.

    A step that is about to use an overflow gets the true gradients back. So no forced
    overflow reaches weights, moments or averages.

    Args:
        windows: The windows of each optimizer, counted from 0.
    """

    def __init__(self, windows: Collection[int]) -> None:
        self.windows = windows
        # By weight: the key of the gradient that overflows, and its true values.
        self._true_gradients: dict[torch.Tensor, tuple[Key, torch.Tensor]] = {}

    def make(self, weights: Iterable[torch.Tensor]) -> None:
        """Multiply the gradients of these weights by infinity."""
        for weight in weights:
            if weight.grad is not None:
                self._true_gradients[weight] = (
                    version_key(weight),
                    weight.grad.detach().clone(),
                )
                _write(weight.grad, weight.grad.data * math.inf)

    def divide(self, weights: Iterable[torch.Tensor], divisor: float) -> None:
        """Divide the true gradients, too, as a scaler has divided the gradients."""
        for weight in weights:
            if weight in self._true_gradients:
                self._true_gradients[weight][1].div_(divisor)

    def give_back(self, weights: Iterable[torch.Tensor], factor: float = 1.0) -> bool:
        """Replace overflows by the true gradients.

        Args:
            weights: The weights of the gradients.
            factor: What the training multiplies its gradients by.

        Returns:
            Whether a gradient overflowed that was not yet the true one again.
        """
        has_given = False
        for weight in weights:
            _, values = self._true_gradients.pop(weight, (None, None))
            if values is None or weight.grad is None:
                continue
            true = values * factor
            # A training with buffers of its own may have put back the true values.
            has_given |= not torch.allclose(weight.grad, true, rtol=0.01)
            _write(weight.grad, true)
        return has_given

    def stop(self) -> None:
        """Take back all overflows, and make no more.

        The recorder calls this if the training raises an error on an overflow.
        """
        self.give_back([*self._true_gradients])
        self.windows = ()

    def are_untouched(self, weights: Iterable[torch.Tensor]) -> bool:
        """Whether the forced overflows are still in these weights' gradients."""
        made = [weight for weight in weights if weight in self._true_gradients]
        return bool(made) and all(
            version_key(each) == self._true_gradients[each][0] for each in made
        )

    def are_in(self, weights: Iterable[torch.Tensor]) -> bool:
        """Whether a gradient of these weights was made to overflow."""
        return not self._true_gradients.keys().isdisjoint(weights)

    def forget(self, weights: Iterable[torch.Tensor]) -> None:
        """Forget the overflows of these weights, whose gradients are gone."""
        for weight in weights:
            self._true_gradients.pop(weight, None)


def version_key(weight: torch.Tensor) -> Key:
    """A key that changes with the gradient tensor of a weight and with its values."""
    gradient = weight.grad
    return (0, 0) if gradient is None else (id(gradient), version_of(gradient))


def _write(gradient: torch.Tensor, values: torch.Tensor) -> None:
    """Write values into a gradient without changing its version."""
    if gradient.is_sparse:
        gradient.data = values  # `data` of a sparse tensor is a copy
    else:
        gradient.data.copy_(values)
