"""Reads how to train a trial, from either form of an experiment configuration.

Our form has the section `hyperparameters.training`, which a script on a cluster receives.
Determined's own form has `searcher.max_length`, `min_validation_period`, `optimizations` and the
like. Determined 0.38.1 reads them only for an entrypoint `module:Class`; they mean the same here.
`perform_initial_validation` and `optimizations.average_aggregated_gradients` belong to both forms.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from determined_amp.amp.errors import Problem
from determined_amp.amp.settings import setting
from determined_amp.experiment.dotted import value_at
from determined_amp.experiment.fields import read

if TYPE_CHECKING:
    from determined import pytorch

# Units of a length or a period, in our form and in Determined's.
LENGTH_UNITS = ("batches", "epochs")
UNITS = ("batches", "records", "epochs")

# The keys of Determined's form, by the names of `TrainingSettings`.
DETERMINEDS_KEYS = {
    "max_length": "searcher.max_length",
    "validation_period": "min_validation_period",
    "checkpoint_period": "min_checkpoint_period",
    "reporting_period": "scheduling_unit",
}

# Keys without effect for a script entrypoint: (name, the master's default, what to use instead).
WITHOUT_EFFECT: tuple[tuple[str, object, str], ...] = (
    ("searcher.max_length", None, "hyperparameters.training.max_length"),
    ("min_validation_period", {"batches": 0}, "hyperparameters.training.validation_period"),
    ("min_checkpoint_period", {"batches": 0}, "hyperparameters.training.checkpoint_period"),
    ("scheduling_unit", 100, "hyperparameters.training.reporting_period"),
    ("records_per_epoch", 0, "hyperparameters.training in batches or epochs"),
    ("optimizations.aggregation_frequency", 1, "hyperparameters.aggregation_frequency"),
    ("optimizations.gradient_compression", False, "nothing: it is for Horovod only"),
    ("optimizations.average_training_metrics", True, "nothing: metrics are exact over ranks"),
    ("optimizations.mixed_precision", "O0", "hyperparameters.amp.precision"),
    ("optimizations.auto_tune_tensor_fusion", False, "nothing: it is for Horovod only"),
    ("optimizations.tensor_fusion_threshold", 64, "nothing: it is for Horovod only"),
    ("optimizations.tensor_fusion_cycle_time", 1, "nothing: it is for Horovod only"),
    ("optimizations.grad_updates_size_file", None, "nothing: it is for Horovod only"),
)


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
        is_number = count.isascii() and count.isdecimal() and len(count) < 20
        return {unit: int(count)} if is_number and unit in LENGTH_UNITS else None

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


@dataclass(frozen=True)
class Plan:
    """How a trial is trained."""

    training: TrainingSettings  # lengths and periods
    aggregation_frequency: int = 1  # batches per optimizer step
    # Whether Determined averages gradients over these batches.
    average_aggregated_gradients: bool = True
    initial_validation: bool = False  # whether to validate before the first batch


def has_our_form(hyperparameters: object) -> bool:
    """Whether these hyperparameters have a section `training` with lengths and periods."""
    section = hyperparameters.get("training") if isinstance(hyperparameters, Mapping) else None
    return isinstance(section, Mapping)


def read_plan(
    config: Mapping[str, Any], hyperparameters: Mapping[str, Any], problems: list[str]
) -> Plan | None:
    """The plan of an experiment, or None if it has a mistake."""
    if has_our_form(hyperparameters):
        return _read_ours(config, hyperparameters, problems)
    return _read_determineds(config, hyperparameters, problems)


def keys_without_effect(config: Mapping[str, Any]) -> Iterator[Problem]:
    """A problem for each key that has no effect in a configuration of our form.

    A key with the master's default asks for nothing: a master fills it in.
    """
    for name, default, instead in WITHOUT_EFFECT:
        value = value_at(config, name)
        if value is not None and value != default:
            text = f"got {value!r}, which has no effect in Determined 0.38.1; use {instead}"
            yield Problem(name, text)


def in_our_form(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a configuration without the keys that have no effect in our form."""
    changed = copy.deepcopy(dict(config))
    for name, _, _ in WITHOUT_EFFECT:
        section, _, key = name.rpartition(".")
        place = value_at(changed, section) if section else changed
        if isinstance(place, dict):
            place.pop(key, None)
    return changed


def is_test(config: Mapping[str, Any]) -> bool:
    """Whether `det experiment create --test` made this experiment."""
    return str(config.get("description")).startswith("[test-mode] ")


