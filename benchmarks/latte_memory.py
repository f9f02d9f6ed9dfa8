"""Measures the memory that Latte keeps for its backward, and the time of a step.

    python -m benchmarks.latte_memory

It measures with and without checkpointing. After each row it writes the results and a
table to `latte_memory_cpu` (`.json` and `.md`) in `--folder`, or on a GPU to
`latte_memory_cuda`. At the end it draws a picture beside them.

It counts bytes on fake tensors, which have shapes but no values, so the paper's sizes
need no memory. A real step of the small model keeps the same number of bytes, in BF16
within 0.02 %. On a CPU, it times the small model. Peak memory and largest batch need a
GPU.

A timed step has random weights, clips and targets. Latte's own initial weights would
distort the time: the gates start at 0, so almost every product of the first backward
has a factor of zeros, and hardware multiplies zeros faster.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.progress import Progress
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from benchmarks.measured import DEVICE, ROOT, markdown_table, parser_of, write
from determined_amp.amp.precision import prepare_backend
from determined_amp.amp.settings import Precision
from determined_amp.experiment import experiment
from determined_amp.experiment.experiment import Experiment
from trials.models.denoiser import Denoiser

CONFIGS = ROOT / "experiment_configs" / "latte"

PRECISIONS = (Precision.FP32, Precision.AMP_FP16, Precision.AMP_BF16)
# The batch sizes (per slot) to count, by model; bytes are linear in the batch size.
COUNTED = {"latte_s": (1, 5), "latte_xl": (1, 5)}
TIMED = {"cpu": ("fp32", (4, 16)), "cuda": ("latte_xl", (1, 2, 5))}
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement.

    Args:
        model: Name of the YAML, without its ending.
        precision: A value of `Precision`.
        checkpointing: Whether the backward recomputes the blocks.
        batch: Number of clips.
        saved_bytes: Bytes kept between forward and backward, without parameters.
        step_seconds: Time of forward, backward and AdamW, the minimum of a few steps.
            On a CPU it is processor time of one thread, which other processes disturb
            least.
        peak_bytes: Largest allocation during a step, on a GPU.
        predicted_batch: Largest batch that should fit on this GPU, by the peaks of two
            batch sizes.
    """

    model: str
    precision: str
    checkpointing: bool
    batch: int
    saved_bytes: int
    step_seconds: float | None = None
    peak_bytes: int | None = None
    predicted_batch: int | None = None


class Step:
    """One training step of one variant of a model.

    Args:
        config: The experiment of the model.
        precision: The precision of forward and backward.
        checkpointing: Whether to use gradient checkpointing.
        device: Where the model is.
    """

    def __init__(
        self,
        config: Experiment,
        precision: Precision,
        checkpointing: bool,
        device: torch.device,
    ) -> None:
        self._data = config.data
        self._device = device
        self._dtype = precision.autocast_dtype
        with device:  # fake parameters cannot be moved later
            self.model = Denoiser(
                config.hparams.model, config.data, gradient_checkpointing=checkpointing
            )
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        fused = device.type == "cuda"
        self._optimizer = torch.optim.AdamW(self.model.parameters(), fused=fused)

    def loss(self, batch: int) -> torch.Tensor:
        """Compute the loss of a random batch, as `trials.latte` does."""
        clips = torch.randn((batch, *self._data.clip_shape), device=self._device)
        timesteps = torch.randint(1000, (batch,), device=self._device)
        labels = torch.zeros_like(timesteps)
        with torch.autocast(
            self._device.type, self._dtype, enabled=self._dtype is not None
        ):
            noise = self.model(clips, timesteps, labels)
            return functional.mse_loss(noise, torch.randn_like(clips))

    def saved_bytes(self, batch: int) -> int:
        """The bytes that autograd keeps after the forward, without parameters."""
        parameters = {p.untyped_storage()._cdata for p in self.model.parameters()}
        held: dict[
            int, torch.UntypedStorage
        ] = {}  # kept, so that no address is used twice

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in parameters:
                held[storage._cdata] = storage
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            loss = self.loss(batch)
        total = sum(storage.nbytes() for storage in held.values())
        del loss
        return total

    def run(self, batch: int) -> None:
        self._optimizer.zero_grad()  # a step that ran out of memory leaves gradients
        self.loss(batch).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        self._optimizer.step()
        self._optimizer.zero_grad()


def counted(name: str, batches: Sequence[int]) -> Iterator[Row]:
    """Count the bytes that each variant of a model keeps, on fake tensors."""
    for precision, checkpointing in variants():
        with FakeTensorMode(allow_non_fake_inputs=True):
            step = Step(load(name), precision, checkpointing, torch.device("cpu"))
            for batch in batches:
                saved = step.saved_bytes(batch)
                yield Row(name, precision.value, checkpointing, batch, saved)


def timed(
    name: str,
    batches: Sequence[int],
    device: torch.device,
    precisions: Sequence[Precision] = PRECISIONS,
) -> Iterator[Row]:
    """Measure bytes, step time and, on a GPU, memory of each variant of a model.

    A batch that does not fit in memory has no row.
    """
    for precision, checkpointing in variants(precisions):
        prepare_backend(precision, device, set_switches=True)
        torch.backends.cudnn.benchmark = True
        step = Step(load(name), precision, checkpointing, device)
        peaks: dict[int, int] = {}
        for batch in batches:
            try:
                saved = step.saved_bytes(batch)
                seconds, peak = measure(step, batch, device)
            except torch.cuda.OutOfMemoryError:
                break
            if peak is not None:
                peaks[batch] = peak
            largest = predicted(peaks, _memory(device)) if len(peaks) > 1 else None
            yield Row(
                name,
                precision.value,
                checkpointing,
                batch,
                saved,
                seconds,
                peak,
                largest,
            )


