"""Measures step time, peak memory and largest batch of Latte-S/2 and Latte-XL/2."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks import latte_memory
from benchmarks.gpu.box import Box
from determined_amp.amp.settings import Precision

# The largest model comes first, because time may run out.
MODELS = {"latte_xl": (1, 4), "latte_s": (2, 8)}


def measure(box: Box) -> Iterator[dict[str, Any]]:
    """Yield rows of `latte_memory.Row`, first in bfloat16, in which Latte trains."""
    for precision in (Precision.AMP_BF16, Precision.FP32):
        for name, batches in ({"fp32": (1, 2)} if box.tiny else MODELS).items():
            for row in latte_memory.timed(name, batches, box.device, (precision,)):
                yield dataclasses.asdict(row)
