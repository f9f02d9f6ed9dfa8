"""What every test runs with: a fixed seed, one thread, and a skip where there is no CUDA device."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random numbers whichever tests ran before; one thread sums in one order."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkpoint folder; the loop copies the working directory into every checkpoint."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


# Files that take longest, started first: workers that end together leave no core idle.
LONGEST = (
    *("test_search_engine.py", "test_hostile.py", "test_strangers.py", "test_finder.py"),
    *("test_package.py", "test_processes.py", "test_contract.py", "test_search_strangers.py"),
    *("test_search_asha.py", "test_lr_schedulers.py", "test_your_trial.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none"))
