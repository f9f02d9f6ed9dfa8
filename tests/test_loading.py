"""`trials.data.loading`: what a rank is fed depends on (seed, epoch, rank) and on
nothing else.
"""

import itertools
import random

import numpy as np
import pytest
import torch

from trials.data.loading import (
    DataError,
    EpochSampler,
    Sample,
    batches_per_epoch,
    training_loader,
    validation_loader,
)

_SIZE, _BATCH = 50, 8  # 6 whole batches an epoch, and 2 images left over
_EPOCH = _SIZE // _BATCH


class Numbers:
    """50 images, each no more than its own (epoch, image)."""

    classes = 2

    def __len__(self):
        return _SIZE

    def __getitems__(self, samples):
        epochs, images = torch.tensor(samples).T
        return epochs, images


def sequence(count, *, seed=7, workers=0, **determined):
    """The first `count` batches of a fresh loader, as Determined's controller asks for
    them.
    """
    loader = training_loader(Numbers(), _BATCH, seed, workers)
    batches = iter(loader.get_data_loader(repeat=True, **determined))
    return [
        list(zip(epochs.tolist(), images.tolist(), strict=True))
        for epochs, images in itertools.islice(batches, count)
    ]


def random_states():
    return (
        f"{torch.get_rng_state().tolist()} {np.random.get_state()} {random.getstate()}"
    )


def test_order_is_a_function_of_seed_and_epoch():
    """The literals hold every numpy to it: a run may be resumed by a newer one."""
    sampler = EpochSampler(6, seed=7)
    assert [list(sampler) for _ in range(2)] == [
        [Sample(0, image) for image in (5, 2, 0, 4, 1, 3)],
        [Sample(1, image) for image in (3, 0, 2, 1, 4, 5)],
    ]


@pytest.mark.parametrize("skip", [1, 6, 13])
@pytest.mark.parametrize(("num_replicas", "rank"), [(1, 0), (4, 3)])
def test_resumed_sequence_is_the_tail_of_the_uninterrupted_one(
    skip, num_replicas, rank
):
    whole = sequence(skip + 8, num_replicas=num_replicas, rank=rank)
    assert sequence(8, skip=skip, num_replicas=num_replicas, rank=rank) == whole[skip:]


def test_ranks_share_out_the_batches_of_a_single_rank():
    whole = sequence(2 * _EPOCH)
    shards = [sequence(2 * _EPOCH // 3, num_replicas=3, rank=rank) for rank in range(3)]
    assert [
        batch for batches in zip(*shards, strict=True) for batch in batches
    ] == whole
    # Hence an epoch is dealt without a repetition: 6 * 8 of the 50 images, each once.
    for epoch in (0, 1):
        seen = [sample for batch in whole for sample in batch if sample[0] == epoch]
        assert len(seen) == len(set(seen)) == _EPOCH * _BATCH


@pytest.mark.parametrize("workers", [0, 2])
def test_training_batches_neither_use_nor_move_the_global_random_state(workers):
    expected = sequence(_EPOCH + 1)
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = random_states()
        assert sequence(_EPOCH + 1, workers=workers) == expected
        assert random_states() == before
    assert sequence(_EPOCH + 1, seed=8) != expected


def test_validation_keeps_the_last_partial_batch_which_training_drops():
    training = training_loader(Numbers(), _BATCH, 7, workers=0)
    assert [len(images) for _, images in training] == [8] * 6
    validation = [
        images for _, images in validation_loader(Numbers(), _BATCH, 0, slots=1)
    ]
    assert torch.equal(torch.cat(validation), torch.arange(_SIZE))
    assert [len(images) for images in validation] == [8] * 6 + [2]


@pytest.mark.parametrize("slots", [1, 4, 7])
def test_batches_per_epoch_are_those_of_the_chief(slots):
    loader = training_loader(Numbers(), _BATCH, 7, workers=0)
    chief = loader.get_data_loader(repeat=True, num_replicas=slots, rank=0)
    assert batches_per_epoch(loader, slots) == len(chief)


def test_validation_without_a_batch_for_every_slot_is_a_data_error():
    assert len(validation_loader(Numbers(), 24, workers=0, slots=3)) == 3
    with pytest.raises(
        DataError, match="batches of 25 leave some of 3 slots without any of the 50"
    ):
        validation_loader(Numbers(), 25, workers=0, slots=3)


def test_training_without_a_whole_batch_is_a_data_error():
    """Determined would repeat the empty epoch for ever."""
    assert len(training_loader(Numbers(), _SIZE, 7, workers=0)) == 1
    with pytest.raises(DataError, match=f"{_SIZE + 1}"):
        training_loader(Numbers(), _SIZE + 1, 7, workers=0)
