"""`trials.models.diffusion`: which noise, how much of it, and that it is the same again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from determined_amp.experiment.fields import read
from trials.data.clips import ClipDataset, ClipSettings, load
from trials.data.loading import Sample, to_device
from trials.models.diffusion import (
    BetaSchedule,
    Conditioning,
    Diffusion,
    DiffusionSettings,
    TrainingClips,
    ValidationClips,
)

CPU = torch.device("cpu")
CLIPS = ClipSettings(ClipDataset.SYNTHETIC, 4, channels=1, frames=2, classes=3, samples=100)
FIRST = [Sample(0, index) for index in range(8)]


def batch(count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 1, 2, 4, 4), torch.zeros(count, dtype=torch.int64)


class TestTrainingNoise:
    def test_noise_is_added_as_the_paper_defines_it(self) -> None:
        """x_t = sqrt(a) x + sqrt(1 - a) e, a the product of 1 - beta up to t; arXiv 2006.11239."""
        clips, labels = batch()
        noised = Diffusion(DiffusionSettings(), 3, CPU).for_training(clips, labels, 7)
        betas = torch.linspace(1.0e-4, 2.0e-2, 1000, dtype=torch.float64)
        kept = (1 - betas).cumprod(0)[noised.timesteps].view(-1, 1, 1, 1, 1)
        expected = kept.sqrt() * clips + (1 - kept).sqrt() * noised.noise
        torch.testing.assert_close(noised.clips.double(), expected, rtol=1.0e-4, atol=1.0e-5)

    def test_noise_is_a_function_of_the_seed_alone(self) -> None:
        diffusion = Diffusion(DiffusionSettings(), 3, CPU)
        first, _, again, other = (diffusion.for_training(*batch(), seed) for seed in (1, 5, 1, 2))
        for name in ("timesteps", "labels", "noise"):
            assert torch.equal(getattr(first, name), getattr(again, name))
        assert not torch.equal(first.noise, other.noise)
        assert not torch.equal(first.timesteps, other.timesteps)

    def test_noise_leaves_the_global_generator_alone(self) -> None:
        clips, labels = batch()
        before = torch.get_rng_state()
        Diffusion(DiffusionSettings(), 3, CPU).for_training(clips, labels, 1)
        assert torch.equal(torch.get_rng_state(), before)

    def test_seed_differs_between_batches_and_epochs_and_trials(self) -> None:
        clips = load(CLIPS, 0)[0]
        made = {
            TrainingClips(clips, seed).__getitems__([Sample(epoch, image), Sample(epoch, 50)])[2]
            for seed in (0, 1)
            for epoch in (0, 1)
            for image in (0, 1)
        }
        assert len(made) == 8
        assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in made)

    @pytest.mark.parametrize(
        ("settings", "share"),
        [
            (DiffusionSettings(class_dropout=0.25), 0.25),
            (DiffusionSettings(class_dropout=0.0), 0.0),
            (DiffusionSettings(conditioning=Conditioning.NONE, class_dropout=0.0), 1.0),
        ],
    )
    def test_labels_are_withheld_as_often_as_asked(
        self, settings: DiffusionSettings, share: float
    ) -> None:
        labels = Diffusion(settings, 3, CPU).for_training(*batch(2000), 1).labels
        assert set(labels.tolist()) <= {0, 3}
        # Four standard deviations of a share of 2000.
        assert float((labels == 3).float().mean()) == pytest.approx(share, abs=0.04)

    def test_timesteps_are_all_of_them(self) -> None:
        settings = DiffusionSettings(num_train_timesteps=4)
        timesteps = Diffusion(settings, 3, CPU).for_training(*batch(200), 1).timesteps
        assert set(timesteps.tolist()) == {0, 1, 2, 3}


class TestValidationNoise:
    def test_depends_on_the_index_alone(self) -> None:
        clips = load(CLIPS, 0)[1]
        whole = ValidationClips(clips).__getitems__([Sample(0, index) for index in range(6)])
        part = ValidationClips(load(CLIPS, 1)[1]).__getitems__([Sample(4, 5), Sample(4, 2)])
        for of_whole, of_part in zip(whole, part, strict=True):
            assert torch.equal(of_whole[[5, 2]], of_part)

    def test_covers_the_levels_evenly(self) -> None:
        """Between any two levels, as many as their distance says, to within a few."""
        clips = load(ClipSettings(ClipDataset.SYNTHETIC, 4, classes=3, samples=1000), 0)[1]
        samples = [Sample(0, index) for index in range(100)]
        level = ValidationClips(clips).__getitems__(samples)[3].sort().values
        assert float((level - torch.arange(100) / 100).abs().max()) < 0.03

    def test_validation_noise_is_what_the_model_gets(self) -> None:
        """And without a class, for a model that was told none."""
        loaded = ValidationClips(load(CLIPS, 0)[1]).__getitems__(FIRST)
        for conditioning in Conditioning:
            settings = DiffusionSettings(conditioning=conditioning, class_dropout=0.0)
            noised = Diffusion(settings, 3, CPU).for_validation(*loaded)
            assert torch.equal(noised.noise, loaded[2])
            assert torch.equal(noised.timesteps, (loaded[3] * 1000).long())
            null = conditioning is Conditioning.NONE
            expected = torch.full((8,), 3) if null else loaded[1]
            assert torch.equal(noised.labels, expected)


def test_batch_goes_to_the_device_with_its_seed() -> None:
    clips, labels, seed = to_device((*batch(), 2**40 + 1), CPU)
    assert seed == 2**40 + 1
    assert clips.shape == (8, 1, 2, 4, 4)
    assert labels.dtype == torch.int64


@pytest.mark.parametrize("schedule", BetaSchedule, ids=lambda schedule: schedule.value)
def test_every_schedule_goes_from_clip_to_noise(schedule: BetaSchedule) -> None:
    clips, _ = batch(2)
    ends = (torch.tensor([0.0, 0.9999]), torch.zeros(2, dtype=torch.int64), torch.zeros(2))
    settings = DiffusionSettings(beta_schedule=schedule)
    noised = Diffusion(settings, 3, CPU).for_validation(
        clips, ends[1], torch.randn_like(clips), ends[0]
    )
    start, end = (noised.clips - clips).flatten(1).norm(dim=1)
    assert float(start) < 0.1 * float(clips[0].norm())
    torch.testing.assert_close(noised.clips[1], noised.noise[1], rtol=0.1, atol=0.2)
    assert float(end) > float(start)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"beta_start": 0.5}, "diffusion.beta_start: got 0.5, which is above beta_end 0.02"),
        (
            {"beta_schedule": "squaredcos_cap_v2", "beta_end": 0.1},
            "diffusion.beta_end: given, but beta_schedule squaredcos_cap_v2 has no such end",
        ),
        ({"conditioning": "none"}, "diffusion.class_dropout: got 0.1, but conditioning none"),
        ({"beta_schedule": "cosine"}, "allowed: linear, scaled_linear, squaredcos_cap_v2"),
    ],
)
def test_contradiction_is_named(raw: dict[str, Any], said: str) -> None:
    problems: list[str] = []
    assert read(DiffusionSettings, raw, "diffusion", problems) is None
    assert len(problems) == 1
    assert said in problems[0]
