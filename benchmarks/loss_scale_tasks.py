"""Eight small tasks for `benchmarks.loss_scale`, with gradients of very different size.

They are plain PyTorch. Seven learn from scikit-learn's handwritten digits or from the
text of this repository's licence; the eighth acts in a small simulation. B = samples of
a batch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer

TEXT = Path(__file__).parents[1] / "LICENSE"

# The task `resume` starts from a checkpoint after this many steps.
RESUMED_AT = 100

_TRAINING_SAMPLES = 1500

Loss = Callable[[Any], torch.Tensor]


@dataclass
class Training:
    """One training, ready for its first step.

    Args:
        model: Float32 parameters, on the CPU.
        optimizer: Has all parameters of the model.
        batches: An endless iterator; a policy makes each batch only when it is needed.
        samples: Number of samples in a batch.
        loss: Maps a batch to its loss, ().
        metric: Measures in float32 what the training is judged by; smaller is better.
    """

    model: nn.Module
    optimizer: Optimizer
    batches: Iterator[Any]
    samples: int
    loss: Loss
    metric: Callable[[], float]


@dataclass(frozen=True)
class Task:
    """A training that can start anew from any seed.

    Args:
        name: Name in the tables.
        what: Model, loss and optimizer, in words.
        metric: What is measured at the end, in words.
        start: Makes the training of a seed; equal seeds make equal trainings.
    """

    name: str
    what: str
    metric: str
    start: Callable[[int], Training]


def classifier(seed: int) -> Training:
    """Classify digits by convolutions; mean loss."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(4, 8, 3, stride=2, padding=1),
            nn.ReLU(),
        ),
        *(nn.Flatten(), nn.Linear(8 * 4 * 4, 10)),
    )
    return _on_digits(
        model, SGD(model.parameters(), lr=0.05, momentum=0.9), seed, _cross_entropy
    )


def segmentation(seed: int) -> Training:
    """Tell ink from paper in noisy digits; loss summed over pixels and samples."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.ReLU(),
        ),
        nn.Conv2d(4, 1, 1),
    )

    def summed(
        model: nn.Module, images: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        ink = (images > 0.5).float()
        noise = torch.randn(
            images.shape, generator=torch.Generator().manual_seed(int(labels.sum()))
        )
        logits = model(images + 0.3 * noise).float()
        return functional.binary_cross_entropy_with_logits(logits, ink, reduction="sum")

    training = _on_digits(model, AdamW(model.parameters(), lr=1e-3), seed, summed)
    whole = training.metric
    pixels = 64 * (len(_digits()[0]) - _TRAINING_SAMPLES)
    training.metric = lambda: whole() / pixels
    return training


def tiny_regression(seed: int) -> Training:
    """Predict tiny targets, so that the loss is near 1e-8.

    Adam's epsilon is small enough for such gradients.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def tiny(
        model: nn.Module, images: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        predicted = model(images).float().squeeze(1) * 1e-4
        return functional.mse_loss(predicted, labels.float() * 1e-5)

    return _on_digits(model, Adam(model.parameters(), lr=1e-3, eps=1e-15), seed, tiny)


def deep_plain(seed: int) -> Training:
    """Classify digits by 22 layers without normalisation; mean loss."""
    torch.manual_seed(seed)
    hidden = [layer for _ in range(20) for layer in (nn.Linear(32, 32), nn.ReLU())]
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), *hidden, nn.Linear(32, 10)
    )
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return _on_digits(model, AdamW(model.parameters(), lr=1e-3), seed, _cross_entropy)


def language_model(seed: int) -> Training:
    """Predict the next character by a transformer; mean loss over tokens."""
    return _language(seed, "mean")


def resumed(seed: int) -> Training:
    """Resume the language model with a summed loss, but without its loss scale."""
    model, optimizer = _checkpoint(seed)
    training = _language(seed, "sum")
    training.model.load_state_dict(model)
    training.optimizer.load_state_dict(copy.deepcopy(optimizer))
    for _ in range(RESUMED_AT):
        next(training.batches)
    return training


def overflowing_forward(seed: int) -> Training:
    """Classify digits by gated layers with the gains of a trained T5.

    Their activations exceed 65504, the largest float16.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(
            nn.Flatten(),
            nn.Linear(64, 64),
            _GatedBlock(64, gain=300.0),
            _GatedBlock(64, gain=300.0),
        ),
        *(_RMSNorm(64, gain=1.0), nn.Linear(64, 10)),
    )
    return _on_digits(model, AdamW(model.parameters(), lr=1e-3), seed, _cross_entropy)


def policy_gradient(seed: int) -> Training:
    """Learn by REINFORCE to keep a point with inertia near the origin; summed loss."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)
    )
    episodes = 32
    chance = torch.Generator().manual_seed(seed)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        while True:
            states, actions, rewards = _episodes(model, episodes, chance)
            to_go = rewards.flip(0).cumsum(0).flip(0)
            yield states, actions, to_go - to_go.mean(1, keepdim=True)

    def loss(batch: Any) -> torch.Tensor:
        states, actions, advantages = batch
        chosen = functional.log_softmax(model(states).float(), -1).gather(
            -1, actions[..., None]
        )
        gained: torch.Tensor = (chosen.squeeze(-1) * advantages).sum(0).mean()
        return -gained

    def metric() -> float:
        return -float(
            _episodes(model, 256, torch.Generator().manual_seed(0))[2].sum(0).mean()
        )

    return Training(
        model, Adam(model.parameters(), lr=3e-3), batches(), episodes, loss, metric
    )


