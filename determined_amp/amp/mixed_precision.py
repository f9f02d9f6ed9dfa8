"""Native mixed precision for one `PyTorchTrial`: what its constructor and `train_batch` need.

The recipe stays visible in every trial: autocast, `scaler.scale`, `step_optimizer` with the scaler,
`update`. This class builds those parts correctly, counts and reports what they do, and saves them
in checkpoints. Nothing in a training step waits for the device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import determined as det
import torch
from determined import pytorch
from torch import nn
from torch.utils.hooks import RemovableHandle

from determined_amp.amp.accumulation import average_at_once, share_gradients_once
from determined_amp.amp.checkpoint import (
    PortableCheckpoint,
    patched,
    plain_groups,
    settle_groups,
    use_safe_controller,
)
from determined_amp.amp.compiled import compile_forward
from determined_amp.amp.fp32_modules import keep_in_float32, matching
from determined_amp.amp.guard import Guard
from determined_amp.amp.metrics import TrainingMetrics, gradients_of, timed
from determined_amp.amp.precision import (
    DeviceSupport,
    described,
    prepare_backend,
    warn_of_slow_operations,
)
from determined_amp.amp.replay import own_copy, tensors_of, without_steps
from determined_amp.amp.scaler import ObservedScaler, StepCounts, any_gradient, fill_momentum
from determined_amp.amp.schedules import AppliedStepSchedule, PlateauSchedule
from determined_amp.audit import AuditMetrics, audited
from determined_amp.experiment.amp_settings import (
    AmpSettings,
    Compile,
    EvalPrecision,
)
from determined_amp.experiment.errors import print_uncaught_user_errors
from determined_amp.experiment.settings import ConfigError, read_section

logger = logging.getLogger(__name__)

# The key of its state in a checkpoint. No trial has a callback of such a name.
CALLBACK = "determined_amp.mixed_precision"

# The attribute of a context that holds the `MixedPrecision` of its trial.
_ATTRIBUTE = "_determined_amp"


class MixedPrecision(pytorch.PyTorchCallback):
    """Autocast, scaler, schedules, counts, metrics, guard and audit of one trial.

    Make it in the trial's constructor, before `context.wrap_model`, and return its `callbacks` from
    `build_callbacks`.

    It changes this process: torch's switches for TF32 (unless `set_backends` is false), the class
    of Determined's training loop (checkpoints are loaded without running code, and a run that the
    guard ends leaves one), and `sys.excepthook` (a `UserError` ends a program with one line and
    exit status 2).

    Args:
        context: The trial's context.
        settings: By default the `amp` section of the context's hyperparameters.

    Attributes:
        device: Where the trial computes.
        settings: The `amp` section.
        scaler: torch's `GradScaler`, enabled for `amp_fp16` alone; otherwise every call on it
            passes through.
        fused: Pass this to the optimizer as `fused`. On CUDA a fused optimizer takes scale and
            overflow flag as device tensors; any other makes `scaler.step` wait for the device.
        metrics: What is reported.
        watched: Set it to False before the training to have neither audit nor guard.

    Raises:
        ConfigError: if the settings are wrong, or the context already has what must come later.
        PrecisionError: if the device only emulates the precision.
    """

    def __init__(
        self, context: pytorch.PyTorchTrialContext, settings: AmpSettings | None = None
    ) -> None:
        print_uncaught_user_errors()
        _check_order(context)
        self.settings = settings or _settings_of(context)
        self.device: torch.device = context.device
        self.fused = self.device.type == "cuda"
        self.watched = True
        self._context = context
        self._aggregation_frequency = int(context._aggregation_frequency)
        prepare_backend(
            self.settings.precision, self.device, set_switches=self.settings.set_backends
        )
        if self.settings.compile.replays_graphs and self._aggregation_frequency > 1:
            raise _wrong(
                "compile",
                f"got {self.settings.compile.value} and aggregation_frequency "
                f"{self._aggregation_frequency}: torch's CUDA graphs write the gradients of a "
                "batch over those of the one before (pytorch issue 96693); allowed: default",
            )
        self.scaler = ObservedScaler(self.settings, self.device.type)
        # A disabled one is saved as {}, and a later resume in amp_fp16 crashes on that.
        if self.scaler.is_enabled():
            context.wrap_scaler(self.scaler)
        # Entering a disabled one costs time.
        dtype = self.settings.precision.autocast_dtype
        self._training_autocast = (
            _Nestable(lambda: self._autocast(dtype)) if dtype else nullcontext()
        )
        self._one = torch.ones((), device=self.device)
        self.metrics = TrainingMetrics(context, self._scales, scaled=self.settings.scales_the_loss)
        self._audit_metrics = AuditMetrics(context) if self.settings.audit else None
        self._schedules: dict[torch.optim.Optimizer, AppliedStepSchedule] = {}
        self._plateaus: list[PlateauSchedule] = []
        self._unmatched = list(self.settings.fp32_modules)
        self._prepared: nn.Module | None = None
        self._constructed: list[list[dict[str, Any]]] | None = None
        self._trial: pytorch.PyTorchTrial | None = None
        self._guard: Guard | None = None
        self._train_batch: Callable[..., Any] | None = None
        self._newest_batch: Any = None
        self._changes_batches: bool | None = None  # not known before the first one
        self._newest_indices = 0, 0  # of its epoch and of the batch
        self._hooks: list[RemovableHandle] = []
        self._patches = ExitStack()
        self._warm_start = False
        self._started = False
        self._steps = True
        self._counted_batch: int | None = None
        self._filled_groups: dict[torch.optim.Optimizer, int] = {}
        setattr(context, _ATTRIBUTE, self)
        use_safe_controller()

    @staticmethod
    def of(context: pytorch.PyTorchTrialContext) -> MixedPrecision | None:
        """The mixed precision of a context, if its trial has one."""
        found: MixedPrecision | None = getattr(context, _ATTRIBUTE, None)
        return found

    # What a trial's constructor calls.

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model, with the modules of `fp32_modules` kept in float32, and its forward compiled.

        Call it before `wrap_model`. Without `compile` in the settings nothing is compiled.
        A pattern that matches in none of the trial's models is refused when the training starts.

        Raises:
            IslandError: if a pattern is no regular expression, or the patterns match all of it.
        """
        mode = self.settings.compile
        here = matching(model, self.settings.fp32_modules)
        keep_in_float32(model, here, self.device.type, compiled=mode is not Compile.OFF)
        compile_forward(model, mode)
        self._unmatched = [pattern for pattern in self._unmatched if pattern not in here]
        self._prepared = self._prepared or model
        return model

    def wrap_lr_scheduler(self, scheduler: Any) -> Any:
        """Move a torch scheduler with the applied steps of its optimizer, and resume it exactly.

        A skipped step does not change the weights, so it does not move the schedule. Nothing waits
        for the device. Do not call `scheduler.step()` yourself. A `ReduceLROnPlateau` is stepped
        after each validation, with the searcher's metric.

        Args:
            scheduler: Any of `torch.optim.lr_scheduler`, for an optimizer that `wrap_optimizer`
                has wrapped. For one that moves by epochs use `context.wrap_lr_scheduler`.

        Returns:
            The scheduler.

        Raises:
            ConfigError: if its optimizer is not wrapped, or has a schedule already.
        """
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer not in self._context.optimizers:
            raise _wrong(
                "wrap_lr_scheduler", "its optimizer is not one that context.wrap_optimizer returned"
            )
        if optimizer in self._schedules or any(optimizer is p.optimizer for p in self._plateaus):
            raise _wrong(
                "wrap_lr_scheduler",
                "its optimizer has a schedule already; join the two by torch's ChainedScheduler",
            )
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self._plateaus.append(PlateauSchedule(scheduler))
        else:
            self._schedules[optimizer] = AppliedStepSchedule(
                scheduler, self.device, skips=self.scaler.is_enabled()
            )
        return scheduler

    # What `train_batch` and `evaluate_batch` call.

    def autocast(self) -> AbstractContextManager[Any]:
        """For forward and loss of a training batch; never for the backward."""
        return self._training_autocast

    def eval_autocast(self) -> AbstractContextManager[Any]:
        """For the forward of a validation batch: float32 unless `eval_precision` is `same`."""
        same = self.settings.eval_precision is EvalPrecision.SAME
        return self._autocast(self.settings.precision.autocast_dtype if same else None)

    def clip(
        self, optimizer: torch.optim.Optimizer, max_norm: float = math.inf
    ) -> Callable[[Iterable[torch.Tensor]], None]:
        """For `step_optimizer(clip_grads=...)`, which calls it after accumulation.

        It calls `scaler.unscale_` before it clips: without that the clip is wrong by the scale.

        Args:
            optimizer: The one to be stepped.
            max_norm: Largest 2-norm of its gradients; infinite only measures it.

        Raises:
            ConfigError: if `max_norm` is not above 0.
        """
        if not max_norm > 0:
            raise _wrong("clip", f"got max_norm {max_norm}; allowed: a number above 0")

        def clip_gradients(parameters: Iterable[torch.Tensor]) -> None:
            if not self._steps:
                return
            parameters = list(parameters)
            if optimizer not in self.scaler.unscaled:
                self.scaler.unscale_(optimizer)
            found, gradients = self.metrics.of(optimizer), gradients_of(parameters)
            found.look(parameters, self.loss_scale)
            if max_norm < math.inf and any_gradient(optimizer):
                found.add_norm(nn.utils.clip_grad_norm_(parameters, max_norm))
            elif gradients:
                norms = torch.stack(torch._foreach_norm(gradients))
                found.add_norm(torch.linalg.vector_norm(norms))

        return clip_gradients

    def update(
        self, loss: torch.Tensor | None = None, samples: int | None = None
    ) -> dict[str, float]:
        """End a batch: call `scaler.update()` if an optimizer was stepped, and count everything.

        Call it once a batch, or after each of several steps of one optimizer: the batch and its
        samples are counted by its first call.

        Args:
            loss: Mean loss of the batch, unscaled, (), on the device; reported as `loss`, of
                several the mean.
            samples: Samples in it; by default what the trial's `get_batch_length` says.

        Returns:
            What `train_batch` must return. You can add your own metrics.

        Raises:
            ConfigError: if `build_callbacks` of the trial does not return `callbacks`.
        """
        if not self._steps:
            return {}
        self.finish_steps()
        if not self._started:
            raise _wrong("update", "build_callbacks of the trial must return amp.callbacks(self)")
        if loss is not None and self.settings.compile.replays_graphs:
            loss = loss.detach().clone()  # kept until the report
        samples = self._batch_length() if samples is None else samples
        batch_idx, counted = self._context._current_batch_idx, self._counted_batch
        self._counted_batch = batch_idx
        again = batch_idx is not None and batch_idx == counted
        return self.metrics.add(loss, samples, again=again)

    def finish_steps(self) -> None:
        """Update the loss scale and the counts after steps; `update` does it at the end of a batch.

        Call it between two steps of the same optimizer in a batch.
        """
        scaler = self.scaler
        if not scaler.stepped:
            return
        if not scaler.updated:  # a trial may have called it itself
            scaler.update()
        for optimizer, skipped in scaler.stepped.items():
            self.steps(optimizer).count(skipped)
            if optimizer in self._schedules:
                self._move_schedule(optimizer)
        scaler.stepped.clear()

    def callbacks(self, trial: pytorch.PyTorchTrial) -> dict[str, pytorch.PyTorchCallback]:
        """For `build_callbacks`: counts in checkpoints, guard, audit, portable checkpoints.

        Args:
            trial: The trial itself. The guard replays its newest batch to find a fault.
        """
        if self._trial is None:
            self._time_the_loader(trial)
        self._trial = trial
        self._guard = Guard(self._context, self, self._train_newest_batch_again)
        return {
            CALLBACK: self,
            "determined_amp.guard": self._guard,
            "determined_amp.portable_checkpoint": PortableCheckpoint(),
        }

    # What else there is to ask.

    def loss_scale(self) -> torch.Tensor:
        """The current loss scale, (), float32, on the device; 1 without a scaler."""
        return self.scaler.times(self._one)

    def steps(self, optimizer: torch.optim.Optimizer) -> StepCounts:
        """The steps of one optimizer, counted on the device."""
        return self.metrics.of(optimizer).counts

    @property
    def applied_steps(self) -> torch.Tensor:
        """Applied steps of the first optimizer, (), int64, on the device; ask after every step."""
        return self.metrics.first_counts.applied

    @property
    def last_step_applied(self) -> torch.Tensor:
        """Whether the newest step of the first optimizer was applied, (), bool, on the device."""
        return self.metrics.first_counts.last_step_applied

    @property
    def attempted_steps(self) -> int:
        """Steps of the first optimizer, applied or skipped."""
        return self.metrics.first_counts.attempted

    @property
    def models(self) -> list[nn.Module]:
        """All models that the trial has wrapped."""
        return self._context.models

    @property
    def is_replaying(self) -> bool:
        """Whether a batch runs in `without_steps`."""
        return not self._steps

    @contextmanager
    def without_steps(self) -> Iterator[None]:
        """Inside this block nothing is stepped, zeroed or counted.

        For replaying a batch, to find a fault or the loss scale.
        """
        self._steps = False
        try:
            with without_steps(self._context, self.scaler):
                yield
        finally:
            self._steps = True

    # What Determined's loop calls.

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizers": [gradients.counts.state_dict() for gradients in self.metrics.all()],
            "constructed": self._constructed,
            "scheduled": [optimizer in self._schedules for optimizer in self._context.optimizers],
            "plateaus": [plateau.state_dict() for plateau in self._plateaus],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called by Determined after weights, optimizers and scaler have been restored."""
        if self._warm_start:
            return
        saved = state_dict.get("optimizers", ())
        for gradients, counts in zip(self.metrics.all(), saved, strict=False):
            gradients.counts.load_state_dict(counts)
        for plateau, state in zip(self._plateaus, state_dict.get("plateaus", ()), strict=False):
            plateau.load_state_dict(state)

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        self._warm_start = first_batch_idx == 0 and checkpoint_uuid is not None

    def on_checkpoint_of(self, *, same_trial: bool) -> None:
        """Called by `SafeController` before a checkpoint is loaded.

        Args:
            same_trial: Whether Determined goes on with the trial that saved it.
        """
        self._warm_start = not same_trial

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        batch_idx = self._context._current_batch_idx
        if batch_idx is not None and (batch_idx + 1) % self._aggregation_frequency:
            logger.warning(
                "this checkpoint is in the middle of a window of %d batches, and does not hold the "
                "gradients so far: checkpoint and validate at multiples of aggregation_frequency",
                self._aggregation_frequency,
            )

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """Let only what this trial's YAML changed win over the checkpoint.

        A resumed run keeps its current scale and growth tracker, and the rates that a scheduler or
        the trial itself has moved. A warm start (weights from another trial) begins with this
        trial's `init_scale`, which a search relies on. The scaler's factors and interval always
        come from this trial, and so does every setting of an optimizer whose constructor got
        another value.
        """
        self._remember_constructed()
        assert self._constructed is not None
        states = checkpoint.get("callbacks", {})
        if CALLBACK not in states and "optimizers" in states.get("mixed_precision", ()):
            states[CALLBACK] = states.pop("mixed_precision")  # its first name
        before = {} if self._warm_start else states.get(CALLBACK)
        settle_groups(checkpoint, self._context, self._constructed, before or {})
        state = checkpoint.pop("scaler_state_dict", None)
        if not self.scaler.is_enabled():
            if state:
                precision = self.settings.precision.value
                logger.info("the checkpoint has a loss scale; %s needs none", precision)
            return
        ours = self.scaler.state_dict()
        if not state:
            logger.info("the checkpoint has no loss scale; starting with %g", ours["scale"])
        elif not self._warm_start:
            ours |= {"scale": state["scale"], "_growth_tracker": state["_growth_tracker"]}
        checkpoint["scaler_state_dict"] = ours

    def on_training_start(self) -> None:
        _refuse_scaler(self._context, self.scaler)
        self._started = True
        self._check_models_and_schedules()
        self._remember_constructed()
        if self._context.distributed.rank == 0:
            logger.info(described(self.device, self._context.distributed.size))
            precision = self.settings.precision
            warn_of_slow_operations(precision, self.device, self._context.models)
        if self._aggregation_frequency > 1:
            self._check_averaging()
            average_at_once(self._context)
            self._hooks += share_gradients_once(self._context, self._is_update_batch)
        self.loss_scale()  # makes the scale, on the device
        self.metrics.all()  # and the counts
        for optimizer in self._schedules:
            self._move_schedule(optimizer)
        if self.scaler.is_enabled():
            self.metrics.drifting = _drifting(self._context)
        for optimizer in self._context.optimizers:
            self._fill_momentum(optimizer)
        watched = self._step_and_note_clip(self._context.step_optimizer)
        self._patches.enter_context(patched(self._context, "step_optimizer", watched))
        for optimizer in self._context.optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._check_step))
        if self.watched and self._trial is not None:
            self._watch(self._trial)

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        if self._plateaus:
            name = _searcher_metric(self._context)
            for plateau in self._plateaus:
                if name not in metrics:
                    raise _wrong(
                        "wrap_lr_scheduler",
                        f"ReduceLROnPlateau moves by searcher.metric, {name}, which the trial does "
                        f"not report; it reports {', '.join(map(str, metrics)) or 'nothing'}",
                    )
                plateau.validated(float(metrics[name]))

    def on_trial_shutdown(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._patches.close()
        self._train_batch = self._newest_batch = None

    # How it does that.

    def _autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def _scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.loss_scale(), self.scaler.scale_of_newest_step(self._one)

    def _move_schedule(self, optimizer: torch.optim.Optimizer) -> None:
        counts, schedule = self.steps(optimizer), self._schedules[optimizer]
        known = None if schedule.on_device else counts.applied_on_host
        schedule.move(counts.attempted, counts.applied if known is None else known)

    def _is_update_batch(self, batch_idx: int) -> bool:
        return self._steps and (batch_idx + 1) % self._aggregation_frequency == 0

    def _step_and_note_clip(self, step_optimizer: Callable[..., None]) -> Callable[..., None]:
        """`context.step_optimizer`, which tells the scaler whether the trial clips."""
        scaler = self.scaler

        def step(optimizer: Any, clip_grads: Any = None, *others: Any, **named: Any) -> None:
            scaler.clips = clip_grads is not None
            step_optimizer(optimizer, clip_grads, *others, **named)
            scaler.clips = False

        return step

    def _fill_momentum(self, optimizer: torch.optim.Optimizer) -> None:
        """Before the first step of each group; a trial may add one when it thaws a layer."""
        if self._filled_groups.get(optimizer) != len(optimizer.param_groups):
            self._filled_groups[optimizer] = len(optimizer.param_groups)
            fill_momentum(optimizer, can_skip=self.scaler.is_enabled())

    def _check_step(self, optimizer: torch.optim.Optimizer, *call: Any) -> None:
        """Before every step, in every precision, so that fp32 shows a mistake, too."""
        self._fill_momentum(optimizer)
        self.scaler.moved = True
        if not self.scaler.stepping:
            raise _wrong(
                "train_batch",
                "it steps an optimizer whose gradients may still be scaled; allowed: "
                "context.step_optimizer(optimizer, scaler=amp.scaler)",
            )
        if not self.scaler.has_scaled and any_gradient(optimizer):
            raise _wrong(
                "train_batch",
                "it does not scale the loss; allowed: context.backward(amp.scaler.scale(loss))",
            )

    def _remember_constructed(self) -> None:
        """Keep what the optimizers were made with, before a checkpoint or a step changes it."""
        if self._constructed is None:
            self._constructed = [plain_groups(optimizer) for optimizer in self._context.optimizers]

    def _check_models_and_schedules(self) -> None:
        asked = {
            "fp32_modules": bool(self._unmatched),
            "compile": self.settings.compile is not Compile.OFF,
        }
        for name, is_asked in asked.items():
            if is_asked and self._prepared is None:
                raise _wrong(name, "given, but no model was given to amp.prepare(model)")
        if self._unmatched and self._prepared is not None:
            keep_in_float32(self._prepared, self._unmatched, self.device.type)  # raises, with names
        ours = {*self._schedules, *(plateau.optimizer for plateau in self._plateaus)}
        theirs = (getattr(w._scheduler, "optimizer", None) for w in self._context.lr_schedulers)
        if not ours.isdisjoint(theirs):
            raise _wrong(
                "wrap_lr_scheduler",
                "an optimizer has a schedule of amp.wrap_lr_scheduler and one of "
                "context.wrap_lr_scheduler; allowed: one of them",
            )

    def _check_averaging(self) -> None:
        configs = self._context._optimizer_configs.values()
        if not all(config["average_aggregated_gradients"] for config in configs):
            frequency = self._aggregation_frequency
            raise _wrong(
                "average_aggregated_gradients",
                f"got false, which sums the gradients of the {frequency} batches of a step; "
                "allowed: true, its default, which takes their mean (then do not divide the loss)",
            )

    def _time_the_loader(self, trial: pytorch.PyTorchTrial) -> None:
        build = trial.build_training_data_loader

        def build_and_time() -> Any:
            return timed(build(), self.metrics.waited)

        self._patches.enter_context(patched(trial, "build_training_data_loader", build_and_time))

    def _watch(self, trial: pytorch.PyTorchTrial) -> None:
        """Keep the newest batch for the guard, and audit the first one."""
        self._train_batch = trial.train_batch
        self._patches.enter_context(patched(trial, "train_batch", self._watched_train_batch))
        if self._audit_metrics is not None:
            has_tf32 = DeviceSupport.of(self.device).tf32
            on_done, asked = self._audit_metrics.add, self.settings.precision
            audited(trial, self.device, asked, on_done, has_tf32=has_tf32)

    def _watched_train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        assert self._train_batch is not None
        # A trial may take its batch apart, and change tensors in place. Copying tensors costs time,
        # so it is done for the first batch, and from then on if the trial has changed one.
        self._newest_batch = own_copy(batch, shared=self._changes_batches is False)
        self._newest_indices = epoch_idx, batch_idx
        versions = _versions(batch)
        result = self._train_batch(batch=batch, epoch_idx=epoch_idx, batch_idx=batch_idx)
        has_changed = any(tensor._version != before for tensor, before in versions)
        self._changes_batches = has_changed or bool(self._changes_batches)
        if self.scaler.stepped and self._steps:
            raise _wrong("train_batch", "it steps an optimizer, and must end with amp.update(...)")
        if isinstance(result, torch.Tensor) or (isinstance(result, dict) and "loss" in result):
            self.metrics.trial_reports_loss = True
        return result

    def _train_newest_batch_again(self) -> Any:
        """The newest batch, and how to train it at a loss scale without a step; None before it."""
        batch, train_batch = self._newest_batch, self._train_batch
        if batch is None or train_batch is None:
            return None

        epoch_idx, batch_idx = self._newest_indices

        def train(scale: float) -> None:
            with self.without_steps(), self.scaler.at(scale):
                train_batch(batch=own_copy(batch), epoch_idx=epoch_idx, batch_idx=batch_idx)

        return batch, train

    def _batch_length(self) -> int | None:
        if self._trial is None or self._newest_batch is None:
            return None
        return int(self._trial.get_batch_length(self._newest_batch))


class _Nestable(AbstractContextManager[None]):
    """One autocast for all batches, and another one for each entry within it.

    Making one costs as much as entering it, and twenty times as much with torch 2.3 on a machine
    without CUDA. But an object remembers one state to restore.

    Args:
        make: Makes one.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make, self._first = make, make()
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        autocast = self._make() if self._entered else self._first
        autocast.__enter__()
        self._entered.append(autocast)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def _versions(batch: Any) -> list[tuple[torch.Tensor, int]]:
    """The tensors of a batch, and how often each has been changed."""
    return [(t, t._version) for t in tensors_of(batch) if not t.is_inference()]


