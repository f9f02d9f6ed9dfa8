"""`trials.sample`: what it writes, from which weights, and what it says when it cannot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from PIL import Image

from tests.test_latte import run_tiny
from tests.training import run_small
from trials import sample


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two batches on moving digits, whose clips are pictures."""
    torch.manual_seed(0)
    return run_tiny(
        "fp32.yaml",
        tmp_path_factory.mktemp("run"),
        "data={dataset: moving_digits, image_size: 12, frames: 3, channels: 1, classes: 10}",
        "hyperparameters.global_batch_size=180",
        "hyperparameters.training.max_length.batches=2",
    )


@pytest.fixture(scope="module")
def latents_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_tiny(
        "fp32.yaml",
        tmp_path_factory.mktemp("latents"),
        "data.channels=4",
        "hyperparameters.training.max_length.batches=2",
        "hyperparameters.diffusion.conditioning=none",
        "hyperparameters.diffusion.class_dropout=0.0",
    )


def sampled(source: Path, out: Path, *options: str) -> int:
    return sample.main([str(source), "--steps", "2", "--out", str(out), *options])


def test_writes_an_animation_and_a_strip(run: Path, tmp_path: Path) -> None:
    """Two clips of three frames: 96 pixels a side, 4 between them and around."""
    assert sampled(run, tmp_path / "clip.gif", "--class", "3", "--class", "7") == 0
    with Image.open(tmp_path / "clip.gif") as animation:
        assert animation.n_frames == 3
        assert animation.size == (2 * 100 + 4, 104)
    with Image.open(tmp_path / "clip.png") as strip:
        assert strip.size == (3 * 100 + 4, 2 * 100 + 4)


def test_clip_of_every_class_by_default(run: Path, tmp_path: Path) -> None:
    assert sampled(run, tmp_path / "clips.npy") == 0
    clips = np.load(tmp_path / "clips.npy")
    assert clips.shape == (10, 1, 3, 12, 12)
    assert np.abs(clips).max() <= 1.0


def test_same_seed_samples_the_same_clips(run: Path, tmp_path: Path) -> None:
    made = []
    for name, options in (("a", ()), ("b", ()), ("c", ("--seed", "1"))):
        assert sampled(run, tmp_path / f"{name}.npy", "--class", "1", *options) == 0
        made.append(np.load(tmp_path / f"{name}.npy"))
    assert np.array_equal(made[0], made[1])
    assert not np.array_equal(made[0], made[2])


def test_uses_the_averaged_weights_of_the_newest_checkpoint(run: Path) -> None:
    (checkpoint,) = (run / "checkpoints").iterdir()
    state = torch.load(checkpoint / "state_dict.pth", weights_only=True)
    for source in (run, checkpoint):
        _, denoiser = sample.load(source)
        for name, parameter in denoiser.named_parameters():
            assert torch.equal(parameter, state["callbacks"]["ema"][name])
    weights = state["models_state_dict"][0]
    assert any(not torch.equal(p, weights[name]) for name, p in denoiser.named_parameters())


