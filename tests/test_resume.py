"""Training N batches equals training k, stopping in whatever way, and training N - k
more, to the bit.
"""

from pathlib import Path

import pytest

from determined_amp.experiment.overrides import with_overrides
from determined_amp.runs.folder import read_record
from tests import killed_rounds, run_here, strangers
from tests.harness import same_bits

TRIALS = {
    "plain": ("Stranger",),
    "workers": ("Shuffled", "hyperparameters.workers=2"),
    "weighted": ("Weighted",),
    "accumulated": (
        "Shuffled",
        "optimizations.aggregation_frequency=2",
        "hyperparameters.amp={precision: amp_fp16, audit: false}",
    ),
}
LONGER = "searcher.max_length.batches=12"


@pytest.fixture(scope="module", params=TRIALS)
def undisturbed(request, tmp_path_factory):
    """The class of a trial, its YAML, and the folder of an undisturbed run."""
    name, *overrides = TRIALS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    entrypoint = f"entrypoint=tests.strangers:{name}"
    config = with_overrides(run_here.STRANGE, [entrypoint, *overrides])
    path = run_here.write_yaml(folder, config)
    run_here.run(folder / "run", path)
    return getattr(strangers, name), path, folder / "run"


def crash(trial, path, run):
    """Lose the run in a batch; an epoch is 5 or 6, a checkpoint every fourth."""
    with run_here.killed_in_batch(10, trial):
        run_here.run(run, path)


def end_within_an_epoch(trial, path, run):
    """End the run with a validation more than the longer one has, which draws, too."""
    length = 8 if "aggregation_frequency" in Path(path).read_text() else 7
    run_here.run(run, path, "--config", f"searcher.max_length.batches={length}")


@pytest.mark.parametrize("stop", [crash, end_within_an_epoch])
def test_resumed_run_is_the_undisturbed_one_to_the_bit(stop, undisturbed, tmp_path):
    trial, path, whole = undisturbed
    stop(trial, path, tmp_path)
    run_here.resume(tmp_path, "--config", LONGER)
    assert same_bits(*(run_here.checkpoint(run, 12) for run in (tmp_path, whole)))
    if stop is crash:
        assert run_here.same_numbers(tmp_path) == run_here.same_numbers(whole)


def test_kills_at_random_moments_lose_nothing(tmp_path):
    """See `tests.killed_rounds`."""
    printed = tmp_path / "printed"
    child = run_here.fork(lambda: killed_rounds.main(tmp_path), printed)
    assert run_here.wait(child) == 0, printed.read_text()


# A schedule that moves, growth of the scale, and accumulation: all of it has to be
# restored.
RICH = (
    "hyperparameters.lr_schedule=cosine",
    "hyperparameters.warmup_steps=2",
    "hyperparameters.aggregation_frequency=2",
    "hyperparameters.amp.growth_interval=3",
)


@pytest.fixture
def killed_run(tmp_path):
    """A run of 12 batches that was lost in the 11th; its newest checkpoint is after the
    8th.
    """
    with run_here.killed_in_batch(10):
        run_here.run_small("mlp/amp.yaml", tmp_path / "run", *RICH)
    return tmp_path / "run"


def test_resumed_run_keeps_the_scale_and_takes_the_new_settings(killed_run):
    """After 8 batches, 4 steps: the scale doubled once, one step on the way to the
    next.

    Two more steps with growth_interval 2 and growth_factor 4: 2^17 * 4 after the first.
    """
    state = run_here.checkpoint(killed_run, 8)["scaler_state_dict"]
    assert (state["scale"], state["_growth_tracker"]) == (2.0**17, 1)
    changes = (
        "init_scale=2.0",
        "growth_interval=2",
        "growth_factor=4.0",
        "backoff_factor=0.25",
    )
    options = [f"hyperparameters.amp.{change}" for change in changes]
    run_here.resume(killed_run, *(word for o in options for word in ("--config", o)))
    after = run_here.checkpoint(killed_run, 12)["scaler_state_dict"]
    assert after == {
        "scale": 2.0**19,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 2,
        "_growth_tracker": 1,
    }


def test_resumed_run_says_where_it_begins_and_adds_a_part(killed_run, capsys):
    (first,) = read_record(killed_run).parts
    run_here.resume(killed_run)
    assert "mlp-amp: resumed from batch 8 of 12\n" in capsys.readouterr().out
    assert "partial checkpoint" not in (killed_run / "log.txt").read_text()
    run = read_record(killed_run)
    assert [part.first_batch for part in run.parts] == [0, 8]
    assert run.parts[0] == first
    assert run.parts[1].settings == first.settings
    assert run.changes == []


def test_resumed_run_of_another_precision_goes_on_and_is_recorded(killed_run, caplog):
    folder = run_here.resume(
        killed_run, *run_here.arguments("mlp/fp32.yaml", *RICH[:-1])
    )
    name = "hyperparameters.amp.precision"
    changed = f"{name} changed from amp_fp16 to fp32 at the resume after 8 batches"
    assert changed in read_record(folder).changes
    assert changed in caplog.text
    assert "scaler_state_dict" not in run_here.checkpoint(folder, 12)
    assert run_here.metrics(folder)[-2]["watch_applied_steps"] == 6
