"""Reads any trial's experiment YAML, in either form, and names every mistake.

`read_yaml` reads the file. `experiment_in` translates Determined's form into ours, and
checks all that needs neither the trial nor torch, which takes seconds to import.
`Experiment.with_trial` imports the trial, and checks the sections that only its classes
know.

Determined 0.38.1 reads some keys only for its legacy entrypoints. They have no effect
for a script that calls `pytorch.Trainer`, as ours does. So our form of a YAML has these
settings under `hyperparameters`, where `train` reads them, and a key without effect is
an error. A YAML without `hyperparameters.training` is in Determined's own form, and
`train` reads Determined's keys.

A trial class may have attributes `Hparams` and `Data`, frozen dataclasses of
`setting`s. With them, the sections `hyperparameters` and `data` are checked strictly
before anything starts. Without them, the sections may hold anything.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from determined_amp.amp.errors import ConfigError, Problem, Problems
from determined_amp.amp.fields import (
    is_settings_class,
    plain,
    read,
    read_section,
    setting,
    shown,
)
from determined_amp.amp.plain_data import Config, Values
from determined_amp.amp.settings import AmpSettings
from determined_amp.experiment.dotted import flat, value_at
from determined_amp.experiment.entrypoint import Task, is_class
from determined_amp.experiment.misplaced import misplaced, of_the_trial
from determined_amp.experiment.overrides import with_overrides, with_trial
from determined_amp.experiment.training import (
    DETERMINEDS_KEYS,
    WITHOUT_EFFECT,
    Length,
    TrainingSettings,
    for_test,
    has_our_form,
    in_our_form,
    in_their_words,
    is_short_test,
    missing_length,
    mistakes_of_our_form,
)
from determined_amp.experiment.trial_text import typo_in
from determined_amp.experiment.yaml_text import load_yaml, read_text

if TYPE_CHECKING:
    from determined import pytorch

    from determined_amp.experiment.factory import Factory

T = TypeVar("T")

_NUMBERS = ("int", "double", "log")
_RANGES = (*_NUMBERS, "categorical")

# The precision of a run without an `amp` section.
NO_AMP_SECTION = (
    "no amp section: the trial's own precision, as it is; no guard, no loss scale"
)

_ONE_VALUE = (
    "got a range to search; allowed: one value, for instance by --config {}=VALUE, or "
    "all of them by det-amp search"
)

_A_TRIAL = "; allowed: module:Class of a PyTorchTrial"

# This hyperparameter sets the seed of a trial. Without it, the platform draws a seed.
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

    READ_IN_PART = True

    metric: str | None = setting(None)
    smaller_is_better: bool = setting(True)
    name: str = setting("single")


@dataclass(frozen=True)
class Reproducibility:
    """`experiment_seed` seeds a local run; a cluster derives the seed of each trial
    from it.
    """

    READ_IN_PART = True

    experiment_seed: int = setting(0, at_least=0, at_most=2**32 - 1)


@dataclass(frozen=True)
class Resources:
    """`slots_per_trial` is the number of processes that the experiment requests on a
    cluster.
    """

    READ_IN_PART = True

    slots_per_trial: int = setting(1, at_least=0)


@dataclass(frozen=True)
class Profiling:
    """`enabled` starts Determined's system profiler on a cluster."""

    READ_IN_PART = True

    enabled: bool = setting(False)


@dataclass(frozen=True)
class Optimizations:
    """Whether Determined averages the gradients over the batches of a step."""

    READ_IN_PART = True

    average_aggregated_gradients: bool = setting(True)


@dataclass(frozen=True)
class Platform:
    """Determined's own keys of an experiment configuration, as far as we read them."""

    READ_IN_PART = True

    searcher: Searcher = setting(Searcher())
    reproducibility: Reproducibility = setting(Reproducibility())
    name: str = setting("unnamed")
    resources: Resources = setting(Resources())
    profiling: Profiling = setting(Profiling())
    checkpoint_policy: CheckpointPolicy = setting(CheckpointPolicy.BEST)
    perform_initial_validation: bool = setting(False)
    optimizations: Optimizations = setting(Optimizations())


