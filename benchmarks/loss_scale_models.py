"""Predicts and measures the loss scale at which models of libraries skip a step.

    python -m pip install transformers
    python -m benchmarks.loss_scale_models

The models are small, but have the operations of the large ones. The finder predicts the
scale from a batch. A bisection measures it: each of its trainings makes one step on the
batch, with a `GradScaler` that starts at 2^k. Both look at the initial parameters, and
at those after some steps.
"""

from __future__ import annotations

import argparse
import copy
import platform
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torchvision.models import VisionTransformer

from benchmarks.measured import markdown_table
from determined_amp.amp.slots import OneSlot
from determined_amp.finder.model import rehearsals_of
from determined_amp.finder.scale_finding import find_range

# Steps before the first look, and from the first look to the second.
STEPS = (0, 20)

# No scale works here.
_FAILS_LOG2 = 64

Loss = Callable[[nn.Module, Any], torch.Tensor]


class Case(NamedTuple):
    """A model, a batch for it, and its loss."""

    name: str
    model: nn.Module
    batch: Any
    loss: Loss


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, in Markdown."""
    described = "Predict and measure where a training skips its first step."
    argparse.ArgumentParser(
        prog="python -m benchmarks.loss_scale_models", description=described
    ).parse_args(arguments)
    rows = []
    for case in (*hugging_face_models(), *other_models()):
        for steps in STEPS:
            train(case, steps, 2.0**8)
            predicted, low = prediction(case)
            safe = f"2^{low} to 2^{predicted - 1}"
            row = [
                case.name,
                str(steps),
                f"2^{predicted}",
                f"2^{first_skip(case)}",
                safe,
            ]
            rows.append(row)
    heads = ["model", "steps", "predicted first skip", "measured", "range"]
    print(markdown_table(heads, rows))
    print(
        f"\n{platform.machine()} CPU, torch {torch.__version__}, one batch, one seed."
    )


def hugging_face_models() -> list[Case]:
    """GPT-2, Llama and a UNet, with initial parameters."""
    # diffusers takes seconds to import, and transformers may be missing.
    from diffusers import UNet2DModel  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    torch.manual_seed(0)
    tokens = torch.randint(0, 500, (8, 64))
    gpt2 = GPT2Config(vocab_size=500, n_positions=64, n_embd=128, n_layer=4, n_head=4)
    llama = LlamaConfig(
        vocab_size=500,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    unet = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    noisy = (
        torch.randn(4, 3, 16, 16),
        torch.tensor([1, 200, 500, 900]),
        torch.randn(4, 3, 16, 16),
    )
    return [
        Case("GPT-2 (transformers)", GPT2LMHeadModel(gpt2), tokens, language),
        Case("Llama (transformers)", LlamaForCausalLM(llama), tokens, language),
        Case("UNet2D (diffusers)", unet, noisy, denoising),
    ]


def other_models() -> list[Case]:
    """A ViT and a PINN, with initial parameters."""
    torch.manual_seed(0)
    vit = VisionTransformer(32, 8, 4, 4, 128, 256, num_classes=10)
    nn.init.normal_(vit.heads.get_submodule("head").get_parameter("weight"), std=0.02)
    images = torch.randn(8, 3, 32, 32)
    pinn = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    return [
        Case("ViT (torchvision)", vit, (images, torch.arange(8)), classification),
        Case("PINN, second derivatives", pinn, torch.rand(256, 2), heat),
    ]


def language(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss, (), of the prediction of next tokens; tokens (B, L), int64."""
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def classification(model: nn.Module, batch: Any) -> torch.Tensor:
    """The cross-entropy, (), of images (B, 3, 32, 32) and labels (B,)."""
    images, labels = batch
    loss: torch.Tensor = functional.cross_entropy(model(images), labels)
    return loss


def denoising(model: nn.Module, batch: Any) -> torch.Tensor:
    """The error of predicted noise, (); images, noise (B, 3, 16, 16), times (B,)."""
    images, times, noise = batch
    loss: torch.Tensor = functional.mse_loss(model(images, times).sample.float(), noise)
    return loss


def heat(model: nn.Module, points: torch.Tensor) -> torch.Tensor:
    """The residual of u_t = u_xx and of its initial values, (), at (x, t), (B, 2)."""
    points = points.clone().requires_grad_()
    u = model(points).float()
    (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (bend,) = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)
    start = (u.squeeze(1) - torch.sin(3 * points[:, 0])) * (points[:, 1] < 0.2)
    residual: torch.Tensor = (
        slope[:, 1] - bend[:, 0]
    ).square().mean() + start.square().mean()
    return residual


def prediction(case: Case) -> tuple[int, int]:
    """Predict log2 of the first power of two that overflows, and of the lowest safe."""
    device = torch.device("cpu")
    rehearsals = rehearsals_of(
        case.model, lambda batch: case.loss(case.model, batch), [case.batch], device
    )
    found = find_range(rehearsals, OneSlot())
    return found.top_log2 + 1, found.low_log2


def first_skip(case: Case) -> int:
    """Measure log2 of the smallest power of two at which the first step is skipped."""
    works, fails = -8, _FAILS_LOG2
    while fails - works > 1:
        middle = (works + fails) // 2
        skipped = train(case._replace(model=copy.deepcopy(case.model)), 1, 2.0**middle)
        works, fails = (works, middle) if skipped else (middle, fails)
    return fails


def train(case: Case, steps: int, init_scale: float) -> int:
    """Train in float16 on one batch again and again; return the number of skips."""
    torch.manual_seed(1)
    case.model.train()
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    skipped = 0
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = case.loss(case.model, case.batch)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
        optimizer.zero_grad()
    return skipped


if __name__ == "__main__":
    main()
