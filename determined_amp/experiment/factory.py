"""Imports a trial by its name `module:Class`, and makes it with its constructor or a function."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from determined import pytorch

from determined_amp.amp.errors import ConfigError

Factory = Callable[..., pytorch.PyTorchTrial]

# Names of parameters that get the hyperparameters, or the experiment configuration.
_HPARAMS = frozenset({"hparams", "hyperparameters"})
_CONFIG = frozenset({"config", "exp_conf", "experiment_config"})

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def load_factory(import_path: str) -> Factory:
    """The trial class, or the function that makes a trial, at `module:name`.

    Raises:
        ValueError: if it cannot be imported, is not a trial, or requires unknown parameters.
    """
    module_name, _, name = import_path.partition(":")
    try:
        module = importlib.import_module(module_name)
        target: Any = functools.reduce(getattr, name.split("."), module)
    except (ImportError, AttributeError, TypeError, ValueError, SyntaxError) as error:
        raise ValueError(f"got {import_path!r}, which cannot be imported: {error}") from error
    if isinstance(target, type) and any(
        base.__name__ == "DeepSpeedTrial" for base in target.__mro__
    ):
        raise ValueError(
            f"got {import_path!r}, which is a DeepSpeedTrial, and DeepSpeed is out of scope: it "
            "has a loop and a mixed precision of its own"
        )
    is_trial = isinstance(target, type) and issubclass(target, pytorch.PyTorchTrial)
    if not is_trial and (isinstance(target, type) or not callable(target)):
        raise ValueError(f"got {import_path!r}, which is not a PyTorchTrial")
    factory: Factory = target
    try:
        _arguments(factory)
    except ValueError as error:
        raise ValueError(f"got {import_path!r}, which {error}") from error
    return factory


def make_trial(factory: Factory, context: pytorch.PyTorchTrialContext) -> pytorch.PyTorchTrial:
    """Make the trial with its context, and with hyperparameters or configuration if required.

    Required parameters named `hparams` or `hyperparameters` get the hyperparameters. Those named
    `config`, `exp_conf` or `experiment_config` get the experiment configuration as a dict. A
    required second parameter with any other name gets the hyperparameters. Parameters with a
    default keep it.

    Raises:
        ConfigError: if another parameter is required, or the result is not a `PyTorchTrial`.
    """
    name = getattr(factory, "__qualname__", repr(factory))
    try:
        arguments = _arguments(factory)
    except ValueError as error:
        raise ConfigError(name, [str(error)]) from error
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for parameter, kind in arguments:
        value: Any = context
        if kind != "context":
            hparams = kind == "hparams"
            value = context.get_hparams() if hparams else context.get_experiment_config()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            named[parameter.name] = value
        else:
            positional.append(value)
    trial = factory(*positional, **named)
    if not isinstance(trial, pytorch.PyTorchTrial):
        raise ConfigError(name, [f"made {type(trial).__name__}; allowed: a PyTorchTrial"])
    return trial


def _arguments(factory: Factory) -> list[tuple[inspect.Parameter, str]]:
    """The parameters to pass to `factory`, in order, each with `context`, `hparams` or `config`.

    Raises:
        ValueError: naming the required parameters that are unknown.
    """
    parameters = list(inspect.signature(factory).parameters.values())
    if not parameters or parameters[0].kind is inspect.Parameter.VAR_KEYWORD:
        raise ValueError("takes no context; allowed: a first parameter for it")
    arguments = [(parameters[0], "context")]
    unknown = []
    for i, parameter in enumerate(parameters[1:], start=1):
        if parameter.default is not parameter.empty or parameter.kind in _VARIADIC:
            continue
        is_second = i == 1 and parameter.kind is not inspect.Parameter.KEYWORD_ONLY
        if parameter.name in _CONFIG:
            arguments.append((parameter, "config"))
        elif parameter.name in _HPARAMS or is_second:
            arguments.append((parameter, "hparams"))
        else:
            unknown.append(parameter.name)
    if unknown:
        raise ValueError(
            f"requires {', '.join(unknown)}; allowed: (context), (context, hparams) or (context, "
            "config), with defaults for all others; or a function of these that makes the trial"
        )
    return arguments
