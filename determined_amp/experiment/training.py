"""The section `hyperparameters.training`: the length of a trial, and its periods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from determined_amp.amp.settings import setting

if TYPE_CHECKING:
    from determined import pytorch

LENGTH_UNITS = ("batches", "epochs")


@dataclass(frozen=True)
class Length:
    """A number of batches or epochs, in Determined's own notation: `{batches: 100}`.

    It may also be text: `100 batches`. A cluster merges `--config` into the YAML. A section could
    then have both units, but text replaces the whole section.
    """

    batches: int | None = setting(None, at_least=1)  # calls of `train_batch`
    epochs: int | None = setting(None, at_least=1)  # passes over the training data

    @staticmethod
    def section_of(text: str) -> Mapping[str, int] | None:
        """`100 batches` as `{batches: 100}`; None for any other text."""
        count, _, unit = text.partition(" ")
        is_length = count.isascii() and count.isdecimal() and unit in LENGTH_UNITS
        return {unit: int(count)} if is_length else None

    def contradictions(self, fields_set: frozenset[str]) -> Iterator[tuple[str, str]]:
        units = sum(unit is not None for unit in (self.batches, self.epochs))
        if units != 1:
            yield (
                "batches",
                f"got {units} units; allowed: one of batches and epochs, or a text instead of the "
                "section, such as '2 epochs'",
            )

    def unit(self) -> pytorch.TrainUnit:
        from determined import pytorch  # noqa: PLC0415  # imports torch, which takes seconds

        if self.epochs is not None:
            return pytorch.Epoch(self.epochs)
        assert self.batches is not None
        return pytorch.Batch(self.batches)

    def in_batches(self, batches_per_epoch: int) -> int:
        return self.batches or (self.epochs or 0) * batches_per_epoch


@dataclass(frozen=True)
class TrainingSettings:
    """Length and periods of a run; script entrypoints pass them to `Trainer.fit`."""

    # Length of the whole run. The section `hyperparameters.training` requires it. Without a length
    # a trial can be audited, but not trained.
    max_length: Length | None = setting(None)
    # Interval of validations. One always follows the last batch; without a period it is the only
    # one.
    validation_period: Length | None = setting(None)
    # Interval of checkpoints. The same rule applies.
    checkpoint_period: Length | None = setting(None)
    # Interval of reports of training metrics.
    reporting_period: Length = setting(Length(batches=100))
    # Whether cuDNN times its convolution algorithms once, for inputs of fixed shape. None leaves
    # torch's switch unchanged.
    cudnn_benchmark: bool | None = setting(None)

    def contradictions(self, fields_set: frozenset[str]) -> Iterator[tuple[str, str]]:
        if self.max_length is None:
            yield "max_length", "missing; allowed: {batches: N} or {epochs: N}"
