"""Lets a resumed run draw the same random numbers as an undisturbed one.

Determined restores the random state of the chief on every rank, and skips the batches
that were trained before. But it also draws the order of `DataLoader(shuffle=True)` from
that state, at the first batch. So a resumed run sees its batches in another order, and
ranks whose states differ share samples. Here the order is a function of the trial's
seed, and each rank gets its own state.
"""

from __future__ import annotations

import copy
import itertools
import logging
import random
from collections.abc import Iterator
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
    get_worker_info,
)

from determined_amp.amp.plain_data import StateDict

logger = logging.getLogger(__name__)

# torch's samplers that draw from the global random state, unless they have a generator.
_DRAWN = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def settle_order(loader: Any, seed: int, *, warns: bool) -> None:
    """Seed the order of a training loader, if it is random, before its first batch.

    The seeded order continues from one epoch to the next, so a resumed run that skips
    the trained batches repeats it. The trial's own sampler stays as it is, because a
    validation may use it, too.

    Args:
        loader: The loader that Determined iterates over.
        seed: The seed, equal on every rank and after a resume.
        warns: Whether to log what a resume depends on if the trial decides the order.
    """
    repeated = _repeated_in(loader)
    sampler: Any = None if repeated is None else _sampler_in(repeated.batch_sampler)
    if type(sampler) in _DRAWN and sampler.generator is None:
        repeated.batch_sampler = _SeededBatches(repeated.batch_sampler, seed)
    elif warns:
        _tell_conditions(loader, sampler)


def _repeated_in(loader: Any) -> Any:
    """The sampler that repeats the batches of a Determined loader, or None.

    It is compared with None, because `bool()` of a sampler may need a length.
    """
    sampler = getattr(loader, "batch_sampler", None)
    while sampler is not None and not isinstance(sampler, samplers.RepeatBatchSampler):
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler


def _sampler_in(batches: Any) -> Any:
    return batches.sampler if type(batches) is BatchSampler else batches


def _has_seed(sampler: Any) -> bool:
    return getattr(sampler, "seed", None) is not None


def _tell_conditions(loader: Any, sampler: Any) -> None:
    """Log what a resume depends on if the trial decides the order."""
    conditions = []
    if sampler is None:
        what = "the trial skips them: its loader is no determined.pytorch.DataLoader"
        conditions.append(what)
    elif type(sampler) in _DRAWN:
        what = "the generator of its loader starts with the same seed again"
        conditions.append(what)
    elif not (type(sampler) is SequentialSampler or _has_seed(sampler)):
        conditions.append(f"its {type(sampler).__name__} gives the same order again")
    level = logging.WARNING if conditions else logging.INFO
    if getattr(loader, "num_workers", 0):
        conditions.append("its loader's workers draw nothing at random")
    if conditions:
        text = "a resumed run sees the batches of an undisturbed one if %s"
        logger.log(level, text, " and ".join(conditions))


class _SeededBatches(BatchSampler):
    """The batches of a torch sampler, in an order that is a function of a seed.

    Args:
        batches: Makes the batches of one epoch.
        seed: The seed of the order, and of the random numbers of the loader's workers.
    """

    def __init__(self, batches: BatchSampler, seed: int) -> None:
        drawn: Any = copy.copy(batches.sampler)
        drawn.generator = torch.Generator().manual_seed(seed)
        super().__init__(drawn, batches.batch_size, batches.drop_last)
        self._seeds = itertools.count(seed)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            seeding = _SeedingIndices(batch)
            seeding.seed = next(self._seeds)
            yield seeding


class _SeedingIndices(list[int]):
    """The sample indices of a batch. They seed the worker that iterates over them.

    Otherwise a worker's random numbers would depend on its earlier batches, and a
    resumed run has new workers.
    """

    seed: int

    def __iter__(self) -> Iterator[int]:
        if get_worker_info() is not None:
            torch.default_generator.manual_seed(self.seed)  # a worker has no GPU
            np.random.seed(self.seed % 2**32)
            random.seed(self.seed)
        return super().__iter__()


def random_state(gpu: int) -> StateDict:
    """The random state of this process in plain types, under Determined's names.

    Args:
        gpu: The index of this process's GPU, if the machine has any.
    """
    state = {
        "cpu_rng_state": torch.random.get_rng_state(),
        "np_rng_state": plain_numbers(np.random.get_state()),
        "random_rng_state": random.getstate(),
    }
    if torch.cuda.device_count():
        state["gpu_rng_state"] = torch.cuda.get_rng_state(gpu)
    return state


def plain_numbers(state: Any) -> tuple[str, list[int], int, int, float]:
    """The random state of numpy with its array as a list, which loads without code."""
    name, keys, position, has_gauss, gauss = state
    return name, keys.tolist(), position, has_gauss, gauss


def restore_random_state(state: StateDict, gpu: int) -> None:
    """Restore what `random_state` returned."""
    torch.random.set_rng_state(state["cpu_rng_state"])
    np.random.set_state(state["np_rng_state"])
    random.setstate(state["random_rng_state"])
    if torch.cuda.device_count():
        torch.cuda.set_rng_state(state["gpu_rng_state"], gpu)
