"""Sample clips from a trained Latte, with its averaged weights.

    python -m trials.sample RUN_FOLDER_OR_CHECKPOINT [--class 3] [--steps 50]

It writes an animated GIF with the clips side by side, and a PNG with a row per clip and
a column per frame. `--out clips.npy` writes the numbers instead; latents need it.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DDIMScheduler
from PIL import Image
from rich.progress import track
from torchvision.transforms.functional import to_pil_image
from torchvision.utils import make_grid

from determined_amp.amp.errors import UserError, one_line
from determined_amp.cli.options import at_least
from determined_amp.experiment import experiment
from determined_amp.local.checkpoint_storage import read_metadata
from determined_amp.runs.folder import complete_checkpoints
from determined_amp.trial.checkpoint import CheckpointError, check_bytes
from trials.data.clips import ClipDataset
from trials.latte import LatteHparams
from trials.models.denoiser import Denoiser
from trials.models.diffusion import Conditioning, DiffusionSettings

# Smaller frames are enlarged to about this side, in pixels.
SHOWN_SIDE = 96
BORDER = 4


class SampleError(UserError):
    """The model cannot sample with these options."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Sample and write clips.

    Returns:
        The exit status: 0, or 2 for an error of the user.
    """
    options = _options(arguments)
    try:
        config, denoiser = load(Path(options.source))
        check_out(Path(options.out), config.data.channels)
        labels = _labels(config, options.labels, options.clips)
        choices = {
            name: getattr(options, name) for name in ("steps", "guidance", "seed")
        }
        clips = sample(denoiser, config, labels, **choices)
        written = write(clips, Path(options.out))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(clips)} clips: {', '.join(map(str, written))}")
    return 0


def load(source: Path) -> tuple[experiment.Experiment, Denoiser]:
    """Load an experiment, and its model with averaged weights.

    This runs no code from the checkpoint: it reads only plain values and tensors.

    Args:
        source: A checkpoint, for instance from `det checkpoint download`, or a run
            folder, whose newest checkpoint with finite weights is used.

    Raises:
        CheckpointError: if there is no checkpoint, it is damaged, its weights are not
            finite, or it is not of a Latte.
        ConfigError: if this version cannot read its configuration.
    """
    folder = _checkpoint_of(source)
    try:
        data: dict[str, Any] = json.loads((folder / "load_data.json").read_bytes())
        check_bytes(folder)
        state = torch.load(
            folder / "state_dict.pth", map_location="cpu", weights_only=True
        )
        weights = state["callbacks"]["ema"]
        raw, hyperparameters = dict(data["experiment_config"]), dict(data["hparams"])
    except (
        CheckpointError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        RuntimeError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        raise CheckpointError(
            f"{folder}: no checkpoint of a Latte can be read here: "
            f"{one_line(repr(error))}; give a run folder or a checkpoint of "
            "trials.latte"
        ) from error
    config = experiment.parse(raw, str(folder), hyperparameters=hyperparameters)
    if not isinstance(config.hparams, LatteHparams):
        raise CheckpointError(f"{folder}: is of {config.trial}, which samples no clips")
    denoiser = Denoiser(config.hparams.model, config.data, gradient_checkpointing=False)
    try:
        denoiser.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder}: its weights do not fit its settings: {error}"
        ) from error
    if not all(bool(weight.isfinite().all()) for weight in denoiser.parameters()):
        raise CheckpointError(
            f"{folder}: its weights are not finite; give an earlier checkpoint"
        )
    return config, denoiser.eval()


def _checkpoint_of(source: Path) -> Path:
    newest_first = complete_checkpoints(source / "checkpoints")[::-1]
    finite = (path for path in newest_first if read_metadata(path).get("finite", True))
    return next(finite, newest_first[0] if newest_first else source)


@torch.no_grad()
def sample(
    denoiser: Denoiser,
    config: experiment.Experiment,
    labels: torch.Tensor,
    *,
    steps: int = 50,
    guidance: float = 2.0,
    seed: int = 0,
) -> torch.Tensor:
    """Sample clips by DDIM (Song et al. 2020, arXiv 2010.02502).

    On one device, equal seeds give equal clips.

    Args:
        denoiser: The model.
        config: Its experiment, with the noise schedule and the shape of a clip.
        labels: Classes, (B,), int64; the null label for a clip of any class.
        steps: Number of denoising steps.
        guidance: Strength of classifier-free guidance. 1 turns it off; larger values
            give clips that are more typical of their class.
        seed: Seed of the initial noise.

    Returns:
        (B, C, F, S, S), float32, on the CPU.

    Raises:
        SampleError: if the model cannot sample with these `steps` or this `guidance`.
    """
    _check_choices(config.hparams.diffusion, steps, guidance)
    if config.hparams.diffusion.conditioning is Conditioning.NONE:
        guidance = 1.0  # predictions with and without a class are the same
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    denoiser = denoiser.to(device)
    # Pixels are in [-1, 1]; latents have no such bounds.
    in_pixels = config.data.dataset is ClipDataset.MOVING_DIGITS
    scheduler = DDIMScheduler(
        **config.hparams.diffusion.scheduler_config(), clip_sample=in_pixels
    )
    scheduler.set_timesteps(steps, device=device)
    shape = (len(labels), *config.data.clip_shape)
    clips = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
    labels = labels.to(device)
    nothing = torch.full_like(labels, denoiser.null_label)
    for timestep in track(scheduler.timesteps, "sampling", transient=True):
        timesteps = timestep.expand(len(labels))
        noise = denoiser(clips, timesteps, labels)
        if guidance != 1.0:
            unconditional = denoiser(clips, timesteps, nothing)
            noise = unconditional + guidance * (noise - unconditional)
        clips = scheduler.step(noise, timestep, clips).prev_sample
    return clips.cpu()


def _check_choices(diffusion: DiffusionSettings, steps: int, guidance: float) -> None:
    if not 1 <= steps <= diffusion.num_train_timesteps:
        raise SampleError(
            f"--steps: got {steps}; allowed: 1 to {diffusion.num_train_timesteps}, the "
            "timesteps of its training"
        )
    if not math.isfinite(guidance):
        raise SampleError(f"--guidance: got {guidance:g}; allowed: a finite number")
    knows_only_classes = (
        diffusion.conditioning is Conditioning.CLASS and not diffusion.class_dropout
    )
    if guidance != 1.0 and knows_only_classes:
        raise SampleError(
            f"--guidance: got {guidance:g}, but with class_dropout 0 this model never "
            "trained without a class; allowed: 1"
        )


def write(clips: torch.Tensor, out: Path) -> list[Path]:
    """Write clips in [-1, 1] as GIF and PNG, or any clips as an array.

    Args:
        clips: (B, C, F, S, S), float32.
        out: A name that `check_out` allows; `.gif` also writes a `.png`.

    Returns:
        The files that were written.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".npy":
        np.save(out, clips.numpy())
        return [out]
    frames = _pictures(clips).transpose(1, 2)  # (B, F, C, H, W)
    strip = out.with_suffix(".png")
    _grid(frames.flatten(0, 1), columns=frames.shape[1]).save(strip)
    first, *rest = (
        _grid(frame, columns=min(5, len(frame))) for frame in frames.unbind(1)
    )
    first.save(out, save_all=True, append_images=rest, duration=150, loop=0)
    return [out, strip]


