"""Finds settings of ours where nothing reads them, and keys that Determined refuses.

Determined's schema closes most sections of an experiment configuration: an unknown key
there is a mistake. `hyperparameters` and `data` are the user's. A section `amp` in a
wrong place would silently leave a run in float32. So a word that only this library
knows, such as `amp_fp16`, is a mistake in a hyperparameter outside the section `amp`. A
section `amp` with our keys in another place is a mistake, too. A trial with AMP of its
own may have hyperparameters such as `amp: true` and `precision: 16`. These are no
mistakes, and the first line of the log names them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from determined_amp.amp.errors import Problem, near_name
from determined_amp.amp.fields import shown
from determined_amp.amp.plain_data import Config
from determined_amp.amp.settings import AmpSettings
from determined_amp.experiment.dotted import leaves, value_at
from determined_amp.experiment.training import LENGTH_UNITS, Length, TrainingSettings

# The keys of the top level and of its sections, in `schemas/expconf/v0/` of Determined
# 0.38.1; sections that neither train nor measure are left to the master.
_TOP_LEVEL = """
bind_mounts checkpoint_policy checkpoint_storage data data_layer debug description
entrypoint environment hyperparameters integrations internal labels log_policies
max_restarts min_checkpoint_period min_validation_period name optimizations pbs
perform_initial_validation preemption_timeout profiling project records_per_epoch
reproducibility resources retention_policy scheduling_unit searcher security slurm
tensorboard_storage workspace
"""
_OTHERWISE = (
    "; Determined 0.38.1 has none of that name at the top level; allowed there: its "
    "own; a trial's own values belong in hyperparameters or data"
)
_SECTIONS = {
    "checkpoint_storage": """
        access_key account_url bucket checkpoint_path connection_string container
        container_path credential endpoint_url host_path prefix propagation
        save_experiment_best save_trial_best save_trial_latest secret_key storage_path
        tensorboard_path type user""",
    "environment": """
        add_capabilities drop_capabilities environment_variables force_pull_image image
        pod_spec ports proxy_ports registry_auth""",
    "optimizations": """
        aggregation_frequency auto_tune_tensor_fusion average_aggregated_gradients
        average_training_metrics grad_updates_size_file gradient_compression
        mixed_precision tensor_fusion_cycle_time tensor_fusion_threshold""",
    "profiling": "begin_on_batch enabled end_after_batch sync_timings",
    "reproducibility": "experiment_seed",
    "resources": """
        agent_label devices is_single_node max_slots native_parallel priority
        resource_pool shm_size slots slots_per_trial weight""",
}

# The keys that every searcher has, and the further keys of each searcher by its name.
_OF_EVERY_SEARCHER = """
name metric smaller_is_better max_length source_trial_id source_checkpoint_uuid
"""
_SEARCHERS = {
    "single": "",
    "grid": "max_concurrent_trials",
    "random": "max_concurrent_trials max_trials",
    "adaptive_asha": """
        bracket_rungs divisor max_concurrent_trials max_rungs max_time max_trials mode
        stop_once time_metric""",
    "async_halving": """
        divisor max_concurrent_trials max_time max_trials num_rungs stop_once
        time_metric""",
}

_AMP_KEYS = frozenset(field.name for field in dataclasses.fields(AmpSettings))
_LENGTHS = frozenset(
    field.name
    for field in dataclasses.fields(TrainingSettings)
    if field.name.endswith(("_length", "_period"))
)

# Keys that no other software has.
_KEYS_OF_OURS_ALONE = frozenset(
    ("eval_precision", "fp32_modules", "max_consecutive_skips", "max_skip_ratio")
)

# The name of a precision that no other software uses, alone or in a list.
_OURS_ALONE = re.compile(r"(?<![^'])amp[\W_]*(fp16|bf16)(?![^'])")

# Words in the name of a hyperparameter that is about precision.
_ABOUT_PRECISION = re.compile(
    r"precision|autocast|float16|(?<![a-z])((use)?amp|fp16|bf16|dtype)(?![a-z])",
    re.IGNORECASE,
)


def misplaced(config: Config) -> Iterator[Problem]:
    """A problem for each setting of ours in a wrong place, and for each key that
    Determined refuses.

    Args:
        config: An experiment configuration, with the hyperparameters of one trial.
    """
    yield from _unknown("", config, _TOP_LEVEL.split(), _OTHERWISE)
    for name, keys in _SECTIONS.items():
        yield from _unknown(name, config.get(name), keys.split())
    yield from _of_the_searcher(config.get("searcher"))
    mode = value_at(config, "optimizations.mixed_precision")
    if mode not in (None, "O0"):
        yield _belongs("optimizations.mixed_precision", mode, "precision")
    for path, value in leaves(config["hyperparameters"]):
        is_read = path[0] == "amp" and len(path) > 1
        if value is not None and not is_read:
            yield from _of_ours(path, value)
    data = config.get("data")
    for path, value in leaves(data) if isinstance(data, Mapping) else ():
        yield from _of_a_section(["data", *path], value)


def of_the_trial(values: Config) -> list[str]:
    """The trial's own hyperparameters about precision, as `name: value`."""
    return [
        f"{'.'.join(['hyperparameters', *path])}: {value}"
        for path, value in leaves(values)
        if _ABOUT_PRECISION.search(path[-1])
        and (path[0] != "amp" or len(path) == 1)
        and value is not None
    ]


