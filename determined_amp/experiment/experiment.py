"""Parses any trial's experiment YAML, in either form, into a typed object; names every mistake.

Determined 0.38.1 reads some keys only for its legacy entrypoints. They have no effect for a script
that calls `pytorch.Trainer`, as ours does. So our form of a YAML has these settings under
`hyperparameters`, where `train` reads them, and a key without effect is an error. A YAML without
`hyperparameters.training` is in Determined's own form, and `train` reads Determined's keys.

A trial class may have attributes `Hparams` and `Data`, frozen dataclasses of `setting`s. With them,
the sections `hyperparameters` and `data` are checked strictly before anything starts. Without them,
the sections may hold anything.

All that needs no trial is checked first, so that a mistake is named at once: the trial imports
torch, which takes seconds.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import enum
import importlib.util
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from determined_amp.amp.errors import ConfigError, Problem
from determined_amp.amp.settings import AmpSettings, setting
from determined_amp.experiment.dotted import flat, value_at
from determined_amp.experiment.entrypoint import is_class, trial_in
from determined_amp.experiment.fields import is_settings_class, plain, read
from determined_amp.experiment.misplaced import misplaced, of_the_trial
from determined_amp.experiment.training import (
    DETERMINEDS_KEYS,
    ONE_BATCH,
    Length,
    Plan,
    TrainingSettings,
    for_test,
    has_our_form,
    in_our_form,
    is_test,
    keys_without_effect,
    read_plan,
)
from determined_amp.experiment.yaml_text import load_yaml, read_text

if TYPE_CHECKING:
    from determined import pytorch

    from determined_amp.experiment.factory import Factory

_NUMBERS = ("int", "double", "log")
_RANGES = (*_NUMBERS, "categorical")

_SCALE = "amp.init_scale"

# The precision of a run without an `amp` section.
NO_AMP_SECTION = "no amp section: the trial's own precision, as it is; no guard, no loss scale"

# The hyperparameter that sets the seed of a trial, in place of one that the platform draws.
TRIAL_SEED = "trial_seed"


class CheckpointPolicy(enum.Enum):
    """After which validations Determined saves a checkpoint."""

    BEST = "best"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True)
class Searcher:
    """The search method and the metric that ranks trials and checkpoints.

    Without a metric there is no best checkpoint.
    """

    metric: str | None = setting(None)
    smaller_is_better: bool = setting(True)
    name: str = setting("single")


@dataclass(frozen=True)
class Reproducibility:
    """`experiment_seed` seeds a local run; a cluster derives the seed of each trial from it."""

    experiment_seed: int = setting(0, at_least=0, at_most=2**32 - 1)


@dataclass(frozen=True)
class Resources:
    """`slots_per_trial` is the number of processes that the experiment requests on a cluster."""

    slots_per_trial: int = setting(1, at_least=0)


@dataclass(frozen=True)
class Profiling:
    """`enabled` starts Determined's system profiler on a cluster."""

    enabled: bool = setting(False)


@dataclass(frozen=True)
class Platform:
    """Determined's own sections of an experiment configuration, as far as we read them."""

    searcher: Searcher = setting(Searcher())
    reproducibility: Reproducibility = setting(Reproducibility())
    name: str = setting("unnamed")
    resources: Resources = setting(Resources())
    profiling: Profiling = setting(Profiling())
    checkpoint_policy: CheckpointPolicy = setting(CheckpointPolicy.BEST)


# Required in the YAML of a trial with `Hparams`: (name, allowed values).
_REQUIRED = (
    ("searcher.metric", "a string"),
    ("searcher.smaller_is_better", "true or false"),
    ("reproducibility.experiment_seed", "an integer >= 0"),
)


