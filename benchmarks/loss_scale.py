"""When does the initial loss scale matter? Eight tasks, seven ways, ten paired seeds.

    python -m benchmarks.loss_scale             # up to an hour on two cores; resumes
    python -m benchmarks.loss_scale --publish   # also replaces results in the docs

Each training runs 200 steps on a CPU, in float16 autocast if its way has a loss scale.
Its row is written at once, and not measured again until the code changes. Only
`--publish` changes files of the repository.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from rich.progress import Progress

from benchmarks.loss_scale_rows import (
    DEFAULT,
    FINDER,
    FLOAT32,
    SEEDS,
    STEPS,
    WAYS,
    Row,
    Way,
    code_of,
    measure,
    wanted,
)
from benchmarks.loss_scale_tasks import TASKS, Task
from benchmarks.measured import RESULTS, ROOT, cpu_name, markdown_table, parser_of
from determined_amp.experiment.machine import Machine
from determined_amp.report.page import INK, PAPER, STYLE, VERMILION, as_png

ROWS = "loss_scale_rows.jsonl"
PUBLISHED = RESULTS / "loss_scale_cpu.json"
PICTURE = ROOT / "docs" / "pictures" / "loss_scale.png"

# Student's t for a two-sided 95 % interval of the mean of ten differences.
_T_95 = 2.262

# The colour of a metric that is just worse than that of another seed.
_FAINT = "#fae3d3"

_HEADS = (
    *(
        "task",
        "way",
        "skipped, mean (range)",
        "first applied step",
        "gradient flushed",
        "metric",
    ),
    *("less float32's, 95 %", "samples to choose", "edge, bits off"),
)

# A scale must lose this share of the steps to count as a loss.
_LOST = 0.05


@dataclass(frozen=True)
class Cell:
    """The ten trainings of one way on one task.

    Args:
        task: The task.
        way: The way.
        rows: The trainings, by seed.
        reference: The trainings in float32, by seed.
    """

    task: Task
    way: Way
    rows: Sequence[Row]
    reference: Sequence[Row]

    @property
    def skipped(self) -> float:
        """Skipped steps, mean over the seeds."""
        return mean(row.skipped for row in self.rows)

    @property
    def metric(self) -> float:
        """The metric, mean over the seeds; infinite if it is not finite for one."""
        return mean(_metric(row) for row in self.rows)

    @property
    def noise(self) -> float:
        """The standard deviation of the metric over the seeds."""
        values = [_metric(row) for row in self.rows]
        return stdev(values) if all(map(math.isfinite, values)) else math.inf

    @property
    def difference(self) -> tuple[float, float]:
        """The mean difference to float32's metric, and half of its 95 % interval.

        The differences are paired by seed.
        """
        pairs = zip(self.rows, self.reference, strict=True)
        differences = [_metric(row) - _metric(reference) for row, reference in pairs]
        if not all(map(math.isfinite, differences)):
            return math.inf, math.inf
        return mean(differences), _T_95 * stdev(differences) / math.sqrt(
            len(differences)
        )

    @property
    def is_worse(self) -> bool:
        """Whether the interval of the difference is above 0."""
        difference, half = self.difference
        return difference > half

    @property
    def worse_by(self) -> float:
        """The difference, in standard deviations of float32's metric over seeds."""
        return self.difference[0] / stdev(_metric(row) for row in self.reference)


Cells = Mapping[tuple[str, str], Cell]


def _metric(row: Row) -> float:
    return math.inf if row.metric is None else row.metric


def cells_of(rows: Sequence[Row]) -> Cells:
    """The cell of each task and way."""
    by_key = {(row.task, row.way, row.seed): row for row in rows}

    def of(task: Task, way: str) -> list[Row]:
        return [by_key[task.name, way, seed] for seed in SEEDS]

    return {
        (task.name, way.name): Cell(task, way, of(task, way.name), of(task, FLOAT32))
        for task in TASKS
        for way in WAYS
    }


