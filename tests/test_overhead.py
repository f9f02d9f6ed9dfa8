"""`benchmarks.overhead`: its loops do the same work, and its table says what it measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import loops, overhead
from benchmarks.measured import RESULTS
from determined_amp.trial.determined_private import SafeController, controlled_by

ROOT = Path(__file__).parents[1]
FEW = 12


class Unmeasured:
    """Ends a loop after a few batches."""

    over = False

    def __init__(self) -> None:
        self._batches = 0

    def batch_begins(self) -> None:
        self.over = self._batches == FEW
        self._batches += 1


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_all_loops_train_the_same_weights(precision: str, schedule: str) -> None:
    """Exactly; PyTorch's cosine multiplies one rate into the next, which rounds otherwise."""
    tolerance = 0.0 if schedule == "constant" else 1e-6
    case = loops.Case(precision, schedule, FEW + 1)
    with controlled_by(SafeController):
        trained = {}
        for name, loop in overhead.LOOPS.items():
            turns: Any = Unmeasured()
            trained[name] = loop(case, turns).state_dict()
    reference = trained.pop(overhead.REFERENCE)
    assert len(trained) == 4
    for weights in trained.values():
        torch.testing.assert_close(weights, reference, rtol=0, atol=tolerance)
    torch.manual_seed(case.experiment.seed)
    assert not torch.equal(case.model().state_dict()["1.weight"], reference["1.weight"])


def test_summary_is_of_the_quiet_rounds_and_taken_within_them() -> None:
    """Eight rounds; in the two quiet ones a loop adds 10 and 20, the busy ones add 1000."""
    bare = [(0.0, cpu) for cpu in (100.0, 110.0, *[200.0] * 6)]
    loop = [(0.0, cpu) for cpu in (110.0, 130.0, *[1200.0] * 6)]
    rows = overhead.summary({overhead.REFERENCE: bare, "loop": loop})
    assert rows["loop"]["cpu_us"] == 120
    assert rows["loop"]["added_cpu_us"] == 15
    assert (rows["loop"]["added_cpu_us_low"], rows["loop"]["added_cpu_us_high"]) == (12.5, 17.5)
    assert rows[overhead.REFERENCE]["added_cpu_us"] == 0
    assert rows[overhead.REFERENCE]["cpu_ratio"] == 1


def test_committed_table_is_that_of_the_committed_numbers_and_is_quoted() -> None:
    result = json.loads((RESULTS / "overhead_cpu.json").read_text())
    table = overhead.markdown(result)
    assert (RESULTS / "overhead_cpu.md").read_text() == table
    assert table in (ROOT / "docs" / "amp.md").read_text()
    assert list(result["schedules"]) == ["constant", "cosine"]
    for rows in result["schedules"].values():
        assert list(rows) == list(overhead.LOOPS)


def test_no_rounds_are_a_mistake_of_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        overhead.main(["--rounds", "0"])
    assert "argument --rounds: got 0; allowed: an integer >= 1" in capsys.readouterr().err
