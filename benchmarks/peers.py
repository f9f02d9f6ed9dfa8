"""Measures what a batch costs in our loops, beside what people would pick instead.

    pip install '.[all]' --group peers
    python -m benchmarks.peers [--precision amp_bf16] [--rounds 12]

All loops train the same model on the same batches, with the same clip and rate, in one process and
in turn. The step is tiny on purpose: it shows what the host does around the kernels. On a CPU the
peers refuse float16, so their figures are in bfloat16.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import accelerate
import lightning
import torch
import transformers
from torch import nn
from torch.nn import functional

from benchmarks import loops
from benchmarks.measured import DEVICE, machine, markdown_table, parser_of, write
from benchmarks.turns import BATCHES_PER_TURN, Turns, by_turns
from determined_amp.amp.loop import AmpLoop
from determined_amp.amp.settings import Precision
from determined_amp.trial.determined_private import SafeController, controlled_by
from trials.data import loading
from trials.schedule import LRSchedule

BATCHES_PER_ROUND = 100
TURNS_PER_ROUND = BATCHES_PER_ROUND // BATCHES_PER_TURN
REFERENCE = "bare PyTorch loop"
PACKAGES = ("accelerate", "lightning", "transformers")


class Net(nn.Module):
    """The model of a case with its loss, for loops that call a model with a batch.

    Args:
        case: The training.
    """

    def __init__(self, case: loops.Case) -> None:
        super().__init__()
        self.layers = case.model()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss, (), of images (B, 1, S, S) and labels (B,) int64."""
        return functional.cross_entropy(self.layers(images), labels)


def batches_of(case: loops.Case, turns: Turns) -> Iterator[loading.Batch]:
    """The batches of a case, on the device, until the turns are over."""
    for batch in case.loader().get_data_loader(repeat=True):
        turns.batch_begins()
        if turns.over:
            return
        yield loading.to_device(batch, case.device)


def amp_loop(case: loops.Case, turns: Turns) -> nn.Module:
    """`AmpLoop`, with a report every 100 batches."""
    torch.manual_seed(case.experiment.seed)
    amp = AmpLoop(case.hparams.amp, case.device)
    model = amp.prepare(Net(case)).to(case.device)
    optimizer = case.optimizer(model)
    for step, (images, labels) in enumerate(batches_of(case, turns), start=1):
        with amp.autocast():
            loss = model(images, labels)
        torch.autograd.backward(amp.scaler.scale(loss))
        amp.clip_gradients(optimizer, max_norm=case.max_grad_norm)
        amp.scaler.step(optimizer)
        optimizer.zero_grad()
        amp.update(loss, samples=len(labels))
        if step % BATCHES_PER_ROUND == 0:
            amp.report()
    return model


def accelerated(case: loops.Case, turns: Turns) -> nn.Module:
    """Hugging Face Accelerate."""
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
    return net


def fabric(case: loops.Case, turns: Turns) -> nn.Module:
    """Lightning Fabric."""
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
    return net


class Module(lightning.LightningModule):  # type: ignore[misc]  # it has no types here
    """The training of a case for Lightning's Trainer.

    Args:
        case: The training.
    """

    def __init__(self, case: loops.Case) -> None:
        super().__init__()
        self.case = case
        self.net = Net(case)

    def training_step(self, batch: loading.Batch, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(*batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.case.optimizer(self.net)


def lightning_trainer(case: loops.Case, turns: Turns) -> nn.Module:
    """Lightning's Trainer, without logger, checkpoints and progress bar."""
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
    return module.net


class Batches(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """The batches of a case, for loops that take a loader.

    Args:
        case: The training.
        turns: Its turns.
    """

    def __init__(self, case: loops.Case, turns: Turns) -> None:
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


def hugging_face(case: loops.Case, turns: Turns) -> nn.Module:
    """Hugging Face's Trainer, without checkpoints, with a log line every 100 batches."""
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
    return net


LOOPS: dict[str, Callable[[loops.Case, Turns], nn.Module]] = {
    REFERENCE: loops.bare,
    "Determined, no metrics": loops.silent,
    "Determined, loss as a metric": loops.stock,
    "`AmpLoop`": amp_loop,
    "the ten lines": loops.ours,
}
PEERS: dict[str, Callable[[loops.Case, Turns], nn.Module]] = {
    "Lightning Fabric": fabric,
    "Accelerate": accelerated,
    "Lightning Trainer": lightning_trainer,
    "Hugging Face Trainer": hugging_face,
}


def _name_of(case: loops.Case, fp32: str, fp16: str, bf16: str) -> Any:
    names = {None: fp32, torch.float16: fp16, torch.bfloat16: bf16}
    return names[case.autocast_dtype]


def measure(precision: str, rounds: int) -> dict[str, list[float]]:
    """CPU time per batch, in microseconds, of every loop and round; the first round is left out."""
    measured = dict(LOOPS)
    if DEVICE.type == "cuda" or precision != Precision.AMP_FP16.value:
        measured |= PEERS
    turns_each = (rounds + 1) * TURNS_PER_ROUND
    case = loops.Case(precision, LRSchedule.CONSTANT.value, turns_each * BATCHES_PER_TURN + 1)
    with controlled_by(SafeController):
        turns = by_turns({name: partial(loop, case) for name, loop in measured.items()}, turns_each)
    return {name: _rounds(each)[1:] for name, each in turns.items()}


def _rounds(turns: Turns) -> list[float]:
    cpu = [1e6 * seconds / BATCHES_PER_ROUND for _, seconds in turns.times]
    starts = range(0, len(cpu), TURNS_PER_ROUND)
    return [sum(cpu[start : start + TURNS_PER_ROUND]) for start in starts]


def summary(found: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """The median of the CPU time of each loop, and of its ratio to the bare loop of its round."""
    bare = found[REFERENCE]
    rows = {}
    for name, times in found.items():
        ratios = [time / reference for time, reference in zip(times, bare, strict=True)]
        low, middle, high = statistics.quantiles(ratios, method="inclusive")
        rows[name] = {
            "cpu_us": statistics.median(times),
            "ratio": middle,
            "ratio_low": low,
            "ratio_high": high,
        }
    return rows


def markdown(result: dict[str, Any]) -> str:
    """The table that the pages quote."""
    heads = ["loop", "CPU us a batch", "times a bare loop (quartiles)"]
    rows = []
    for name, row in result["loops"].items():
        ratio = f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
        rows.append([name, f"{row['cpu_us']:.0f}", ratio])
    return markdown_table(heads, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("peers", "Measure what a batch costs beside other libraries.", rounds=12)
    parser.add_argument(
        "--precision",
        choices=[each.value for each in Precision],
        default=Precision.AMP_BF16.value,
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = {
        **machine(),
        **{package: version(package) for package in PACKAGES},
        "precision": options.precision,
        "rounds": options.rounds,
        "batches_per_round": BATCHES_PER_ROUND,
        "loops": summary(measure(options.precision, options.rounds)),
    }
    write(options.folder / f"peers_{DEVICE.type}", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
