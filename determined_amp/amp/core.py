"""Mixed precision for one training, with any loop; depends on torch only.

The file follows one step: the forward in `autocast`, the backward of
`scaler.scale(loss)`, the clip, `scaler.step`, and `update`, which ends the batch: it
updates the scale, counts the steps, and adds to the sums for the next report.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial, wraps
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from determined_amp.amp.casts import drop_casts_when_loaded
from determined_amp.amp.compiled import compile_forward
from determined_amp.amp.counts import StepCounts
from determined_amp.amp.errors import ConfigError
from determined_amp.amp.fp32_modules import keep_in_float32, matching
from determined_amp.amp.guard import Guard
from determined_amp.amp.metrics import TrainingMetrics
from determined_amp.amp.mistakes import Mistake, Stage, Wording
from determined_amp.amp.patched import do_nothing, patched
from determined_amp.amp.precision import autocast, prepare_backend
from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.rehearse.restored import without_steps
from determined_amp.amp.scaler import LossScaler
from determined_amp.amp.schedules import schedule_of
from determined_amp.amp.settings import AmpSettings, Compile, EvalPrecision
from determined_amp.amp.slots import Slots
from determined_amp.amp.tensors import (
    SIXTEEN_BITS,
    dtype_name,
    parameters_in,
    parameters_of,
    unwrapped,
)
from determined_amp.amp.window import RUNNING, Windows

# The trainings that are asked about every step in the process, newest first.
_TRAININGS: list[weakref.ref[AmpCore]] = []


class AmpCore:
    """Autocast, loss scale, schedules, counts, metrics and guard of one training.

    Use a subclass: `AmpLoop` in any loop, `determined_amp.MixedPrecision` in a
    `PyTorchTrial`.

    It sets torch's TF32 switches for the whole process, unless `set_backends` of the
    settings is false.

    Args:
        settings: The `amp` section of a YAML.
        device: Where the training computes.
        slots: The processes of the training.
        models: The models to train. More may be appended later.
        optimizers: Their optimizers. Reports and saved states number them in this
            order. More may be appended later.

    Attributes:
        scaler: torch's `GradScaler`, enabled only for `amp_fp16`. In other precisions
            every call on it passes through.
        fused: Pass this to the optimizer as `fused`. On CUDA a fused optimizer reads
            scale and `found_inf` as device tensors. With any other optimizer
            `scaler.step` waits for the device.
        windows: What has happened to each optimizer's gradients since its last step.
        metrics: The sums and counts that are reported.
        guard: Ends a run that no longer trains.
        is_rehearsing: Whether a batch runs in `without_steps`.

    Raises:
        PrecisionError: if the device only emulates the precision.
    """

    words: Wording  # what error messages say

    is_rehearsing = False
    _started = False

    def __init__(
        self,
        settings: AmpSettings,
        device: torch.device | str,
        *,
        slots: Slots,
        models: list[nn.Module],
        optimizers: list[Optimizer],
    ) -> None:
        self.settings = settings
        self.device = where = torch.device(device)
        self.fused = where.type == "cuda"
        self.models = models
        self.optimizers = optimizers
        self.slots = slots
        prepare_backend(settings.precision, where, set_switches=settings.set_backends)
        self.windows = Windows(
            where,
            optimizers,
            scaled=settings.scales_the_loss,
            meet=weakref.WeakMethod(self._meet),
            words=self.words,
        )
        parameters = partial(parameters_in, models, optimizers)
        self.scaler = LossScaler(
            settings, where.type, self.windows, parameters=parameters
        )
        self._dtype = settings.precision.autocast_dtype
        self.metrics = TrainingMetrics(where, self.scaler, slots.size)
        self.guard = Guard(
            settings,
            self.metrics,
            self.scaler,
            models=models,
            slots=slots,
        )
        self._prepared: list[nn.Module] = []
        self._unmatched = list(settings.fp32_modules)
        self._patches = ExitStack()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise self.words.error_of(Mistake.COPIES)

    # Before the training.

    def prepare(self, model: nn.Module) -> nn.Module:
        """Keep `fp32_modules` in float32, compile the forward, and return the model.

        Call it once for every model. Pass a `DistributedDataParallel` model with its
        wrapper. The forward is compiled only if the settings have `compile`. A pattern
        that matches no module of any model is an error when the training starts.

        Raises:
            ConfigError: if the model is prepared already.
            IslandError: if a pattern is not a regular expression, or the patterns match
                the whole model.
        """
        inner = unwrapped(model)
        if inner in self._prepared:
            raise self._wrong("prepare", "got a model a second time; allowed: once")
        patterns, compiled = self.settings.fp32_modules, self.settings.compile
        here = matching(inner, patterns)
        keep_in_float32(
            inner, here, self.device.type, compiled=compiled is not Compile.OFF
        )
        compile_forward(inner, compiled)
        self._unmatched = [
            pattern for pattern in self._unmatched if pattern not in here
        ]
        drop_casts_when_loaded(inner)
        self._prepared.append(inner)
        return model

    def wrap_lr_scheduler(self, scheduler: Any) -> Any:
        """Move a torch scheduler with the applied steps of its optimizer, and resume it
        exactly.

        A skipped step does not change the weights, so it does not move the schedule.
        No synchronisation with a fused optimizer. Do not call `scheduler.step()` or
        save the scheduler's state yourself.

        Args:
            scheduler: Any scheduler of `torch.optim.lr_scheduler` that moves by steps,
                or a `ReduceLROnPlateau`.

        Returns:
            The same scheduler.

        Raises:
            ConfigError: if it is not a torch scheduler, or its optimizer already has a
                schedule or has stepped.
        """
        if not isinstance(scheduler, LRScheduler):
            kind = type(scheduler).__name__
            raise self._wrong(
                "wrap_lr_scheduler",
                f"got a {kind}; allowed: one of torch.optim.lr_scheduler",
            )
        if self.is_rehearsing:  # the training wraps it later
            return scheduler
        optimizer = scheduler.optimizer
        window = self.windows[optimizer]
        if window.schedule is not None:
            raise self._wrong(
                "wrap_lr_scheduler",
                "its optimizer has a schedule already; join the two by torch's "
                "ChainedScheduler",
            )
        schedule = schedule_of(scheduler, self.device, skips=self.scaler.is_enabled())
        counts = window.counts
        if schedule.by_steps and counts.attempted > sum(counts.began):
            raise self._wrong(
                "wrap_lr_scheduler",
                "its optimizer has stepped already, and a schedule counts all steps; "
                "allowed: before its first step, with torch's SequentialLR for a "
                "schedule that begins later",
            )
        window.schedule = schedule
        self.windows.restore_schedule(optimizer)
        return scheduler

    def _begin(self) -> None:
        """Check the settings against the models, and create the scale on the device."""
        self._started = True
        if self._prepared:  # raises for an unmatched pattern, with near names
            keep_in_float32(self._prepared[0], self._unmatched, self.device.type)
        elif self._unmatched or self.settings.compile is not Compile.OFF:
            needs_model = "fp32_modules" if self._unmatched else "compile"
            problem = "given, but no model was given to amp.prepare(model)"
            raise self._wrong(needs_model, problem)
        self.loss_scale()
        for window in self.windows.all():
            window.place_rate()

    # The step.

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for a training batch's forward and loss, not for its backward."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._dtype)

    def _clip(
        self,
        optimizer: Optimizer,
        max_norm: float,
        parameters: Iterable[torch.Tensor] | None = None,
    ) -> None:
        if self.is_rehearsing:
            return
        window = self.windows[optimizer]
        if window.stage is not Stage.UNSCALED:
            self.scaler.unscale_(optimizer)
        given = None if parameters is None else list(parameters)
        window.clip(given, max_norm, self.scaler.loss_scale)

    def on_step_without_scaler(
        self, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> None:
        """Refuse a step that no scaler makes, if it belongs to this training.

        Called before each such step in the process, in every precision. An unmodified
        trial replaces this method and takes the step over.

        Raises:
            ConfigError: if the step belongs to this training.
        """
        if optimizer in self.windows or self._trains_weights_of(optimizer):
            raise self.words.error_of(Mistake.STEPS_ITSELF)

    def _trains_weights_of(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer moves weights that this training has begun to train."""
        if not (self._started or self.scaler.has_scaled):
            return False
        return not set(self.parameters()).isdisjoint(parameters_of(optimizer))

    def finish_steps(self) -> None:
        """Update the loss scale and the step counts; `update` does so after a batch.

        Call it between two steps of the same optimizer within a batch.
        """
        self.scaler.finish()

    def _count(
        self,
        loss: torch.Tensor | float | None,
        samples: int | None,
        *,
        again: bool = False,
    ) -> dict[str, float]:
        if loss is not None:
            loss = torch.as_tensor(loss)
            if loss.numel() != 1:
                problem = (
                    f"got a loss of shape {tuple(loss.shape)}; allowed: its mean, one"
                    " number"
                )
                raise self._wrong("update", problem)
            # A copy, because the report reads it later. Until then the training may
            # add to its own tensor in place, and a CUDA graph replay overwrites it.
            loss = loss.detach().to(self.device, non_blocking=True, copy=True)
            loss = loss.reshape(()) if loss.dim() else loss
        return self.metrics.add(loss, samples, again=again)

    # What else a training can use.

    def eval_autocast(self) -> AbstractContextManager[Any]:
        """The context for a validation batch: float32 unless `eval_precision: same`."""
        same = self.settings.eval_precision is EvalPrecision.SAME
        return autocast(self.device.type, self._dtype if same else None)

    def parameters(self) -> list[torch.Tensor]:
        """All parameters of the models and optimizers known so far."""
        return parameters_in(self.models, self.optimizers)

    def loss_scale(self) -> torch.Tensor:
        """The current loss scale, (), float32, on the device; 1 without a scaler."""
        return self.scaler.loss_scale()

    def steps(self, optimizer: Optimizer) -> StepCounts:
        """The step counts of one optimizer."""
        return self.windows[optimizer].counts

    @property
    def applied_steps(self) -> torch.Tensor:
        """Applied steps of the first optimizer, (), int64, on the device.

        Read it again after every step.
        """
        return self.windows.first_counts.applied

    @property
    def last_step_applied(self) -> torch.Tensor:
        """Whether the newest step of the first optimizer was applied, (), bool, on the
        device.

        Raises:
            ConfigError: between a step and `update`, because the newest step is not
                counted yet.
        """
        if self.scaler.has_uncounted_steps():
            problem = (
                "asked between a step and amp.update(...); allowed: after"
                " amp.update(...)"
            )
            raise self._wrong("last_step_applied", problem)
        return self.windows.first_counts.last_step_applied

    @property
    def attempted_steps(self) -> int:
        """Steps of the first optimizer, applied and skipped."""
        return self.windows.first_counts.attempted

    @contextmanager
    def without_steps(self, scale: float | None = None) -> Iterator[None]:
        """Step, zero, clip and count nothing in this block.

        A rehearsal uses it to look for a fault or the loss scale. An optimizer that
        this training does not know loses its gradients before its step, so the step
        changes nothing.

        Args:
            scale: The loss scale in this block; by default the current one.
        """
        others = self._other_step_methods()
        with (
            patched(self, "is_rehearsing", True),
            patched(self.scaler, "is_rehearsing", True),
            without_steps(self.scaler, self.optimizers, others, scale=scale),
        ):
            yield

    def rehearsal_by(self, train: Callable[[], object], batch: Any = None) -> Rehearsal:
        """Make the rehearsal of a batch.

        Args:
            train: Trains the batch.
            batch: The batch itself, so that its data can be examined.
        """

        def train_without_steps(scale: float | None) -> None:
            with self.without_steps(scale):
                train()

        return Rehearsal(train_without_steps, self.models, self.optimizers, batch)

    # What `AmpLoop` and `MixedPrecision` do differently.

    def _meet(self, optimizer: Optimizer) -> None:
        """Called with each optimizer when this training first sees it.

        Raises:
            ConfigError: if the optimizer trains weights in 16 bits.
        """
        trained = {p.dtype for p in parameters_of(optimizer) if p.requires_grad}
        for dtype in trained.intersection(SIXTEEN_BITS):
            problem = (
                f"its weights are in {dtype_name(dtype)}, as after .half() or "
                ".bfloat16(); autocast computes in 16 bits with weights in float32: "
                "leave that out"
            )
            raise ConfigError(self.words.source, [problem])

    def _other_step_methods(self) -> Sequence[tuple[object, str]]:
        """What else moves weights or schedules: objects, each with a method name."""
        return ()

    # What both use.

    @classmethod
    def _require_settings(cls, settings: object) -> None:
        if not isinstance(settings, AmpSettings):
            kind = type(settings).__name__
            raise cls._wrong(
                "settings",
                f"got a {kind}; allowed: AmpSettings(precision=...), or "
                "AmpSettings(**section)",
            )

    def _see_steps(self) -> Callable[[], object]:
        """Check every step in the process, for as long as this training is alive.

        Returns:
            A function that ends this earlier.
        """
        _hear_of_all_steps()
        reference = weakref.ref(self, _TRAININGS.remove)
        _TRAININGS.insert(0, reference)
        return partial(_TRAININGS.remove, reference)

    def _see_steps_of(self, optimizer: Optimizer) -> None:
        """Check the steps of this optimizer even if torch's step hooks miss them."""
        try:
            optimizer.register_step_pre_hook(do_nothing).remove()
        except AttributeError:  # a wrapper that never calls `Optimizer.__init__`
            step = optimizer.step

            @wraps(step)
            def hooked(*args: Any, **kwargs: Any) -> Any:
                _before_any_step(optimizer, (optimizer, *args), kwargs)
                return step(*args, **kwargs)

            self._patches.enter_context(patched(optimizer, "step", hooked))

    def _check_norm(self, max_norm: float | None, place: str) -> None:
        if max_norm is None or not max_norm > 0:
            raise self._wrong(
                place, f"got max_norm {max_norm}; allowed: a number above 0"
            )

    @classmethod
    def _wrong(cls, place: str, problem: str) -> ConfigError:
        return ConfigError(cls.words.source, [f"{place}: {problem}"])


@cache
def _hear_of_all_steps() -> None:
    """Register one hook, and never remove it.

    Another thread may iterate over torch's hooks when a later training begins or ends.
    """
    handle = register_optimizer_step_pre_hook(_before_any_step)
    hooks: Any = handle.hooks_dict_ref()
    # It runs first, so that the doctor does not count a step that is refused.
    hooks.move_to_end(handle.id, last=False)


def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Ask every training about a step that no scaler makes.

    A step by the scaler of one training is right even if another training has the same
    model.
    """
    for reference in list(_TRAININGS):
        training = reference()
        if training is None or RUNNING.in_threads or RUNNING.window is not None:
            continue
        if training.is_rehearsing:
            for parameter in parameters_of(optimizer):
                parameter.grad = None
        else:
            training.on_step_without_scaler(optimizer, args, kwargs)
    if RUNNING.window is not None:
        RUNNING.window.see_step(optimizer)
