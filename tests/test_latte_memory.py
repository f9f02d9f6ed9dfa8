"""`benchmarks.latte_memory`: a limit from two peaks, rows at once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import latte_memory
from benchmarks.gpu import latte
from benchmarks.gpu.box import Box
from benchmarks.latte_memory import Row

CPU = torch.device("cpu")


def test_largest_batch_is_predicted_from_two_peaks() -> None:
    """Seven bytes of weights, three for every clip."""
    peaks = {2: 13, 5: 22}
    assert [latte_memory.predicted(peaks, memory) for memory in (22, 24, 25, 307)] == [5, 5, 6, 100]


def test_latte_in_the_gpu_benchmark_has_the_same_rows() -> None:
    box = Box(CPU, tiny=True, ends=time.monotonic() + 60)
    rows = [Row(**row) for row in latte.measure(box)]
    assert {row.precision for row in rows} == {"fp32", "amp_bf16"}
    assert all(row.step_seconds for row in rows)


def test_command_writes_each_row_at_once_and_nothing_of_another_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def timed(*_: Any) -> Any:
        for batch in (1, 2):
            yield Row("fp32", "fp32", False, batch, 3, 0.5)
            (written,) = tmp_path.glob("*.json")
            seen.append(len(json.loads(written.read_text())["rows"]))

    monkeypatch.setattr(latte_memory, "timed", timed)
    monkeypatch.setattr(latte_memory, "COUNTED", {})
    assert latte_memory.main(["--folder", str(tmp_path)]) == 0
    assert seen == [1, 2]
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"latte_memory_{kind}.{suffix}" for suffix in ("json", "md", "png")}
