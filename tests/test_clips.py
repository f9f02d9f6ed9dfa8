"""`trials.data.clips`: what moves, how, and that it is the same wherever and whenever
made.
"""

from __future__ import annotations

import torch

from trials.data.clips import ClipSettings, MovingDigits, load
from trials.data.loading import Sample

SETTINGS = ClipSettings()
SIDE = SETTINGS.image_size
FIRST = [Sample(0, index) for index in range(8)]


def clips_of(
    *samples: Sample, seed: int = 0, settings: ClipSettings = SETTINGS
) -> torch.Tensor:
    return load(settings, seed)[0].__getitems__(samples)[0]


def test_clip_depends_on_seed_epoch_and_scan_alone() -> None:
    alone = clips_of(Sample(1, 5))
    torch.testing.assert_close(
        clips_of(Sample(0, 3), Sample(1, 5))[1:], alone, rtol=0, atol=1.0e-6
    )
    assert torch.equal(clips_of(Sample(1, 5)), alone)
    for other in (clips_of(Sample(2, 5)), clips_of(Sample(1, 5), seed=1)):
        assert not torch.allclose(other, alone, atol=0.1)


def test_digit_moves_in_a_straight_line_and_bounces() -> None:
    """Its centre of mass, seen from the clip, against the line it should have
    followed.
    """
    room = SIDE - 8
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
        assert float(velocity.abs().max()) <= room / 4 + 1.0e-4
        # Without a bounce the velocity is constant; a bounce turns it round.
        bounces = (velocity.diff(dim=1).abs() > 1.0e-3).any(dim=1)
        assert bounces.any()
        assert not bounces.all()
    motion = grey.diff(dim=1).abs().sum(dim=(1, 2, 3))
    assert float(motion.min()) > 0


def test_validation_is_the_same_for_every_seed_and_in_every_pass() -> None:
    first, second = (load(SETTINGS, seed)[1] for seed in (0, 1))
    later = [Sample(3, sample.image) for sample in FIRST]
    assert torch.equal(first.__getitems__(FIRST)[0], second.__getitems__(later)[0])
