"""The names of everything that a training reports; a report reads them without
torch.
"""

from __future__ import annotations


class MetricName:
    """The names in a training report; that of the audit is in `AuditMetricName`.

    The WebUI shows metrics in the order of their names. What a user looks at first has
    a plain name. `watch_` is in front of what explains it, and sorts behind
    `validation_`.

    Where there are several optimizers, the names marked with * stand for one of each,
    which ends in `_0`, `_1` and so on, in the order of `wrap_optimizer`.
    """

    # Mean over samples of the training loss, if `update` is given one.
    LOSS = "loss"
    # * Mean over applied steps of the unscaled gradient norm, before clipping,
    # where something of ours clips: `amp.clip`, `amp.clip_gradients`, or the
    # `clip_grads` of an unmodified trial.
    GRAD_NORM = "watch_grad_norm"
    # log2 of the loss scale at the report. This and the skipped steps: `amp_fp16` only.
    LOSS_SCALE_LOG2 = "loss_scale_log2"
    # * Optimizer steps since the start of the trial.
    APPLIED_STEPS = "watch_applied_steps"
    SKIPPED_STEPS = "skipped_steps"
    # * Optimizer steps skipped since the last applied one. This, the ratio and the
    # drift are reported from the first skipped step of the trial on.
    CONSECUTIVE_SKIPS = "watch_consecutive_skips"
    # * Skipped share of this report's optimizer steps.
    SKIP_RATIO = "watch_skip_ratio"
    # * Optimizer steps that a scheduler of `context.wrap_lr_scheduler` is ahead of the
    # applied ones; if there is one that moves by batches or steps, and a scaler.
    LR_DRIFT_STEPS = "watch_lr_drift_steps"
    # * log2 of 65504 over the largest scaled gradient of a parameter; the smallest of
    # the report, measured on every tenth step. As the norm, and in `amp_fp16` only.
    HEADROOM_BITS = "watch_headroom_bits"
    # Over all slots, first batches of the process excluded.
    SAMPLES_PER_SECOND = "samples_per_second"
    # Share of that time that the loop waited for data; the largest over slots. A GPU
    # may still compute meanwhile. Of a `determined.pytorch.DataLoader` only.
    DATA_WAIT_SHARE = "watch_data_wait_share"
    # Largest over slots; on a GPU allocated by torch in training batches, the first
    # ones of the process excluded; on a CPU resident, of the whole process.
    PEAK_MEMORY_MIB = "watch_peak_memory_mib"
    # The same for what torch holds of a GPU.
    PEAK_RESERVED_MEMORY_MIB = "watch_peak_reserved_memory_mib"


class AuditMetricName:
    """The metric's name in the first training report; it covers one batch, on the
    chief's slot.
    """

    # Share of the FLOPs in the dtype that the precision asks for.
    SHARE = "watch_audit_share"
