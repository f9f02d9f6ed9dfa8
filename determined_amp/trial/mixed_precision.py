"""Mixed precision for one `PyTorchTrial`: `AmpCore` in Determined's loop.

The recipe stays visible in every trial: autocast, `scaler.scale`, `step_optimizer` with
the scaler, `update`. This module takes models and optimizers from the trial's context.
It connects `AmpCore` to the start, reports, checkpoints and validations of Determined's
loop.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from determined import pytorch
from torch.optim import Optimizer

from determined_amp.amp.core import AmpCore
from determined_amp.amp.errors import ConfigError, UserError
from determined_amp.amp.fields import read_section
from determined_amp.amp.metrics import TrainingMetrics
from determined_amp.amp.mistakes import IN_A_TRIAL
from determined_amp.amp.plain_data import Metrics
from determined_amp.amp.precision import (
    described,
    warn_of_slow_operations,
)
from determined_amp.amp.settings import AmpSettings
from determined_amp.experiment.experiment import Experiment
from determined_amp.experiment.failures import (
    ending_the_program,
    print_uncaught_user_errors,
)
from determined_amp.experiment.hyperparameters import constants
from determined_amp.experiment.misplaced import misplaced
from determined_amp.trial.batches import Batches
from determined_amp.trial.checkpoint import PortableCheckpoint
from determined_amp.trial.determined_private import (
    AMP,
    aggregation_frequency,
    amp_of,
    scaler_of,
    searcher,
    sections,
    step_methods,
)
from determined_amp.trial.notes import TrialGuard
from determined_amp.trial.resumed import CALLBACK, ResumedTraining, scheduled

logger = logging.getLogger(__name__)

# The key of a `MixedPrecision` among the callbacks of its trial.
LOOP = "determined_amp.loop"

# `TrainingMetrics` has a reducer's methods, but its package must not import Determined.
pytorch.MetricReducer.register(TrainingMetrics)


class MixedPrecision(AmpCore, pytorch.PyTorchCallback):
    """Autocast, scaler, schedules, counts, metrics, guard and audit of one trial.

    Make it in the trial's constructor, before `context.wrap_model`, and return its
    `callbacks` from `build_callbacks`. For its attributes, and torch's TF32 switches
    that it sets, see `AmpCore`. A `UserError` ends the program with one line and exit
    status 2.

    Args:
        context: The trial's context.
        settings: By default the `amp` section of the context's hyperparameters.

    Attributes:
        is_unmodified: Whether the trial's code does not use this object.

    Raises:
        ConfigError: if the settings are wrong, or the context already has a model or a
            scaler.
        PrecisionError: if the device only emulates the precision.
    """

    words = IN_A_TRIAL
    is_unmodified = False

    @ending_the_program()
    def __init__(
        self, context: pytorch.PyTorchTrialContext, settings: AmpSettings | None = None
    ) -> None:
        _check_order(context)
        settings = _settings_of(context) if settings is None else settings
        self._require_settings(settings)
        super().__init__(
            settings,
            context.device,
            slots=context.distributed,
            models=context.models,
            optimizers=context.optimizers,
        )
        self._context = context
        self._aggregation_frequency = aggregation_frequency(context)
        if self.settings.compile.replays_graphs and self._aggregation_frequency > 1:
            raise self._wrong(
                "compile",
                f"got {self.settings.compile.value} and aggregation_frequency "
                f"{self._aggregation_frequency}: torch's CUDA graphs write the "
                "gradients of a batch over those of the one before (pytorch issue "
                "96693); allowed: default",
            )
        # Determined would save a disabled scaler as {}, and a later resume in amp_fp16
        # would crash on that.
        if self.scaler.is_enabled():
            context.wrap_scaler(self.scaler)
        reducer: Any = self.metrics
        context.wrap_reducer(reducer, for_validation=False)
        self._batches: Batches | None = None
        setattr(context, AMP, self)

    # Calls of the trial.

    prepare = ending_the_program()(AmpCore.prepare)

    @ending_the_program()
    def wrap_lr_scheduler(self, scheduler: Any) -> Any:
        """Move a torch scheduler with the applied steps of its optimizer, and resume it
        exactly.

        See `AmpCore.wrap_lr_scheduler`. A `ReduceLROnPlateau` is stepped after each
        validation with the searcher's metric. For a scheduler that moves by epochs use
        `context.wrap_lr_scheduler`.

        Raises:
            ConfigError: if its optimizer is not wrapped, or has a schedule already.
        """
        if getattr(scheduler, "optimizer", None) not in self._context.optimizers:
            raise self._wrong(
                "wrap_lr_scheduler",
                "its optimizer is not one that context.wrap_optimizer returned",
            )
        return super().wrap_lr_scheduler(scheduler)

    def clip(
        self, optimizer: Optimizer, max_norm: float = math.inf
    ) -> Callable[[Iterable[torch.Tensor]], None]:
        """Make a function for `step_optimizer(clip_grads=...)`, which calls it after
        accumulation.

        The function unscales the gradients before it clips them.

        Args:
            optimizer: The optimizer that is about to step.
            max_norm: Largest 2-norm of its gradients; infinity only measures the norm.

        Raises:
            ConfigError: if `max_norm` is not above 0.
        """
        self._check_norm(max_norm, "clip")
        return partial(self._clip, optimizer, max_norm)

    def update(
        self, loss: torch.Tensor | float | None = None, samples: int | None = None
    ) -> dict[str, float]:
        """End a batch: call `scaler.update()` if an optimizer stepped, and count.

        Call it once per batch, or after each of several steps of one optimizer. The
        first call counts the batch and its samples.

        Args:
            loss: Mean loss of the batch, unscaled, one number. The mean of all calls is
                reported as `loss`.
            samples: Samples in the batch; by default what the trial's
                `get_batch_length` says.

        Returns:
            What `train_batch` must return. You can add your own metrics.

        Raises:
            ConfigError: if `build_callbacks` of the trial does not return `callbacks`,
                or the loss is not one number.
        """
        if self.is_rehearsing:
            return {}
        self.scaler.finish()
        if not self._started:
            # only our callbacks start this object
            with ending_the_program():
                raise self._wrong(
                    "update",
                    "build_callbacks of the trial must return amp.callbacks(self)",
                )
        batches, again = self._batches, False
        if batches is not None:
            again, batches.is_counted = batches.is_counted, True
            samples = batches.samples() if samples is None else samples
        return self._count(loss, samples, again=again)

    def callbacks(
        self, trial: pytorch.PyTorchTrial
    ) -> dict[str, pytorch.PyTorchCallback]:
        """The callbacks that `build_callbacks` must return.

        They save counts in checkpoints, and run guard and audit.

        Args:
            trial: The trial itself. The guard rehearses its newest batch to find a
                fault.
        """
        if self._batches is None:
            self._batches = Batches(
                self, trial, self._context, checks_clips=not self.is_unmodified
            )
        return {
            CALLBACK: ResumedTraining(self, self._context),
            LOOP: self,
            "determined_amp.guard": TrialGuard(
                self._context,
                self.guard,
                self.settings,
                newest=self._batches.rehearsal,
            ),
            PortableCheckpoint.NAME: PortableCheckpoint(self._context),
        }

    # Calls of Determined's loop.

    def on_training_start(self) -> None:
        _refuse_scaler(self._context, self.scaler)
        self._check_schedules()
        self._begin()
        if self._context.distributed.rank == 0:
            logger.info(described(self.device, self._context.distributed.size))
            # not if the finder or the doctor borrows this loop
            if self.guard.enabled:
                warn_of_slow_operations(self.settings.precision, self.device)
        if self.scaler.is_enabled():
            modes = pytorch.LRScheduler.StepMode
            by_step = modes.STEP_EVERY_BATCH, modes.STEP_EVERY_OPTIMIZER_STEP
            self.metrics.drifting = scheduled(self._context, *by_step)
        self._patches.callback(self._see_steps())
        for optimizer in self._context.optimizers:
            self._see_steps_of(optimizer)
            self.windows[optimizer].prepare()

    def on_validation_end(self, metrics: Metrics) -> None:
        by_metric = [s for s in self.windows.schedules() if s.by_validations]
        if by_metric:
            name = str(searcher(self._context).get("metric"))
            if name not in metrics:
                raise self._wrong(
                    "wrap_lr_scheduler",
                    f"ReduceLROnPlateau moves by searcher.metric, {name}, which the "
                    "trial does not report; it reports "
                    f"{', '.join(map(str, metrics)) or 'nothing'}",
                )
            for schedule in by_metric:
                schedule.validated(float(metrics[name]))

    def on_trial_shutdown(self) -> None:
        self._patches.close()
        self.scaler.stop_listening()
        if self._batches is not None:
            self._batches.remove()
        if isinstance(sys.exc_info()[1], UserError):  # the error is leaving the loop
            print_uncaught_user_errors()

    # Internals.

    def _other_step_methods(self) -> list[tuple[object, str]]:
        return step_methods(self._context)

    def _check_schedules(self) -> None:
        ours = {schedule.optimizer for schedule in self.windows.schedules()}
        if not ours.isdisjoint(scheduled(self._context)):
            raise self._wrong(
                "wrap_lr_scheduler",
                "an optimizer has a schedule of amp.wrap_lr_scheduler and one of "
                "context.wrap_lr_scheduler; allowed: one of them",
            )


def _check_order(context: pytorch.PyTorchTrialContext) -> None:
    if amp_of(context) is not None:
        raise MixedPrecision._wrong(
            "MixedPrecision",
            "this context has one already; allowed: one, also for GANs",
        )
    if context.models:
        raise MixedPrecision._wrong(
            "MixedPrecision", "make it before context.wrap_model"
        )
    _refuse_scaler(context)


def _refuse_scaler(
    context: pytorch.PyTorchTrialContext, ours: torch.amp.GradScaler | None = None
) -> None:
    theirs = scaler_of(context)
    if theirs is not None and theirs is not ours:
        raise MixedPrecision._wrong(
            "MixedPrecision",
            "the context has another GradScaler; leave out experimental.use_amp() and "
            "wrap_scaler(): amp.scaler is wrapped here",
        )


def _settings_of(context: pytorch.PyTorchTrialContext) -> AmpSettings:
    """The settings of the context's experiment; for a script they are read here."""
    experiment = Experiment.of(context)
    known = None if experiment is None else experiment.amp
    settings = _read_settings(context) if known is None else known
    if settings.ignored:
        precision = settings.precision.value
        logger.info(
            "%s has no loss scale: ignoring %s", precision, ", ".join(settings.ignored)
        )
    return settings


def _read_settings(context: pytorch.PyTorchTrialContext) -> AmpSettings:
    _, hparams = sections(context)
    elsewhere = list(misplaced({"hyperparameters": constants(hparams)}))
    if elsewhere:
        raise ConfigError("hyperparameters", elsewhere)
    if "amp" not in hparams:
        raise ConfigError(
            "hyperparameters",
            [
                "amp: missing; allowed: amp: {precision: amp_fp16}, or fp32, tf32, "
                "amp_bf16 there, in pytorch.init(hparams=...) or the YAML; or "
                "MixedPrecision(context, AmpSettings(...))"
            ],
        )
    return read_section(AmpSettings, hparams["amp"], "hyperparameters.amp")
