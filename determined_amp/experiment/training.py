"""Reads the lengths and periods of a training from either form of a configuration.

Our form has the section `hyperparameters.training`, which a script on a cluster
receives. Determined's own form has `searcher.max_length`, `min_validation_period`,
`optimizations` and the like. Determined 0.38.1 reads them only for an entrypoint
`module:Class`. They mean the same here. `in_our_form` translates them once, so all
other code knows our form only. `key_of` goes back, for messages and for changes.

A configuration here is that of one trial: its `hyperparameters` are those of the trial.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from determined_amp.amp.errors import Problem, nearest
from determined_amp.amp.fields import Contradictions, setting
from determined_amp.amp.plain_data import Config, Values
from determined_amp.experiment.dotted import value_at

if TYPE_CHECKING:
    from determined import pytorch

# Units of a length or a period.
LENGTH_UNITS = ("batches", "epochs")

_IN_WORDS = re.compile(rf"(?P<count>[0-9]{{1,19}}) (?P<unit>{'|'.join(LENGTH_UNITS)})")

_TRAINING = "hyperparameters.training"

# Determined's keys, which have no effect for a script entrypoint: the name of each, the
# master's default, and our key with the same meaning or other advice.
WITHOUT_EFFECT: tuple[tuple[str, object, str], ...] = (
    ("searcher.max_length", None, f"{_TRAINING}.max_length"),
    ("min_validation_period", {"batches": 0}, f"{_TRAINING}.validation_period"),
    ("min_checkpoint_period", {"batches": 0}, f"{_TRAINING}.checkpoint_period"),
    ("scheduling_unit", 100, f"{_TRAINING}.reporting_period.batches"),
    ("optimizations.aggregation_frequency", 1, "hyperparameters.aggregation_frequency"),
    ("records_per_epoch", 0, "batches or epochs in hyperparameters.training"),
)


@dataclass(frozen=True)
class Length:
    """A number of batches or epochs, in Determined's own notation: `{batches: 100}`.

    It may also be text: `100 batches`. A cluster merges `--config` into the YAML. A
    section could then have both units, but text replaces the whole section.
    """

    ALLOWED = "{batches: N}, {epochs: N}, or a text such as '2 epochs'"

    batches: int | None = setting(None, at_least=1)  # calls of `train_batch`
    epochs: int | None = setting(None, at_least=1)  # passes over the training data

    @staticmethod
    def section_of(text: str) -> Mapping[str, int] | None:
        """`100 batches` as `{batches: 100}`; None for any other text."""
        length = _IN_WORDS.fullmatch(text)
        return None if length is None else {length["unit"]: int(length["count"])}

    def contradictions(self, fields_set: frozenset[str]) -> Contradictions:
        if len(fields_set) != 1:
            yield (
                "batches",
                f"got {len(fields_set)} units; allowed: {self.ALLOWED}",
            )

    def unit(self) -> pytorch.TrainUnit:
        from determined import pytorch  # noqa: PLC0415  # imports torch: seconds

        if self.epochs is not None:
            return pytorch.Epoch(self.epochs)
        assert self.batches is not None
        return pytorch.Batch(self.batches)

    def in_batches(self, batches_per_epoch: int) -> int:
        return self.batches or (self.epochs or 0) * batches_per_epoch


@dataclass(frozen=True)
class TrainingSettings:
    """Length and periods of a run; script entrypoints pass them to `Trainer.fit`."""

    # Length of the whole run. Without one a trial can be audited, but not trained.
    max_length: Length | None = setting(None)
    # Interval of validations. A validation always follows the last batch. Without a
    # period it is the only one.
    validation_period: Length | None = setting(None)
    # Interval of checkpoints. The same rule applies.
    checkpoint_period: Length | None = setting(None)
    # Interval of reports of training metrics.
    reporting_period: Length = setting(Length(batches=100))
    # Whether cuDNN times its convolution algorithms once, for inputs of fixed shape.
    # None leaves torch's switch unchanged.
    cudnn_benchmark: bool | None = setting(None)


def has_our_form(config: Config) -> bool:
    """Whether there is a section `hyperparameters.training`."""
    return config["hyperparameters"].get("training") is not None


def key_of(config: Config, ours: str) -> str:
    """The key that a configuration has for a key of our form."""
    if not has_our_form(config):
        for theirs, _, same in WITHOUT_EFFECT:
            if ours.startswith(same):
                return ours.replace(same, theirs)
    return ours


def in_the_words_of(config: Config, problem: Problem) -> Problem:
    """A problem of our form, with the key that a configuration has for it."""
    text = problem.removeprefix(f"{problem.key}: ")
    return Problem(key_of(config, problem.key), text)


def missing_length(key: str) -> Problem:
    """The problem of a configuration that lacks this key, the length of a run."""
    text = (
        "missing; allowed: {batches: N} or {epochs: N}, for instance by --config "
        f"{key}.batches=100"
    )
    return Problem(key, text)


def mistakes_of_our_form(config: Config) -> Iterator[Problem]:
    """A problem for a missing length, and for each key without effect, in our form.

    A key with the master's default is no mistake, because a master fills it in.
    """
    training = config["hyperparameters"].get("training")
    if not isinstance(training, Mapping):
        return
    given = [key for key, value in training.items() if value is not None]
    if not nearest("max_length", given):  # another problem names a misspelt key
        yield missing_length(f"{_TRAINING}.max_length")
    for name, default, instead in WITHOUT_EFFECT:
        value = value_at(config, name)
        if value is not None and value != default:
            text = (
                f"got {value!r}, which has no effect in Determined 0.38.1; use"
                f" {instead}"
            )
            yield Problem(name, text)


def in_our_form(config: Config) -> Config:
    """The hyperparameters in our form, with lengths and periods from Determined's own
    keys if the configuration has theirs.
    """
    values: Values = dict(config["hyperparameters"])
    if not isinstance(values.get("amp"), Mapping):  # a value of the trial's own
        values["amp"] = None
    if has_our_form(config):
        return values
    length = value_at(config, "searcher.max_length")
    values["training"] = {
        "max_length": {"batches": length} if type(length) is int else length,
        "validation_period": _period(config.get("min_validation_period")),
        "checkpoint_period": _period(config.get("min_checkpoint_period")),
    }
    reporting = config.get("scheduling_unit")
    if reporting is not None:
        values["training"]["reporting_period"] = {"batches": reporting}
    frequency = value_at(config, "optimizations.aggregation_frequency")
    values["aggregation_frequency"] = frequency
    return values


def _period(period: Any) -> Any:
    """A period of Determined's form; None for 0, which means never."""
    is_never = isinstance(period, Mapping) and list(map(repr, period.values())) == ["0"]
    return None if is_never else period
