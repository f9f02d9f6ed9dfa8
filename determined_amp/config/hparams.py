"""The hyperparameters that every trial has, and how long a trial is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from determined import pytorch

from determined_amp.amp.mixed_precision import AmpSettings
from determined_amp.amp.schedules import LRSchedule, learning_rates
from determined_amp.config.settings import ConfigError, setting


@dataclass(frozen=True)
class Length:
    """A number of batches or of epochs, in Determined's own notation: `{batches: 100}`.

    Args:
        batches: Calls of `train_batch`.
        epochs: Passes over the training data.
    """

    batches: int | None = setting(None, at_least=1)
    epochs: int | None = setting(None, at_least=1)

    def contradictions(self, given: frozenset[str]) -> Iterator[tuple[str, str]]:
        units = sum(unit is not None for unit in (self.batches, self.epochs))
        if units != 1:
            yield "batches", f"got {units} units; allowed: one of batches and epochs"

    def unit(self) -> pytorch.TrainUnit:
        if self.epochs is not None:
            return pytorch.Epoch(self.epochs)
        assert self.batches is not None
        return pytorch.Batch(self.batches)

    def in_batches(self, batches_per_epoch: int) -> int:
        return self.batches or (self.epochs or 0) * batches_per_epoch


@dataclass(frozen=True)
class TrainingSettings:
    """How long, and how often what happens; script entrypoints pass these to `Trainer.fit`.

    Args:
        max_length: Length of the whole run.
        validation_period: Between validations; one always follows the last batch.
        checkpoint_period: Between checkpoints; one always follows the last batch.
        reporting_period: Between reports of training metrics.
        cudnn_benchmark: Let cuDNN time its convolution algorithms once; for inputs of fixed shape.
    """

    max_length: Length = setting()
    validation_period: Length = setting()
    checkpoint_period: Length = setting()
    reporting_period: Length = setting()
    cudnn_benchmark: bool = setting(True)


# A checkpoint may follow each of these. Accumulated gradients are not in it: half a window is lost.
_WHOLE_WINDOWS = ("max_length", "validation_period", "checkpoint_period")


@dataclass(frozen=True)
class Hparams:
    """The hyperparameters that every trial has; a trial adds its own in a subclass.

    Args:
        trial: Import path of the trial class, `module:Class`.
        global_batch_size: Samples of one batch over all slots.
        learning_rate: Peak of the schedule.
        amp: Precision and loss scale.
        training: Lengths and periods.
        aggregation_frequency: Batches per optimizer step; gradients are averaged over them.
        lr_schedule: Shape after the warm-up; advances on applied steps only.
        warmup_steps: Optimizer steps.
        weight_decay: As the optimizer defines it.
        max_grad_norm: Clip the unscaled gradient to this 2-norm; left out, nothing is clipped.
    """

    trial: str = setting()
    global_batch_size: int = setting(at_least=1)
    learning_rate: float = setting(above=0)
    amp: AmpSettings = setting()
    training: TrainingSettings = setting()
    aggregation_frequency: int = setting(1, at_least=1)
    lr_schedule: LRSchedule = setting(LRSchedule.CONSTANT)
    warmup_steps: int = setting(0, at_least=0)
    weight_decay: float = setting(0.0, at_least=0)
    max_grad_norm: float | None = setting(None, above=0)

    def rates(self, batches_per_epoch: int) -> list[float]:
        """The learning rate of every optimizer step of the run.

        Raises:
            ConfigError: if a length in epochs ends within an accumulation window.
        """
        problems = [
            f"training.{name}.epochs: is {batches} batches, which is not a multiple of "
            f"aggregation_frequency {self.aggregation_frequency}; allowed: whole accumulation "
            "windows, for instance a length in batches"
            for name in _WHOLE_WINDOWS
            if (batches := getattr(self.training, name).in_batches(batches_per_epoch))
            % self.aggregation_frequency
        ]
        if problems:
            raise ConfigError("hyperparameters", problems)
        batches = self.training.max_length.in_batches(batches_per_epoch)
        steps = max(1, batches // self.aggregation_frequency)
        return learning_rates(self.lr_schedule, self.learning_rate, self.warmup_steps, steps)

    def contradictions(self, given: frozenset[str]) -> Iterator[tuple[str, str]]:
        for name in _WHOLE_WINDOWS:
            batches = getattr(self.training, name).batches
            if batches is not None and batches % self.aggregation_frequency:
                yield (
                    f"training.{name}.batches",
                    f"got {batches}, which is not a multiple of aggregation_frequency "
                    f"{self.aggregation_frequency}; allowed: whole accumulation windows",
                )
