"""The 16-bit copies of weights that autocast keeps until its outermost region ends.

A region may stay open while the weights change: reinforcement learning makes several
steps in one. Then the copies are those of the old weights, and each further step is
computed from these. So they are dropped wherever this library sees weights change.
Outside of a region there are none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def drop_casts(*_: Any) -> None:
    """Let autocast cast the weights anew; it takes any arguments, as a hook must."""
    torch.clear_autocast_cache()


def drop_casts_when_loaded(model: nn.Module) -> None:
    """Drop them whenever a state is loaded into a model, or into a part of it."""
    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):  # they take no hooks
            # torch has no types here
            register: Any = module.register_load_state_dict_post_hook
            register(drop_casts)