def test_ddim_recovers_a_clip_from_a_perfect_denoiser(run: Path) -> None:
    """One that knows the clip predicts its noise exactly; guided or not, sampling ends there."""
    config, denoiser = sample.load(run)
    clip = torch.rand(1, *config.data.clip_shape) * 2 - 1
    kept = DDIMScheduler(**config.hparams.diffusion.scheduler_config()).alphas_cumprod

    def perfect(clips: torch.Tensor, timesteps: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        a = kept[timesteps].view(-1, 1, 1, 1, 1)
        noise: torch.Tensor = (clips - a.sqrt() * clip) / (1 - a).sqrt()
        return noise

    denoiser.forward = perfect  # type: ignore[method-assign]
    for guidance in (1.0, 3.0):
        made = sample.sample(
            denoiser, config, torch.tensor([4, 5]), steps=10, guidance=guidance, seed=1
        )
        torch.testing.assert_close(made, clip.expand(2, -1, -1, -1, -1), rtol=0, atol=1.0e-2)


def test_latents_are_written_as_numbers_only(
    latents_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sampled(latents_run, tmp_path / "clip.gif") == 2
    assert "clips of 4 channels are latents and no picture" in capsys.readouterr().err
    assert sampled(latents_run, tmp_path / "clip.npy", "--clips", "2") == 0
    assert np.load(tmp_path / "clip.npy").shape == (2, 4, 2, 8, 8)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "2000"], "--steps: got 2000; allowed: 1 to"),
        (["--class", "10"], "--class: got 10; allowed: 0 to 9"),
        (["--out", "clip.mp4"], "--out: got clip.mp4; allowed: a name in .gif or in .npy"),
    ],
)
def test_wrong_option_is_named(
    run: Path,
    options: Sequence[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sample, "track", None)  # before the work, not after it
    assert sample.main([str(run), "--steps", "1", *options]) == 2
    assert said in capsys.readouterr().err


def test_clips_that_do_not_fit_in_memory_are_one_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*given: object, **settings: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 1 TB")

    monkeypatch.setattr(sample, "sample", allocate)
    assert sampled(run, tmp_path / "clip.npy", "--clips", "2") == 2
    assert "not enough memory: DefaultCPUAllocator" in capsys.readouterr().err


def test_model_without_classes_has_none_to_ask_for(
    latents_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sampled(latents_run, tmp_path / "clip.npy", "--class", "1") == 2
    assert "trained with conditioning none" in capsys.readouterr().err


def test_source_that_is_no_checkpoint_or_of_another_trial_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sampled(tmp_path, tmp_path / "clip.npy") == 2
    assert f"{tmp_path}: no checkpoint of a Latte" in capsys.readouterr().err
    length = "hyperparameters.training.max_length.batches=2"
    other = run_small("mlp/fp32.yaml", tmp_path / "mlp", length)
    assert sampled(other, tmp_path / "clip.npy") == 2
    said = "no checkpoint of a Latte can be read here: KeyError('ema')"
    assert said in capsys.readouterr().err


def cut_off(checkpoint: Path) -> None:
    weights = checkpoint / "state_dict.pth"
    weights.write_bytes(weights.read_bytes()[:-1000])


def flip_bits(checkpoint: Path) -> None:
    """In more than the padding between two tensors, which nothing reads."""
    whole = (checkpoint / "state_dict.pth").read_bytes()
    middle, end = len(whole) // 2, len(whole) // 2 + 256
    flipped = bytes(byte ^ 1 for byte in whole[middle:end])
    (checkpoint / "state_dict.pth").write_bytes(whole[:middle] + flipped + whole[end:])


def average_a_list(checkpoint: Path) -> None:
    torch.save({"callbacks": {"ema": [1]}}, checkpoint / "state_dict.pth")


def set_data(key: str, value: object) -> Callable[[Path], None]:
    def change(checkpoint: Path) -> None:
        file = checkpoint / "load_data.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))

    return change


def be_of_another_trial(checkpoint: Path) -> None:
    """One that keeps averaged weights, too, and has no class `Hparams`."""
    file = checkpoint / "load_data.json"
    data = json.loads(file.read_text())
    data["hparams"]["trial"] = "benchmarks.small_trials:SummedLoss"
    file.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_off, "no checkpoint of a Latte"),
        (flip_bits, "no checkpoint of a Latte"),
        (average_a_list, "its weights do not fit its settings"),
        (be_of_another_trial, "is of benchmarks.small_trials:SummedLoss, which samples no clips"),
        (set_data("experiment_config", []), ""),
        (set_data("experiment_config", 5), ""),
        (set_data("hparams", [1]), ""),
    ],
)
def test_damaged_checkpoint_is_named(
    run: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(run, tmp_path / "run")
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    damage(checkpoint)
    assert sampled(tmp_path / "run", tmp_path / "clip.npy") == 2
    assert f"{checkpoint}: {said}" in capsys.readouterr().err