def _unknown(
    section: str, found: Any, allowed: Collection[str], otherwise: str = ""
) -> Iterator[Problem]:
    """A problem for each key of a section that is not allowed and has a value.

    The problem suggests the nearest key. If no key is near, it has the text
    `otherwise`, or all allowed keys.
    """
    if not isinstance(found, Mapping):
        return
    for key, value in found.items():
        if value is None or key in allowed:
            continue
        place = f"{section}.{key}" if section else key
        if key.lower() == "amp" or key in _AMP_KEYS | _LENGTHS:
            yield _belongs(place, value, key)
        else:
            listed = otherwise or f"; allowed: {', '.join(allowed)}"
            near = near_name(key.lower(), allowed, listed)
            yield Problem(place, f"unknown key{near}")


def _of_the_searcher(section: Any) -> Iterator[Problem]:
    if not isinstance(section, Mapping):
        return
    name = str(section.get("name") or "single")
    if name in _SEARCHERS:
        keys = f"{_OF_EVERY_SEARCHER} {_SEARCHERS[name]}".split()
        yield from _unknown("searcher", section, keys)
    else:
        near = near_name(
            name.lower(), _SEARCHERS, f"; allowed: {', '.join(_SEARCHERS)}"
        )
        yield Problem("searcher.name", f"got {name!r}{near}")


def _of_ours(path: Sequence[str], value: object) -> Iterator[Problem]:
    """The problem of a hyperparameter that is a setting of ours in a wrong place."""
    place, text = ".".join(["hyperparameters", *path]), str(value)
    section, key = ["", *path][-2:]
    word = _OURS_ALONE.search(text.lower())
    of_a_section = [*_of_a_section(["hyperparameters", *path], value)]
    if of_a_section:
        yield from of_a_section
    elif word is not None:
        yield _belongs(place, value, "precision", f"amp_{word[1]}")
    elif key in _KEYS_OF_OURS_ALONE:
        yield _belongs(place, value, key)
    elif path[0] != "training" and section in _LENGTHS and key in LENGTH_UNITS:
        yield _belongs(place.removesuffix(f".{key}"), {key: value}, section)
    elif path[0] != "training" and key in _LENGTHS and Length.section_of(text):
        yield _belongs(place, value, key, text)


def _of_a_section(path: Sequence[str], value: object) -> Iterator[Problem]:
    """The problem of a key in a section `amp` that nothing reads."""
    *outer, section, key = path
    if section.lower() == "amp" and key in _AMP_KEYS:
        yield _belongs(".".join([*outer, section]), {key: value}, "amp")


def _belongs(place: str, value: object, key: str, shown_there: str = "...") -> Problem:
    """The problem of a value that belongs to a key of `amp` or `training`."""
    section = "training" if key in _LENGTHS else "amp"
    named = "precision" if key.lower() == "amp" else key
    line = f"{{{section}: {{{named}: {shown_there}}}}}"
    given = f"got {shown(value)}, which nothing reads here"
    return Problem(place, f"{given}; write hyperparameters: {line}")