# The lengths of `--test` in our form; `det` writes them into the keys of Determined's form.
ONE_BATCH: Mapping[str, Any] = {
    "max_length": {"batches": 1},
    "validation_period": {"batches": 1},
    "reporting_period": {"batches": 1},
}


def for_test(config: Mapping[str, Any]) -> dict[str, Any]:
    """Repair a copy of a configuration of our form that `det experiment create --test` has changed.

    The changed configuration has keys of Determined's form, and lacks the direction of the metric.
    """
    mended = in_our_form(config)
    if isinstance(mended.get("searcher"), dict):
        mended["searcher"].setdefault("smaller_is_better", True)
    return mended


@dataclass(frozen=True)
class _Optimizations:
    aggregation_frequency: int = setting(1, at_least=1)
    average_aggregated_gradients: bool = setting(True)


@dataclass(frozen=True)
class _OfBothForms:
    perform_initial_validation: bool = setting(False)
    optimizations: _Optimizations = setting(_Optimizations())


@dataclass(frozen=True)
class _OurHyperparameters:
    aggregation_frequency: int = setting(1, at_least=1)


def _read_ours(
    config: Mapping[str, Any], hyperparameters: Mapping[str, Any], problems: list[str]
) -> Plan | None:
    place = "hyperparameters"
    training = read(TrainingSettings, hyperparameters["training"], f"{place}.training", problems)
    ours = read(_OurHyperparameters, hyperparameters, place, problems, strict=False)
    both = read(_OfBothForms, config, "", problems, strict=False)
    if training is None or ours is None or both is None:
        return None
    average = both.optimizations.average_aggregated_gradients
    return Plan(training, ours.aggregation_frequency, average, both.perform_initial_validation)


@dataclass(frozen=True)
class _Period:
    """A length in Determined's form; 0 means never."""

    batches: int | None = setting(None, at_least=0)
    records: int | None = setting(None, at_least=0)
    epochs: int | None = setting(None, at_least=0)

    def contradictions(self, fields_set: frozenset[str]) -> Iterator[tuple[str, str]]:
        if len(fields_set) != 1:
            yield "batches", f"got {len(fields_set)} units; allowed: one of {', '.join(UNITS)}"


@dataclass(frozen=True)
class _DeterminedKeys(_OfBothForms):
    min_validation_period: _Period = setting(_Period(batches=0))
    min_checkpoint_period: _Period = setting(_Period(batches=0))
    scheduling_unit: int = setting(100, at_least=1)


def _read_determineds(
    config: Mapping[str, Any], hyperparameters: Mapping[str, Any], problems: list[str]
) -> Plan | None:
    before = len(problems)
    keys = read(_DeterminedKeys, config, "", problems, strict=False)
    size = hyperparameters.get("global_batch_size")
    batch_size = size if isinstance(size, int) and size > 0 else None
    max_length = _max_length(config, batch_size, problems)
    if keys is None:
        return None
    training = TrainingSettings(
        max_length,
        _length(keys.min_validation_period, "min_validation_period", batch_size, problems),
        _length(keys.min_checkpoint_period, "min_checkpoint_period", batch_size, problems),
        Length(batches=keys.scheduling_unit),
    )
    if len(problems) > before:
        return None
    return Plan(
        training,
        keys.optimizations.aggregation_frequency,
        keys.optimizations.average_aggregated_gradients,
        keys.perform_initial_validation,
    )


def _max_length(
    config: Mapping[str, Any], batch_size: int | None, problems: list[str]
) -> Length | None:
    place, length = "searcher.max_length", value_at(config, "searcher.max_length")
    if length is None:
        return None
    if isinstance(length, int) and not isinstance(length, bool):
        unit = value_at(config, "searcher.unit")
        length = {unit if unit in UNITS else "batches": length}
    period = read(_Period, length, place, problems, strict=False)
    if period is None:
        return None
    if not (period.batches or period.records or period.epochs):
        problems.append(Problem(place, "got 0; allowed: 1 or more"))
    return _length(period, place, batch_size, problems)


def _length(
    period: _Period, place: str, batch_size: int | None, problems: list[str]
) -> Length | None:
    """A period as a length, by the rules of Determined's `TrainUnit`.

    A number of records is rounded down to whole batches, but to one batch at least.
    """
    if period.epochs:
        return Length(epochs=period.epochs)
    if period.records:
        if batch_size is None:
            text = (
                "needs hyperparameters.global_batch_size; allowed: that, or a length in batches or "
                "epochs"
            )
            problems.append(Problem(f"{place}.records", text))
            return None
        return Length(batches=max(period.records // batch_size, 1))
    return Length(batches=period.batches) if period.batches else None
