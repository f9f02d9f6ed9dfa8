"""`trials.data.clips`: what moves, how, and that it is the same wherever and whenever
made.
"""

import torch

from trials.data.clips import ClipSettings, load
from trials.data.loading import Sample

SETTINGS = ClipSettings()
FIRST = [Sample(0, index) for index in range(8)]


def clips_of(*samples, seed=0):
    return load(SETTINGS, seed)[0].__getitems__(samples)[0]


def test_clip_depends_on_seed_epoch_and_scan_alone():
    alone = clips_of(Sample(1, 5))
    torch.testing.assert_close(
        clips_of(Sample(0, 3), Sample(1, 5))[1:], alone, rtol=0, atol=1.0e-6
    )
    assert torch.equal(clips_of(Sample(1, 5)), alone)
    for other in (clips_of(Sample(2, 5)), clips_of(Sample(1, 5), seed=1)):
        assert not torch.allclose(other, alone, atol=0.1)


def test_validation_is_the_same_for_every_seed_and_in_every_pass():
    first, second = (load(SETTINGS, seed)[1] for seed in (0, 1))
    later = [Sample(3, sample.image) for sample in FIRST]
    assert torch.equal(first.__getitems__(FIRST)[0], second.__getitems__(later)[0])
