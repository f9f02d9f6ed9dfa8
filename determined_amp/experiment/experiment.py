"""Reads any trial's experiment YAML, in either form, and names every mistake.

`read_yaml` reads the file. `experiment_in` checks all that needs neither the trial nor
torch, which takes seconds to import. `Experiment.loaded` imports the trial, and
checks the sections that only its classes know.

Determined 0.38.1 reads some keys only for its legacy entrypoints. They have no effect
for a script that calls `pytorch.Trainer`, as ours does. So our form of a YAML has these
settings under `hyperparameters`, where `train` reads them, and a key without effect is
an error. A YAML without `hyperparameters.training` is in Determined's own form, and
`train` reads Determined's keys. `training.py` translates them.

A trial class may have attributes `Hparams` and `Data`, frozen dataclasses of
`setting`s. With them, the sections `hyperparameters` and `data` are checked strictly
before anything starts. Without them, the sections may hold anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from determined_amp.amp.errors import ConfigError, Problem, Problems
from determined_amp.amp.fields import (
    is_settings_class,
    plain,
    read,
    read_section,
    shown,
)
from determined_amp.amp.plain_data import Config, Values
from determined_amp.experiment.dotted import flat, value_at
from determined_amp.experiment.entrypoint import named_trial, with_trial
from determined_amp.experiment.hyperparameters import (
    TRIAL_SEED,
    constants,
    with_power_of_two,
)
from determined_amp.experiment.misplaced import misplaced, of_the_trial
from determined_amp.experiment.overrides import for_test, with_overrides
from determined_amp.experiment.sections import (
    CommonHyperparameters,
    Platform,
    read_sections,
)
from determined_amp.experiment.training import Length, key_of, missing_length
from determined_amp.experiment.trial_text import typo_in
from determined_amp.experiment.yaml_text import load_yaml, read_text

if TYPE_CHECKING:
    from determined import pytorch

    from determined_amp.experiment.factory import Factory

T = TypeVar("T")

# The precision of a run without an `amp` section.
NO_AMP_SECTION = (
    "no amp section: the trial's own precision, as it is; no guard, no loss scale"
)

_A_TRIAL = "; allowed: module:Class of a PyTorchTrial"

# This attribute of a context has the experiment of its trial.
_ATTRIBUTE = "determined_amp_experiment"


@dataclass(frozen=True, kw_only=True)
class Experiment(CommonHyperparameters):
    """The experiment of one trial. It is read once in a process, and never changes.

    Its fields are what the configuration says; `variant` makes another experiment. The
    properties follow from the fields. `factory`, `hparams`, `data`, `hyperparameters`
    and `resolved` import the trial on first use, and raise a `ConfigError` that names
    every mistake. `loaded` checks all of them at once.
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
        return key_of(self.config, f"hyperparameters.training.{name}")

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
        own = {"global_batch_size": None, **self.hyperparameters, "trial": self.trial}
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
        has_trial = self.hparams is not None or isinstance(values.get("trial"), str)
        return {**values, "trial": self.trial} if has_trial else values

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
        values = {**self.config["hyperparameters"], "trial": self.trial}
        for name, known in (("amp", self.amp), ("training", self.training)):
            if name in values and known is not None:
                values[name] = known
        hparams = self._read_own("Hparams", "hyperparameters", values, problems)
        given = self.config.get("data") or {}
        data = self._read_own("Data", "data", given, problems)
        problems.raise_from(self.source)
        return hparams, given if data is None else data

    def _read_own(
        self, name: str, section: str, values: Config, problems: Problems
    ) -> Any:
        """A section as a class of the trial reads it; None if it has no such class."""
        own: Any = getattr(self.factory, name, None)
        return read(own, values, section, problems) if is_settings_class(own) else None

    def loaded(self) -> Experiment:
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
        trial: `module:Class` or `module:function`; by default what the configuration
            names, see `named_trial`.
        hyperparameters: The hyperparameters that the searcher chose for this trial; by
            default those of `config`. An initial loss scale that was drawn from a range
            is rounded to the nearest power of two, which scales without error.
        drawn_seed: The seed that a search drew for this trial. By default the seed is
            that of `config`; `hyperparameters.trial_seed` comes before both.
        importable: The import path of a trial that need not be looked up again.

    Raises:
        ConfigError: naming every mistake.
    """
    config = _of_one_trial(config, hyperparameters, source)
    path, key = named_trial(config) if trial is None else (trial, "--trial")
    problems = Problems()
    if not key:
        problems.append(_missing_trial(config))
    elif path != importable and (typo := typo_in(path)):
        problems.append(Problem(key, f"{typo}{_A_TRIAL}"))
    problems.extend(misplaced(config))
    common, platform = read_sections(config, source, problems)
    of_config = platform.reproducibility.experiment_seed
    seeds = (common.trial_seed, drawn_seed, of_config)
    seed = next(seed for seed in seeds if seed is not None)
    return Experiment(
        **vars(common),
        source=source,
        config=_filled_in(config, path, seed),
        trial=path,
        trial_key=key,
        platform=platform,
        seed=seed,
    )


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
    return found.loaded()


def _of_one_trial(config: Config, chosen: Config | None, source: str) -> Config:
    """The configuration with the hyperparameters of one trial."""
    values = config.get("hyperparameters", {}) if chosen is None else chosen
    if not isinstance(values, Mapping):
        text = f"got {values!r}; allowed: a mapping of keys to values"
        raise ConfigError(source, [Problem("hyperparameters", text)])
    values = with_power_of_two(constants(values), config)
    return for_test({**config, "hyperparameters": values})


def _filled_in(config: Config, trial: str, seed: int) -> Config:
    """The configuration with this trial and this seed."""
    values = config["hyperparameters"].items()
    own = {name: value for name, value in values if name != TRIAL_SEED}
    seeds = {**(config.get("reproducibility") or {}), "experiment_seed": seed}
    made = {**config, "hyperparameters": own, "reproducibility": seeds}
    return with_trial(made, trial)


def _missing_trial(config: Config) -> Problem:
    name, entrypoint = (
        value_at(config, "hyperparameters.trial"),
        config.get("entrypoint"),
    )
    given = "missing" if name is None else f"got {name!r}"
    if name is None and entrypoint is not None:
        given = f"missing, and the entrypoint {shown(entrypoint)} names none"
    text = (
        f"{given}; allowed: module:Class of a PyTorchTrial there, as the entrypoint, "
        "or as --trial module:Class"
    )
    return Problem("hyperparameters.trial", text)
