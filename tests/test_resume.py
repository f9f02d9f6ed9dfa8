"""Training N batches equals training k, stopping in whatever way, and training N - k
more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from determined_amp.runs.folder import read_record
from tests import training

# A schedule that moves, growth of the scale, and accumulation: all of it has to be
# restored.
RICH = (
    "hyperparameters.lr_schedule=cosine",
    "hyperparameters.warmup_steps=2",
    "hyperparameters.aggregation_frequency=2",
    "hyperparameters.amp.growth_interval=3",
)


@pytest.fixture
def killed_run(tmp_path: Path) -> Path:
    """A run of 12 batches that was lost in the 11th; its newest checkpoint is after the
    8th.
    """
    with training.killed_in_batch(10):
        training.run_small("mlp/amp.yaml", tmp_path / "run", *RICH)
    return tmp_path / "run"


def test_resumed_run_keeps_the_scale_and_takes_the_new_settings(
    killed_run: Path,
) -> None:
    """After 8 batches, 4 steps: the scale doubled once, one step on the way to the
    next.

    Two more steps with growth_interval 2 and growth_factor 4: 2^17 * 4 after the first.
    """
    state = training.checkpoint(killed_run, 8)["scaler_state_dict"]
    assert (state["scale"], state["_growth_tracker"]) == (2.0**17, 1)
    changes = (
        "init_scale=2.0",
        "growth_interval=2",
        "growth_factor=4.0",
        "backoff_factor=0.25",
    )
    options = [f"hyperparameters.amp.{change}" for change in changes]
    training.resume(killed_run, *(word for o in options for word in ("--config", o)))
    after = training.checkpoint(killed_run, 12)["scaler_state_dict"]
    assert after == {
        "scale": 2.0**19,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 2,
        "_growth_tracker": 1,
    }


def test_resumed_run_adds_a_part_and_keeps_the_first(killed_run: Path) -> None:
    (first,) = read_record(killed_run).parts
    training.resume(killed_run)
    run = read_record(killed_run)
    assert [part.first_batch for part in run.parts] == [0, 8]
    assert run.parts[0] == first
    assert run.parts[1].settings == first.settings
    assert run.changed == {}


def test_resumed_run_of_another_precision_goes_on_and_is_recorded(
    killed_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = training.resume(
        killed_run, *training.arguments("mlp/fp32.yaml", *RICH[:-1])
    )
    changed = read_record(folder).changed["hyperparameters.amp.precision"]
    assert changed == [(0, "amp_fp16"), (8, "fp32")]
    message = "after 8 batches hyperparameters.amp.precision changed from amp_fp16 to"
    assert message in caplog.text
    assert "scaler_state_dict" not in training.checkpoint(folder, 12)
    assert training.metrics(folder)[-2]["watch_applied_steps"] == 6
