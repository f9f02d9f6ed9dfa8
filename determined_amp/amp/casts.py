"""Drops the 16-bit copies of weights that autocast caches.

Autocast keeps these copies until its outermost region ends. A region may stay open
while the weights change: in reinforcement learning it can span several steps. Each
further step would then be computed from copies of the old weights. So this library
drops the copies wherever it sees weights change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def drop_casts(*_: Any) -> None:
    """Clear autocast's cache. Takes any arguments, so that it can be a hook."""
    torch.clear_autocast_cache()


def drop_casts_when_loaded(model: nn.Module) -> None:
    """Clear autocast's cache whenever a state is loaded into any part of a model."""
    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
            # torch does not type this method
            register: Any = module.register_load_state_dict_post_hook
            register(drop_casts)
