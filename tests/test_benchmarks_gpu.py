"""`benchmarks.gpu`: a rehearsal on this CPU, parts that go wrong, what the rows say of goals."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import compiled, loops, run
from benchmarks.gpu.box import Box
from benchmarks.gpu.goals import goals
from benchmarks.gpu.picture import picture
from benchmarks.gpu.report import markdown, table
from determined_amp.amp.settings import Precision
from tests import gpu

PLANTED = "tests.planted_parts:{}"


def notes(rows: list[dict[str, Any]], part: str) -> list[str]:
    return [row["note"] for row in rows if row["part"] == part and "note" in row]


@pytest.mark.gpu  # and in the dry run of those tests: it takes half a minute of a CPU
@pytest.mark.usefixtures("_workers_import_once")
def test_rehearsal_measures_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All but Latte, in `test_latte_memory`. No goal is judged by the numbers of a rehearsal."""
    parts = set(run.PARTS) - {"latte"}
    where = ["--folder", str(tmp_path), "--device", gpu.DEVICE.type, "--tiny"]
    assert run.main([*where, "--parts", *sorted(parts)]) == 0
    result = json.loads((tmp_path / "gpu.json").read_text())
    rows = result["rows"]
    assert [row["note"] for row in rows if "note" in row and row.get("mode") != "amp.compile"] == []
    values = ("value", "images_per_second")
    measured = [row for row in rows if any(key in row for key in values)]
    assert {row["part"] for row in measured} == parts
    assert all(row[key] > 0 for row in measured for key in values if key in row)
    precisions = {row["precision"] for row in measured if row["part"] == "resnet"}
    assert precisions >= {"fp32", "tf32", "amp_bf16"}
    sources = {(row["source"], row["what"]) for row in measured if row["part"] == "loader"}
    assert sources == {
        (source, what)
        for source in ("synthetic", "image_folder")
        for what in ("loader alone", "training")
    }
    assert {goal["answer"] for goal in result["goals"]} == {"cannot be told"}
    assert (tmp_path / "gpu.md").read_text() == markdown(result)
    assert (tmp_path / "gpu.png").exists()
    assert capsys.readouterr().out.count("cannot be told: ") == len(result["goals"])


def test_setting_of_the_library_is_measured_off_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_with: list[str] = []

    def compile_nothing(forward: Any, *, mode: str) -> Any:
        compiled_with.append(mode)
        return forward

    monkeypatch.setattr(torch, "compile", compile_nothing)
    box = Box(torch.device("cpu"), tiny=True, ends=time.monotonic() + 60)
    rows = list(compiled.through_the_library(box, Precision.FP32))
    assert [row["mode"] for row in rows] == ["amp.compile: false"] * 2 + [
        "amp.compile: default"
    ] * 2
    assert compiled_with == ["default"]


@pytest.mark.usefixtures("_workers_import_once")
def test_part_that_goes_wrong_is_noted_and_the_others_go_on(tmp_path: Path) -> None:
    parts = {"never_ends": 1.0, "raises": 60.0, "dies": 60.0, "missing": 60.0, "fine": 60.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "LEAST", 0)
        rows = run.measure(tmp_path, parts, "cpu", tiny=True, grace=60.0, where=PLANTED)
    assert notes(rows, "never_ends") == ["the time was over before the end"]
    assert notes(rows, "raises") == ["ArithmeticError: planted"]
    assert notes(rows, "dies") == ["its process ended with 7"]
    assert notes(rows, "missing")[0].startswith("AttributeError: ")
    assert notes(rows, "fine") == []  # negative control
    # What was measured before stays.
    values = {row["part"]: row["value"] for row in rows if "value" in row}
    assert (values["raises"], values["dies"], values["fine"]) == (2.0, 3.0, 1.0)


@pytest.mark.usefixtures("_workers_import_once")
def test_part_that_hangs_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LEAST", 0)
    rows = run.measure(tmp_path, {"hangs": 1.0}, "cpu", tiny=True, grace=0.0, where=PLANTED)
    assert notes(rows, "hangs")[0].startswith("cut off after ")
    monkeypatch.setattr(run, "LEAST", 5)
    rows = run.measure(tmp_path, {"hangs": 1.0}, "cpu", tiny=True, where=PLANTED)
    assert notes(rows, "hangs")[0].startswith("not begun: ")


def test_whole_run_is_shorter_than_nine_minutes() -> None:
    assert sum(run.PARTS.values()) + run.GRACE < 9 * 60 - 40  # torch has to be imported, too


