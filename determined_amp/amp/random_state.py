"""The random numbers of a run, which a resumed one must repeat.

Determined restores the random state of the chief on every rank, and skips the batches that were
trained before. But it draws the order of `DataLoader(shuffle=True)` from that state too, and only
with the first batch: a resumed run sees its batches in another order, and ranks whose states differ
share samples. Here the order is a function of the trial's seed, and each rank gets its own state.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from determined.pytorch import samplers
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

# The samplers of torch that draw from the global random state unless they have a generator.
_DRAWN = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def settle_order(loader: Any, seed: int) -> str | None:
    """Seed the order of a training loader if it is drawn at random; before its first batch.

    The order goes on from one epoch to the next, so whoever skips what was trained repeats it all.

    Args:
        loader: What Determined iterates over. The trial's own sampler is left alone: a validation
            may use it, too.
        seed: The same on every rank and after a resume.

    Returns:
        What must be so that a resumed run sees the batches of an undisturbed one; None if it does.
    """
    repeated = getattr(loader, "batch_sampler", None)
    while repeated is not None and not isinstance(repeated, samplers.RepeatBatchSampler):
        repeated = getattr(repeated, "batch_sampler", None)
    if repeated is None:
        return "the trial skips them itself: its loader is no determined.pytorch.DataLoader"
    batches, conditions = repeated.batch_sampler, []
    sampler: Any = batches.sampler if type(batches) is BatchSampler else batches
    if type(sampler) in _DRAWN and sampler.generator is None:
        seeded = copy.copy(sampler)
        seeded.generator = torch.Generator().manual_seed(seed)
        batches = repeated.batch_sampler = copy.copy(batches)
        batches.sampler = seeded
    elif type(sampler) in _DRAWN:
        conditions.append("the generator of its loader starts with the same seed again")
    elif type(sampler) is not SequentialSampler:
        conditions.append(f"its {type(sampler).__name__} gives the same order again")
    if loader.num_workers:
        conditions.append("its loader's workers draw nothing at random")
    return " and ".join(conditions) or None


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of this process in plain types, under the names that Determined gives its parts.

    Args:
        device: Where the trial computes; a GPU has a state of its own.
    """
    name, keys, *rest = np.random.get_state()
    state = {
        "cpu_rng_state": torch.random.get_rng_state(),
        "np_rng_state": (str(name), [int(key) for key in keys], *rest),
        "random_rng_state": random.getstate(),
    }
    if device.type == "cuda":
        state["gpu_rng_state"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on from what `random_state` gave."""
    torch.random.set_rng_state(state["cpu_rng_state"])
    np.random.set_state(state["np_rng_state"])
    random.setstate(state["random_rng_state"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["gpu_rng_state"], device)
