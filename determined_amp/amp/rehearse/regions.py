"""Lets the autocast regions of a rehearsal compute in another dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from determined_amp.amp.patched import patched
from determined_amp.amp.precision import autocast_is_on
from determined_amp.amp.tensors import SIXTEEN_BITS


@contextmanager
def float16_as(dtype: torch.dtype | None) -> Iterator[set[torch.dtype]]:
    """Make the autocast regions in this block compute in another dtype.

    Args:
        dtype: With bfloat16, float16 regions compute in bfloat16. With float32, float16
            and bfloat16 regions are switched off. None changes nothing.

    Yields:
        The dtypes that the entered regions have in training.
    """
    in_float32 = dtype is torch.float32
    replaced: Sequence[torch.dtype] = ()
    if dtype is not None:
        replaced = SIXTEEN_BITS if in_float32 else (torch.float16,)
    enter = torch.autocast.__enter__
    entered: set[torch.dtype] = set()

    def enter_as(region: Any) -> Any:
        enter(region)  # type: ignore[no-untyped-call]  # torch has no types here
        if not autocast_is_on(region.device):
            return region
        entered.add(region.fast_dtype)
        if region.fast_dtype in replaced:
            keeps_casts = torch.is_autocast_cache_enabled()
            region.__exit__(None, None, None)
            other: Any = torch.autocast(
                region.device,
                dtype=None if in_float32 else dtype,
                enabled=not in_float32,
                cache_enabled=keeps_casts,
            )
            enter(other)  # type: ignore[no-untyped-call]
            before = {
                name: value for name, value in vars(other).items() if "prev" in name
            }
            vars(region).update(before)  # what its exit restores
        return region

    with patched(torch.autocast, "__enter__", enter_as):
        yield entered
