"""Replaces an attribute for the duration of a block.

These attributes of torch are replaced this way, for the whole process:

* `torch.autocast.__enter__`, while a batch is rehearsed in another dtype: the trial's
  own code opens the regions, and nothing else changes their dtype.
* `torch.autograd.Variable._execution_engine`, while a batch is rehearsed, and while an
  unmodified trial trains: `Tensor.backward` and `torch.autograd.grad` have no hook, and
  all of them end there.
* What registers forward hooks, while an unmodified trial trains in 16 bits: they see
  float32.
* What registers hooks of a backward, and `Tensor.retain_grad`, while an unmodified
  trial trains with a loss scale: they are refused.
* A function that torch's clips call, while a training with a loss scale lives, which
  refuses clips of scaled gradients, and while the doctor watches, which hears of the
  others: `amp/clips.py` alone replaces it, and asks the trainings first.
* `GradScaler.scale`, while the finder looks: a loss may be scaled by a scaler of the
  trial's own.

Steps need no replacement: torch has hooks for those of all optimizers. That of the
newest training runs first (`amp/core.py`), in an unmodified trial after it has made
the step one of ours, and that of the doctor last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """In place of a method, or as a hook."""


@contextmanager
def patched(owner: Any, name: str, replacement: object) -> Iterator[None]:
    """Replace an attribute of any object inside this block."""
    own = vars(owner)
    was_own, before = name in own, own.get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if was_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
