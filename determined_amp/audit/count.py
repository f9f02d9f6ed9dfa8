"""Counts the products of a batch by dtype in torch's dispatch, without synchronisation."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# The keyword for an operation's result in torch's FLOP formulas; torch 2.3 uses another keyword.
_FORMULA = inspect.signature(flop_registry[torch.ops.aten.mm], follow_wrapped=False)
_RESULT = "out_val" if "out_val" in _FORMULA.parameters else "out"


class ProductCount(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Counts products and casts by dtype. It does not synchronise and changes no result.

    The backward is counted too, because autograd's threads inherit the mode.

    Attributes:
        flops: FLOPs by operation and dtype of its factors; a multiply-add counts as 2.
        casts: Tensors converted from one floating dtype to another.
        cast_bytes: Bytes that these conversions read and wrote.
    """

    supports_higher_order_operators = True  # torch refuses a batch with flex_attention otherwise

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: Counter[tuple[str, torch.dtype]] = Counter()
        self.casts = 0
        self.cast_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operation = getattr(func, "overloadpacket", func)
        if operation in flop_registry:
            flops = flop_registry[operation](*args, **{**kwargs, _RESULT: result})
            self._count_product(operation.__name__, flops, args)
        elif operation is torch.ops.aten._to_copy:
            self._count_cast(args[0], result)
        return result

    def _count_product(self, operation: str, flops: int, args: tuple[Any, ...]) -> None:
        dtypes = [a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
        if dtypes:  # attention also takes statistics, which are wider than its factors
            self.flops[operation, min(dtypes, key=lambda dtype: dtype.itemsize)] += flops

    def _count_cast(self, source: torch.Tensor, result: torch.Tensor) -> None:
        floating = source.is_floating_point() and result.is_floating_point()
        if floating and source.dtype != result.dtype:
            self.casts += 1
            self.cast_bytes += source.nbytes + result.nbytes