def predicted(peaks: dict[int, int], memory: int) -> int:
    """The largest batch whose peak fits in `memory`, if each clip adds the same bytes.

    Args:
        peaks: Peak bytes by batch size, of two batch sizes or more.
        memory: Bytes that torch may use.
    """
    (small, low), (large, high) = min(peaks.items()), max(peaks.items())
    of_a_clip = (high - low) / (large - small)
    return int((memory - low) / of_a_clip + small)


def _memory(device: torch.device) -> int:
    """The sum of the free bytes and those that torch holds already."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def measure(step: Step, batch: int, device: torch.device) -> tuple[float, int | None]:
    """Measure the minimum seconds of a few steps and, on a GPU, the peak bytes."""
    step.run(batch)  # the first step allocates
    if device.type != "cuda":
        times = []
        for _ in range(STEPS):
            start = time.process_time()
            step.run(batch)
            times.append(time.process_time() - start)
        return min(times), None
    torch.cuda.reset_peak_memory_stats(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    times = []
    for _ in range(STEPS):
        events[0].record()
        step.run(batch)
        events[1].record()
        torch.cuda.synchronize(device)
        times.append(events[0].elapsed_time(events[1]) / 1000.0)
    return min(times), torch.cuda.max_memory_allocated(device)


def variants(
    precisions: Sequence[Precision] = PRECISIONS,
) -> list[tuple[Precision, bool]]:
    return [(precision, on) for precision in precisions for on in (False, True)]


def load(name: str) -> Experiment:
    path = str(CONFIGS / f"{name}.yaml")
    return experiment.parse(experiment.read_yaml(path), path)


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown, without columns that are empty."""
    columns: dict[str, Callable[[Row], str]] = {
        "model": lambda row: row.model,
        "precision": lambda row: f"`{row.precision}`",
        "checkpointing": lambda row: "yes" if row.checkpointing else "no",
        "batch": lambda row: str(row.batch),
        "kept for the backward, MiB": lambda row: f"{row.saved_bytes / 2**20:,.1f}",
        "step, s": lambda row: f"{row.step_seconds:.3f}" if row.step_seconds else "",
        "peak, MiB": lambda row: (
            f"{row.peak_bytes / 2**20:,.0f}" if row.peak_bytes else ""
        ),
        "largest batch, predicted": lambda row: str(row.predicted_batch or ""),
    }
    shown = {
        name: cell for name, cell in columns.items() if any(cell(row) for row in rows)
    }
    return markdown_table(
        list(shown), [[cell(row) for cell in shown.values()] for row in rows]
    )


def draw(rows: Sequence[Row], device: str, path: Path) -> None:
    """Draw the bytes that Latte-XL/2 keeps, and step times, by batch size."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = dict(zip(PRECISIONS, ("tab:gray", "tab:orange", "tab:blue"), strict=True))
    for precision, checkpointing in variants():
        look: dict[str, Any] = {
            "color": colours[precision],
            "linestyle": "--" if checkpointing else "-",
            "marker": "o" if precision is not Precision.AMP_FP16 else "x",
            "label": precision.value + (", checkpointing" if checkpointing else ""),
        }
        mine = [
            row
            for row in rows
            if (row.precision, row.checkpointing) == (precision.value, checkpointing)
        ]
        large = [
            row for row in mine if row.model == "latte_xl" and not row.step_seconds
        ]
        left.plot(
            [r.batch for r in large], [r.saved_bytes / 2**30 for r in large], **look
        )
        slow = [row for row in mine if row.step_seconds]
        right.plot([r.batch for r in slow], [r.step_seconds for r in slow], **look)
    left.set(
        xlabel="clips per slot", ylabel="GiB", title="Latte-XL/2: kept for the backward"
    )
    left.legend(fontsize="small")
    model = next(row.model for row in rows if row.step_seconds)
    right.set(
        xlabel="clips",
        ylabel="s",
        yscale="log",
        title=f"{model}.yaml: a step ({device})",
    )
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status, 0."""
    options = parser_of("latte_memory", "Memory and speed of Latte.").parse_args(
        arguments
    )
    name, batches = TIMED[DEVICE.type]
    torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "one CPU thread"
    stem = options.folder / f"latte_memory_{DEVICE.type}"
    rows: list[Row] = []
    sizes = [len(COUNTED[model]) for model in COUNTED] + [len(batches)]
    # Rows that need the device come first: it may be available only for a short time.
    sources = [
        timed(name, batches, DEVICE),
        *(counted(model, COUNTED[model]) for model in COUNTED),
    ]
    with Progress() as bar:
        task = bar.add_task("measuring", total=len(variants()) * sum(sizes))
        for row in itertools.chain(*sources):
            rows.append(row)
            bar.advance(task)
            result = {
                "torch": torch.__version__,
                "device": where,
                "rows": [*map(vars, rows)],
            }
            write(stem, result, table(rows))
    draw(rows, where, stem.with_suffix(".png"))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
