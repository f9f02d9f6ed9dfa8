"""Precomputed video latents, in `.npy` and `.pt` files that are mapped into memory."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torchvision import datasets

from trials.data.loading import Batch, DataError, Sample, class_folders


class LatentFolder:
    """The clips in `root/CLASS/*.npy` and `root/CLASS/*.pt`.

    A file holds one clip (C, F, S, S) or several (N, C, F, S, S), in any floating
    dtype. Their variance must be about 1: multiply by the autoencoder's
    `scaling_factor` before you save them. The constructor reads all headers; a batch
    reads only its own clips. It opens their files again, because an open mapping holds
    a file descriptor, and a process may open only so many.

    Args:
        root: The folder that has a folder for each class.
        clip_shape: (C, F, S, S), the shape of every clip.

    Attributes:
        class_names: The names of the class folders, sorted; a label is an index here.
        classes: Number of classes.

    Raises:
        DataError: if `root` is not a folder, a class in it has no file, or files have
            no clips of this shape; it names up to ten files.
    """

    def __init__(self, root: Path, clip_shape: tuple[int, int, int, int]) -> None:
        read = partial(
            datasets.DatasetFolder, loader=mapped, extensions=(".npy", ".pt")
        )
        folder = class_folders(root, "video_latents", read)
        self.class_names: list[str] = folder.classes
        self.classes = len(self.class_names)
        self._clips: list[
            tuple[str, int, int]
        ] = []  # file, position in the file, label
        problems = []
        for path, label in folder.samples:
            try:
                count = _clips_in(path, clip_shape)
            except DataError as error:
                problems.append(str(error))
            else:
                self._clips.extend((path, position, label) for position in range(count))
        if problems:
            shown = problems[:10] + [f"and {len(problems) - 10} more"] * (
                len(problems) > 10
            )
            raise DataError("\n".join(shown))

    def __len__(self) -> int:
        return len(self._clips)

    def __getitems__(self, samples: Sequence[Sample]) -> Batch:
        """A batch: clips (B, C, F, S, S) float32, labels (B,) int64."""
        chosen = [self._clips[sample.image] for sample in samples]
        clips = [_as_clips(mapped(path))[position] for path, position, _ in chosen]
        return torch.stack([clip.float() for clip in clips]), torch.tensor(
            [c[2] for c in chosen]
        )


def mapped(path: str) -> torch.Tensor:
    """Map the tensor in a `.npy` or `.pt` file into memory, without running its code.

    Raises:
        DataError: if the file holds anything else or cannot be read.
    """
    try:
        if path.endswith(".npy"):
            # "c" is copy-on-write: it never changes the file, and torch does not warn
            # of it as it does of read-only arrays.
            content = torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if isinstance(content, torch.Tensor):  # it may require gradients
                content = content.detach()
    except (
        OSError,
        ValueError,
        TypeError,
        RuntimeError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path}: cannot be read as latents: {reason}") from error
    if not isinstance(content, torch.Tensor):
        raise DataError(
            f"{path}: holds a {type(content).__name__}; allowed: one tensor"
        )
    return content


def _clips_in(path: str, clip_shape: tuple[int, int, int, int]) -> int:
    """Count the clips in a file; raise DataError for another shape or dtype."""
    latents = mapped(path)
    if latents.dim() not in (4, 5) or latents.shape[-4:] != clip_shape:
        raise DataError(
            f"{path}: has shape {tuple(latents.shape)}; allowed by data.channels, "
            f"data.frames and data.image_size: {clip_shape}, or several of them in one "
            "file"
        )
    if not latents.is_floating_point():
        raise DataError(f"{path}: is {latents.dtype}; allowed: a floating dtype")
    return len(_as_clips(latents))


def _as_clips(latents: torch.Tensor) -> torch.Tensor:
    return latents if latents.dim() == 5 else latents[None]
