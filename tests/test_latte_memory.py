"""`benchmarks.latte_memory`: a limit from two peaks, and its rows in the GPU
benchmark.
"""

from __future__ import annotations

import math

import torch

from benchmarks import latte_memory
from benchmarks.gpu import latte
from benchmarks.gpu.box import Box
from benchmarks.latte_memory import Row


def test_largest_batch_is_predicted_from_two_peaks():
    """Seven bytes of weights, three for every clip."""
    peaks = {2: 13, 5: 22}
    assert [latte_memory.predicted(peaks, memory) for memory in (22, 24, 25, 307)] == [
        5,
        5,
        6,
        100,
    ]


def test_gpu_benchmark_measures_latte_in_the_same_rows():
    box = Box(torch.device("cpu"), tiny=True, ends=math.inf)
    rows = [Row(**row) for row in latte.measure(box)]
    assert {row.precision for row in rows} == {"fp32", "amp_bf16"}
    assert all(row.step_seconds for row in rows)