@dataclass(frozen=True)
class Experiment:
    """An experiment configuration, parsed."""

    # The configuration before parsing, with trial and seed filled in.
    config: Mapping[str, Any] = dataclasses.field(repr=False)
    trial: str  # import path of the factory, `module:name`
    # The trial class, or a function that makes the trial; None before it is imported.
    factory: Factory | None = dataclasses.field(repr=False)
    platform: Platform  # Determined's own sections
    # The hyperparameters that the trial gets; `{type: const, val: x}` becomes x.
    hyperparameters: Mapping[str, Any] = dataclasses.field(repr=False)
    plan: Plan  # how the trial is trained
    amp: AmpSettings | None  # the `amp` section of the hyperparameters; None if there is none
    # Number of samples in a batch, over all slots; None if the YAML has none.
    global_batch_size: int | None
    # The `data` section: an instance of the trial's class `Data` if it has one, else a dict.
    data: Any
    hparams: Any  # an instance of the trial's class `Hparams`; None if it has none

    @property
    def name(self) -> str:
        return self.platform.name

    @property
    def seed(self) -> int:
        """Seed of a local run."""
        return self.platform.reproducibility.experiment_seed

    @property
    def precision(self) -> str:
        """The precision of a run, in words for its log and its closing table."""
        return NO_AMP_SECTION if self.amp is None else self.amp.precision.value

    def described_precision(self, precision: str) -> str:
        """The first line of the log of a run that trains in this precision."""
        own = of_the_trial(self.hyperparameters)
        first = precision if precision == NO_AMP_SECTION else f"precision: {precision}"
        return f"{first} ({'; '.join(own)}: the trial's own)" if own else first

    @property
    def training(self) -> TrainingSettings:
        return self.plan.training

    def key_of(self, name: str) -> str:
        """The key of the YAML that holds a setting of the training, such as `max_length`."""
        if has_our_form(self.hyperparameters):
            return f"hyperparameters.training.{name}"
        return DETERMINEDS_KEYS[name]

    @property
    def aggregation_frequency(self) -> int:
        return self.plan.aggregation_frequency

    @property
    def max_length(self) -> Length:
        """Length of the whole run.

        Raises:
            ConfigError: if the configuration has none.
        """
        if self.training.max_length is None:
            raise ConfigError(
                self.name,
                [
                    "has no length; allowed: hyperparameters.training.max_length: {batches: N}, or "
                    "--config searcher.max_length.batches=N"
                ],
            )
        return self.training.max_length

    def resolved(self) -> dict[str, Any]:
        """An equivalent configuration in our form, with every default filled in."""
        if self.hparams is None:
            own = {
                **self.hyperparameters,
                "training": plain(self.training),
                "aggregation_frequency": self.aggregation_frequency,
            }
        else:
            own = plain(self.hparams)
        if self.amp is not None:
            own["amp"] = plain(self.amp)
        changes = {
            **plain(self.platform),
            "perform_initial_validation": self.plan.initial_validation,
            "optimizations": {
                "average_aggregated_gradients": self.plan.average_aggregated_gradients
            },
            "data": plain(self.data),
        }
        return {**_merged(in_our_form(self.config), changes), "hyperparameters": own}

    @property
    def settings(self) -> dict[str, Any]:
        """The whole configuration in our form, defaults included, by dotted name."""
        resolved = self.resolved()
        hyperparameters = {
            "trial": resolved.get("entrypoint"),
            "global_batch_size": None,
            **resolved["hyperparameters"],
            "aggregation_frequency": self.aggregation_frequency,
            "training": plain(self.training),
        }
        sections = {"data": resolved["data"], "hyperparameters": hyperparameters}
        return flat({**plain(self.platform), **sections})

    def make(self, context: pytorch.PyTorchTrialContext) -> pytorch.PyTorchTrial:
        """Make the trial in a context of this experiment."""
        from determined_amp.experiment.factory import make_trial  # noqa: PLC0415  # torch

        assert self.factory is not None  # `parse` has imported it
        return make_trial(self.factory, context)


