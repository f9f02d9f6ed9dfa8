"""The hyperparameters that all trials of this repository have."""

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
    """The hyperparameters that every trial has; a trial adds its own in a subclass.

    Args:
        trial: Import path of the trial class, `module:Class`.
        global_batch_size: Samples of one batch over all slots.
        learning_rate: Peak of the schedule.
        amp: Precision and loss scale.
        training: Lengths and periods.
        aggregation_frequency: Batches per optimizer step; gradients are averaged over
            them.
        lr_schedule: Shape after the warm-up; it advances on applied steps only.
        warmup_steps: Optimizer steps.
        weight_decay: As the optimizer defines it.
        max_grad_norm: Clip the unscaled gradient to this 2-norm; None does not clip.
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
        """The hyperparameters of a trial's context.

        Raises:
            ConfigError: naming every mistake.
        """
        return hparams_of(cls, context)

    @property
    def max_norm(self) -> float:
        """The argument of `amp.clip`: infinite if nothing is clipped."""
        return self.max_grad_norm or math.inf

    def steps(self, batches_per_epoch: int) -> int:
        """Number of optimizer steps of the run, at least one.

        Raises:
            ConfigError: if a length in epochs ends within an accumulation window.
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
        """The given lengths that a checkpoint may follow, which holds no accumulated
        gradients.
        """
        for name in ("max_length", "validation_period", "checkpoint_period"):
            length = getattr(self.training, name)
            if length is not None:
                yield name, length
