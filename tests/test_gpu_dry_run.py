"""The GPU tests run through without a GPU: a mistake in them does not wait for one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests import training
from tests.test_amp import FUSED_ON_CPU


@pytest.mark.skipif(not FUSED_ON_CPU, reason="this torch has no fused optimizers on a CPU")
def test_gpu_tests_run_through_on_the_cpu(tmp_path: Path) -> None:
    process = training.start(
        *("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests/test_gpu.py"),
        GPU_TESTS_ON_CPU="1",
        GPU_OUT=str(tmp_path),
    )
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert "nvjet" in (tmp_path / "kernels.txt").read_text()
    assert "of the first" in (tmp_path / "notes.txt").read_text()


def test_tests_of_the_cpu_and_their_processes_see_no_gpu() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert torch.cuda.device_count() == 0