@dataclass(frozen=True)
class CommonHyperparameters:
    """The hyperparameters that mean the same in every trial."""

    READ_IN_PART = True

    training: TrainingSettings = setting(TrainingSettings())  # lengths and periods
    aggregation_frequency: int = setting(1, at_least=1)  # batches per optimizer step
    # Number of samples in a batch, over all slots; None if the YAML has none.
    global_batch_size: int | None = setting(None, at_least=1)
    amp: AmpSettings | None = setting(None)  # the section `amp`; None if there is none
    trial_seed: int | None = setting(None, at_least=0, at_most=2**32 - 1)


# This attribute of a context has the experiment of its trial.
_ATTRIBUTE = "determined_amp_experiment"


@dataclass(frozen=True, kw_only=True)
class Experiment(CommonHyperparameters):
    """An experiment configuration, read once in a process.

    `variant` makes another experiment of it.

    The properties that need the trial import it on first use, and raise a `ConfigError`
    that names every mistake. `with_trial` checks all of them at once.
    """

    source: str  # the name of the configuration, for error messages
    # The configuration from the user, with the hyperparameters, the import path and the
    # seed of this trial. It reads as this experiment again.
    config: Config = dataclasses.field(repr=False)
    trial: str  # import path of the factory, `module:name`
    trial_key: str  # the key or the option that names the trial
    platform: Platform  # Determined's own sections
    seed: int  # the seed of a local run

    @staticmethod
    def of(context: pytorch.PyTorchTrialContext) -> Experiment | None:
        """The experiment whose trial was made in a context; None in a user's script."""
        experiment: Experiment | None = getattr(context, _ATTRIBUTE, None)
        return experiment

    @property
    def name(self) -> str:
        return self.platform.name

    @property
    def precision(self) -> str:
        """The precision of a run, in words for its log and its closing table."""
        return NO_AMP_SECTION if self.amp is None else self.amp.precision.value

    def described_precision(self, precision: str) -> str:
        """The first line of the log of a run that trains in this precision."""
        own = of_the_trial(self.hyperparameters)
        first = precision if precision == NO_AMP_SECTION else f"precision: {precision}"
        return f"{first} ({'; '.join(own)}: the trial's own)" if own else first

    def variant(self, changes: Sequence[str]) -> Experiment:
        """The experiment with some changes of the form `a.b=value`, see
        `with_overrides`.

        Raises:
            ConfigError: naming every mistake.
        """
        return experiment_in(with_overrides(self.config, changes), self.source)

    def key_of(self, name: str) -> str:
        """The key of the YAML that holds a setting of the training: `max_length`,
        `validation_period`, `checkpoint_period` or `reporting_period.batches`.
        """
        key = f"hyperparameters.training.{name}"
        ours = has_our_form(self.config["hyperparameters"])
        return key if ours else DETERMINEDS_KEYS[key]

    @property
    def max_length(self) -> Length:
        """Length of the whole run.

        Raises:
            ConfigError: if the configuration has none.
        """
        if self.training.max_length is None:
            raise ConfigError(self.name, [missing_length(self.key_of("max_length"))])
        return self.training.max_length

    def resolved(self) -> Config:
        """All settings in our form, defaults included, for the record of a run."""
        own = {"trial": self.trial, "global_batch_size": None, **self.hyperparameters}
        if self.hparams is not None:
            own = plain(self.hparams)
        own["aggregation_frequency"] = self.aggregation_frequency
        own["training"] = plain(self.training)
        if self.amp is not None:
            own["amp"] = plain(self.amp)
        return {
            **plain(self.platform),
            "reproducibility": {"experiment_seed": self.seed},
            "data": plain(self.data),
            "hyperparameters": own,
        }

    @property
    def settings(self) -> Values:
        """All settings in our form, defaults included, by dotted name."""
        return flat(self.resolved())

    @property
    def hyperparameters(self) -> Config:
        """The hyperparameters that the trial gets; `{type: const, val: x}` is x."""
        values: Config = self.config["hyperparameters"]
        return values if self.hparams is None else {**values, "trial": self.trial}

    @property
    def hparams(self) -> Any:
        """An instance of the trial's class `Hparams`; None if it has none."""
        return self._own_sections[0]

    @property
    def data(self) -> Any:
        """The `data` section: an instance of the trial's class `Data`, else a dict."""
        return self._own_sections[1]

    @cached_property
    def factory(self) -> Factory:
        """The trial class, or a function that makes the trial."""
        from determined_amp.experiment.factory import load_factory  # noqa: PLC0415  # torch

        try:
            return load_factory(self.trial)
        except ValueError as error:
            problem = Problem(self.trial_key, f"{error}{_A_TRIAL}")
            raise ConfigError(self.source, [problem]) from error

    @cached_property
    def _own_sections(self) -> tuple[Any, Any]:
        """`hyperparameters` and `data`, as the trial's own classes read them."""
        problems = Problems()
        hparams, data = None, self.config.get("data")
        own_classes: dict[str, Any] = {
            name: held
            for name in ("Hparams", "Data")
            if is_settings_class(held := getattr(self.factory, name, None))
        }
        if "Hparams" in own_classes:
            values = {**self.config["hyperparameters"], "trial": self.trial}
            for name, known in (("amp", self.amp), ("training", self.training)):
                if name in values and known is not None:
                    values[name] = known
            hparams = read(own_classes["Hparams"], values, "hyperparameters", problems)
        data = {} if data is None else data
        if "Data" in own_classes:
            data = read(own_classes["Data"], data, "data", problems)
        problems.raise_from(self.source)
        return hparams, data

    def with_trial(self) -> Experiment:
        """Import the trial, and check the sections that only it knows.

        Raises:
            ConfigError: naming every mistake.
        """
        _ = self._own_sections
        return self

    def make(self, context: pytorch.PyTorchTrialContext) -> pytorch.PyTorchTrial:
        """Make the trial in a context of this experiment."""
        from determined_amp.experiment.factory import make_trial  # noqa: PLC0415  # torch

        setattr(context, _ATTRIBUTE, self)
        return make_trial(self.factory, context)