def of_a_gpu(**changes: float) -> list[dict[str, Any]]:
    """Rows of two rounds in which everything is reached."""
    speed = {"fp32": 900.0, "tf32": 2000.0, "amp_fp16": 3200.0, "amp_bf16": 3100.0, **changes}
    peak = {"fp32": 20e9, "tf32": 20e9, "amp_fp16": 11e9, "amp_bf16": 11e9}
    rows: list[dict[str, Any]] = []
    for number, drift in enumerate((1.0, 1.03)):
        for precision, value in speed.items():
            if precision in peak:
                about = {"precision": precision, "batch": 256, "round": number}
                found = {"images_per_second": value * drift, "peak_bytes": peak[precision]}
                rows.append({"part": "resnet", **about, **found})
        for precision in ("amp_fp16", "amp_bf16"):
            for loop, share in (("bare", 1.0), ("determined_amp", changes.get("share", 0.99))):
                about = {"precision": precision, "batch": 256, "round": number, "loop": loop}
                measured = speed[precision] * drift * share
                rows.append({"part": "loops", **about, "images_per_second": measured})
    waits, planted = changes.get("waits", 0), changes.get("planted", 1)
    counted = {"synchronisations": waits, "batches": 40, "of_a_planted_one": planted}
    return [*rows, {"part": "loops", **counted}]


def answers(rows: list[dict[str, Any]], device: str = "NVIDIA H200") -> str:
    short = {"yes": "y", "no": "n", "cannot be told": "?"}
    return "".join(short[goal["answer"]] for goal in goals(rows, device))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "yyyyyyyy"),
        # In the second round alone.
        ({"amp_fp16": 3060.0, "amp_bf16": 3000.0}, "??yyyyyy"),
        ({"amp_fp16": 2500.0, "amp_bf16": 2500.0}, "nnnnyyyy"),
        ({"fp32": 1200.0}, "yyynyyyy"),
        ({"share": 0.9}, "ynyyynny"),
        ({"waits": 1}, "yyyyyyyn"),
        # A counter that does not see a planted one sees nothing.
        ({"planted": 0}, "yyyyyyy?"),
    ],
)
def test_goals_are_judged_by_all_rounds(changes: dict[str, float], expected: str) -> None:
    assert answers(of_a_gpu(**changes)) == expected


def test_goals_are_of_what_was_measured_on_the_device_they_name() -> None:
    assert answers(of_a_gpu(), "NVIDIA A100") == "??yyyyyy"
    assert answers([]) == "?" * 8
    without_fp32 = [row for row in of_a_gpu() if row.get("precision") != "fp32"]
    assert answers(without_fp32) == "yyy??yyy"


def test_table_and_picture_show_all_precisions() -> None:
    result = {"machine": {"device": "NVIDIA H200"}, "goals": [], "rows": of_a_gpu()}
    lines = table(result).splitlines()
    assert lines[2] == "| `fp32` | 914 (900 to 927) | 1.00x | 0.45x | 18.6 | 100% |"
    assert lines[4] == "| `amp_fp16` | 3,248 (3,200 to 3,296) | 3.56x | 1.60x | 10.2 | 55% |"
    assert len(lines) == 6
    speed, _ = picture(result).axes
    names = ["fp32", "tf32", "amp_fp16", "amp_bf16"]
    legend = speed.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == names
    assert [text.get_text() for text in speed.texts] == ["published for AMP: 3,079"]


def test_waits_are_counted_between_reports_once_all_is_warm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU torch warns of nothing, so the model does."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: warn_if(modes))
    monkeypatch.setattr(loops, "WARM", 2)
    monkeypatch.setattr(loops, "COUNTED", 2)
    monkeypatch.setattr(loops, "BATCHES_PER_TURN", 1)
    monkeypatch.setattr("trials.resnet50.resnet50", lambda **_: Waiting(modes))
    box = Box(torch.device("cpu"), tiny=True, ends=time.monotonic() + 60)
    row = loops.count_synchronisations(box, Precision.FP32)
    # One in each of the two batches that count, none of the two before.
    assert (row["synchronisations"], row["batches"], row["of_a_planted_one"]) == (2, 2, 1)
    assert modes[-1] == "default"


class Waiting(torch.nn.Module):
    """Waits in every forward."""

    def __init__(self, modes: list[str]) -> None:
        super().__init__()
        self.modes = modes
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))

    def forward(self, images: torch.Tensor) -> Any:
        warn_if(self.modes)
        return self.layers(images)


def warn_if(modes: list[str]) -> float:
    if modes and modes[-1] == "warn":
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    return 0.0
