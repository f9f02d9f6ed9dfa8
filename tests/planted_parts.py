"""Parts of `benchmarks.gpu` that go wrong in every way they can, and one that does
not.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator

from benchmarks.gpu.box import Box
from determined_amp.amp.plain_data import Values


def fine(box: Box) -> Iterator[Values]:
    yield {"value": 1.0}


def raises(box: Box) -> Iterator[Values]:
    yield {"value": 2.0}
    raise ArithmeticError("planted\nin two lines")


def dies(box: Box) -> Iterator[Values]:
    yield {"value": 3.0}
    os._exit(7)  # as after a fault of the driver


def never_ends(box: Box) -> Iterator[Values]:
    for number in itertools.count():
        time.sleep(0.1)
        yield {"value": float(number)}
