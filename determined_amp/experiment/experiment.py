"""Parses any trial's experiment YAML, in either form, into a typed object; names every mistake.

Determined 0.38.1 reads some keys only for its legacy entrypoints. They have no effect for a script
that calls `pytorch.Trainer`, as ours does. So our form of a YAML has these settings under
`hyperparameters`, where `train` reads them, and a key without effect is an error. A YAML without
`hyperparameters.training` is in Determined's own form, and `train` reads Determined's keys.

A trial class may have attributes `Hparams` and `Data`, frozen dataclasses of `setting`s. With them,
the sections `hyperparameters` and `data` are checked strictly before anything starts. Without them,
the sections may hold anything.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import enum
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from determined import pytorch

from determined_amp.experiment.amp_settings import AmpSettings, without_unused_scaler
from determined_amp.experiment.dotted import value_at
from determined_amp.experiment.factory import Factory, load_factory, make_trial
from determined_amp.experiment.plan import (
    ONE_BATCH,
    Plan,
    for_test,
    has_our_form,
    in_determineds_form,
    is_test,
    keys_without_effect,
    read_plan,
)
from determined_amp.experiment.settings import ConfigError, is_settings_class, plain, read, setting
from determined_amp.experiment.training import Length, TrainingSettings
from determined_amp.experiment.yaml_text import load_yaml, read_text

H_co = TypeVar("H_co", covariant=True)
T = TypeVar("T")

# Top-level keys of an experiment configuration (`schemas/expconf/v0/experiment.json`).
_SECTIONS = frozenset(
    [
        *("bind_mounts", "checkpoint_policy", "checkpoint_storage", "data", "debug", "description"),
        *("entrypoint", "environment", "hyperparameters", "integrations", "internal", "labels"),
        *("log_policies", "max_restarts", "min_checkpoint_period", "min_validation_period", "name"),
        *("optimizations", "pachyderm", "pbs", "perform_initial_validation", "preemption_timeout"),
        *("profiling", "project", "records_per_epoch", "reproducibility", "resources"),
        *("retention_policy", "scheduling_unit", "searcher", "security", "slurm", "unmanaged"),
        *("tensorboard_storage", "workspace"),
    ]
)

# Matches an entrypoint that Determined itself imports.
_LEGACY_ENTRYPOINT = re.compile(r"[\w.]+:[\w.]+")
_NUMBERS = ("int", "double", "log")
_RANGES = (*_NUMBERS, "categorical")

_SCALE = "amp.init_scale"

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

    def best_first(
        self,
        items: Iterable[T],
        value: Callable[[T], float | None],
        tie: Callable[[T], float],
    ) -> list[T]:
        """The items with a finite metric value, best first; of equals the smallest `tie`."""
        valued = [(number, item) for item in items if (number := value(item)) is not None]
        finite = [(number, item) for number, item in valued if math.isfinite(number)]
        sign = 1 if self.smaller_is_better else -1
        ranked = sorted(finite, key=lambda pair: (sign * pair[0], tie(pair[1])))
        return [item for _, item in ranked]


def searcher_of(config: Mapping[str, Any]) -> Searcher:
    """The `searcher` section of a search configuration that has already been checked."""
    searcher = read(Searcher, config["searcher"], "searcher", [], strict=False)
    assert searcher is not None
    return searcher


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


_READ_IN_PART: Mapping[str, type] = {
    "searcher": Searcher,
    "reproducibility": Reproducibility,
    "resources": Resources,
    "profiling": Profiling,
}

# Required in the YAML of a trial with `Hparams`: (name, allowed values).
_REQUIRED = (
    ("searcher.metric", "a string"),
    ("searcher.smaller_is_better", "true or false"),
    ("reproducibility.experiment_seed", "an integer >= 0"),
)


@dataclass(frozen=True)
class Experiment(Generic[H_co]):
    """An experiment configuration, parsed.

    Args:
        config: The configuration before parsing, with trial and seed filled in.
        trial: Import path of the factory, `module:name`.
        factory: The trial class, or a function that makes the trial.
        platform: Determined's own sections.
        hyperparameters: The hyperparameters that the trial gets; `{type: const, val: x}` becomes x.
        plan: How the trial is trained.
        amp: The `amp` section of the hyperparameters; None if there is none.
        global_batch_size: Number of samples in a batch, over all slots; None if the YAML has none.
        data: The `data` section: an instance of the trial's class `Data` if it has one, else a
            dict.
        hparams: An instance of the trial's class `Hparams`; None if it has none.
    """

    config: Mapping[str, Any] = dataclasses.field(repr=False)
    trial: str
    factory: Factory = dataclasses.field(repr=False)
    platform: Platform
    hyperparameters: Mapping[str, Any] = dataclasses.field(repr=False)
    plan: Plan
    amp: AmpSettings | None
    global_batch_size: int | None
    data: Any
    hparams: H_co

    @property
    def name(self) -> str:
        return self.platform.name

    @property
    def seed(self) -> int:
        """Seed of a local run."""
        return self.platform.reproducibility.experiment_seed

    @property
    def training(self) -> TrainingSettings:
        return self.plan.training

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
        """An equivalent configuration with every default filled in."""
        own = dict(self.hyperparameters) if self.hparams is None else plain(self.hparams)
        given, sections = dict(self.config), plain(self.platform)
        if self.hparams is None and has_our_form(own):
            own["training"] = plain(self.training)
            own["aggregation_frequency"] = self.aggregation_frequency
        elif self.hparams is None:
            lengths = in_determineds_form(self.plan)
            sections = _merged(sections, lengths)
            for period in given.keys() & lengths.keys() - {"searcher", "optimizations"}:
                given[period] = None  # else two units would be merged into one length
        if self.amp is not None:
            own["amp"] = plain(self.amp)
        made = _merged(given, sections)
        return {**made, "data": plain(self.data), "hyperparameters": own}

    def make(self, context: pytorch.PyTorchTrialContext) -> pytorch.PyTorchTrial:
        """Make the trial in a context of this experiment."""
        return make_trial(self.factory, context)


def _merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `changes`; a section in `changes` replaces only the keys it has."""
    made = copy.deepcopy(dict(config))
    for key, value in changes.items():
        made[key] = {**(made.get(key) or {}), **value} if isinstance(value, Mapping) else value
    return made


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
    completed_by_master: bool = False,
) -> Experiment[Any]:
    """Check a whole configuration and convert it to typed settings.

    Args:
        config: The experiment configuration.
        source: Where it comes from, for the error message.
        trial: `module:Class` or `module:function`; by default `hyperparameters.trial`, else an
            entrypoint of that form.
        hyperparameters: The hyperparameters that the searcher chose for this trial; by default
            those of `config`. An initial loss scale that was drawn from a range is rounded to the
            nearest power of two: scaling by one is exact.
        completed_by_master: Whether a master has filled in its defaults and merged `--config` into
            the YAML. Then its defaults are not mistakes, and loss scale settings are ignored in a
            precision without a loss scale.

    Raises:
        ConfigError: naming every mistake.
    """
    problems: list[str] = []
    raw = config.get("hyperparameters") if hyperparameters is None else hyperparameters
    if raw is None and "hyperparameters" not in config:
        raw = {}
    if not isinstance(raw, Mapping):
        problems.append(f"hyperparameters: got {raw!r}; allowed: a mapping of keys to values")
        raw = {}
        named = None
    else:
        named = _named_trial(config, raw, trial, problems)
    if hyperparameters is not None:
        raw = _with_power_of_two(raw, config)
    config, raw = _with_trial_seed(config, raw, problems)
    if completed_by_master:
        config, raw = _as_merged(config, raw)
    if hyperparameters is not None:
        config = {**config, "hyperparameters": raw}
    parts = _Parts(config, raw, named, completed_by_master)
    found = parts.read(problems)
    if problems or found is None:
        raise ConfigError(source, problems)
    return found