TASKS = (
    Task(
        "classifier",
        "2 convolutions, cross-entropy, SGD",
        "validation loss",
        classifier,
    ),
    Task(
        "segmentation",
        "3 convolutions, loss summed over pixels, AdamW",
        "validation loss per pixel",
        segmentation,
    ),
    Task(
        "tiny regression",
        "2 layers, loss near 1e-8, Adam",
        "validation loss",
        tiny_regression,
    ),
    Task(
        "deep plain net",
        "22 layers without normalisation, AdamW",
        "validation loss",
        deep_plain,
    ),
    Task(
        "language model",
        "transformer of 2 layers, mean loss, AdamW",
        "validation loss",
        language_model,
    ),
    Task(
        "forward overflow",
        "gated layers with T5's large gains, AdamW",
        "validation loss",
        overflowing_forward,
    ),
    Task(
        "resume",
        f"language model, loss summed over tokens, from step {RESUMED_AT}",
        "validation loss",
        resumed,
    ),
    Task(
        "policy gradient",
        "REINFORCE, loss summed over an episode, Adam",
        "cost of an episode",
        policy_gradient,
    ),
)


class _RMSNorm(nn.Module):
    """T5's norm, in float32; (B, F) to (B, F)."""

    def __init__(self, features: int, gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((features,), gain))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        root = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        normed: torch.Tensor = x * root * self.weight
        return normed


class _GatedBlock(nn.Module):
    """x + W (gelu(U n(x)) * V n(x)), with n an RMS norm; (B, F) to (B, F)."""

    def __init__(self, features: int, gain: float) -> None:
        super().__init__()
        self.norm = _RMSNorm(features, gain)
        self.gate, self.up, self.down = (
            nn.Linear(features, features, bias=False) for _ in range(3)
        )
        for linear in (self.gate, self.up, self.down):
            nn.init.normal_(linear.weight, std=features**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        update: torch.Tensor = self.down(
            functional.gelu(self.gate(normed)) * self.up(normed)
        )
        return x + update


class _Characters(nn.Module):
    """A causal transformer; tokens (B, L) to logits (B, L, vocabulary)."""

    def __init__(self, vocabulary: int, length: int) -> None:
        super().__init__()
        self.token, self.position = (
            nn.Embedding(vocabulary, 32),
            nn.Embedding(length, 32),
        )
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.token(tokens) + self.position(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        logits: torch.Tensor = self.head(self.layers(x, mask=mask, is_causal=True))
        return logits


def _language(seed: int, reduction: str) -> Training:
    torch.manual_seed(seed)
    tokens, vocabulary = _text()
    samples, length = 8, 32
    end = len(tokens) * 9 // 10
    model = _Characters(vocabulary, length)
    places = torch.Generator().manual_seed(seed)

    def cut(starts: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            [tokens[start : start + length + 1] for start in starts.tolist()]
        )

    def batches() -> Iterator[torch.Tensor]:
        while True:
            yield cut(torch.randint(0, end - length - 1, (samples,), generator=places))

    def loss(batch: Any, reduction: str = reduction) -> torch.Tensor:
        logits = model(batch[:, :-1]).float()
        return functional.cross_entropy(
            logits.flatten(0, 1), batch[:, 1:].flatten(), reduction=reduction
        )

    def metric() -> float:
        with torch.no_grad():
            return loss(
                cut(torch.arange(end, len(tokens) - length - 1, length)), "mean"
            ).item()

    return Training(
        model, AdamW(model.parameters(), lr=3e-3), batches(), samples, loss, metric
    )


@functools.cache
def _checkpoint(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Model and optimizer after the first steps of `_language`, trained in float16."""
    training = _language(seed, "sum")
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(RESUMED_AT):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = training.loss(next(training.batches))
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
    return training.model.state_dict(), training.optimizer.state_dict()


def _episodes(
    model: nn.Module, episodes: int, chance: torch.Generator, length: int = 24
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Act in float32.

    Returns:
        States (length, episodes, 4), actions and rewards, both (length, episodes).
    """
    pushes = torch.tensor(
        [[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]
    )
    place, speed = torch.randn(episodes, 2, generator=chance), torch.zeros(episodes, 2)
    states, actions, rewards = [], [], []
    with torch.no_grad():
        for _ in range(length):
            states.append(torch.cat([place, speed], 1))
            actions.append(
                torch.multinomial(
                    model(states[-1]).softmax(-1), 1, generator=chance
                ).squeeze(1)
            )
            speed = 0.9 * speed + 0.2 * pushes[actions[-1]]
            place = place + speed
            rewards.append(-place.norm(dim=1))
    return torch.stack(states), torch.stack(actions), torch.stack(rewards)


def _on_digits(
    model: nn.Module,
    optimizer: Optimizer,
    seed: int,
    loss: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor],
    samples: int = 32,
) -> Training:
    """Make a training on digits (B, 1, 8, 8) float32 in [0, 1], labels (B,) int64."""
    images, labels = _digits()
    order = torch.Generator().manual_seed(seed)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            for chosen in torch.randperm(_TRAINING_SAMPLES, generator=order).unfold(
                0, samples, samples
            ):
                yield images[chosen], labels[chosen]

    def metric() -> float:
        with torch.no_grad():
            return loss(
                model, images[_TRAINING_SAMPLES:], labels[_TRAINING_SAMPLES:]
            ).item()

    return Training(
        model, optimizer, batches(), samples, lambda batch: loss(model, *batch), metric
    )


def _cross_entropy(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    return functional.cross_entropy(model(images).float(), labels)


@functools.cache
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    return torch.tensor(
        digits.images[:, None], dtype=torch.float32
    ) / 16.0, torch.tensor(digits.target)


@functools.cache
def _text() -> tuple[torch.Tensor, int]:
    """The characters of the text as numbers, (N,) int64; the size of the alphabet."""
    text = TEXT.read_text()
    known = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([known[character] for character in text]), len(known)
