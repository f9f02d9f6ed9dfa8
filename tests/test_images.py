"""`data.images`: sizes, splits and values of the datasets; augmentation of the training
set alone.

Nothing is downloaded: `mnist` and `cifar10` read what stands in for torchvision's
classes.
"""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets

from determined_amp.amp.fields import read
from trials.data.images import DatasetName, DataSettings, TensorImages, load
from trials.data.loading import DataError, Sample, to_device


def samples_of(images, epoch=0):
    return [Sample(epoch, image) for image in range(len(images))]


CPU = torch.device("cpu")


def everything(images, epoch=0):
    """As the model gets it."""
    return of(images, samples_of(images, epoch))


def of(images, samples):
    pixels, labels = to_device(images.__getitems__(samples), CPU)
    return pixels, labels


def equal(a, b):
    return all(map(torch.equal, a, b))


def test_digits_are_1437_and_360_images_with_values_from_minus_1_to_1():
    settings = DataSettings(image_size=28, channels=3)
    for images, count in zip(load(settings, seed=0), (1437, 360), strict=True):
        pixels, labels = everything(images)
        assert len(images) == count
        assert pixels.shape == (count, 3, 28, 28)
        assert (pixels.dtype, labels.dtype) == (torch.float32, torch.int64)
        assert (pixels.min().item(), pixels.max().item()) == (-1.0, 1.0)
        assert set(labels.tolist()) == set(range(10))


def test_channels_are_repeated_or_averaged():
    label, colour = torch.tensor([0]), torch.full((1, 3, 8, 8), 30, dtype=torch.uint8)
    colour[:, 1], colour[:, 2] = 60, 92  # mean 60.67: rounded to 61
    for made, channels, value in ((colour, 1, 61.0), (colour[:, :1], 3, 30.0)):
        settings = DataSettings(image_size=8, channels=channels)
        pixels, _ = everything(TensorImages(made, label, 1, settings))
        expected = torch.full((1, channels, 8, 8), value) / 127.5 - 1.0
        assert torch.equal(pixels, expected)


def test_device_synthetic_images_are_made_once_and_depend_on_the_seed_alone():
    settings = DataSettings(
        DatasetName.DEVICE_SYNTHETIC, image_size=8, channels=3, classes=4, samples=50
    )
    state = torch.get_rng_state()
    train, validation = load(settings, 3, CPU)
    assert (len(train), len(validation)) == (50, 5)
    first, second = (train.__getitems__(samples_of(train)[:20]) for _ in range(2))
    assert first[0].shape == (20, 3, 8, 8)
    # The same memory, and nothing is left to do to it.
    batches = (first, second, to_device(first, CPU))
    assert len({batch[0].data_ptr() for batch in batches}) == 1
    for seed in (3, 4):
        again = load(settings, seed)[0].__getitems__(samples_of(train)[:20])
        assert equal(again, first) is (seed == 3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def folder(tmp_path):
    """Three images a class to train on and one to validate on: noise, but for a plain
    last dog.
    """
    noise = np.random.default_rng(0)
    for index, part in enumerate(("train", "train", "train", "val")):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True, exist_ok=True)
            pixels = noise.integers(0, 256, (40, 48, 3), dtype=np.uint8)
            if (part, name) == ("val", "dog"):
                pixels[:] = (30, 60, 90)
            Image.fromarray(pixels).save(tmp_path / part / name / f"{index}.png")
    return tmp_path


def of_folder(folder, channels=3, classes=2):
    return DataSettings(
        DatasetName.IMAGE_FOLDER, 16, channels, classes, directory=str(folder)
    )


def test_folder_is_decoded_to_the_size_and_channels_asked_for(folder):
    train, validation = load(of_folder(folder, channels=1), seed=3)
    pixels, labels = everything(train)
    assert pixels.shape == (6, 1, 16, 16)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    pixels, labels = everything(validation)
    # of 30, 60 and 90
    assert torch.equal(pixels[1], torch.full((1, 16, 16), 60.0) / 127.5 - 1.0)
    assert labels.tolist() == [0, 1]
    assert equal(everything(validation, epoch=1), (pixels, labels))  # no augmentation


def test_folder_augmentation_is_a_function_of_seed_epoch_and_image(folder):
    train, _ = load(of_folder(folder), seed=3)
    pixels, _ = everything(train, epoch=5)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    for index, sample in reversed(list(enumerate(samples_of(train, epoch=5)))):
        assert torch.equal(of(train, [sample])[0][0], pixels[index])
    assert torch.equal(torch.get_rng_state(), state)
    for other in (
        everything(train, epoch=6),
        everything(load(of_folder(folder), seed=4)[0], 5),
    ):
        assert not any(map(torch.equal, other[0], pixels))


@pytest.mark.parametrize(
    ("part", "elsewhere", "words"),
    [
        ("val/dog", "dog", "different class folders"),
        ("val/dog", "val/bird", "different class folders"),  # cats become class 1
        ("val/dog/3.png", "3.png", "data"),
        ("train", "elsewhere", r"data\.directory: .*train is not a directory"),
    ],
)
def test_folder_that_does_not_fit_its_labels_is_a_data_error(
    folder, part, elsewhere, words
):
    """The labels are positions in the sorted list of folders."""
    (folder / part).rename(folder / elsewhere)
    with pytest.raises(DataError, match=words):
        load(of_folder(folder), seed=0)


def test_wrong_number_of_classes_is_a_data_error(folder):
    with pytest.raises(
        DataError, match=r"data\.classes: got 3, but image_folder has 2 classes"
    ):
        load(of_folder(folder, classes=3), seed=0)


class Mnist:
    """The part of torchvision's `MNIST` that is used: 4 images to train on, 3 to
    validate on.
    """

    def __init__(self, root, *, train, download):
        assert (root, download) == ("somewhere", True)
        count = 4 if train else 3
        generator = torch.Generator().manual_seed(count)
        self.data = torch.randint(
            0, 256, (count, 28, 28), dtype=torch.uint8, generator=generator
        )
        self.targets = torch.arange(count)


def test_mnist_is_downloaded_once_and_never_augmented(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets, "MNIST", Mnist)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where the lock is
    settings = DataSettings(DatasetName.MNIST, 28, 1, directory="somewhere")
    for images, is_train in zip(load(settings, seed=3), (True, False), strict=True):
        grey = Mnist("somewhere", train=is_train, download=True)
        expected = (grey.data[:, None] / 127.5 - 1.0, grey.targets)
        assert equal(everything(images, epoch=5), expected)


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ({"channels": 2}, "channels"),
        ({"dataset": "mnist"}, "directory"),
        ({"directory": "somewhere"}, "directory"),
        ({"samples": 100}, "samples"),
        ({"dataset": "device_synthetic", "workers": 2}, "workers"),
        ({"dataset": "device_synthetic", "samples": 100}, None),
        ({"dataset": "mnist", "directory": "somewhere"}, None),
    ],
)
def test_contradiction_of_data_settings_is_reported_at_one_key(raw, key):
    problems = []
    read(DataSettings, raw, "data", problems)
    assert [problem.partition(":")[0] for problem in problems] == (
        [f"data.{key}"] if key else []
    )
