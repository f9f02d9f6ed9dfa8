"""`benchmarks.overhead`: its loops do the same work, and its table says what it measured."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import loops, overhead
from benchmarks.measured import RESULTS
from benchmarks.turns import BATCHES_PER_TURN, Turns, by_turns
from determined_amp.trial.determined_0_38 import SafeController, controlled_by

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


def test_loops_take_turns_and_all_of_them_end() -> None:
    seen: list[str] = []

    def loop(name: str, turns: Turns) -> None:
        while True:
            turns.batch_begins()
            if turns.over:
                return
            seen.append(name)

    found = by_turns({name: partial(loop, name) for name in "ab"}, 2)
    assert seen == [*"a" * 20, *"b" * 20, *"b" * 20, *"a" * 20]
    assert BATCHES_PER_TURN == 20
    assert [len(turns.times) for turns in found.values()] == [2, 2]
    assert all(cpu >= 0 for turns in found.values() for _, cpu in turns.times)


def test_turn_ends_when_the_gpu_has_done_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of three seconds for every batch, by a clock that only `synchronize` moves."""
    clock, queued, seen = 0.0, 0.0, []

    def synchronize() -> None:
        nonlocal clock, queued
        clock, queued = clock + queued, 0.0

    def loop(turns: Turns) -> None:
        nonlocal queued
        while True:
            turns.batch_begins()
            if turns.over:
                return
            seen.append(queued)
            queued += 3.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr("benchmarks.turns.time.perf_counter", lambda: clock)
    found = by_turns({"a": loop, "b": loop}, 2, batches=2)
    assert [[wall for wall, _ in turns.times] for turns in found.values()] == [[6.0, 6.0]] * 2
    assert seen == [0.0, 3.0] * 4  # nobody's work is left for the next one
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)  # negative control
    found = by_turns({"a": loop, "b": loop}, 2, batches=2)
    assert [[wall for wall, _ in turns.times] for turns in found.values()] == [[0.0, 0.0]] * 2


def test_error_of_a_loop_is_raised_and_ends_the_others() -> None:
    ended = []

    def good(turns: Turns) -> None:
        while not turns.over:
            turns.batch_begins()
        ended.append("good")

    def bad(turns: Turns) -> None:
        turns.batch_begins()
        raise ArithmeticError("bad")

    with pytest.raises(ArithmeticError, match="bad"):
        by_turns({"good": good, "bad": bad}, 3)
    assert ended == ["good"]


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


def test_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overhead.main(["--precision", "fp32", "--rounds", "1", "--folder", str(tmp_path)])
    (written,) = tmp_path.glob("*.json")
    result = json.loads(written.read_text())
    assert result["precision"] == "fp32"
    assert result["rounds"] == 1
    assert all(row["cpu_us"] > 0 for rows in result["schedules"].values() for row in rows.values())
    assert written.with_suffix(".md").read_text() == overhead.markdown(result)
    assert "determined_amp" in capsys.readouterr().out
