"""Watches any loop that trains: a plain one, a Core API script, a trainer of another library."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import distributed
from torch.utils.data import dataloader

from determined_amp.amp.patched import patched
from determined_amp.check.finding import Findings
from determined_amp.check.record import Record
from determined_amp.check.rules import judge
from determined_amp.check.spies import OVERFLOWS, Spies
from determined_amp.check.stand_in import ONLY_ON_A_GPU, cpu_for_cuda


@contextmanager
def watching(overflows: Collection[int] = OVERFLOWS) -> Iterator[Findings]:
    """Watch the training in this block; the findings are there when it ends.

        with determined_amp.check.watching() as findings:
            train()
        print(findings)

    A few dozen steps are enough. On a machine without a GPU, mixed precision that is written for
    CUDA runs on the CPU in this block. What the training raises is raised, and judged, too.

    Args:
        overflows: Windows of each optimizer, from 0, whose gradients are made to overflow, so that
            the step is skipped. With an empty tuple the training is left undisturbed; what it does
            on a skipped step is then seen only if one is skipped anyway.
    """
    findings, spies = Findings(), Spies(overflows)
    spies.meet_optimizers()
    spies.record.has_cuda = torch.cuda.is_available()
    try:
        with cpu_for_cuda(), _batches_of_loaders(spies), spies.watching():
            yield findings
            _gather_scales(spies.record)
    finally:
        judged = judge(spies.record)
        findings.all, findings.seen = judged.all, judged.seen
        findings.notes = [*judged.notes]
        if not spies.record.has_cuda:
            findings.notes.append(ONLY_ON_A_GPU)


def _gather_scales(record: Record) -> None:
    """Let each rank know the scales of all."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    own = [event.after for event in record.of("update")]
    gathered: list[Any] = [None] * distributed.get_world_size()
    if len(gathered) > 1:
        with suppress(RuntimeError):  # a rank has left
            distributed.all_gather_object(gathered, own)
            record.scales_of_ranks = gathered


@contextmanager
def _batches_of_loaders(spies: Spies) -> Iterator[None]:
    """A batch of a `DataLoader` that is taken with gradients enabled is a training batch."""
    own = dataloader._BaseDataLoaderIter.__next__

    def take(iterator: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(iterator)
        spies.end_batch()
        try:
            batch = own(iterator)
        except StopIteration:
            spies.record.epochs += 1
            raise
        spies.begin_batch()
        return batch

    with patched(dataloader._BaseDataLoaderIter, "__next__", take):
        yield
