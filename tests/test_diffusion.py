"""`trials.models.diffusion`: which noise, how much of it, and that it is the same
again.
"""

from __future__ import annotations

import pytest
import torch

from trials.data.clips import ClipDataset, ClipSettings, load
from trials.data.loading import Sample
from trials.models.diffusion import (
    Conditioning,
    Diffusion,
    DiffusionSettings,
    ValidationClips,
)

CPU = torch.device("cpu")
CLIPS = ClipSettings(
    ClipDataset.SYNTHETIC, 4, channels=1, frames=2, classes=3, samples=100
)
FIRST = [Sample(0, index) for index in range(8)]


def batch(count=8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 1, 2, 4, 4), torch.zeros(count, dtype=torch.int64)


class TestTrainingNoise:
    def test_noise_is_added_as_the_paper_defines_it(self):
        """x_t = sqrt(a) x + sqrt(1 - a) e, a the product of 1 - beta up to t; arXiv
        2006.11239.
        """
        clips, labels = batch()
        noised = Diffusion(DiffusionSettings(), 3, CPU).for_training(clips, labels, 7)
        betas = torch.linspace(1.0e-4, 2.0e-2, 1000, dtype=torch.float64)
        kept = (1 - betas).cumprod(0)[noised.timesteps].view(-1, 1, 1, 1, 1)
        expected = kept.sqrt() * clips + (1 - kept).sqrt() * noised.noise
        torch.testing.assert_close(
            noised.clips.double(), expected, rtol=1.0e-4, atol=1.0e-5
        )

    @pytest.mark.parametrize(
        ("settings", "share"),
        [
            (DiffusionSettings(class_dropout=0.25), 0.25),
            (DiffusionSettings(conditioning=Conditioning.NONE, class_dropout=0.0), 1.0),
        ],
        ids=["class_dropout", "conditioning none"],
    )
    def test_labels_are_withheld_as_often_as_asked(self, settings, share):
        labels = Diffusion(settings, 3, CPU).for_training(*batch(2000), 1).labels
        assert set(labels.tolist()) <= {0, 3}
        # Four standard deviations of a share of 2000.
        assert float((labels == 3).float().mean()) == pytest.approx(share, abs=0.04)


class TestValidationNoise:
    def test_validation_noise_depends_on_the_index_alone(self):
        clips = load(CLIPS, 0)[1]
        whole = ValidationClips(clips).__getitems__(
            [Sample(0, index) for index in range(6)]
        )
        part = ValidationClips(load(CLIPS, 1)[1]).__getitems__(
            [Sample(4, 5), Sample(4, 2)]
        )
        for of_whole, of_part in zip(whole, part, strict=True):
            assert torch.equal(of_whole[[5, 2]], of_part)

    def test_model_is_validated_with_the_loaded_noise(self):
        """And without a class, for a model that was told none."""
        loaded = ValidationClips(load(CLIPS, 0)[1]).__getitems__(FIRST)
        for conditioning in Conditioning:
            settings = DiffusionSettings(conditioning=conditioning, class_dropout=0.0)
            noised = Diffusion(settings, 3, CPU).for_validation(*loaded)
            assert torch.equal(noised.noise, loaded[2])
            assert torch.equal(noised.timesteps, (loaded[3] * 1000).long())
            told = [3] * 8 if conditioning is Conditioning.NONE else loaded[1].tolist()
            assert noised.labels.tolist() == told
