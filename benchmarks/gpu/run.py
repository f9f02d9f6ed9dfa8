"""Measures one GPU in parts; each has its own process and its own time limit.

    python -m benchmarks.gpu --folder OUT          # less than nine minutes
    python -m benchmarks.gpu --folder OUT --tiny   # a rehearsal; so is --device cpu
    python -m benchmarks.gpu --folder OUT --parts  # measures nothing, only sums up

Each row goes to `OUT/rows.jsonl` as soon as it is measured. A part that fails or runs
out of time leaves a note there, and the next part begins. At the end, `gpu.json`,
`gpu.md` and, with matplotlib, `gpu.png` sum up the rows. Copy `gpu.json` to
`benchmarks/results`; then `benchmarks.readme` writes its table into the README.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import pkgutil
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.box import Box, problem_of
from benchmarks.gpu.goals import goals, words
from benchmarks.gpu.report import draw, markdown
from determined_amp.experiment.machine import installed_version

# The seconds of each part, by module. Later parts may use what earlier ones leave over.
WHERE = "benchmarks.gpu.{}:measure"
PARTS = {
    "ceilings": 20,
    "resnet": 155,
    "loops": 70,
    "loader": 75,
    "latte": 75,
    "compiled": 85,
}
# Seconds after the time limit in which a part may finish its row.
GRACE = 10
# A part does not begin with fewer seconds than this.
LEAST = 5
PACKAGES = ("torch", "torchvision", "determined", "diffusers", "numpy", "triton")

_processes = multiprocessing.get_context("forkserver")


def measure(
    folder: Path,
    parts: Mapping[str, float],
    device: str,
    *,
    tiny: bool,
    grace: float = GRACE,
    where: str = WHERE,
) -> list[dict[str, Any]]:
    """Run the parts one after the other, and write their rows to `folder/rows.jsonl`.

    Args:
        folder: Where the results go.
        parts: Seconds of each part, by the name of its module.
        device: `cuda` or `cpu`.
        tiny: Whether this is a rehearsal.
        grace: Seconds by which a part may exceed its time before it is killed.
        where: Import path of a part's function, with `{}` for the name of the part.

    Returns:
        All rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.jsonl"
    path.write_text("")
    imported = _processes.Process()  # ends once the fork server has imported everything
    imported.start()
    imported.join()
    ends = time.monotonic()
    for part, seconds in parts.items():
        ends += seconds
        began = time.monotonic()
        if ends - began < LEAST:
            _append(path, part, {"note": f"not begun: {ends - began:.0f} s are left"})
            continue
        box = Box(torch.device(device), tiny, ends)
        process = _processes.Process(target=_part, args=(part, where, path, box))
        if note := _run(process, box, grace):
            _append(path, part, {"note": note})
        took = round(time.monotonic() - began, 1)
        _append(path, part, {"seconds": took})
        notes = [
            f"; {r['note']}" for r in rows_of(path) if r["part"] == part and "note" in r
        ]
        print(f"{part}: {took} s{''.join(notes)}", flush=True)
    return rows_of(path)


def _run(process: BaseProcess, box: Box, grace: float) -> str:
    """Run a process, and kill it if it exceeds its time by `grace`.

    It is no daemon, because daemons may not start loader processes.

    Returns:
        A note on how it failed, or an empty text.
    """
    began = time.monotonic()
    process.start()
    process.join(box.left() + grace)
    if process.is_alive():
        process.kill()
        process.join()
        return f"cut off after {time.monotonic() - began:.0f} s"
    return f"its process ended with {process.exitcode}" if process.exitcode else ""


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Read the rows that are written so far."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(folder: Path) -> dict[str, Any]:
    """Write JSON, Markdown and picture of the rows in a folder; return the result."""
    rows = rows_of(folder / "rows.jsonl")
    on: dict[str, Any] = next((row["machine"] for row in rows if "machine" in row), {})
    # A rehearsal is too small to judge the goals.
    told = [] if on.get("rehearsal") else rows
    result = {"machine": on, "goals": goals(told, on.get("device", "")), "rows": rows}
    (folder / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "gpu.md").write_text(markdown(result))
    draw(result, folder / "gpu.png")
    return result


def _append(path: Path, part: str, row: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"part": part, **row}) + "\n")


def _part(part: str, where: str, path: Path, box: Box) -> None:
    """Run a part. It has its own process, so that a device fault ends with it."""
    # Fork loader processes, as a run does. Otherwise each would import everything, and
    # copy the dataset.
    multiprocessing.set_start_method("fork", force=True)
    try:
        if box.device.type == "cpu":
            torch.set_num_threads(1)
        _append(
            path, part, {"machine": {**machine(box.device.type), "rehearsal": box.tiny}}
        )
        # Imports the part here, because a package that only it needs may be missing.
        for row in pkgutil.resolve_name(where.format(part))(box):
            _append(path, part, row)
            if box.left() <= 0:
                _append(path, part, {"note": "the time was over before the end"})
                return
    except Exception as error:  # after any error, the other parts go on
        _append(path, part, {"note": problem_of(error)})


def machine(device: str) -> dict[str, Any]:
    """Describe the device, and the versions of what is measured."""
    cuda = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory
        if cuda
        else None,
        "driver": _driver() if cuda else None,
        "cuda": torch.version.cuda,  # torch's own
        "cudnn": torch.backends.cudnn.version() if cuda else None,  # type: ignore[no-untyped-call]
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        **{name: installed_version(name) for name in PACKAGES},
    }


def _driver() -> str:
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.check_output(ask, text=True, timeout=20).strip()
    except (OSError, subprocess.SubprocessError) as error:
        return problem_of(error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status, 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="What one GPU reaches, in nine minutes.",
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the results go"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="a rehearsal; always on a CPU"
    )
    parser.add_argument(
        "--parts", nargs="*", choices=PARTS, default=list(PARTS), help="by default all"
    )
    options = parser.parse_args(arguments)
    # The process that forks the parts imports these once, and never uses the device. An
    # error here would end all parts, so import only what is certain to work.
    multiprocessing.set_forkserver_preload(["torch._dynamo", "torchvision"])
    parts = {name: PARTS[name] for name in options.parts}
    tiny = options.tiny or options.device == "cpu"
    if parts:
        measure(options.folder, parts, options.device, tiny=tiny)
    print(words(write(options.folder)["goals"]))
    return 0
