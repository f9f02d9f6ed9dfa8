"""Mixed precision for any training loop of PyTorch; nothing in a step waits for the device.

    amp = AmpLoop(AmpSettings(Precision.AMP_FP16), device)
    model = amp.prepare(net()).to(device)
    optimizer = AdamW(model.parameters(), lr=1e-3, fused=amp.fused)
    amp.wrap_lr_scheduler(OneCycleLR(optimizer, ...))
    for step, batch in enumerate(loader):
        with amp.autocast():
            loss = loss_fn(batch)
        amp.scaler.scale(loss).backward()
        amp.clip_gradients(optimizer, max_norm=1.0)  # unscale_, clip, norm
        amp.scaler.step(optimizer)
        optimizer.zero_grad()
        amp.update(loss, samples=len(batch))  # scaler.update(), counts, schedule
        if step % 100 == 99:
            report(amp.report(batch, loss_fn))  # one synchronisation; the guard judges it

The recipe is PyTorch's own and stays visible. This object builds its parts correctly, counts and
reports what they do, and resumes them to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle

from determined_amp.amp.compiled import compile_forward
from determined_amp.amp.fields import ConfigError
from determined_amp.amp.fp32_modules import keep_in_float32, matching
from determined_amp.amp.guard import Guard
from determined_amp.amp.metrics import TrainingMetrics
from determined_amp.amp.mistakes import IN_A_LOOP, Mistake
from determined_amp.amp.precision import prepare_backend
from determined_amp.amp.replay import own_copy, without_steps
from determined_amp.amp.scaler import LossScaler, any_gradient, parameters_of
from determined_amp.amp.schedules import AppliedStepSchedule, PlateauSchedule
from determined_amp.amp.settings import AmpSettings, Compile, EvalPrecision
from determined_amp.amp.slots import OneSlot, Slots
from determined_amp.amp.steps import StepCounts, gradients_of

_NOT_REPLAYED = (
    "Its cause was not looked for: give the newest batch and the loss function, "
    "amp.report(batch, loss_fn)"
)


class AmpLoop:
    """Autocast, loss scale, schedules, counts, metrics and guard of one training loop.

    It sets torch's switches for TF32, which are global to the process, unless `set_backends` of the
    settings is false.

    Args:
        settings: Precision, loss scale and all else of the `amp` section of a YAML.
        device: Where the training computes.
        slots: The processes of the training, such as `core_context.distributed` of Determined;
            by default this is the only one.

    Attributes:
        settings: Those given.
        device: The device.
        scaler: torch's `GradScaler`, enabled for `amp_fp16` alone; otherwise every call on it
            passes through.
        fused: Pass this to the optimizer as `fused`. On CUDA a fused optimizer takes scale and
            overflow flag as device tensors; any other makes `scaler.step` wait for the device.
        metrics: What is reported.
        guard: Ends a run that no longer trains.
        models: Those given to `prepare`.
        optimizers: Those met so far, in the order in which reports and states number them.

    Raises:
        PrecisionError: if the device only emulates the precision.
    """

    remedies: Mapping[Mistake, str] = IN_A_LOOP

    def __init__(
        self,
        settings: AmpSettings,
        device: torch.device | str,
        *,
        slots: Slots | None = None,
        models: list[nn.Module] | None = None,
        optimizers: list[Optimizer] | None = None,
    ) -> None:
        self.settings = settings
        self.device = torch.device(device)
        self.fused = self.device.type == "cuda"
        self.models: list[nn.Module] = [] if models is None else models
        self.optimizers: list[Optimizer] = [] if optimizers is None else optimizers
        self.slots = slots or OneSlot()
        prepare_backend(settings.precision, self.device, set_switches=settings.set_backends)
        self.scaler = LossScaler(settings, self.device.type, self._meet, self.remedies)
        # Entering a disabled one costs time.
        dtype = settings.precision.autocast_dtype
        self._training_autocast: AbstractContextManager[Any] = (
            _Nestable(lambda: self._autocast(dtype)) if dtype else nullcontext()
        )
        self._one = torch.ones((), device=self.device)
        self.metrics = TrainingMetrics(
            self.device,
            self.optimizers,
            self.slots.size,
            lambda: (self.loss_scale(), self.scaler.scale_of_newest_step(self._one)),
            scaled=settings.scales_the_loss,
        )
        self.guard = Guard(
            settings,
            self.metrics,
            self.scaler,
            models=self.models,
            optimizers=self.optimizers,
            slots=self.slots,
            replay=self._replay,
        )
        self._unmatched = list(settings.fp32_modules)
        self._prepared: nn.Module | None = None
        self._hooks: dict[Optimizer, RemovableHandle] = {}
        self._saved: Sequence[dict[str, int]] = ()
        self._newest: tuple[Any, Callable[[Any], torch.Tensor]] | None = None
        self._started = False
        self._replays = False

    # Before the training.

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model, with the modules of `fp32_modules` kept in float32, and its forward compiled.

        Call it for every model. A model in `DistributedDataParallel` is given as that. Without
        `compile` in the settings nothing is compiled. A pattern that matches in none of the models
        is refused when the training starts.

        Raises:
            IslandError: if a pattern is no regular expression, or the patterns match all of it.
        """
        mode = self.settings.compile
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        here = matching(inner, self.settings.fp32_modules)
        keep_in_float32(inner, here, self.device.type, compiled=mode is not Compile.OFF)
        compile_forward(inner, mode)
        self._unmatched = [pattern for pattern in self._unmatched if pattern not in here]
        self._prepared = self._prepared or inner
        self._add_model(model)
        return model

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Number an optimizer, in the order of these calls; returns it.

        One optimizer needs no call. Of several, the numbers tell which state of a saved training
        belongs to which, so call it for each before `load_state_dict`.
        """
        self._meet(optimizer)
        return optimizer

    def wrap_lr_scheduler(self, scheduler: Any) -> Any:
        """Move a torch scheduler with the applied steps of its optimizer, and resume it exactly.

        A skipped step does not change the weights, so it does not move the schedule. Nothing waits
        for the device. Do not call `scheduler.step()` yourself, nor save its state. Tell
        `validated` the metric of each validation if it is a `ReduceLROnPlateau`.

        Args:
            scheduler: Any of `torch.optim.lr_scheduler` that moves by steps, or that one.

        Returns:
            The scheduler.

        Raises:
            ConfigError: if its optimizer has a schedule already.
        """
        optimizer: Optimizer = scheduler.optimizer
        self._meet(optimizer)
        steps = self.metrics.of(optimizer)
        if steps.schedule is not None:
            raise self._wrong(
                "wrap_lr_scheduler",
                "its optimizer has a schedule already; join the two by torch's ChainedScheduler",
            )
        steps.schedule = (
            PlateauSchedule(scheduler)
            if isinstance(scheduler, ReduceLROnPlateau)
            else AppliedStepSchedule(scheduler, self.device, skips=self.scaler.is_enabled())
        )
        return scheduler

    def start(self) -> None:
        """Check the settings against the models, and remember how the training begins.

        The first `autocast` does it. Synchronises.

        Raises:
            ConfigError: if a setting of the models has no effect.
        """
        self._begin()
        self.metrics.reset()
        self.guard.start()

    # In the training.

    def autocast(self) -> AbstractContextManager[Any]:
        """For forward and loss of a training batch; never for the backward."""
        if not self._started:
            self.start()
        return self._training_autocast

    def eval_autocast(self) -> AbstractContextManager[Any]:
        """For the forward of a validation batch: float32 unless `eval_precision` is `same`."""
        same = self.settings.eval_precision is EvalPrecision.SAME
        return self._autocast(self.settings.precision.autocast_dtype if same else None)

    def clip_gradients(self, optimizer: Optimizer, max_norm: float = math.inf) -> None:
        """Unscale the gradients of an optimizer, measure their norm, and clip them.

        Call it after accumulation, before `scaler.step`.

        Args:
            optimizer: The one to be stepped.
            max_norm: Largest 2-norm of its gradients; infinite only measures it.

        Raises:
            ConfigError: if `max_norm` is not above 0.
        """
        self._check_norm(max_norm, "clip_gradients")
        self._meet(optimizer)
        self._clip(optimizer, parameters_of(optimizer), max_norm)

    def update(
        self, loss: torch.Tensor | None = None, samples: int | None = None
    ) -> dict[str, float]:
        """End a batch: call `scaler.update()` if an optimizer was stepped, and count everything.

        Call it once a batch, also where gradients accumulate over several.

        Args:
            loss: Mean loss of the batch, unscaled, (), on the device; reported as `loss`.
            samples: Samples in it; without it no speed is reported.

        Returns:
            What `train_batch` of a trial must return; of no use elsewhere.
        """
        if self._replays:
            return {}
        self.finish_steps()
        return self._count(loss, samples)

    def finish_steps(self) -> None:
        """Update the loss scale and the counts after steps; `update` does it at the end of a batch.

        Call it between two steps of the same optimizer in a batch.
        """
        if self.scaler.outcomes:
            for optimizer, skipped in self.scaler.finish().items():
                self.metrics.each.of(optimizer).finish(skipped)

    def report(
        self, batch: Any = None, loss_fn: Callable[[Any], torch.Tensor] | None = None
    ) -> dict[str, Any]:
        """What happened since the last report; `MetricName` lists it. Synchronises once.

        With several slots all of them must call it.

        Args:
            batch: The newest batch. If the guard has to end the run, it is trained again without a
                step, operation by operation, to find the cause; everything is restored.
            loss_fn: Runs the forward of a batch and returns the loss, as for `find_loss_scale`.

        Raises:
            GuardError: if the run no longer trains. Save a checkpoint if its `state_is_good`.
        """
        everywhere = self.slots.allgather(self.metrics.per_slot_reduce())
        metrics, batches = self.metrics.cross_slot_reduce(everywhere), self.metrics.batches
        self.metrics.reset()
        self._newest = None if loss_fn is None else (batch, loss_fn)
        self.guard.without_replay = _NOT_REPLAYED
        self.guard.judge(metrics, batches)
        return metrics

    def validated(self, metric: float) -> None:
        """Move each `ReduceLROnPlateau` by the metric of a validation."""
        for schedule in self._plateaus():
            schedule.validated(metric)

    # What a checkpoint holds, beside models and optimizers.

    def state_dict(self) -> dict[str, Any]:
        """Loss scale, counts and schedules, in plain numbers; synchronises."""
        return {
            "scaler": self.scaler.state_dict(),
            "optimizers": [steps.counts.state_dict() for steps in self.metrics.all()],
            "plateaus": [schedule.state_dict() for schedule in self._plateaus()],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, after models and optimizers have been restored.

        The scale comes from the state; its factors and interval stay those of the settings.

        Raises:
            ConfigError: if it holds the counts of several optimizers that are not known here.
        """
        scaler = state_dict.get("scaler")
        if scaler and self.scaler.is_enabled():
            kept = {key: scaler[key] for key in ("scale", "_growth_tracker")}
            self.scaler.load_state_dict({**self.scaler.state_dict(), **kept})
        saved = len(state_dict.get("optimizers", ()))
        if saved > max(1, len(self.optimizers)):
            raise self._wrong(
                "load_state_dict",
                f"the state has the steps of {saved} optimizers, and {len(self.optimizers)} are "
                "known here; call amp.wrap_optimizer(optimizer) for each of them before, in the "
                "same order as in the training that was saved",
            )
        self._load_steps(state_dict)

    # What else there is to ask.

    def loss_scale(self) -> torch.Tensor:
        """The current loss scale, (), float32, on the device; 1 without a scaler."""
        return self.scaler.times(self._one)

    def steps(self, optimizer: Optimizer) -> StepCounts:
        """The steps of one optimizer, counted on the device."""
        return self.metrics.of(optimizer).counts

    @property
    def applied_steps(self) -> torch.Tensor:
        """Applied steps of the first optimizer, (), int64, on the device; ask after every step."""
        return self.metrics.first.counts.applied

    @property
    def last_step_applied(self) -> torch.Tensor:
        """Whether the newest step of the first optimizer was applied, (), bool, on the device."""
        return self.metrics.first.counts.last_step_applied

    @property
    def attempted_steps(self) -> int:
        """Steps of the first optimizer, applied or skipped."""
        return self.metrics.first.counts.attempted

    @property
    def is_replaying(self) -> bool:
        """Whether a batch runs in `without_steps`."""
        return self._replays

    @contextmanager
    def without_steps(self) -> Iterator[None]:
        """Inside this block nothing is stepped, zeroed or counted.

        For replaying a batch, to find a fault or the loss scale.
        """
        self._replays = True
        try:
            with without_steps(self.scaler, self.optimizers, self._others_that_step()):
                yield
        finally:
            self._replays = False

    def replay(self, batch: Any, loss_fn: Callable[[Any], torch.Tensor]) -> None:
        """Forward, loss and backward of a batch as in training, without a step.

        Args:
            batch: The batch; a copy is trained.
            loss_fn: Runs the forward of a batch and returns the loss.
        """
        has_scaled = self.scaler.has_scaled
        with self.without_steps():
            with self._training_autocast:
                loss = loss_fn(own_copy(batch))
            torch.autograd.backward(self.scaler.scale(loss))
        self.scaler.has_scaled = has_scaled

    # How it does that. A `PyTorchTrial` has other ways for the first four.

    def _add_model(self, model: nn.Module) -> None:
        self.models.append(model)

    def _meet(self, optimizer: Optimizer) -> None:
        if optimizer not in self._hooks:
            if optimizer not in self.optimizers:
                self.optimizers.append(optimizer)
            self._watch_steps(optimizer)
            self._restore(optimizer)

    def _others_that_step(self) -> Sequence[tuple[object, str]]:
        """Objects beside the optimizers, and names of their methods that move weights."""
        return ()

    def _replay(self) -> Any:
        """The newest batch, and how to train it at a loss scale without a step; None without it."""
        if self._newest is None:
            return None
        batch, loss_fn = self._newest

        def train(scale: float) -> None:
            with self.scaler.at(scale):
                self.replay(batch, loss_fn)

        return batch, train

    def _begin(self) -> None:
        self._started = True
        self._check_models()
        self.loss_scale()  # makes the scale, on the device
        for steps in self.metrics.all():  # and the counts
            steps.place_rate()

    def _wrong(self, place: str, problem: str) -> ConfigError:
        return ConfigError("the loop", [f"{place}: {problem}"])

    def _autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def _watch_steps(self, optimizer: Optimizer) -> None:
        self._hooks[optimizer] = optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, *call: Any) -> None:
        """Before every step, in every precision, so that fp32 shows a mistake, too."""
        self.metrics.each.of(optimizer).begin(optimizer)
        self.scaler.check_step()

    def _check_norm(self, max_norm: float, place: str) -> None:
        if not max_norm > 0:
            raise self._wrong(place, f"got max_norm {max_norm}; allowed: a number above 0")

    def _clip(self, optimizer: Optimizer, parameters: list[torch.Tensor], max_norm: float) -> None:
        if self._replays:
            return
        if not self.scaler.is_unscaled(optimizer):
            self.scaler.unscale_(optimizer)
        steps, gradients = self.metrics.each.of(optimizer), gradients_of(parameters)
        steps.measure(parameters, self.loss_scale)
        if max_norm < math.inf and any_gradient(optimizer):
            steps.add_norm(nn.utils.clip_grad_norm_(parameters, max_norm))
        elif gradients:
            norms = torch.stack(torch._foreach_norm(gradients))
            steps.add_norm(torch.linalg.vector_norm(norms))

    def _count(
        self, loss: torch.Tensor | None, samples: int | None, *, again: bool = False
    ) -> dict[str, float]:
        if loss is not None and self.settings.compile.replays_graphs:
            loss = loss.detach().clone()  # kept until the report
        return self.metrics.add(loss, samples, again=again)

    def _plateaus(self) -> list[PlateauSchedule]:
        schedules = (steps.schedule for steps in self.metrics.all())
        return [schedule for schedule in schedules if isinstance(schedule, PlateauSchedule)]

    def _load_steps(self, state_dict: Mapping[str, Any]) -> None:
        self._saved = state_dict.get("optimizers", ())
        for optimizer in self.optimizers:
            self._restore(optimizer)
        plateaus = state_dict.get("plateaus", ())
        for schedule, state in zip(self._plateaus(), plateaus, strict=False):
            schedule.load_state_dict(state)

    def _restore(self, optimizer: Optimizer) -> None:
        """Let an optimizer go on from what a checkpoint holds of it."""
        number = self.optimizers.index(optimizer)
        if number < len(self._saved):
            steps = self.metrics.of(optimizer)
            steps.counts.load_state_dict(self._saved[number])
            steps.place_rate()
            steps.reset()

    def _check_models(self) -> None:
        settings = {
            "fp32_modules": bool(self._unmatched),
            "compile": self.settings.compile is not Compile.OFF,
        }
        for name, is_set in settings.items():
            if is_set and self._prepared is None:
                raise self._wrong(name, "given, but no model was given to amp.prepare(model)")
        if self._unmatched and self._prepared is not None:
            keep_in_float32(self._prepared, self._unmatched, self.device.type)  # raises, with names


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
