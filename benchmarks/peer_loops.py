"""Other libraries' loops, on the batches of a case; see `benchmarks.peers`.

On a CPU, none of them computes in float16, even if asked to: Lightning uses bfloat16,
and Accelerate and Hugging Face's Trainer use float32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import lightning
import torch
import transformers
from torch import nn
from torch.nn import functional

from benchmarks.loops import Case, batches_of
from benchmarks.measured import DEVICE
from benchmarks.turns import BATCHES_PER_ROUND, Turns
from trials.data import loading


class Net(nn.Module):
    """The model of a case and its loss as one module, for loops that need one.

    Args:
        case: The training.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = case.model()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Compute the loss, (), of images (B, 1, S, S) and labels (B,) int64."""
        return functional.cross_entropy(self.layers(images), labels)


def accelerated(case: Case, turns: Turns) -> None:
    """Train with Hugging Face Accelerate."""
    torch.manual_seed(case.experiment.seed)
    helper = accelerate.Accelerator(
        mixed_precision=_name_of(case, "no", "fp16", "bf16"), cpu=DEVICE.type == "cpu"
    )
    net = Net(case).to(case.device)
    model, optimizer = helper.prepare(net, case.optimizer(net))
    for images, labels in batches_of(case, turns):
        loss = model(images, labels)
        helper.backward(loss)
        helper.clip_grad_norm_(model.parameters(), case.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()


def fabric(case: Case, turns: Turns) -> None:
    """Train with Lightning Fabric."""
    torch.manual_seed(case.experiment.seed)
    helper = lightning.Fabric(
        accelerator=DEVICE.type,
        devices=1,
        precision=_name_of(case, "32-true", "16-mixed", "bf16-mixed"),
    )
    net = Net(case)
    model, optimizer = helper.setup(net, case.optimizer(net))
    for images, labels in batches_of(case, turns):
        loss = model(images, labels)
        helper.backward(loss)
        helper.clip_gradients(model, optimizer, max_norm=case.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()


class Module(lightning.LightningModule):  # type: ignore[misc]  # it has no types here
    """The training of a case for Lightning's Trainer.

    Args:
        case: The training.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.net = Net(case)

    def training_step(self, batch: loading.Batch, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(*batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.case.optimizer(self.net)


def lightning_trainer(case: Case, turns: Turns) -> None:
    """Train with Lightning's Trainer, without logger, checkpoints and progress bar."""
    torch.manual_seed(case.experiment.seed)
    module = Module(case)
    trainer = lightning.Trainer(
        accelerator=DEVICE.type,
        devices=1,
        precision=_name_of(case, "32-true", "16-mixed", "bf16-mixed"),
        max_epochs=1,
        gradient_clip_val=case.max_grad_norm,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, Batches(case, turns))


class Batches(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """The batches of a case, for loops that take a loader.

    Args:
        case: The training.
        turns: The turns of the loop.
    """

    def __init__(self, case: Case, turns: Turns) -> None:
        self._case = case
        self._turns = turns

    def __iter__(self) -> Iterator[loading.Batch]:
        return batches_of(self._case, self._turns)


class InTurns(transformers.Trainer):  # type: ignore[misc]  # it has no types here
    """Hugging Face's Trainer on the batches of a case."""

    batches: Batches

    def get_train_dataloader(self) -> Any:
        return self.batches

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any
    ) -> Any:
        loss = model(*inputs)
        return (loss, None) if return_outputs else loss


def hugging_face(case: Case, turns: Turns) -> None:
    """Train with Hugging Face's Trainer, with a log line every 100 batches."""
    net = Net(case)
    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            folder,
            bf16=case.autocast_dtype is torch.bfloat16,
            fp16=case.autocast_dtype is torch.float16,
            use_cpu=DEVICE.type == "cpu",
            max_steps=10**6,
            max_grad_norm=case.max_grad_norm,
            logging_steps=BATCHES_PER_ROUND,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=case.experiment.seed,
        )
        optimizer = case.optimizer(net)
        trainer = InTurns(net, options, optimizers=(optimizer, None))
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.batches = Batches(case, turns)
        trainer.train()


PEERS: dict[str, Callable[[Case, Turns], None]] = {
    "Lightning Fabric": fabric,
    "Accelerate": accelerated,
    "Lightning Trainer": lightning_trainer,
    "Hugging Face Trainer": hugging_face,
}


def _name_of(case: Case, fp32: str, fp16: str, bf16: str) -> Any:
    names = {None: fp32, torch.float16: fp16, torch.bfloat16: bf16}
    return names[case.autocast_dtype]