def hparams_of(cls: type[T], context: pytorch.PyTorchTrialContext) -> T:
    """The hyperparameters of a context as `cls`, the class `Hparams` of its trial.

    Raises:
        ConfigError: naming every mistake.
    """
    known = getattr(Experiment.of(context), "hparams", None)
    raw = known if isinstance(known, cls) else context.get_hparams()
    return read_section(cls, raw, "hyperparameters")


def data_of(cls: type[T], context: pytorch.PyTorchTrialContext) -> T:
    """The section `data` of a context as `cls`, the class `Data` of its trial.

    Raises:
        ConfigError: naming every mistake.
    """
    known = getattr(Experiment.of(context), "data", None)
    raw = context.get_experiment_config().get("data") or {}
    return read_section(cls, known if isinstance(known, cls) else raw, "data")


def read_yaml(path: str) -> Config:
    """The experiment configuration in a YAML file.

    Raises:
        ConfigError: if the file is missing, not YAML, or not a mapping.
    """
    config = load_yaml(read_text(path), path)
    if not isinstance(config, Mapping):
        raise ConfigError(
            path, ["is not an experiment configuration: its top level has no keys"]
        )
    return config


def experiment_in(
    config: Config,
    source: str,
    *,
    trial: str | None = None,
    hyperparameters: Config | None = None,
    drawn_seed: int | None = None,
    importable: str = "",
) -> Experiment:
    """Check all of a configuration that needs neither the trial nor torch.

    Args:
        config: The experiment configuration, in either form.
        source: The name of the configuration, for the error message.
        trial: `module:Class` or `module:function`; by default the `--trial` of an
            entrypoint, else `hyperparameters.trial`, else an entrypoint of that form.
        hyperparameters: The hyperparameters that the searcher chose for this trial; by
            default those of `config`. An initial loss scale that was drawn from a range
            is rounded to the nearest power of two, which scales without error.
        drawn_seed: The seed that a search drew for this trial. By default the seed is
            that of `config`; `hyperparameters.trial_seed` comes before both.
        importable: The import path of a trial that need not be looked up again.

    Raises:
        ConfigError: naming every mistake.
    """
    problems = Problems()
    values = _values(config, hyperparameters, problems)
    path, key = ("", "") if problems else _named_trial(config, values, trial, problems)
    if path != importable and (typo := typo_in(path)):
        problems.append(Problem(key, f"{typo}{_A_TRIAL}"))
    problems.extend(misplaced(config, values))
    common, platform = read_sections(config, values, source, problems)
    of_config = platform.reproducibility.experiment_seed
    seeds = (common.trial_seed, drawn_seed, of_config)
    seed = next(seed for seed in seeds if seed is not None)
    return Experiment(
        **vars(common),
        source=source,
        config=_of_trial(config, values, path, seed),
        trial=path,
        trial_key=key,
        platform=platform,
        seed=seed,
    )


