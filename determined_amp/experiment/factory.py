"""Imports a trial by its name `module:Class`, and makes it."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from determined import pytorch

from determined_amp.amp.errors import ConfigError, near_name
from determined_amp.experiment.trial_text import not_importable

# A factory takes a context, and the hyperparameters if it needs a second argument.
Factory = Callable[..., pytorch.PyTorchTrial]


def load_factory(import_path: str) -> Factory:
    """The trial class, or the function that makes a trial, at `module:name`.

    Raises:
        ValueError: if it cannot be imported, is not a trial, or needs other arguments
            than a context and hyperparameters.
    """
    module_name, _, name = import_path.partition(":")
    try:
        module = importlib.import_module(module_name)
        target: Any = functools.reduce(getattr, name.split("."), module)
    except (ImportError, AttributeError, TypeError, ValueError, SyntaxError) as error:
        near = ""
        if isinstance(error, AttributeError) and error.name:
            near = near_name(error.name, dir(error.obj))
        raise ValueError(not_importable(import_path, f"{error}{near}")) from error
    is_class = isinstance(target, type)
    if not (issubclass(target, pytorch.PyTorchTrial) if is_class else callable(target)):
        raise ValueError(f"got {import_path!r}, which is not a PyTorchTrial")
    if not (_takes(target, 1) or _takes(target, 2)):
        raise ValueError(
            f"got {import_path!r}, which takes {inspect.signature(target)}; allowed: "
            "(context) or (context, hparams), with defaults for all others, or a "
            "function of these that makes the trial"
        )
    factory: Factory = target
    return factory


def _takes(factory: Factory, count: int) -> bool:
    """Whether `count` arguments suffice."""
    try:
        inspect.signature(factory).bind(*range(count))
    except TypeError:
        return False
    return True


def make_trial(
    factory: Factory, context: pytorch.PyTorchTrialContext
) -> pytorch.PyTorchTrial:
    """Make the trial.

    Raises:
        ConfigError: if the result is not a `PyTorchTrial`.
    """
    arguments = [context] if _takes(factory, 1) else [context, context.get_hparams()]
    trial: object = factory(*arguments)
    if not isinstance(trial, pytorch.PyTorchTrial):
        name = getattr(factory, "__qualname__", repr(factory))
        raise ConfigError(
            name, [f"made {type(trial).__name__}; allowed: a PyTorchTrial"]
        )
    return trial
