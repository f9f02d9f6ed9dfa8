"""`benchmarks.latte_memory`: steps with full products, a limit from two peaks, rows at once."""

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
from benchmarks.latte_memory import Row, Step
from determined_amp.amp.settings import Precision
from trials.models.denoiser import Denoiser

CPU = torch.device("cpu")
SMALL = latte_memory.load("fp32")


def test_no_product_of_a_step_has_a_factor_of_zeros() -> None:
    """A product with a factor of zeros is zero; the gradient of a weight is one."""

    def zero_gradients(step: Step) -> int:
        step.loss(2).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        gradients = [p.grad for p in step.model.parameters() if p.dim() > 1 and p.grad is not None]
        return sum(not gradient.any() for gradient in gradients)

    step = Step(SMALL, Precision.FP32, False, CPU)
    assert zero_gradients(step) == 0
    # Negative control: as Latte begins.
    step.model = Denoiser(SMALL.hparams.model, SMALL.data, gradient_checkpointing=False)
    assert zero_gradients(step) > 10


def test_largest_batch_is_predicted_from_two_peaks() -> None:
    """Seven bytes of weights, three for every clip."""
    peaks = {2: 13, 5: 22}
    assert [latte_memory.predicted(peaks, memory) for memory in (22, 24, 25, 307)] == [5, 5, 6, 100]


def test_rows_of_a_gpu_have_the_limit_once_there_are_two_peaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(step: Step, batch: int, device: torch.device) -> tuple[float, int]:
        if batch > 4:
            raise torch.cuda.OutOfMemoryError
        return 0.5, 100 + 10 * batch

    monkeypatch.setattr(latte_memory, "measure", measure)
    monkeypatch.setattr(latte_memory, "_memory", lambda device: 1000)
    rows = list(latte_memory.timed("fp32", (1, 3, 5), CPU, (Precision.FP32,)))
    assert [(row.batch, row.predicted_batch) for row in rows] == [(1, None), (3, 90)] * 2


def test_part_of_the_gpu_benchmark_has_the_same_rows() -> None:
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
