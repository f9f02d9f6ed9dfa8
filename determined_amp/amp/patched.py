"""Replaces an attribute for the duration of a block.

While a training runs, these attributes of torch are replaced for the whole process. The
doctor replaces more (in `check/`), and a resume `torch.load` (`trial/controller.py`).

* `torch.autocast.__enter__`, while a batch is rehearsed in another dtype: the trial's
  own code opens the regions, so nothing else can change their dtype.
* `torch.autograd.Variable._execution_engine`, while a batch is rehearsed, and while an
  unmodified trial trains: `Tensor.backward` and `torch.autograd.grad` have no hook, but
  both call this engine.
* The methods that register forward hooks, while an unmodified trial trains in 16 bits:
  those hooks must see float32.
* The methods that register backward hooks, and `Tensor.retain_grad`, while an
  unmodified trial trains with a loss scale: such calls are refused.
* A function that all of torch's clip functions call. Only `amp/clips.py` replaces it:
  while a training with a loss scale is alive, which refuses clips of scaled gradients,
  and while the doctor watches, which then hears of the other clips.
* `GradScaler.scale`, while the finder looks: the trial may scale a loss by a scaler of
  its own.

Steps need no replacement: torch has step hooks for all of its optimizers. (`step` of a
wrapper that is no `Optimizer` of torch is replaced on the instance.) Ours runs before
the doctor's, and asks the newest training first (`amp/core.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, in place of a method or as a hook."""


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