def goals(cells: Cells) -> list[tuple[str, list[str], int]]:
    """Each goal, the tasks that meet it, and how many tasks must meet it."""
    names = [task.name for task in TASKS]

    def of(name: str, way: str) -> Cell:
        return cells[name, way]

    def near_best(name: str) -> bool:
        best = min((of(name, way.name) for way in WAYS), key=lambda cell: cell.metric)
        return of(name, FINDER).metric <= best.metric + best.noise

    quiet = [name for name in names if of(name, FINDER).skipped == 0]
    exact = [name for name in names if max(map(edge_error, of(name, FINDER).rows)) <= 1]
    lost = [name for name in names if of(name, DEFAULT).skipped >= _LOST * STEPS]
    return [
        (
            f"the finder skips none of the first {STEPS} steps, at any seed",
            quiet,
            len(names),
        ),
        (
            "its predicted edge is the true one or its neighbour, at every seed",
            exact,
            len(names),
        ),
        (
            "its metric is within the seeds' standard deviation of the best of all "
            "ways",
            [name for name in names if near_best(name)],
            len(names),
        ),
        (f"PyTorch's default loses at least {_LOST:.0%} of {STEPS} steps", lost, 3),
    ]


def edge_error(row: Row) -> float:
    """Bits between the true and the predicted overflow edge; 0 if neither exists."""
    if row.predicted_log2 is None or row.edge_log2 is None:
        return 0.0 if row.predicted_log2 == row.edge_log2 else math.inf
    return abs(row.predicted_log2 - row.edge_log2)


def said(cells: Cells) -> Iterator[str]:
    """Lines of Markdown: where the initial scale matters, and which goals are met."""
    compared = [cell for (_, way), cell in cells.items() if way != FLOAT32]
    matters = [cell for cell in compared if cell.worse_by > 1]
    slight = [cell for cell in compared if cell.worse_by <= 1 and cell.is_worse]
    yield (
        f"In {len(compared) - len(matters)} of {len(compared)} rows the initial loss "
        "scale makes no difference that is larger than that of another seed. Worse "
        f"than float32 by more than that: {_by_way(matters)}. By less, though the "
        f"paired 95 % interval tells it from 0: {_by_way(slight)}."
    )
    yield ""
    for goal, met, needed in goals(cells):
        missed = [task.name for task in TASKS if task.name not in met]
        state = "met" if len(met) >= needed else "**not met**"
        of = f"on {len(met)} of {len(TASKS)}" + (
            f", at least {needed}" * (needed < len(TASKS))
        )
        which = missed if needed == len(TASKS) else met
        yield f"* {state}: {goal}: {of}{_listed(which, needed)}"
    grown = {
        t.name: max(r.growth_bits or 0 for r in cells[t.name, FLOAT32].rows)
        for t in TASKS
    }
    most = ", ".join(f"{name} {bits:.1f}" for name, bits in grown.items() if bits >= 1)
    yield ""
    yield (
        "Bits by which the largest 16-bit gradient of the training exceeded that of "
        f"the finder's batches, most of {len(SEEDS)} seeds: {most or 'none'}; less "
        "than 1 elsewhere."
    )


def _by_way(cells: Sequence[Cell]) -> str:
    ways = {
        way.name: [cell.task.name for cell in cells if cell.way is way] for way in WAYS
    }
    return (
        "; ".join(f"{way} ({', '.join(of)})" for way, of in ways.items() if of)
        or "none"
    )


def _listed(names: Sequence[str], needed: int) -> str:
    if not names:
        return ""
    return f" ({'not ' * (needed == len(TASKS))}{', '.join(names)})"


def markdown(result: Mapping[str, Any]) -> str:
    """The answer, the goals, and a row for each way on each task."""
    cells, where = (
        cells_of([Row(**row) for row in result["rows"]]),
        result["environment"],
    )
    lines = [
        *said(cells),
        "",
        markdown_table(_HEADS, map(_row, cells.values())),
        f"{len(SEEDS)} seeds, {STEPS} steps; {where['device']}, torch "
        f"{where['torch']}, {where['date']}, commit {where['commit']}. `python -m "
        "benchmarks.loss_scale`",
        "",
        "Metric: validation loss, of a policy the cost of an episode, in float32 at "
        "the end. Its difference is paired by seed. Flushed: share of the norm of "
        "float32's gradient that is 0 in float16, in the tensor that loses most, mean "
        "of every 20th step.",
        "",
        *(f"* {task.name}: {task.what}" for task in TASKS),
        *(f"* {way.name}: {way.what}" for way in WAYS),
    ]
    return "\n".join(lines) + "\n"


