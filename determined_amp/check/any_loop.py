"""Watches any loop that trains: a plain one, a Core API script, a trainer of another
library.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from determined_amp.amp.patched import patched
from determined_amp.check.finding import CheckFindings
from determined_amp.check.judge import interventions, judge_record
from determined_amp.check.lines import is_doctors
from determined_amp.check.recorder import OVERFLOWS, Recorder
from determined_amp.check.stand_in import ONLY_ON_A_GPU


@contextmanager
def watching(
    overflows: Collection[int] = OVERFLOWS, *, moves_scale: bool = True
) -> Iterator[CheckFindings]:
    """Watch the training in this block; the findings are there when it ends.

        with determined_amp.check.watching() as findings:
            train()
        print(findings)

    A few dozen steps are enough. On a machine without a GPU, mixed precision that is
    written for CUDA runs on the CPU in this block. What the training raises is raised,
    with its own traceback, after the findings are printed.

    Args:
        overflows: Windows of each optimizer, from 0, whose gradients are made to
            overflow, so that the step is skipped. With an empty tuple, what it does on
            a skipped step is seen only if one is skipped anyway.
        moves_scale: Whether the loss scale is divided by 256 in some windows, and put
            back by `update`. That changes no right update beyond the rounding of
            float16. Without it, and without overflows, the training is left
            undisturbed.
    """
    findings = CheckFindings()
    recorder = Recorder(overflows, moves_scale=moves_scale)
    try:
        with watched(recorder, findings):
            yield findings
    except Exception as error:
        print(findings, file=sys.stderr)
        leave_out_doctor(error)
        raise


@contextmanager
def watched(recorder: Recorder, findings: CheckFindings) -> Iterator[None]:
    """Watch the training in this block, and fill the findings when it ends, however it
    does.
    """
    recorder.meet_optimizers()
    record = recorder.record
    record.has_cuda = torch.cuda.is_available()
    try:
        with _batches_of_loaders(recorder), recorder.watching():
            yield
    finally:
        vars(findings).update(vars(judge_record(record)))
        findings.notes += interventions(record)
        findings.notes += [] if record.has_cuda else [ONLY_ON_A_GPU]


def leave_out_doctor(error: BaseException) -> None:
    """Take the frames of this package out of a traceback, behind the first."""
    trace = error.__traceback__
    while trace is not None:
        below = trace.tb_next
        if below is not None and is_doctors(below.tb_frame.f_code.co_filename):
            trace.tb_next = below.tb_next
        else:
            trace = below


def _kind_of_iterators() -> type:
    """The class whose `__next__` every iterator over a `DataLoader` has."""
    generator = torch.Generator()  # so that the global one draws nothing
    numbers: Any = [0]
    kinds = type(iter(DataLoader(numbers, generator=generator))).__mro__
    return next(kind for kind in kinds if "__next__" in vars(kind))


@contextmanager
def _batches_of_loaders(recorder: Recorder) -> Iterator[None]:
    """A batch of a `DataLoader` that is taken with gradients enabled is a training
    batch.
    """
    kind: Any = _kind_of_iterators()
    own = kind.__next__

    def take(iterator: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(iterator)
        recorder.end_batch()
        try:
            batch = own(iterator)
        except StopIteration:
            recorder.record.epochs += 1
            raise
        recorder.begin_batch(batch)
        return batch

    with patched(kind, "__next__", take):
        yield