def _merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `changes`; a section in `changes` replaces only the keys it has."""
    merged = copy.deepcopy(dict(config))
    for key, value in changes.items():
        merged[key] = {**(merged.get(key) or {}), **value} if isinstance(value, Mapping) else value
    return merged


def read_yaml(path: str) -> Mapping[str, Any]:
    """The experiment configuration in a YAML file.

    Raises:
        ConfigError: if the file is missing, not YAML, or not a mapping.
    """
    config = load_yaml(read_text(path), path)
    if not isinstance(config, Mapping):
        raise ConfigError(path, ["is not an experiment configuration: its top level has no keys"])
    return config


def parse(
    config: Mapping[str, Any],
    source: str,
    *,
    trial: str | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
) -> Experiment:
    """Check a whole configuration and convert it to typed settings.

    Args:
        config: The experiment configuration.
        source: Where it comes from, for the error message.
        trial: `module:Class` or `module:function`; by default the `--trial` of an entrypoint, else
            `hyperparameters.trial`, else an entrypoint of that form.
        hyperparameters: The hyperparameters that the searcher chose for this trial; by default
            those of `config`. An initial loss scale that was drawn from a range is rounded to the
            nearest power of two: scaling by one is exact.

    Raises:
        ConfigError: naming every mistake. Those that only the trial's own classes show are named
            when there are no others.
    """
    experiment, key = _check(config, source, trial, hyperparameters)
    return _with_trial(experiment, key, source)


def check(
    config: Mapping[str, Any],
    source: str,
    *,
    trial: str | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
) -> Experiment:
    """Check all of a configuration that can be checked without the trial, and without torch.

    A command calls it before it imports torch, so that a mistake is named at once. `parse`, which
    has the same arguments, checks the rest.

    Returns:
        The experiment, whose trial cannot be made.

    Raises:
        ConfigError: naming every mistake.
    """
    return _check(config, source, trial, hyperparameters)[0]


def _check(
    config: Mapping[str, Any],
    source: str,
    trial: str | None,
    hyperparameters: Mapping[str, Any] | None,
) -> tuple[Experiment, str]:
    """The experiment as far as it is known without its trial, and the key that names the trial."""
    problems: list[str] = []
    config, values = _with_values(config, hyperparameters, problems)
    named = None if problems else _named_trial(config, values, trial, problems)
    platform = read(Platform, config, "", problems, strict=False)
    known = _read_known(values, problems)
    problems.extend(_misspelt(config))
    if has_our_form(values):
        problems.extend(keys_without_effect(config))
    plan = None if known is None else read_plan(config, values, problems)
    if platform is not None and known is not None:
        slots = platform.resources.slots_per_trial
        problems.extend(indivisible_batch(known.global_batch_size, slots))
    elsewhere = misplaced(config, values)
    named_before = {problem.key for problem in elsewhere}
    problems = [*elsewhere, *(p for p in problems if getattr(p, "key", "") not in named_before)]
    if problems or named is None or platform is None or known is None or plan is None:
        raise ConfigError(source, problems)
    path, key = named
    experiment = Experiment(
        config=config,
        trial=path,
        factory=None,
        platform=platform,
        hyperparameters=values,
        plan=plan,
        amp=known.amp,
        global_batch_size=known.global_batch_size,
        data={} if config.get("data") is None else config["data"],
        hparams=None,
    )
    return experiment, key


def _with_values(
    config: Mapping[str, Any], chosen: Mapping[str, Any] | None, problems: list[str]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Configuration and hyperparameters of one trial, which the searcher may have chosen."""
    values = config.get("hyperparameters", {}) if chosen is None else chosen
    if not isinstance(values, Mapping):
        text = f"got {values!r}; allowed: a mapping of keys to values"
        problems.append(Problem("hyperparameters", text))
        values = {}
    if has_our_form(values) and is_test(config):
        config, values = for_test(config), {**values, "training": ONE_BATCH}
    values = constants(values)
    if chosen is not None:
        values = with_power_of_two(values, config)
        config = {**config, "hyperparameters": values}
    return _with_trial_seed(config, values, problems)