def _row(cell: Cell) -> list[str]:
    rows = cell.rows
    skips, firsts = (
        [row.skipped for row in rows],
        [row.first_applied or STEPS for row in rows],
    )
    flushed = [row.flushed for row in rows if row.flushed is not None]
    difference, half = cell.difference
    applied = (
        f"{mean(firsts):.3g}" if any(row.first_applied for row in rows) else "none"
    )
    compared = "" if cell.way.name == FLOAT32 else f"{difference:+.2g} ± {half:.1g}"
    off = f"{max(map(edge_error, rows)):g}" if cell.way.name == FINDER else ""
    return [
        cell.task.name,
        cell.way.name,
        f"{mean(skips):.3g} ({min(skips)} to {max(skips)})",
        applied,
        f"{mean(flushed):.1%}" if flushed else "",
        f"{cell.metric:.4g}",
        compared,
        f"{mean(row.chosen_with for row in rows):.0f}",
        off,
    ]


def draw(cells: Cells) -> Figure:
    """Draw a table of skipped steps; a cell that ends worse than float32 is red."""
    ways = [way for way in WAYS if way.name != FLOAT32]
    worse = [
        [min(max(cells[t.name, w.name].worse_by, 0), 4) for w in ways] for t in TASKS
    ]
    # Shares of 4; up to 1 is white.
    at = [
        (0.0, PAPER),
        (0.249, PAPER),
        (0.25, _FAINT),
        (1.0, VERMILION),
    ]
    reds = LinearSegmentedColormap.from_list("worse", at)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 4.2), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(worse, cmap=reds, vmin=0, vmax=4, aspect="auto")
        for y, task in enumerate(TASKS):
            for x, way in enumerate(ways):
                skipped = cells[task.name, way.name].skipped
                axes.text(x, y, f"{skipped:.3g}", ha="center", va="center", color=INK)
        axes.set_xticks(range(len(ways)), [way.name for way in ways])
        axes.set_yticks(range(len(TASKS)), [task.name for task in TASKS])
        axes.tick_params(length=0, top=False)
        axes.set_title(
            f"Optimizer steps skipped of {STEPS}, mean of {len(SEEDS)} seeds"
        )
        bar = figure.colorbar(image, ax=axes, ticks=[0, 1, 2, 3, 4])
        bar.ax.set_yticklabels(["0", "1", "2", "3", "4 or more"])
        bar.set_label("ends worse than float32 by ... seed sd")
        return figure


def read(file: Path) -> list[Row]:
    """Read the rows that the present code made, the newest of each training."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [Row(**json.loads(line)) for line in lines]
    known = {
        (row.task, row.way, row.seed): row
        for row in rows
        if row.code == code_of(row.way)
    }
    return list(known.values())


def publish(rows: Sequence[Row]) -> None:
    """Replace the published results, their table and the picture of the docs."""
    where = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": f"{cpu_name()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "commit": Machine.of_this_process().versions["commit"],
    }
    lines = ",\n".join(f"  {json.dumps(asdict(row))}" for row in rows)
    PUBLISHED.write_text(
        f'{{"environment": {json.dumps(where)},\n "rows": [\n{lines}\n]}}\n'
    )
    result = json.loads(PUBLISHED.read_text())
    PUBLISHED.with_suffix(".md").write_text(markdown(result))
    PICTURE.write_bytes(as_png(draw(cells_of(rows))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the missing rows and print the results; returns the exit status, 0."""
    parser = parser_of("loss_scale", "When does the initial loss scale matter?")
    names = [way.name for way in WAYS]
    parser.add_argument(
        "--ways", nargs="+", choices=names, default=names, help="only these"
    )
    parser.add_argument(
        "--publish", action="store_true", help="replace the results in the docs"
    )
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # torch warns once per training
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / ROWS
    known = {(row.task, row.way, row.seed) for row in read(file)}
    missing = [
        (task, way, seed)
        for task, way, seed in wanted(
            ways=[way for way in WAYS if way.name in options.ways]
        )
        if (task.name, way.name, seed) not in known
    ]
    with Progress() as progress, file.open("a") as written:
        for task, way, seed in progress.track(missing, description="trainings"):
            written.write(json.dumps(asdict(measure(task, way, seed))) + "\n")
            written.flush()
    rows = sorted(read(file), key=lambda row: (row.task, row.way, row.seed))
    if len(rows) < len([*wanted()]):
        print(f"{len(rows)} of {len([*wanted()])} trainings are measured: {file}")
        return 0
    print("\n".join(said(cells_of(rows))))
    if options.publish:
        publish(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