def _check_order(context: pytorch.PyTorchTrialContext) -> None:
    if MixedPrecision.of(context) is not None:
        raise _wrong("MixedPrecision", "this context has one already; allowed: one, also for GANs")
    if context.models:
        raise _wrong("MixedPrecision", "make it before context.wrap_model")
    _refuse_scaler(context)


def _refuse_scaler(
    context: pytorch.PyTorchTrialContext, ours: torch.amp.GradScaler | None = None
) -> None:
    theirs: Any = context._scaler
    if theirs is not None and theirs is not ours:
        raise _wrong(
            "MixedPrecision",
            "the context has another GradScaler; leave out experimental.use_amp() and "
            "wrap_scaler(): amp.scaler is wrapped here",
        )


def _settings_of(context: pytorch.PyTorchTrialContext) -> AmpSettings:
    info = det.get_cluster_info()
    trial = info.trial if info is not None and info.task_type == "TRIAL" else None
    hparams = context._hparams
    if hparams is None and trial is not None:
        hparams = trial.hparams
    if hparams is None:
        raise _wrong(
            "MixedPrecision",
            "the context has no hyperparameters; allowed: pytorch.init(hparams=...), or "
            "MixedPrecision(context, AmpSettings(...))",
        )
    if "amp" not in hparams:
        raise ConfigError(
            "hyperparameters",
            ["amp: missing; allowed: amp: {precision: amp_fp16}, or fp32, tf32, amp_bf16 there"],
        )
    settings = read_section(AmpSettings, hparams["amp"], "hyperparameters.amp")
    if settings.ignored:
        precision = settings.precision.value
        logger.info("%s has no loss scale: ignoring %s", precision, ", ".join(settings.ignored))
    return settings


def _drifting(context: pytorch.PyTorchTrialContext) -> frozenset[torch.optim.Optimizer]:
    """The optimizers whose scheduler Determined moves after every step, skipped or not."""
    modes = pytorch.LRScheduler.StepMode
    by_step = (modes.STEP_EVERY_BATCH, modes.STEP_EVERY_OPTIMIZER_STEP)
    schedulers = (w._scheduler for w in context.lr_schedulers if w._step_mode in by_step)
    return frozenset(s.optimizer for s in schedulers if hasattr(s, "optimizer"))


def _searcher_metric(context: pytorch.PyTorchTrialContext) -> str:
    return str(((context._exp_conf or {}).get("searcher") or {}).get("metric"))


def _wrong(place: str, problem: str) -> ConfigError:
    return ConfigError("the trial", [f"{place}: {problem}"])
