"""Replaces an attribute for the time of a block.

What is replaced so in torch, for the whole process, and why:

* `torch.autocast.__enter__`, while a batch is replayed in another dtype: the regions are opened in
  code of the trial's own, and nothing else changes the dtype of one.
* `torch.autograd.Variable._execution_engine`, while a batch is replayed, and while a trial trains
  as it is: `Tensor.backward` and `torch.autograd.grad` have no hook, and all of them end there.
* `Tensor.retain_grad` and the methods of `Tensor` and `Module` that register hooks, while a trial
  trains as it is: what it registers in a batch gets float32 and true gradients, too.
* `GradScaler.scale`, while the finder looks: a loss may be scaled by a scaler of the trial's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(owner: Any, name: str, replacement: object) -> Iterator[None]:
    """Replace an attribute of any object inside this block, where it takes no argument for it."""
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
