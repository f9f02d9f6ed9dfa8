"""What all benchmarks need: options, facts about the machine, and output files."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import determined
import torch

from determined_amp.cli.options import at_least

ROOT = Path(__file__).parents[1]
# The published results. Pages quote them, and tests compare the quotes.
RESULTS = ROOT / "benchmarks" / "results"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def parser_of(
    name: str, description: str, *, rounds: int = 0
) -> argparse.ArgumentParser:
    """Make a parser with `--folder`, whose default changes no file of the repository.

    Args:
        name: Name of the benchmark.
        description: What it does, for `--help`.
        rounds: Default of the option `--rounds`; with 0 there is no such option.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=description
    )
    if rounds:
        parser.add_argument(
            "--rounds", type=at_least(1), default=rounds, help=f"({rounds})"
        )
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "runs" / "benchmarks",
        help="where the results go; benchmarks/results replaces the published ones",
    )
    return parser


def cpu_name() -> str:
    """The model name of this processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()


def machine() -> dict[str, Any]:
    """Describe the device, the load of the machine, and the versions."""
    return {
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "determined": determined.__version__,
    }


def write(stem: Path, result: Mapping[str, Any], text: str | None = None) -> None:
    """Write a result as `stem.json`, and a text about it as `stem.md`."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    if text is not None:
        stem.with_suffix(".md").write_text(text)


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table in Markdown."""
    lines = [f"| {' | '.join(line)} |" for line in (heads, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(heads)}", *lines[1:]]) + "\n"


def spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """Format the median and the range of some values."""
    middle, low, high = (
        format(value, form)
        for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle}{unit} ({low} to {high})"
