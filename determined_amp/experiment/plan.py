"""Reads how to train a trial, from either form of an experiment configuration.

Our form has the section `hyperparameters.training`, which a script on a cluster receives.
Determined's own form has `searcher.max_length`, `min_validation_period`, `optimizations` and the
like. Determined 0.38.1 reads them only for an entrypoint `module:Class`; they mean the same here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from determined_amp.experiment.dotted import put, value_at
from determined_amp.experiment.overrides import UNITS
from determined_amp.experiment.settings import plain, read, setting
from determined_amp.experiment.training import Length, TrainingSettings

# Keys without effect for a script entrypoint: (name, the master's default, what to use instead).
WITHOUT_EFFECT: tuple[tuple[str, object, str], ...] = (
    ("searcher.max_length", None, "hyperparameters.training.max_length"),
    ("min_validation_period", {"batches": 0}, "hyperparameters.training.validation_period"),
    ("min_checkpoint_period", {"batches": 0}, "hyperparameters.training.checkpoint_period"),
    ("scheduling_unit", 100, "hyperparameters.training.reporting_period"),
    ("records_per_epoch", 0, "hyperparameters.training in batches or epochs"),
    ("perform_initial_validation", False, "nothing: determined_amp train validates by its periods"),
    ("optimizations.aggregation_frequency", 1, "hyperparameters.aggregation_frequency"),
    ("optimizations.average_aggregated_gradients", True, "nothing: gradients are averaged"),
    ("optimizations.gradient_compression", False, "nothing: it is for Horovod only"),
    ("optimizations.average_training_metrics", True, "nothing: metrics are exact over ranks"),
    ("optimizations.mixed_precision", "O0", "hyperparameters.amp.precision"),
    ("optimizations.auto_tune_tensor_fusion", False, "nothing: it is for Horovod only"),
    ("optimizations.tensor_fusion_threshold", 64, "nothing: it is for Horovod only"),
    ("optimizations.tensor_fusion_cycle_time", 1, "nothing: it is for Horovod only"),
    ("optimizations.grad_updates_size_file", None, "nothing: it is for Horovod only"),
)


@dataclass(frozen=True)
class Plan:
    """How a trial is trained.

    Args:
        training: Lengths and periods.
        aggregation_frequency: Batches per optimizer step.
        average_aggregated_gradients: Whether Determined averages gradients over these batches.
        initial_validation: Whether to validate before the first batch.
    """

    training: TrainingSettings
    aggregation_frequency: int = 1
    average_aggregated_gradients: bool = True
    initial_validation: bool = False


def has_our_form(hyperparameters: object) -> bool:
    """Whether these hyperparameters have a section `training` with lengths and periods."""
    section = hyperparameters.get("training") if isinstance(hyperparameters, Mapping) else None
    return isinstance(section, Mapping)


def read_plan(
    config: Mapping[str, Any], hyperparameters: Mapping[str, Any], problems: list[str]
) -> Plan | None:
    """The plan of an experiment, or None if it has a mistake.

    Args:
        config: The experiment configuration.
        hyperparameters: The hyperparameters of the trial.
        problems: A sentence per mistake is appended.
    """
    if has_our_form(hyperparameters):
        return _read_ours(hyperparameters, problems)
    return _read_determineds(config, hyperparameters, problems)


def keys_without_effect(config: Mapping[str, Any], completed: bool) -> Iterator[str]:
    """A sentence for each key that has no effect in a configuration of our form.

    Args:
        config: The experiment configuration.
        completed: Whether a master has filled in its defaults, which then are not mistakes.
    """
    for name, default, instead in WITHOUT_EFFECT:
        value = value_at(config, name)
        if value is None or (completed and value == default):
            continue
        yield f"{name}: got {value!r}, which has no effect in Determined 0.38.1; use {instead}"


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
    mended = copy.deepcopy(dict(config))
    for name, _, _ in WITHOUT_EFFECT:
        if value_at(mended, name) is not None:
            put(mended, name.split("."), None)
    mended["searcher"].setdefault("smaller_is_better", True)
    return mended


@dataclass(frozen=True)
class _OurKeys:
    aggregation_frequency: int = setting(1, at_least=1)


def _read_ours(hyperparameters: Mapping[str, Any], problems: list[str]) -> Plan | None:
    place = "hyperparameters"
    training = read(TrainingSettings, hyperparameters["training"], f"{place}.training", problems)
    keys = read(_OurKeys, hyperparameters, place, problems, strict=False)
    if training is None or keys is None:
        return None
    return Plan(training, keys.aggregation_frequency)


@dataclass(frozen=True)
class _Period:
    """A length in Determined's form; 0 means never."""

    batches: int | None = setting(None, at_least=0)
    records: int | None = setting(None, at_least=0)
    epochs: int | None = setting(None, at_least=0)

    def contradictions(self, given: frozenset[str]) -> Iterator[tuple[str, str]]:
        if len(given) != 1:
            yield "batches", f"got {len(given)} units; allowed: one of {', '.join(UNITS)}"


@dataclass(frozen=True)
class _Optimizations:
    aggregation_frequency: int = setting(1, at_least=1)
    average_aggregated_gradients: bool = setting(True)


@dataclass(frozen=True)
class _DeterminedKeys:
    min_validation_period: _Period = setting(_Period(batches=0))
    min_checkpoint_period: _Period = setting(_Period(batches=0))
    scheduling_unit: int = setting(100, at_least=1)
    perform_initial_validation: bool = setting(False)
    optimizations: _Optimizations = setting(_Optimizations())


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


def in_determineds_form(plan: Plan) -> dict[str, Any]:
    """A plan as keys of Determined's form: the inverse of `read_plan`."""
    training = plan.training
    return {
        "searcher": {"max_length": _in_its_unit(training.max_length)},
        "min_validation_period": _in_its_unit(training.validation_period) or {"batches": 0},
        "min_checkpoint_period": _in_its_unit(training.checkpoint_period) or {"batches": 0},
        "scheduling_unit": training.reporting_period.batches,
        "perform_initial_validation": plan.initial_validation,
        "optimizations": {
            "aggregation_frequency": plan.aggregation_frequency,
            "average_aggregated_gradients": plan.average_aggregated_gradients,
        },
    }


def _in_its_unit(length: Length | None) -> dict[str, int] | None:
    return {unit: count for unit, count in plain(length).items() if count} if length else None


def _max_length(
    config: Mapping[str, Any], batch_size: int | None, problems: list[str]
) -> Length | None:
    place, given = "searcher.max_length", value_at(config, "searcher.max_length")
    if given is None:
        return None
    if isinstance(given, int) and not isinstance(given, bool):
        unit = value_at(config, "searcher.unit")
        given = {unit if unit in UNITS else "batches": given}
    period = read(_Period, given, place, problems, strict=False)
    if period is None:
        return None
    if not (period.batches or period.records or period.epochs):
        problems.append(f"{place}: got 0; allowed: 1 or more")
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
            problems.append(
                f"{place}.records: needs hyperparameters.global_batch_size; allowed: that, or a "
                "length in batches or epochs"
            )
            return None
        return Length(batches=max(period.records // batch_size, 1))
    return Length(batches=period.batches) if period.batches else None