def read_sections(
    config: Config, values: Config, source: str, problems: Problems
) -> tuple[CommonHyperparameters, Platform]:
    """The settings of a configuration that mean the same in every trial.

    Args:
        config: The experiment configuration, in either form.
        values: The hyperparameters of the trial.
        source: The name of the configuration, for the error message.
        problems: Mistakes that are known already.

    Raises:
        ConfigError: naming every mistake.
    """
    platform = read(Platform, config, "", problems)
    common = _read_common(config, values, problems)
    size = values.get("global_batch_size")
    if platform is not None and isinstance(size, int):
        problems.extend(indivisible_batch(size, platform.resources.slots_per_trial))
    problems.raise_from(source)
    assert platform is not None
    assert common is not None
    return common, platform


def parse(
    config: Config,
    source: str,
    *,
    trial: str | None = None,
    hyperparameters: Config | None = None,
) -> Experiment:
    """Read an experiment, and import its trial. `experiment_in` explains the arguments.

    Raises:
        ConfigError: naming every mistake. Mistakes that only the trial's own classes
            show are named if there are no others.
    """
    found = experiment_in(config, source, trial=trial, hyperparameters=hyperparameters)
    return found.with_trial()


def _read_common(
    config: Config, values: Config, problems: list[Problem]
) -> CommonHyperparameters | None:
    """The hyperparameters that mean the same in every trial, from either form.

    Args:
        config: The experiment configuration.
        values: The hyperparameters of the trial.
        problems: The mistakes are appended, with the keys of the user's form.
    """
    searched = [f"hyperparameters.{name}" for name in ranges(values)]
    problems.extend(Problem(name, _ONE_VALUE.format(name)) for name in searched)
    ours, found = has_our_form(values), list[Problem]()
    if ours:
        problems.extend(mistakes_of_our_form(config, values))
    elif values.get("training") is not None:
        text = f"got {shown(values['training'])}; allowed: a mapping of keys to values"
        problems.append(Problem("hyperparameters.training", text))
    translated = dict(values) if ours else in_our_form(config, values)
    if not isinstance(values.get("amp"), Mapping):  # a value of the trial's own
        translated["amp"] = None
    common = read(CommonHyperparameters, translated, "hyperparameters", found)
    problems.extend(found if ours else map(in_their_words, found))
    return common


