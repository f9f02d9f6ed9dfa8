"""Finds settings of ours in places where nothing reads them, and keys that Determined has not.

A section `amp` that nothing reads would leave a run in float32 without a sign of it. So text that
is a precision of ours, or a section with our keys, is a mistake anywhere but in its own place. A
trial with AMP of its own may have hyperparameters such as `amp: true` and `precision: 16`: those
are its own, and the first line of the log names them.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from determined_amp.amp.errors import Problem
from determined_amp.amp.settings import AmpSettings, Precision
from determined_amp.experiment.dotted import flat
from determined_amp.experiment.fields import shown
from determined_amp.experiment.training import UNITS, TrainingSettings

# Top-level keys of an experiment configuration (`schemas/expconf/v0/experiment.json`).
_TOP_LEVEL = frozenset(
    [
        *("bind_mounts", "checkpoint_policy", "checkpoint_storage", "data", "data_layer", "debug"),
        *("description", "entrypoint", "environment", "hyperparameters", "integrations"),
        *("internal", "labels", "log_policies", "max_restarts", "min_checkpoint_period"),
        *("min_validation_period", "name", "optimizations", "pbs", "perform_initial_validation"),
        *("preemption_timeout", "profiling", "project", "records_per_epoch", "reproducibility"),
        *("resources", "retention_policy", "scheduling_unit", "searcher", "security", "slurm"),
        *("tensorboard_storage", "workspace"),
    ]
)

_HYPERPARAMETERS = "hyperparameters"
_AMP, _TRAINING = f"{_HYPERPARAMETERS}.amp", f"{_HYPERPARAMETERS}.training"

# What a user may call the section `amp`, and its keys, without case and underscores.
_NAMES_OF_AMP = frozenset(["amp", "ampsettings", "automaticmixedprecision", "mixedprecision"])
_KEYS_OF_AMP = frozenset(f.name.replace("_", "") for f in dataclasses.fields(AmpSettings))

_LENGTHS = frozenset(
    f.name for f in dataclasses.fields(TrainingSettings) if f.name.endswith(("_length", "_period"))
)
_LENGTH_IN_WORDS = re.compile(r"\d+ (batches|epochs)")

# A precision that no other software calls so, also within a longer text.
_AUTOCAST = re.compile(r"amp[\W_]*(fp16|bf16)", re.IGNORECASE)

# Words in the name of a hyperparameter that is about precision.
_ABOUT_PRECISION = re.compile(
    r"precision|autocast|float16|(?<![a-z])((use)?amp|fp16|bf16|dtype)(?![a-z])",
    re.IGNORECASE,
)


def misplaced(config: Mapping[str, Any], values: Mapping[str, Any]) -> list[Problem]:
    """A problem for each setting of ours that is in a wrong place, and each unknown top-level key.

    Args:
        config: An experiment configuration.
        values: The hyperparameters of the trial, which count instead of those of `config`.
    """
    sections = {**config, _HYPERPARAMETERS: values}
    problems: list[Problem] = []
    for key, section in sections.items():
        is_known, within = key in _TOP_LEVEL, list[Problem]()
        if not is_known or isinstance(section, Mapping):
            within = list(_within(section, str(key), str(key)))
        problems += within
        if not (is_known or within):
            problems.append(Problem(str(key), _unknown(str(key))))
    return problems


def of_the_trial(values: Mapping[str, Any]) -> list[str]:
    """The hyperparameters about precision that are the trial's own, as `name: value`."""
    amp = values.get("amp")
    own = {**values, "amp": None if isinstance(amp, Mapping) else amp}
    named = flat({_HYPERPARAMETERS: own})
    return [
        f"{name}: {value}"
        for name, value in named.items()
        if _ABOUT_PRECISION.search(name.rpartition(".")[2]) and value is not None
    ]


def _within(value: object, path: str, key: str) -> Iterator[Problem]:
    """The problems of a value and of all that is in it; `key` is the last one of its path."""
    text = _wrong(value, path, key)
    if text is not None:
        yield Problem(path, text)
    elif isinstance(value, Mapping) and path != _AMP:
        for name, inner in value.items():
            yield from _within(inner, f"{path}.{name}", str(name))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _within(inner, f"{path}[{index}]", key)


def _wrong(value: object, path: str, key: str) -> str | None:
    """What is wrong with a value in its place; None if it is not one of our settings."""
    section, _, ours = key.partition(".")
    if ours and section in ("amp", "training", _HYPERPARAMETERS):
        return f"got a key with a dot, which nothing reads; write {section}: {{{ours}: ...}}"
    if isinstance(value, str):
        precision = _precision_in(value, path, key)
        if precision is not None:
            return _belongs(value, f"{{amp: {{precision: {precision}}}}}")
    if isinstance(value, Mapping) and _plain_name(key) in _NAMES_OF_AMP and path != _AMP:
        keys = {_plain_name(str(name)) for name in value}
        if keys & _KEYS_OF_AMP:
            return _belongs(value, "{amp: {precision: ...}}, one section of keys and values")
    if path == "optimizations.mixed_precision" and value not in (None, "O0"):
        return f"got {value!r}, which has no effect in Determined 0.38.1; use {_AMP}.precision"
    if _is_length(key, value) and not path.startswith(("searcher.", f"{_TRAINING}.")):
        return _belongs(value, f"{{training: {{{key}: {value}}}}}")
    return None


def _precision_in(text: str, path: str, key: str) -> str | None:
    """The value of the `Precision` that a text in this place asks for; None if it asks for none."""
    name = text.strip().lower()
    if _ABOUT_PRECISION.search(key):
        if name in (Precision.FP32.value, Precision.TF32.value):
            return name
        autocast = _AUTOCAST.search(text)
    else:
        is_own = path.startswith(_HYPERPARAMETERS)
        autocast = _AUTOCAST.fullmatch(name) if is_own else None
    return None if autocast is None else f"amp_{autocast[1].lower()}"


def _is_length(key: str, value: object) -> bool:
    if key not in _LENGTHS:
        return False
    if isinstance(value, Mapping):
        return bool(value) and set(value) <= set(UNITS)
    return isinstance(value, str) and _LENGTH_IN_WORDS.fullmatch(value) is not None


def _belongs(value: object, line: str) -> str:
    return f"got {shown(value)}, which nothing reads here; write {_HYPERPARAMETERS}: {line}"


def _unknown(key: str) -> str:
    near = difflib.get_close_matches(key.lower(), _TOP_LEVEL, n=1, cutoff=0.7)
    if near:
        return f"unknown key; did you mean {near[0]}?"
    return (
        "unknown key: Determined 0.38.1 has none of that name at the top level; allowed there: "
        f"its own; a trial's own values belong in {_HYPERPARAMETERS} or data"
    )


def _plain_name(key: str) -> str:
    return re.sub(r"[\W_]", "", key).lower()