def with_power_of_two(values: Mapping[str, Any], search: Mapping[str, Any]) -> Mapping[str, Any]:
    """The hyperparameters with `amp.init_scale` rounded, if `search` has a range for it."""
    space, scale = value_at(search, f"hyperparameters.{_SCALE}"), value_at(values, _SCALE)
    is_range = isinstance(space, Mapping) and space.get("type") in _NUMBERS
    if not is_range or not isinstance(scale, (int, float)) or scale <= 0:
        return values
    return {**values, "amp": {**values["amp"], "init_scale": 2.0 ** round(math.log2(scale))}}


def _with_trial_seed(
    config: Mapping[str, Any], values: Mapping[str, Any], problems: list[str]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Configuration and hyperparameters with `trial_seed` moved to the seed of the experiment.

    The platform draws a seed for each trial of a search. This hyperparameter sets it instead, so
    that trials can share one. The trial itself does not get it.
    """
    if TRIAL_SEED not in values:
        return config, values
    others = {key: value for key, value in values.items() if key != TRIAL_SEED}
    seed = values[TRIAL_SEED]
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        text = f"got {seed!r}; allowed: an integer >= 0 and below 2^32"
        problems.append(Problem(f"hyperparameters.{TRIAL_SEED}", text))
        return config, others
    given = config.get("reproducibility") or {}
    if not isinstance(given, Mapping):  # which is a mistake of its own
        return config, others
    reproducibility = {**given, "experiment_seed": seed}
    changed = {**config, "hyperparameters": others, "reproducibility": reproducibility}
    return changed, others


def constants(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters as a trial on a cluster gets them: `{type: const, val: x}` becomes x."""
    values: dict[str, Any] = {}
    for key, value in hyperparameters.items():
        if isinstance(value, Mapping) and value.get("type") == "const":
            values[key] = copy.deepcopy(value.get("val"))
        elif isinstance(value, Mapping):
            values[key] = constants(value)
        else:
            values[key] = copy.deepcopy(value)
    return values


def ranges(values: Mapping[str, Any], path: str = "hyperparameters") -> Iterator[str]:
    """The dotted names of the hyperparameters that are search ranges."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            if value.get("type") in _RANGES:
                yield f"{path}.{key}"
            else:
                yield from ranges(value, f"{path}.{key}")


def indivisible_batch(global_batch_size: int | None, slots: int) -> Iterator[Problem]:
    """A problem if the slots cannot share the batch evenly; Determined would shrink the batch."""
    if global_batch_size is not None and global_batch_size % max(slots, 1):
        yield Problem(
            "hyperparameters.global_batch_size",
            f"got {global_batch_size}, which does not divide among {slots} slots; allowed: a "
            f"multiple of {slots}",
        )


def _named_trial(
    config: Mapping[str, Any],
    hyperparameters: Mapping[str, Any],
    option: str | None,
    problems: list[str],
) -> tuple[str, str] | None:
    """The import path of the trial, and the key that has it."""
    entrypoint, name = config.get("entrypoint"), hyperparameters.get("trial")
    if option is not None:
        return option, "--trial"
    if named := trial_in(entrypoint):
        return named, "entrypoint"
    if isinstance(name, str):
        return name, "hyperparameters.trial"
    if is_class(entrypoint):
        return entrypoint, "entrypoint"
    text = (
        f"{'missing' if name is None else f'got {name!r}'}; allowed: module:Class of a "
        "PyTorchTrial there, as the entrypoint, or as --trial module:Class"
    )
    problems.append(Problem("hyperparameters.trial", text))
    return None


def _misspelt(config: Mapping[str, Any]) -> Iterator[Problem]:
    """A problem for each key that looks like a misspelt one, in the sections that we read in part.

    Such a key would have no effect. Other unknown keys are allowed there.
    """
    read_in_part = vars(Platform()).items()
    known = {k: frozenset(vars(v)) for k, v in read_in_part if dataclasses.is_dataclass(v)}
    for name, keys in known.items():
        section = config.get(name)
        for key in section.keys() - keys if isinstance(section, Mapping) else ():
            for near in difflib.get_close_matches(str(key), keys, n=1, cutoff=0.8):
                yield Problem(f"{name}.{key}", f"unknown key; did you mean {near}?")


@dataclass(frozen=True)
class _Known:
    """The hyperparameters that mean the same in every trial."""

    global_batch_size: int | None = setting(None, at_least=1)
    amp: AmpSettings | None = setting(None)


def _read_known(hyperparameters: Mapping[str, Any], problems: list[str]) -> _Known | None:
    before = len(problems)
    for path in ranges(hyperparameters):
        text = f"got a range to search; allowed: one value, for instance by --config {path}=VALUE"
        problems.append(Problem(path, text))
    if len(problems) > before:
        return None
    amp = hyperparameters.get("amp")
    settings = None
    if isinstance(amp, Mapping):  # any other `amp` is the trial's own
        settings = read(AmpSettings, amp, "hyperparameters.amp", problems)
    size = {"global_batch_size": hyperparameters.get("global_batch_size")}
    known = read(_Known, size, "hyperparameters", problems, strict=False)
    return None if known is None else dataclasses.replace(known, amp=settings)


def _with_trial(experiment: Experiment, key: str, source: str) -> Experiment:
    """Import the trial, and check the sections that only it knows."""
    from determined_amp.experiment.factory import load_factory  # noqa: PLC0415  # torch

    try:
        factory = load_factory(experiment.trial)
    except ValueError as error:
        text = (
            f"{error}{_searched(experiment.trial, source)}; allowed: module:Class of a PyTorchTrial"
        )
        raise ConfigError(source, [Problem(key, text)]) from error
    problems: list[str] = []
    values, data, hparams = dict(experiment.hyperparameters), experiment.data, None
    strict, data_class = _own_class(factory, "Hparams"), _own_class(factory, "Data")
    if strict is not None or isinstance(values.get("trial"), str):
        values["trial"] = experiment.trial
    if strict is not None:
        hparams = read(strict, values, "hyperparameters", problems)
        for name, allowed in _REQUIRED:
            if value_at(experiment.config, name) is None:
                problems.append(Problem(name, f"missing; allowed: {allowed}"))
    if data_class is not None:
        data = read(data_class, data, "data", problems)
    if problems:
        raise ConfigError(source, problems)
    # With its trial and its seed the configuration needs no further arguments.
    changes: dict[str, Any] = {"reproducibility": {"experiment_seed": experiment.seed}}
    if isinstance(values.get("trial"), str):
        changes["hyperparameters"] = {"trial": experiment.trial}
    else:
        changes["entrypoint"] = experiment.trial
    return dataclasses.replace(
        experiment,
        config=_merged(experiment.config, changes),
        factory=factory,
        hyperparameters=values,
        data=data,
        hparams=hparams,
    )


def _searched(trial: str, source: str) -> str:
    """Where the module of a trial was looked for, and where it is; empty if it was found."""
    package = trial.partition(":")[0].partition(".")[0]
    if not package or importlib.util.find_spec(package) is not None:
        return ""
    searched = f"; searched: {os.getcwd()}"
    for folder in Path(source).absolute().parents:
        if (folder / f"{package}.py").is_file() or (folder / package).is_dir():
            return f"{searched}; it is in {folder}: type the command there"
    return searched


def _own_class(factory: Factory, name: str) -> type[Any] | None:
    """The attribute `name` of a trial class if it is a settings class; else None."""
    held = getattr(factory, name, None) if isinstance(factory, type) else None
    return held if is_settings_class(held) else None