def _values(config: Config, chosen: Config | None, problems: list[Problem]) -> Config:
    """The hyperparameters of one trial, which the searcher may have chosen."""
    values = config.get("hyperparameters", {}) if chosen is None else chosen
    if not isinstance(values, Mapping):
        text = f"got {values!r}; allowed: a mapping of keys to values"
        problems.append(Problem("hyperparameters", text))
        return {}
    return with_power_of_two(constants(for_test(config, values)), config)


def _of_trial(config: Config, values: Config, trial: str, seed: int) -> Config:
    """The configuration with these hyperparameters, this trial and this seed."""
    if is_short_test(config, values):  # its lengths are in `values` now
        unread = [f"{name}=null" for name, _, _ in WITHOUT_EFFECT]
        config = with_overrides(config, ["description=null", *unread])
    own = {name: value for name, value in values.items() if name != TRIAL_SEED}
    seeds = {**(config.get("reproducibility") or {}), "experiment_seed": seed}
    made = {**config, "hyperparameters": own, "reproducibility": seeds}
    if not isinstance(own.get("trial"), str):
        return {**made, "entrypoint": trial}
    own["trial"] = trial
    # The `--trial` of an entrypoint comes before `hyperparameters.trial`.
    is_other = Task.of(config.get("entrypoint"), []).trial not in (None, trial)
    return with_trial(made, trial) if is_other else made


def with_power_of_two(values: Config, search: Config) -> Config:
    """The hyperparameters with `amp.init_scale` rounded, if `search` has a range for
    it.
    """
    space = value_at(search, "hyperparameters.amp.init_scale")
    scale = value_at(values, "amp.init_scale")
    is_range = isinstance(space, Mapping) and space.get("type") in _NUMBERS
    if not is_range or not isinstance(scale, (int, float)) or scale <= 0:
        return values
    return {
        **values,
        "amp": {**values["amp"], "init_scale": 2.0 ** round(math.log2(scale))},
    }


def constants(hyperparameters: Config) -> Config:
    """Hyperparameters as a trial on a cluster gets them: `{type: const, val: x}`
    becomes x.
    """
    made = dict(hyperparameters)
    for key, value in made.items():
        if isinstance(value, Mapping):
            is_const = value.get("type") == "const"
            made[key] = value.get("val") if is_const else constants(value)
    return made


def ranges(values: Config) -> Iterator[str]:
    """The dotted names of the hyperparameters that are search ranges."""
    for name, value in flat(values).items():
        if isinstance(value, Mapping) and value.get("type") in _RANGES:
            yield name


def indivisible_batch(global_batch_size: int, slots: int) -> Iterator[Problem]:
    """A problem if the slots cannot share the batch evenly; Determined would shrink the
    batch.
    """
    if global_batch_size % max(slots, 1):
        yield Problem(
            "hyperparameters.global_batch_size",
            f"got {global_batch_size}, which does not divide among {slots} slots; "
            f"allowed: a multiple of {slots}",
        )


def _named_trial(
    config: Config,
    hyperparameters: Config,
    option: str | None,
    problems: list[Problem],
) -> tuple[str, str]:
    """The import path of the trial, and the key that has it. If nothing names a trial,
    both are empty and a problem is appended.
    """
    entrypoint, name = config.get("entrypoint"), hyperparameters.get("trial")
    if option is not None:
        return option, "--trial"
    if in_entrypoint := Task.of(entrypoint, []).trial:
        return in_entrypoint, "entrypoint"
    if isinstance(name, str):
        return name, "hyperparameters.trial"
    if is_class(entrypoint):
        return entrypoint, "entrypoint"
    given = "missing" if name is None else f"got {name!r}"
    if name is None and entrypoint is not None:
        given = f"missing, and the entrypoint {shown(entrypoint)} names none"
    text = (
        f"{given}; allowed: module:Class of a PyTorchTrial there, as the entrypoint, "
        "or as --trial module:Class"
    )
    problems.append(Problem("hyperparameters.trial", text))
    return "", ""
