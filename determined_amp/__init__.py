"""Native mixed precision for any `PyTorchTrial` of Determined, and for any loop of
PyTorch.

The names below are the public ones. Each is imported on first use, so `import
determined_amp` costs nothing and a trial loads only what it uses.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from determined_amp.amp.errors import ConfigError, GuardError, UserError
    from determined_amp.amp.fields import setting
    from determined_amp.amp.loop import AmpLoop
    from determined_amp.amp.rehearse.precision_audit import AuditError
    from determined_amp.amp.settings import (
        AmpSettings,
        EvalPrecision,
        OnOverflow,
        Precision,
    )
    from determined_amp.finder import find_loss_scale
    from determined_amp.trial.fitting import fit
    from determined_amp.trial.make import TrialAsItIs
    from determined_amp.trial.mixed_precision import MixedPrecision

__version__ = "0.1.0"

__all__ = [
    "AmpLoop",
    "AmpSettings",
    "AuditError",
    "ConfigError",
    "EvalPrecision",
    "GuardError",
    "MixedPrecision",
    "OnOverflow",
    "Precision",
    "TrialAsItIs",
    "UserError",
    "__version__",
    "find_loss_scale",
    "fit",
    "setting",
]

_MODULES = {
    "AmpLoop": "amp.loop",
    "AmpSettings": "amp.settings",
    "AuditError": "amp.rehearse.precision_audit",
    "ConfigError": "amp.errors",
    "EvalPrecision": "amp.settings",
    "GuardError": "amp.errors",
    "MixedPrecision": "trial.mixed_precision",
    "OnOverflow": "amp.settings",
    "Precision": "amp.settings",
    "TrialAsItIs": "trial.make",
    "UserError": "amp.errors",
    "find_loss_scale": "finder",
    "fit": "trial.fitting",
    "setting": "amp.fields",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
