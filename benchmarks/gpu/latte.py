"""Measures Latte-S and Latte-XL/2, with and without checkpointing: step, peak, largest
batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks import latte_memory
from benchmarks.gpu.box import Box
from determined_amp.amp.settings import Precision

# The largest model first, and first in the precision that it is trained in.
MODELS = {"latte_xl": (1, 4), "latte_s": (2, 8)}


def measure(box: Box) -> Iterator[dict[str, Any]]:
    """Rows of `latte_memory.Row`, bfloat16 before IEEE float32."""
    for precision in (Precision.AMP_BF16, Precision.FP32):
        for name, batches in ({"fp32": (1, 2)} if box.tiny else MODELS).items():
            for row in latte_memory.timed(name, batches, box.device, (precision,)):
                yield dataclasses.asdict(row)
