"""The hyperparameters that all example trials share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from determined import pytorch
from typing_extensions import Self

from determined_amp import AmpSettings, ConfigError
from determined_amp.amp.fields import setting
from determined_amp.experiment.experiment import hparams_of
from determined_amp.experiment.training import Length, TrainingSettings
from trials.schedule import LRSchedule


@dataclass(frozen=True)
class Hparams:
    """The hyperparameters of every trial; a trial adds its own in a subclass.

    Args:
        trial: Import path of the trial class, `module:Class`.
        global_batch_size: Number of samples in a batch, over all slots.
        learning_rate: Peak of the schedule.
        amp: Precision and loss scale.
        training: Length of the run; periods of validation, checkpoints and reports.
        aggregation_frequency: Batches per optimizer step; their gradients are averaged.
        lr_schedule: Shape after the warm-up; it advances on applied steps only.
        warmup_steps: Length of the linear warm-up, in optimizer steps.
        weight_decay: As the optimizer defines it.
        max_grad_norm: Largest 2-norm of the unscaled gradient; None does not clip.
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

    @classmethod
    def of(cls, context: pytorch.PyTorchTrialContext) -> Self:
        """The hyperparameters in a trial's context.

        Raises:
            ConfigError: if they have mistakes; it names each of them.
        """
        return hparams_of(cls, context)

    @property
    def max_norm(self) -> float:
        """The norm for `amp.clip`: `max_grad_norm`, or infinity for no clipping."""
        return self.max_grad_norm or math.inf

    def steps(self, batches_per_epoch: int) -> int:
        """The number of optimizer steps in the run, at least 1.

        Raises:
            ConfigError: if a length in epochs ends between two optimizer steps.
        """
        problems = [
            f"training.{name}.epochs: is {batches} batches, which is not a multiple of "
            f"aggregation_frequency {self.aggregation_frequency}; allowed: whole "
            "accumulation windows, for instance a length in batches"
            for name, length in self._lengths()
            if (batches := length.in_batches(batches_per_epoch))
            % self.aggregation_frequency
        ]
        if problems:
            raise ConfigError("hyperparameters", problems)
        assert self.training.max_length is not None  # the section requires it
        batches = self.training.max_length.in_batches(batches_per_epoch)
        return max(1, batches // self.aggregation_frequency)

    def contradictions(self, given: frozenset[str]) -> Iterator[tuple[str, str]]:
        for name, length in self._lengths():
            if (
                length.batches is not None
                and length.batches % self.aggregation_frequency
            ):
                yield (
                    f"training.{name}.batches",
                    f"got {length.batches}, which is not a multiple of "
                    f"aggregation_frequency {self.aggregation_frequency}; allowed: "
                    "whole accumulation windows",
                )

    def _lengths(self) -> Iterator[tuple[str, Length]]:
        """The lengths after which a checkpoint may be saved.

        A checkpoint has no accumulated gradients, so a step must end there.
        """
        for name in ("max_length", "validation_period", "checkpoint_period"):
            length = getattr(self.training, name)
            if length is not None:
                yield name, length
