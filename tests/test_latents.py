"""`trials.data.latents`: precomputed latents, mapped from files, and what is wrong with a file."""

from __future__ import annotations

import pickle
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trials.data.clips import ClipDataset, ClipSettings, load
from trials.data.latents import LatentFolder
from trials.data.loading import DataError, Sample

SHAPE = (4, 3, 8, 8)


def folder_with(root: Path, **files: Any) -> Path:
    """`name__ext=content`: arrays go to `.npy`, tensors to `.pt`, bytes as they are."""
    (root / "cat").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = root / "cat" / name.replace("__", ".")
        if isinstance(content, torch.Tensor):
            torch.save(content, path)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            np.save(path, content)
    return root


def test_clips_of_both_kinds_of_file_come_with_the_label_of_their_folder(tmp_path: Path) -> None:
    one, several = torch.randn(SHAPE), np.random.randn(2, *SHAPE).astype(np.float16)
    folder_with(tmp_path, a__pt=one)
    (tmp_path / "dog").mkdir()
    np.save(tmp_path / "dog" / "b.npy", several)
    torch.save(one.bfloat16(), tmp_path / "dog" / "c.pt")
    latents = LatentFolder(tmp_path, SHAPE)
    assert len(latents) == 4
    assert latents.class_names == ["cat", "dog"]
    clips, labels = latents.__getitems__([Sample(0, index) for index in (0, 1, 2, 3)])
    assert clips.dtype == torch.float32
    assert labels.tolist() == [0, 1, 1, 1]
    expected = [one, *torch.from_numpy(several).float(), one.bfloat16().float()]
    assert torch.equal(clips, torch.stack(expected))


def test_latents_written_with_a_gradient_want_none(tmp_path: Path) -> None:
    """Loader processes could not hand them on."""
    folder_with(tmp_path, a__pt=torch.randn(SHAPE, requires_grad=True))
    clips, _ = LatentFolder(tmp_path, SHAPE).__getitems__([Sample(0, 0)])
    assert not clips.requires_grad


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a__npy": np.zeros((4, 3, 8, 9), np.float32)}, "a.npy: has shape (4, 3, 8, 9); allowed"),
        ({"a__pt": torch.zeros(4, 8, 8)}, "a.pt: has shape (4, 8, 8); allowed"),
        ({"a__npy": np.zeros(SHAPE, np.int16)}, "a.npy: is torch.int16; allowed: a floating"),
        ({"a__npy": np.array([{}], object)}, "a.npy: cannot be read as latents"),
        ({"a__npy": b""}, "a.npy: cannot be read as latents"),
        ({"a__pt": b"PK\x03\x04 and no more"}, "a.pt: cannot be read as latents"),
    ],
    ids=["frame size", "no frames", "integers", "objects", "empty", "damaged"],
)
def test_file_that_is_no_clip_is_named(tmp_path: Path, files: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as error:
        LatentFolder(folder_with(tmp_path, **files), SHAPE)
    assert said in str(error.value)


def test_every_wrong_file_is_named_up_to_ten(tmp_path: Path) -> None:
    wrong = {f"w{index:02d}__npy": np.zeros(SHAPE[1:]) for index in range(12)}
    with pytest.raises(DataError) as error:
        LatentFolder(folder_with(tmp_path, good__npy=np.zeros(SHAPE), **wrong), SHAPE)
    lines = str(error.value).splitlines()
    assert [line.rpartition("/")[2][:7] for line in lines[:10]] == [
        f"w{index:02d}.npy" for index in range(10)
    ]
    assert lines[10:] == ["and 2 more"]


class Harmful:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("harmed"),)


def test_code_in_a_file_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_with(tmp_path / "latents")
    torch.save(Harmful(), tmp_path / "latents" / "cat" / "a.pt")
    with pytest.raises(DataError, match=r"a\.pt: cannot be read as latents"):
        LatentFolder(tmp_path / "latents", SHAPE)
    assert not (tmp_path / "harmed").exists()
    pickle.loads(pickle.dumps(Harmful()))  # negative control: it would have run
    assert (tmp_path / "harmed").exists()


def test_something_else_than_a_tensor_is_named(tmp_path: Path) -> None:
    folder_with(tmp_path)
    torch.save({"latents": torch.zeros(SHAPE)}, tmp_path / "cat" / "a.pt")
    with pytest.raises(DataError, match=r"a\.pt: holds a dict; allowed: one tensor"):
        LatentFolder(tmp_path, SHAPE)


@pytest.mark.parametrize("kind", ["npy", "pt"])
def test_clip_is_read_without_the_rest_of_its_file(tmp_path: Path, kind: str) -> None:
    """Half a gigabyte of zeros, most of which never leaves the disk."""
    count = 2**29 // (4 * int(np.prod(SHAPE)))
    path = tmp_path / "cat" / f"large.{kind}"
    path.parent.mkdir()
    if kind == "npy":
        written = np.lib.format.open_memmap(path, "w+", np.float32, (count, *SHAPE))
        written[-1] = 1.0
        del written
    else:
        # One clip, expanded: the file is small, and what is mapped is not more than the file.
        torch.save(torch.ones(SHAPE).expand(count, *SHAPE), path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    latents = LatentFolder(tmp_path, SHAPE)
    clips, _ = latents.__getitems__([Sample(0, count - 1)])
    assert len(latents) == count
    assert float(clips.min()) == 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 2**10  # in KiB


@pytest.mark.parametrize("make", [lambda root: None, lambda root: root.mkdir()])
def test_missing_folder_is_named(tmp_path: Path, make: Any) -> None:
    root = tmp_path / "nowhere"
    make(root)
    with pytest.raises(DataError, match=f"data.directory: {root}"):
        LatentFolder(root, SHAPE)


def test_different_classes_in_train_and_val_are_an_error(tmp_path: Path) -> None:
    folder_with(tmp_path / "train", a__npy=np.zeros(SHAPE, np.float32))
    (tmp_path / "val" / "dog").mkdir(parents=True)
    np.save(tmp_path / "val" / "dog" / "a.npy", np.zeros(SHAPE, np.float32))
    settings = ClipSettings(
        ClipDataset.VIDEO_LATENTS, 8, channels=4, frames=3, classes=1, directory=str(tmp_path)
    )
    with pytest.raises(DataError, match="different class folders: cat, dog"):
        load(settings, 0)