def _as_merged(
    config: Mapping[str, Any], raw: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Configuration and hyperparameters without the leftovers of a merge."""
    if isinstance(raw.get("amp"), Mapping):
        raw = {**raw, "amp": without_unused_scaler(constants(raw["amp"]))}
    if has_our_form(raw) and is_test(config):
        return for_test(config), {**raw, "training": ONE_BATCH}
    return config, raw


def _with_power_of_two(raw: Mapping[str, Any], search: Mapping[str, Any]) -> Mapping[str, Any]:
    """The hyperparameters with `amp.init_scale` rounded, if `search` has a range for it."""
    space, scale = value_at(search, f"hyperparameters.{_SCALE}"), value_at(raw, _SCALE)
    is_range = isinstance(space, Mapping) and space.get("type") in _NUMBERS
    if not is_range or not isinstance(scale, (int, float)) or scale <= 0:
        return raw
    return {**raw, "amp": {**raw["amp"], "init_scale": 2.0 ** round(math.log2(scale))}}


def _with_trial_seed(
    config: Mapping[str, Any], raw: Mapping[str, Any], problems: list[str]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Configuration and hyperparameters with `trial_seed` moved to the seed of the experiment.

    The platform draws a seed for each trial of a search. This hyperparameter sets it instead, so
    that trials can share one. The trial itself does not get it.
    """
    if TRIAL_SEED not in raw:
        return config, raw
    others = {key: value for key, value in raw.items() if key != TRIAL_SEED}
    seed = constants({TRIAL_SEED: raw[TRIAL_SEED]})[TRIAL_SEED]
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        problems.append(
            f"hyperparameters.{TRIAL_SEED}: got {seed!r}; allowed: an integer >= 0 and below 2^32"
        )
        return config, others
    reproducibility = {**(config.get("reproducibility") or {}), "experiment_seed": seed}
    changed = {**config, "hyperparameters": others, "reproducibility": reproducibility}
    return changed, others


def constants(given: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters as a trial on a cluster gets them: `{type: const, val: x}` becomes x."""
    values: dict[str, Any] = {}
    for key, value in given.items():
        if isinstance(value, Mapping) and value.get("type") == "const":
            values[key] = copy.deepcopy(value.get("val"))
        else:
            nested = isinstance(value, Mapping)
            values[key] = constants(value) if nested else copy.deepcopy(value)
    return values


def ranges(given: Mapping[str, Any], path: str = "hyperparameters") -> Iterator[str]:
    """The dotted names of the hyperparameters that are search ranges."""
    for key, value in given.items():
        if isinstance(value, Mapping):
            if value.get("type") in _RANGES:
                yield f"{path}.{key}"
            else:
                yield from ranges(value, f"{path}.{key}")


def indivisible_batch(global_batch_size: int | None, slots: int) -> Iterator[str]:
    """A sentence if the slots cannot share the batch evenly; Determined would shrink the batch."""
    if global_batch_size is not None and global_batch_size % max(slots, 1):
        yield (
            f"hyperparameters.global_batch_size: got {global_batch_size}, which does not divide "
            f"among {slots} slots; allowed: a multiple of {slots}"
        )


@dataclass(frozen=True)
class _Named:
    """A trial, and whether its name belongs in the hyperparameters or in the entrypoint."""

    path: str
    factory: Factory
    in_hyperparameters: bool


def _named_trial(
    config: Mapping[str, Any], raw: Mapping[str, Any], given: str | None, problems: list[str]
) -> _Named | None:
    entrypoint, ours = config.get("entrypoint"), raw.get("trial")
    is_legacy = isinstance(entrypoint, str) and _LEGACY_ENTRYPOINT.fullmatch(entrypoint)
    if given is not None:
        place, path = "--trial", given
    elif isinstance(ours, str):
        place, path = "hyperparameters.trial", ours
    elif is_legacy:
        place, path = "entrypoint", str(entrypoint)
    else:
        found = "missing" if ours is None else f"got {ours!r}"
        problems.append(
            f"hyperparameters.trial: {found}; allowed: module:Class of a PyTorchTrial there, as "
            "the entrypoint, or as --trial module:Class"
        )
        return None
    try:
        factory = load_factory(path)
    except ValueError as error:
        problems.append(f"{place}: {error}; allowed: module:Class of a PyTorchTrial")
        return None
    in_hyperparameters = isinstance(ours, str) or _own_class(factory, "Hparams") is not None
    return _Named(path, factory, in_hyperparameters)


def _misspelt(config: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each key that looks like a misspelt key of Determined's.

    Such a key would have no effect, because the master knows only its own keys. In sections that we
    read in part, other unknown keys are allowed.
    """
    known = {"": _SECTIONS}
    known |= {name: frozenset(cls.__annotations__) for name, cls in _READ_IN_PART.items()}
    for name, keys in known.items():
        section = config.get(name) if name else config
        for key in section.keys() - keys if isinstance(section, Mapping) else ():
            for near in difflib.get_close_matches(str(key), keys, n=1, cutoff=0.8):
                yield f"{name}.{key}".lstrip(".") + f": unknown key; did you mean {near}?"


def _own_class(factory: Factory | None, name: str) -> type[Any] | None:
    """The attribute `name` of a trial class if it is a settings class; else None."""
    found = getattr(factory, name, None) if isinstance(factory, type) else None
    return found if is_settings_class(found) else None


@dataclass(frozen=True)
class _Known:
    """The hyperparameters that mean the same in every trial."""

    global_batch_size: int | None = setting(None, at_least=1)


class _Parts:
    """The sections of one configuration; each is read even if another has mistakes."""

    def __init__(
        self,
        config: Mapping[str, Any],
        raw: Mapping[str, Any],
        named: _Named | None,
        completed: bool,
    ) -> None:
        self.config, self.named, self.completed = config, named, completed
        self.hyperparameters = constants(raw)
        if named is not None and named.in_hyperparameters:
            self.hyperparameters["trial"] = named.path
        factory = named.factory if named else None
        self.hparams_class = _own_class(factory, "Hparams")
        self.data_class = _own_class(factory, "Data")

    def read(self, problems: list[str]) -> Experiment[Any] | None:
        """Read the experiment. On a mistake, append to `problems` or return None."""
        strict = self.hparams_class is not None
        hparams, sound = self._hparams(problems) if not problems else (None, False)
        amp = self._amp(problems) if sound else None
        data = self._data(problems)
        platform = self._platform(problems)
        problems.extend(_misspelt(self.config))
        if strict or has_our_form(self.hyperparameters):
            problems.extend(keys_without_effect(self.config, self.completed))
        plan = read_plan(self.config, self.hyperparameters, problems) if sound else None
        size = self.hyperparameters.get("global_batch_size")
        if platform is not None and sound:
            problems.extend(indivisible_batch(size, platform.resources.slots_per_trial))
        if self.named is None or platform is None or plan is None:
            return None
        return Experiment(
            config=self._recorded(platform),
            trial=self.named.path,
            factory=self.named.factory,
            platform=platform,
            hyperparameters=self.hyperparameters,
            plan=plan,
            amp=amp,
            global_batch_size=size,
            data=data,
            hparams=hparams,
        )

    def _hparams(self, problems: list[str]) -> tuple[Any, bool]:
        """The instance of the trial's class `Hparams`, and whether the section is correct."""
        before = len(problems)
        if self.hparams_class is not None:
            found = read(self.hparams_class, self.hyperparameters, "hyperparameters", problems)
            return found, found is not None
        for path in ranges(self.hyperparameters):
            problems.append(
                f"{path}: got a range to search; allowed: one value, for instance by "
                f"--config {path}=VALUE"
            )
        if len(problems) == before:
            read(_Known, self.hyperparameters, "hyperparameters", problems, strict=False)
        return None, len(problems) == before

    def _amp(self, problems: list[str]) -> AmpSettings | None:
        section = self.hyperparameters.get("amp")
        if not isinstance(section, Mapping):
            return None
        return read(AmpSettings, section, "hyperparameters.amp", problems)

    def _data(self, problems: list[str]) -> Any:
        raw = {} if self.config.get("data") is None else self.config["data"]
        return raw if self.data_class is None else read(self.data_class, raw, "data", problems)

    def _platform(self, problems: list[str]) -> Platform | None:
        before = len(problems)
        platform = read(Platform, self.config, "", problems, strict=False)
        if self.hparams_class is not None and len(problems) == before:
            problems.extend(
                f"{path}: missing; allowed: {allowed}"
                for path, allowed in _REQUIRED
                if value_at(self.config, path) is None
            )
        return platform

    def _recorded(self, platform: Platform) -> dict[str, Any]:
        """The configuration with trial and seed, so that it needs no further arguments."""
        seed = platform.reproducibility.experiment_seed
        changes: dict[str, Any] = {"reproducibility": {"experiment_seed": seed}}
        if self.named is not None and self.named.in_hyperparameters:
            changes["hyperparameters"] = {"trial": self.named.path}
        elif self.named is not None:
            changes["entrypoint"] = self.named.path
        return _merged(self.config, changes)
