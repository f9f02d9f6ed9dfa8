"""The benchmark of the finder's choice: its verdict, its count of samples, one real training."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from benchmarks import loss_scale_choice as bench
from benchmarks.loss_scale_choice import GRID_LOG2, SEEDS, Comparison, Training
from tests.reporting import found_scale


def trainings(choice_loss: float, spread: float = 0.1) -> list[Training]:
    """Losses of 1 and a bit more by seed; the grid's best is 2^8, the choice is 2^17."""
    made = []
    for i, seed in enumerate(SEEDS):
        for scale in GRID_LOG2:
            better = 0.01 if scale == 8 else 0.0
            made.append(Training(scale, seed, 1.0 + spread * i - better, 0))
        made.append(Training(17, seed, choice_loss + spread * i, 0))
    return made


@pytest.mark.parametrize(
    ("choice_loss", "verdict"), [(1.0, "tie"), (0.99, "tie"), (1.3, "worse"), (0.5, "better")]
)
def test_verdict_is_paired_and_knows_a_tie(choice_loss: float, verdict: str) -> None:
    found = bench.compare(trainings(choice_loss), found_scale(choice=17), steps=250)
    assert found.verdict == verdict
    assert found.best_log2 == 8
    assert found.difference == pytest.approx(choice_loss - 0.99)
    assert found.half_width == pytest.approx(
        0.0, abs=1e-9
    )  # seeds differ, their differences do not
    assert found.seed_sd == pytest.approx(0.1 * 2.5**0.5)
    assert found.default_loss == pytest.approx(1.2)


def test_ratio_counts_every_pass_of_the_finder() -> None:
    # 12 trainings of 250 batches, against 4 batches in two passes.
    assert bench.compare(trainings(1.0), found_scale(), 250).ratio == 12 * 250 / (4 * 2)


def test_scales_and_seeds_reach_the_training() -> None:
    model = next(m for m in bench.models() if m.name == "SummedLoss")
    first = bench.train(model, seed=1, scale_log2=8, steps=3)
    assert (first.scale_log2, first.seed, first.skipped_steps) == (8, 1, 0)
    assert bench.train(model, seed=1, scale_log2=8, steps=3) == first
    assert (
        bench.train(model, seed=2, scale_log2=8, steps=3).validation_loss != first.validation_loss
    )
    assert bench.train(model, seed=1, scale_log2=30, steps=3).skipped_steps == 3


def test_committed_results_say_what_their_trainings_do() -> None:
    """At least five seeds, twelve points, and no verdict but a tie or better."""
    results = json.loads(bench.RESULTS.read_text())
    assert len(results["seeds"]) >= 5
    assert len(results["models"]) == 3
    for model in results["models"]:
        c = Comparison(**model["comparison"])
        rows = [Training(**training) for training in model["trainings"]]
        window = model["window_log2"]
        again = bench.compare(rows, found_scale(c.choice_log2, *window), results["steps"])
        assert asdict(again) == pytest.approx(model["comparison"])
        assert c.verdict in ("tie", "better")
        assert c.ratio >= 300
    assert bench.RESULTS.with_suffix(".md").read_text() == bench.markdown(results)
