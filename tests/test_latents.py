"""`trials.data.latents`: precomputed latents, mapped from files, and what is wrong with
a file.
"""

import numpy as np
import pytest
import torch

from tests.test_checkpoint import RunsCode
from trials.data.latents import LatentFolder
from trials.data.loading import DataError, Sample

SHAPE = (4, 3, 8, 8)


def folder_with(root, **files):
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


def test_clips_of_both_kinds_of_file_come_with_the_label_of_their_folder(tmp_path):
    one, several = torch.randn(SHAPE), np.random.randn(2, *SHAPE).astype(np.float16)
    folder_with(tmp_path, a__pt=one.clone().requires_grad_())
    (tmp_path / "dog").mkdir()
    np.save(tmp_path / "dog" / "b.npy", several)
    torch.save(one.bfloat16(), tmp_path / "dog" / "c.pt")
    latents = LatentFolder(tmp_path, SHAPE)
    assert len(latents) == 4
    assert latents.class_names == ["cat", "dog"]
    clips, labels = latents.__getitems__([Sample(0, index) for index in (0, 1, 2, 3)])
    assert clips.dtype == torch.float32
    assert not clips.requires_grad  # loader processes could not hand them on
    assert labels.tolist() == [0, 1, 1, 1]
    expected = [one, *torch.from_numpy(several).float(), one.bfloat16().float()]
    assert torch.equal(clips, torch.stack(expected))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"a__npy": np.zeros((4, 3, 8, 9), np.float32)},
            "a.npy: has shape (4, 3, 8, 9); allowed",
        ),
        ({"a__pt": torch.zeros(4, 8, 8)}, "a.pt: has shape (4, 8, 8); allowed"),
        (
            {"a__npy": np.zeros(SHAPE, np.int16)},
            "a.npy: is torch.int16; allowed: a floating",
        ),
        ({"a__npy": np.array([{}], object)}, "a.npy: cannot be read as latents"),
        ({"a__pt": b"PK\x03\x04 and no more"}, "a.pt: cannot be read as latents"),
    ],
    ids=["frame size", "no frames", "integers", "objects", "damaged"],
)
def test_file_that_is_no_clip_is_named(tmp_path, files, said):
    with pytest.raises(DataError) as error:
        LatentFolder(folder_with(tmp_path, **files), SHAPE)
    assert said in str(error.value)


def test_code_in_a_file_is_refused_and_not_run(tmp_path):
    harmed = tmp_path / "harmed"
    folder_with(tmp_path / "latents")
    torch.save(RunsCode(harmed), tmp_path / "latents" / "cat" / "a.pt")
    with pytest.raises(DataError, match=r"a\.pt: cannot be read as latents"):
        LatentFolder(tmp_path / "latents", SHAPE)
    assert not harmed.exists()
