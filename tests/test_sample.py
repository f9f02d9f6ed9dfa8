"""`trials.sample`: from which weights, and what DDIM makes of a denoiser that is
perfect.
"""

import json
import shutil

import numpy as np
import pytest
import torch

from tests.test_latte import run_tiny
from trials import sample


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two batches on moving digits, whose clips are pictures."""
    return run_tiny(
        "fp32.yaml",
        tmp_path_factory.mktemp("run"),
        "data={dataset: moving_digits, image_size: 12, frames: 3, channels: 1, "
        "classes: 10}",
        "hyperparameters.global_batch_size=180",
        "hyperparameters.training.max_length.batches=2",
    )


def sampled(source, out, *options):
    return sample.main([str(source), "--steps", "2", "--out", str(out), *options])


def test_clips_are_sampled_from_the_averaged_weights_of_the_newest_checkpoint(run):
    (checkpoint,) = (run / "checkpoints").iterdir()
    state = torch.load(checkpoint / "state_dict.pth", weights_only=True)
    for source in (run, checkpoint):
        _, denoiser = sample.load(source)
        for name, parameter in denoiser.named_parameters():
            assert torch.equal(parameter, state["callbacks"]["ema"][name])
    weights = state["models_state_dict"][0]
    assert any(
        not torch.equal(p, weights[name]) for name, p in denoiser.named_parameters()
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "2000"], "--steps: got 2000; allowed: 1 to"),
        (["--guidance", "nan"], "--guidance: got nan; allowed: a finite number"),
        (["--class", "10"], "--class: got 10; allowed: 0 to 9"),
        (
            ["--out", "clip.mp4"],
            "--out: got clip.mp4; allowed: a name in .gif or in .npy",
        ),
    ],
)
def test_wrong_option_of_the_sampler_is_named(run, options, said, capsys, monkeypatch):
    monkeypatch.setattr(sample, "track", None)  # before the work, not after it
    assert sample.main([str(run), "--steps", "1", *options]) == 2
    assert said in capsys.readouterr().err


def test_checkpoint_with_weights_that_are_not_finite_is_passed_over_or_named(
    run, tmp_path, capsys
):
    """Its clips would be black, and nobody would be told why."""
    shutil.copytree(run, tmp_path / "run")
    (whole,) = (tmp_path / "run" / "checkpoints").iterdir()
    newest = whole.with_name("batch-00000009")
    shutil.copytree(whole, newest)
    metadata = json.loads((newest / "metadata.json").read_text())
    lost = {**metadata, "steps_completed": 9, "finite": False}
    (newest / "metadata.json").write_text(json.dumps(lost))
    state = torch.load(newest / "state_dict.pth", weights_only=True)
    for average in state["callbacks"]["ema"].values():
        average.fill_(torch.nan)
    torch.save(state, newest / "state_dict.pth")
    assert sampled(newest, tmp_path / "clip.npy") == 2
    assert f"{newest}: its weights are not finite; give an" in capsys.readouterr().err
    assert sampled(tmp_path / "run", tmp_path / "clip.npy", "--class", "1") == 0
    assert np.isfinite(np.load(tmp_path / "clip.npy")).all()
