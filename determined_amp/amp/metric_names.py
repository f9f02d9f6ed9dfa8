"""The names of all metrics that a training reports; importing them needs no torch."""

from __future__ import annotations


class MetricName:
    """The names in a training report; the audit has its own in `AuditMetricName`.

    The WebUI sorts metrics by name. The metrics that a user looks at first have plain
    names. Those that explain them begin with `watch_`, which sorts after `validation_`.

    With several optimizers, each name marked with * is reported once per optimizer,
    with the ending `_0`, `_1` and so on, in the order of `wrap_optimizer`.
    """

    # Mean over samples of the training loss, if `update` is given one.
    LOSS = "loss"
    # * Mean over applied steps of the unscaled gradient norm, before clipping. Measured
    # only where the training clips by `amp.clip`, `amp.clip_gradients`, or the
    # `clip_grads` of an unmodified trial.
    GRAD_NORM = "watch_grad_norm"
    # log2 of the loss scale at the report. This and the skipped steps are reported in
    # `amp_fp16` only.
    LOSS_SCALE_LOG2 = "loss_scale_log2"
    # * Optimizer steps since the start of the trial.
    APPLIED_STEPS = "watch_applied_steps"
    SKIPPED_STEPS = "skipped_steps"
    # * Optimizer steps skipped since the last applied one. This, the ratio and the
    # drift are reported from the first skipped step of the trial on.
    CONSECUTIVE_SKIPS = "watch_consecutive_skips"
    # * Skipped share of this report's optimizer steps.
    SKIP_RATIO = "watch_skip_ratio"
    # * How many optimizer steps a scheduler of `context.wrap_lr_scheduler` is ahead of
    # the applied ones. Reported if it moves by batches or steps, and there is a scaler.
    LR_DRIFT_STEPS = "watch_lr_drift_steps"
    # * log2(65504 / largest scaled gradient of a parameter), the smallest of a report.
    # Measured on every tenth step, where the norm is measured, in `amp_fp16` only.
    HEADROOM_BITS = "watch_headroom_bits"
    # Over all slots, without the first batches of the process.
    SAMPLES_PER_SECOND = "samples_per_second"
    # Share of that time in which the loop waited for data; the largest over slots. A
    # GPU may compute meanwhile. Only with a `determined.pytorch.DataLoader`.
    DATA_WAIT_SHARE = "watch_data_wait_share"
    # Largest over slots. On a GPU: memory allocated by torch in training batches,
    # without the first ones of the process. On a CPU: resident memory of the process.
    PEAK_MEMORY_MIB = "watch_peak_memory_mib"
    # The same for the GPU memory that torch has reserved.
    PEAK_RESERVED_MEMORY_MIB = "watch_peak_reserved_memory_mib"


class AuditMetricName:
    """The audit's metric in the first training report, about one batch of the chief."""

    # Share of the FLOPs in the dtype that the precision asks for.
    SHARE = "watch_audit_share"
