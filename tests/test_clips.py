"""`trials.data.clips`: what moves, how, and that it is the same wherever and whenever made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from determined_amp.experiment.fields import read
from trials.data.clips import ClipDataset, ClipSettings, MovingDigits, load
from trials.data.loading import DataError, Sample

SETTINGS = ClipSettings()
SIDE, FRAMES = SETTINGS.image_size, SETTINGS.frames
FIRST = [Sample(0, index) for index in range(8)]


def clips_of(*samples: Sample, seed: int = 0, settings: ClipSettings = SETTINGS) -> torch.Tensor:
    return load(settings, seed)[0].__getitems__(samples)[0]


class TestMovingDigits:
    def test_batch_has_shape_dtype_and_range_of_the_settings(self) -> None:
        clips, labels = load(SETTINGS, 0)[0].__getitems__(FIRST)
        assert clips.shape == (8, *SETTINGS.clip_shape) == (8, 1, FRAMES, SIDE, SIDE)
        assert clips.dtype == torch.float32
        assert labels.dtype == torch.int64
        assert -1.0 <= float(clips.min()) < -0.99
        assert 0.8 < float(clips.max()) <= 1.0

    def test_clip_depends_on_seed_epoch_and_scan_alone(self) -> None:
        alone = clips_of(Sample(1, 5))
        torch.testing.assert_close(
            clips_of(Sample(0, 3), Sample(1, 5))[1:], alone, rtol=0, atol=1.0e-6
        )
        assert torch.equal(clips_of(Sample(1, 5)), alone)
        for other in (clips_of(Sample(2, 5)), clips_of(Sample(1, 5), seed=1)):
            assert not torch.allclose(other, alone, atol=0.1)

    def test_every_frame_holds_the_whole_scan(self) -> None:
        """Linear interpolation spreads a grey value over its neighbours and loses none of it."""
        scans = torch.rand(3, 8, 8)
        made = MovingDigits(scans, torch.zeros(3).long(), SETTINGS, 0, new_each_epoch=True)
        clips, _ = made.__getitems__(FIRST[:3])
        grey = (clips + 1) / 2
        expected = scans.sum(dim=(1, 2)).expand(FRAMES, 3).T
        torch.testing.assert_close(grey.sum(dim=(1, 3, 4)), expected)

    def test_digit_moves_in_a_straight_line_and_bounces(self) -> None:
        """Its centre of mass, seen from the clip, against the line it should have followed."""
        room, turns = SIDE - 8, 0
        made = MovingDigits(
            torch.ones(64, 8, 8), torch.zeros(64).long(), SETTINGS, 0, new_each_epoch=True
        )
        clips, _ = made.__getitems__([Sample(0, index) for index in range(64)])
        grey = (clips[:, 0] + 1) / 2  # (64, F, S, S)
        position = torch.arange(SIDE, dtype=torch.float32)
        for along in (2, 3):  # sum over the other side
            mass = grey.sum(dim=5 - along)
            corner = (mass * position).sum(dim=-1) / mass.sum(dim=-1) - 3.5
            assert float(corner.min()) >= -1.0e-4
            assert float(corner.max()) <= room + 1.0e-4
            velocity = corner.diff(dim=1)
            speed = velocity.abs().max(dim=1).values
            assert float(speed.max()) <= room / 4 + 1.0e-4
            # Between bounces the velocity is constant; a bounce turns it round within one frame.
            changed = ((velocity.diff(dim=1)).abs() > 1.0e-3).sum(dim=1)
            assert int(changed.max()) <= 4
            turns += int((changed > 0).sum())
            assert int((changed == 0).sum()) > 0
        assert turns > 0
        motion = grey.diff(dim=1).abs().sum(dim=(1, 2, 3))
        assert float(motion.min()) > 0

    def test_scan_at_a_whole_offset_is_the_scan_itself(self) -> None:
        settings = ClipSettings(image_size=12, frames=1)
        scans = torch.rand(1, 8, 8)
        made = MovingDigits(scans, torch.zeros(1).long(), settings, 0, new_each_epoch=True)
        made._path = lambda samples: torch.tensor([[[1.0]], [[3.0]]])  # type: ignore[method-assign]
        clip = made.__getitems__(FIRST[:1])[0][0, 0, 0]
        assert torch.equal((clip[1:9, 3:11] + 1) / 2, (scans[0] * 2 - 1 + 1) / 2)
        assert int((clip != -1).sum()) == 64

    def test_validation_is_the_same_for_every_seed_and_in_every_pass(self) -> None:
        first, second = (load(SETTINGS, seed)[1] for seed in (0, 1))
        later = [Sample(3, sample.image) for sample in FIRST]
        assert torch.equal(first.__getitems__(FIRST)[0], second.__getitems__(later)[0])

    def test_training_and_validation_are_of_different_scans(self) -> None:
        train, validation = load(SETTINGS, 0)
        assert (len(train), len(validation)) == (1437, 360)
        still = ClipSettings(image_size=12, frames=1)
        of_train, of_validation = (part._scans for part in load(still, 0))  # type: ignore[attr-defined]
        assert not {s.numpy().tobytes() for s in of_validation} & {
            s.numpy().tobytes() for s in of_train
        }

    def test_digit_grows_with_the_frame(self) -> None:
        clips = clips_of(*FIRST, settings=ClipSettings(image_size=24, frames=1))
        drawn = (clips[:, 0, 0] > -0.9).any(dim=1).sum(dim=1)  # columns with ink
        assert 8 < int(drawn.max()) <= 17


def test_synthetic_clips_have_the_shape_of_the_settings() -> None:
    settings = ClipSettings(ClipDataset.SYNTHETIC, 32, channels=4, frames=16, classes=3, samples=50)
    train, validation = load(settings, 0)
    assert (len(train), len(validation)) == (50, 5)
    clips, labels = train.__getitems__(FIRST)
    assert clips.shape == (8, 4, 16, 32, 32)
    assert set(labels.tolist()) == {0, 1, 2}
    assert torch.equal(clips, load(settings, 0)[0].__getitems__(FIRST)[0])


def test_wrong_number_of_classes_is_an_error() -> None:
    with pytest.raises(DataError, match=r"data\.classes: got 9, but moving_digits has 10"):
        load(ClipSettings(classes=9), 0)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"channels": 3}, "data.channels: got 3, but moving_digits are grey; allowed: 1"),
        ({"image_size": 8}, "allowed: 12 or more"),
        ({"samples": 100}, "data.samples: given, but dataset moving_digits has its own size"),
        ({"directory": "x"}, "data.directory: given, but dataset moving_digits reads no"),
        ({"dataset": "video_latents"}, "data.directory: missing; dataset video_latents needs"),
        ({"dataset": "mnist"}, "allowed: moving_digits, video_latents, synthetic"),
    ],
)
def test_contradiction_is_named(raw: dict[str, Any], said: str) -> None:
    problems: list[str] = []
    assert read(ClipSettings, raw, "data", problems) is None
    assert len(problems) == 1
    assert said in problems[0]