def check_out(out: Path, channels: int) -> None:
    """Check the name of the output file.

    Raises:
        SampleError: if it ends in neither `.gif` nor `.npy`, or a picture cannot show
            this number of channels.
    """
    if out.suffix not in (".gif", ".npy"):
        raise SampleError(f"--out: got {out}; allowed: a name in .gif or in .npy")
    if out.suffix == ".gif" and channels not in (1, 3):
        raise SampleError(
            f"--out: got {out}, but clips of {channels} channels are latents and no "
            "picture; allowed: a name in .npy, for an autoencoder to decode"
        )


def _pictures(clips: torch.Tensor) -> torch.Tensor:
    """Clips in [-1, 1] as uint8, enlarged without smoothing, (B, C, F, H, W)."""
    enlarge = max(1, round(SHOWN_SIDE / clips.shape[-1]))
    pixels = clips.clamp(-1.0, 1.0).add(1.0).mul(127.5).round().to(torch.uint8)
    return pixels.repeat_interleave(enlarge, dim=-1).repeat_interleave(enlarge, dim=-2)


def _grid(pictures: torch.Tensor, columns: int) -> Image.Image:
    """Put `pictures`, (N, C, H, W), into one, row by row, with grey between them."""
    grid = make_grid(pictures, nrow=columns, padding=BORDER, pad_value=96)
    picture: Image.Image = to_pil_image(grid)
    return picture


def _labels(
    config: experiment.Experiment, wanted: Sequence[int] | None, clips: int
) -> torch.Tensor:
    """The class of each clip, (B,): `clips` of each wanted class, by default of all."""
    classes = config.data.classes
    if config.hparams.diffusion.conditioning is Conditioning.NONE:
        if wanted:
            raise SampleError(
                "--class: given, but this model was trained with conditioning none"
            )
        return torch.full((clips,), classes)
    for label in wanted or ():
        if not 0 <= label < classes:
            raise SampleError(f"--class: got {label}; allowed: 0 to {classes - 1}")
    return torch.tensor(wanted or range(classes)).repeat_interleave(clips)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m trials.sample", description="Sample clips from a trained Latte."
    )
    parser.add_argument("source", help="run folder or checkpoint")
    parser.add_argument(
        "--class",
        dest="labels",
        type=int,
        action="append",
        metavar="N",
        help="which class; may be given several times; by default a clip of each",
    )
    parser.add_argument(
        "--clips", type=at_least(1), default=1, help="clips per class (1)"
    )
    parser.add_argument(
        "--steps", type=at_least(1), default=50, help="denoising steps (default 50)"
    )
    parser.add_argument(
        "--guidance", type=float, default=2.0, help="default 2.0; 1.0 is none"
    )
    parser.add_argument(
        "--seed",
        type=at_least(0, 2**63 - 1),
        default=0,
        help="of the initial noise (default 0)",
    )
    parser.add_argument(
        "--out", default="clip.gif", help=".gif or .npy (default clip.gif)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
