"""Finds settings of ours in places where nothing reads them, and keys that Determined
has not.

A section `amp` that nothing reads would leave a run in float32 without a sign of it. So
text that is a precision of ours, or one of our keys in a section `amp`, is a mistake
anywhere but in its own place. A trial with AMP of its own may have hyperparameters such
as `amp: true` and `precision: 16`: those are its own, and the first line of the log
names them.
"""

from __future__ import annotations

import dataclasses
import difflib
import re

from determined_amp.amp.errors import Problem
from determined_amp.amp.plain_data import Config
from determined_amp.amp.settings import AmpSettings, Precision
from determined_amp.experiment.dotted import flat, value_at
from determined_amp.experiment.fields import shown
from determined_amp.experiment.training import UNITS, Length, TrainingSettings

# Top-level keys of an experiment configuration (`schemas/expconf/v0/experiment.json`).
_OF_DETERMINED = """
bind_mounts checkpoint_policy checkpoint_storage data data_layer debug description
entrypoint environment hyperparameters integrations internal labels log_policies
max_restarts min_checkpoint_period min_validation_period name optimizations pbs
perform_initial_validation preemption_timeout profiling project records_per_epoch
reproducibility resources retention_policy scheduling_unit searcher security slurm
tensorboard_storage workspace
"""
_TOP_LEVEL = frozenset(_OF_DETERMINED.split())

# Where the section `amp` and lengths are read.
_AMP = "hyperparameters.amp."
_LENGTHS_ARE_READ = ("hyperparameters.training.", "searcher.")

# What a user may call the section `amp`, and its keys, without case and underscores.
_NAMES_OF_AMP = frozenset(
    ["amp", "ampsettings", "automaticmixedprecision", "mixedprecision"]
)
_KEYS_OF_AMP = frozenset(
    f.name.replace("_", "") for f in dataclasses.fields(AmpSettings)
)

_LENGTHS = frozenset(
    f.name
    for f in dataclasses.fields(TrainingSettings)
    if f.name.endswith(("_length", "_period"))
)

_SECTION = "a section of keys and values"

# A precision that no other software calls so, alone or in a list; and any text that
# names one.
_AUTOCAST = r"amp[\W_]*(?:fp16|bf16)"
_ALONE = re.compile(rf"(?<![^']){_AUTOCAST}(?![^'])")
_NAMED = re.compile(rf"{_AUTOCAST}|(?<![^'])(?:fp32|tf32)(?![^'])")

# Words in the name of a hyperparameter that is about precision.
_ABOUT_PRECISION = re.compile(
    r"precision|autocast|float16|(?<![a-z])((use)?amp|fp16|bf16|dtype)(?![a-z])",
    re.IGNORECASE,
)


def misplaced(config: Config, values: Config) -> list[Problem]:
    """A problem for each setting of ours that is in a wrong place, and each unknown
    top-level key.

    Args:
        config: An experiment configuration.
        values: The hyperparameters of the trial, which count instead of those of
            `config`.
    """
    sections = {**config, "hyperparameters": values}
    found = []
    for path, value in flat(sections).items():
        # A key with a dot in it only looks as if it were in its place.
        is_read = path.startswith(_AMP) and value_at(sections, path) is not None
        if value is not None and not is_read:
            found.append(_misplaced(path, value))
    problems = dict.fromkeys(problem for problem in found if problem is not None)
    named = {problem.key.partition(".")[0] for problem in problems}
    unknown = [str(key) for key in config if key not in _TOP_LEVEL | named]
    return [*problems, *(Problem(key, _unknown(key)) for key in unknown)]


def of_the_trial(values: Config) -> list[str]:
    """The hyperparameters about precision that are the trial's own, as `name:
    value`.
    """
    return [
        f"{name}: {value}"
        for name, value in flat({"hyperparameters": values}).items()
        if _ABOUT_PRECISION.search(name.rpartition(".")[2])
        and not name.startswith(_AMP)
        and value is not None
    ]


def _misplaced(path: str, value: object) -> Problem | None:
    """The problem of a value that is not in the section `amp`; None if it is none of
    ours.
    """
    section, _, key = path.rpartition(".")
    name, text = section.rpartition(".")[2], str(value)
    if _plain_name(name) in _NAMES_OF_AMP and _plain_name(key) in _KEYS_OF_AMP:
        return _belongs(section, _SECTION, "{amp: {precision: ...}}")
    precision = _precision_in(path, key, text.lower())
    if path == "optimizations.mixed_precision" and text != "O0":
        precision = precision or "..."
    if precision is not None:
        return _belongs(path, shown(value), f"{{amp: {{precision: {precision}}}}}")
    if path.startswith(_LENGTHS_ARE_READ):
        return None
    if name in _LENGTHS and key in UNITS:
        return _belongs(section, _SECTION, f"{{training: {{{name}: ...}}}}")
    if key in _LENGTHS and Length.section_of(text) is not None:
        return _belongs(path, shown(value), f"{{training: {{{key}: {text}}}}}")
    return None


def _precision_in(path: str, key: str, text: str) -> str | None:
    """The value of the `Precision` that a text in this place asks for; None if it asks
    for none.
    """
    if _ABOUT_PRECISION.search(key):
        found = _NAMED.search(text)
    else:
        found = _ALONE.search(text) if path.startswith("hyperparameters.") else None
    by_name = {_plain_name(precision.value): precision.value for precision in Precision}
    return None if found is None else by_name[_plain_name(found[0])]


def _belongs(path: str, what: str, line: str) -> Problem:
    text = f"got {what}, which nothing reads here; write hyperparameters: {line}"
    return Problem(path, text)


def _unknown(key: str) -> str:
    near = difflib.get_close_matches(key.lower(), _TOP_LEVEL, n=1, cutoff=0.7)
    if near:
        return f"unknown key; did you mean {near[0]}?"
    return (
        "unknown key: Determined 0.38.1 has none of that name at the top level; "
        "allowed there: its own; a trial's own values belong in hyperparameters or data"
    )


def _plain_name(key: str) -> str:
    return re.sub(r"[\W_]", "", key).lower()
