"""Where the results of a benchmark go, and which machine they are from."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The published results, which pages quote and tests compare with them.
RESULTS = ROOT / "benchmarks" / "results"


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Add the option `--folder`. By default no file of the repository changes."""
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "runs" / "benchmarks",
        help="where the results go; benchmarks/results replaces the published ones",
    )


def cpu_name() -> str:
    """The model of this processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
