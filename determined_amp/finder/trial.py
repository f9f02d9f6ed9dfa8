"""Finds the initial loss scale of a trial in one pass over a few of its batches."""

from __future__ import annotations

from collections.abc import Sequence

from determined import pytorch

from determined_amp.finder.advice import FoundScale, run_now
from determined_amp.finder.frozen import FrozenBatch, in_training, wrapped_scaler
from determined_amp.finder.verdict import find
from determined_amp.trial.mixed_precision import MixedPrecision


def find_in_trial(
    name: str,
    trial: pytorch.PyTorchTrial,
    context: pytorch.PyTorchTrialContext,
    batches: int,
    *,
    latest_checkpoint: str | None = None,
    sweep: bool = False,
) -> FoundScale:
    """Find the initial loss scale of a trial; the trial cannot be used afterwards.

    Args:
        name: Name of the experiment.
        trial: The trial.
        context: Its context.
        batches: Number of training batches to use.
        latest_checkpoint: The checkpoint to start from, in the context's checkpoint storage.
        sweep: Also measure every shown scale in float16.

    Raises:
        LossScaleError: if the trial has no loss scale, or none can be found.
    """
    scaler = wrapped_scaler(context)
    init_scale, growth_interval = float(scaler.get_scale()), int(scaler.get_growth_interval())

    def work(frozen: Sequence[FrozenBatch]) -> FoundScale:
        finding = find(context, frozen, sweep=sweep)
        amp = MixedPrecision.of(context)
        run = run_now(
            name,
            context.device,
            batches=len(frozen),
            samples=sum(context.distributed.allgather(sum(batch.samples for batch in frozen))),
            init_scale=init_scale,
            growth_interval=growth_interval,
            is_ours=amp is not None,
            min_scale=amp.settings.min_scale if amp else 0.0,
            fp32_modules=amp.settings.fp32_modules if amp else (),
        )
        return FoundScale(finding, run)

    return in_training(trial, context, batches, work, latest_checkpoint)
