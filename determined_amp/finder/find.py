"""The initial loss scale of a trial, in one pass over a few of its batches."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

import torch
from determined import pytorch

from determined_amp.amp.mixed_precision import MixedPrecision
from determined_amp.amp.precision import DeviceSupport
from determined_amp.finder.advice import FinderRun
from determined_amp.finder.frozen import FrozenBatch, in_training, wrapped_scaler
from determined_amp.finder.verdict import Finding, find


def look(
    name: str,
    trial: pytorch.PyTorchTrial,
    context: pytorch.PyTorchTrialContext,
    batches: int,
    *,
    latest_checkpoint: str | None = None,
    sweep: bool = False,
) -> tuple[Finding, FinderRun]:
    """Find the initial loss scale of a trial; the trial cannot be used afterwards.

    Args:
        name: Of the experiment.
        trial: The trial.
        context: Its context.
        batches: Training batches to look at.
        latest_checkpoint: Where to start from, in the context's checkpoint storage.
        sweep: Measure every scale that is shown in float16, too.

    Raises:
        LossScaleError: if there is no loss scale to look for.
    """
    scaler = wrapped_scaler(context)
    init_scale, growth_interval = float(scaler.get_scale()), int(scaler.get_growth_interval())

    def work(frozen: Sequence[FrozenBatch]) -> tuple[Finding, FinderRun]:
        finding = find(context, frozen, sweep=sweep)
        samples = sum(context.distributed.allgather(sum(batch.samples for batch in frozen)))
        device = DeviceSupport.of(context.device).name
        amp = MixedPrecision.of(context)
        settings = None if amp is None else amp.settings
        run = FinderRun(
            name=name,
            device=device,
            torch=torch.__version__,
            date=datetime.now(timezone.utc).date().isoformat(),
            batches=len(frozen),
            samples=samples,
            init_scale=init_scale,
            growth_interval=growth_interval,
            is_ours=settings is not None,
            min_scale=settings.min_scale if settings else 0.0,
            fp32_modules=settings.fp32_modules if settings else (),
        )
        return finding, run

    return in_training(trial, context, batches, work, latest_checkpoint)
