"""The doctor: says what is wrong with the mixed precision that a training has of its own.

`python -m determined_amp check CONFIG` examines a trial. Around any other loop:

    with determined_amp.check.watching() as findings:
        train()
    print(findings)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from determined_amp.check.finding import Finding, Findings
    from determined_amp.check.watch import watching

__all__ = ["Finding", "Findings", "watching"]

_MODULES = {"Finding": "finding", "Findings": "finding", "watching": "watch"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
