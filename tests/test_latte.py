"""`trials.latte`, trained for a few batches: averaged weights, clipping, settings."""

import pytest
import torch
import yaml
from torch.nn import functional

from determined_amp.amp.errors import ConfigError
from determined_amp.experiment.experiment import parse
from determined_amp.experiment.overrides import with_overrides
from tests.run_here import ROOT, changing, checkpoint, metrics, run
from trials.data.clips import load as load_clips
from trials.data.loading import Sample
from trials.models.denoiser import Denoiser
from trials.models.diffusion import Diffusion, ValidationClips

BATCHES = 8
TINY = (
    "data.dataset=synthetic",
    "data.samples=40",
    "data.image_size=8",
    "data.frames=2",
    "hyperparameters.model.num_layers=1",
    "hyperparameters.model.num_attention_heads=2",
    "hyperparameters.model.attention_head_dim=4",
    "hyperparameters.global_batch_size=4",
    "hyperparameters.warmup_steps=2",
    "hyperparameters.clip_start_step=2",
    f"hyperparameters.training.max_length.batches={BATCHES}",
    "hyperparameters.training.validation_period.batches=4",
    "hyperparameters.training.checkpoint_period.batches=4",
    "hyperparameters.training.reporting_period.batches=2",
)


def run_tiny(config, folder, *overrides):
    """Train in this process; the run folder."""
    return run(folder, *changing(f"latte/{config}", *TINY, *overrides))


def parsed(*overrides):
    raw = yaml.safe_load(
        (ROOT / "experiment_configs" / "latte" / "fp32.yaml").read_text()
    )
    return parse(with_overrides(raw, [*TINY, *overrides]), "fp32.yaml")


def test_validation_loss_is_that_of_the_averaged_weights(tmp_path):
    """Computed again from the checkpoint, whose weights themselves give another
    loss.
    """
    trained = run_tiny("fp32.yaml", tmp_path, "hyperparameters.learning_rate=2.0e-2")
    config = parsed()
    state = checkpoint(trained, BATCHES)
    clips = ValidationClips(load_clips(config.data, 0)[1])
    batch = clips.__getitems__([Sample(0, index) for index in range(len(clips))])
    diffusion = Diffusion(
        config.hparams.diffusion, config.data.classes, torch.device("cpu")
    )
    noised = diffusion.for_validation(*batch)
    losses = []
    for weights in (state["callbacks"]["ema"], state["models_state_dict"][0]):
        model = Denoiser(
            config.hparams.model, config.data, gradient_checkpointing=False
        )
        model.load_state_dict(weights)
        with torch.no_grad():
            noise = model(noised.clips, noised.timesteps, noised.labels)
        losses.append(float(functional.mse_loss(noise, noised.noise)))
    reported = [
        r["validation_loss"] for r in metrics(trained) if "validation_loss" in r
    ][-1]
    assert reported == pytest.approx(losses[0], rel=1.0e-5)
    assert reported != pytest.approx(losses[1], rel=1.0e-4)


def test_clip_starts_at_the_step_that_was_asked_for(tmp_path):
    """Seen in the second moments of Adam, which a clip to almost nothing leaves as they
    were.
    """
    tight = "hyperparameters.max_grad_norm=1.0e-12"
    moments = {}
    short = "hyperparameters.training.max_length.batches=4"
    for start in (0, 2):
        trained = run_tiny(
            "fp32.yaml",
            tmp_path / str(start),
            tight,
            short,
            f"hyperparameters.clip_start_step={start}",
        )
        state = checkpoint(trained, 4)["optimizers_state_dict"][0]["state"]
        moments[start] = max(
            float(entry["exp_avg_sq"].max()) for entry in state.values()
        )
    assert moments[0] < 1.0e-20
    assert moments[0] * 1.0e6 < moments[2]


def test_patches_must_fit_the_frame():
    config = parsed("hyperparameters.model.patch_size=3")
    with pytest.raises(
        ConfigError, match=r"patch_size: got 3, which does not divide .* 8"
    ):
        Denoiser(config.hparams.model, config.data, gradient_checkpointing=False)


def test_clip_start_step_without_a_clip_is_refused():
    with pytest.raises(
        ConfigError, match="clip_start_step: got 2, but nothing is clipped"
    ):
        parsed("hyperparameters.max_grad_norm=null")
