"""Measures ResNet-50 in a bare loop, in all precisions, with images on the device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torchvision.models import resnet50
from torchvision.models.resnet import Bottleneck, ResNet

from benchmarks.gpu.box import Box, problem_of, stretch
from determined_amp.amp.precision import prepare_backend
from determined_amp.amp.settings import Precision
from trials.data.loading import Batch

# The batch size of the YAML comes first, because time may run out.
BATCHES = (256, 128, 512, 64)
TINY_BATCHES = (2,)
ROUNDS = 5
CLASSES = 1000


class Bare:
    """PyTorch's AMP recipe, with the settings of `trials.resnet50` and imagenet_*.yaml.

    Args:
        box: The device; a rehearsal uses a small network.
    """

    def __init__(self, box: Box) -> None:
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        small = {"layers": [1, 1, 1, 1], "block": Bottleneck, "width_per_group": 8}
        network: torch.nn.Module = (
            ResNet(**small) if box.tiny else resnet50(zero_init_residual=True)
        )
        self.device = box.device
        self.model = network.to(memory_format=torch.channels_last).to(box.device)
        fused = box.device.type == "cuda"
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=1e-3,
            momentum=0.9,
            weight_decay=1e-4,
            fused=fused,
        )
        # If fused SGD skips its first step, its momentum is undefined. At this
        # init_scale no step is skipped.
        self._scalers = {
            precision: torch.amp.GradScaler(
                box.device.type,
                init_scale=1024.0,
                enabled=precision is Precision.AMP_FP16,
            )
            for precision in Precision
        }

    def step(self, batch: Batch, precision: Precision) -> None:
        """Train on one batch.

        It has images (B, 3, S, S) float32 channels_last, and labels (B,) int64.
        """
        images, labels = batch
        dtype, scaler = precision.autocast_dtype, self._scalers[precision]
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            logits = self.model(images)
            loss = functional.cross_entropy(logits, labels, label_smoothing=0.1)
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()


def batch_on(box: Box, size: int) -> Batch:
    """Make a batch of noise on the device.

    Returns:
        Images (B, 3, S, S) float32 channels_last in [-1, 1), and labels (B,) int64.
    """
    side = 32 if box.tiny else 224
    images = torch.rand(size, 3, side, side, device=box.device).mul_(2.0).sub_(1.0)
    labels = torch.randint(CLASSES, (size,), device=box.device)
    return images.contiguous(memory_format=torch.channels_last), labels


def measure(box: Box) -> Iterator[dict[str, Any]]:
    """Yield rows of `precision`, `batch`, `round`, `images_per_second`, `peak_bytes`.

    A batch that does not fit in memory gets a note.
    """
    bare = Bare(box)
    precisions = (Precision.FP32, Precision.TF32, *box.amp)
    sizes = TINY_BATCHES if box.tiny else BATCHES
    cases = [(precision, size) for size in sizes for precision in precisions]
    for number in range(2 if box.tiny else ROUNDS):
        for precision, size in list(cases):
            batch = batch_on(box, size)
            prepare_backend(precision, box.device, set_switches=True)

            step = partial(bare.step, batch, precision)
            where = {"precision": precision.value, "batch": size, "round": number}
            try:
                # cuDNN times its algorithms in the first round.
                for _ in range(1 if number or box.tiny else 3):
                    step()
                seconds, peak = stretch(step, box)
            except torch.cuda.OutOfMemoryError as error:
                cases.remove((precision, size))
                bare.optimizer.zero_grad()
                yield {**where, "note": problem_of(error)}
            else:
                yield {**where, "images_per_second": size / seconds, "peak_bytes": peak}
