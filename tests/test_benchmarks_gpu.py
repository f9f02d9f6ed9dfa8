"""`benchmarks.gpu`: a rehearsal on this CPU, parts that go wrong, what the rows say of
goals.
"""

import json
import math

import pytest
import torch

from benchmarks import latte_memory
from benchmarks.gpu import latte, run
from benchmarks.gpu.box import Box
from benchmarks.gpu.goals import goals
from benchmarks.gpu.picture import picture
from benchmarks.gpu.report import markdown, table
from tests import gpu


@pytest.mark.gpu  # and in the dry run of those tests: it takes half a minute of a CPU
def test_rehearsal_measures_every_part(tmp_path, capsys):
    """All but Latte, below. No goal is judged by the numbers of a rehearsal."""
    parts = set(run.PARTS) - {"latte"}
    where = ["--folder", str(tmp_path), "--device", gpu.DEVICE.type, "--tiny"]
    assert run.main([*where, "--parts", *sorted(parts)]) == 0
    result = json.loads((tmp_path / "gpu.json").read_text())
    rows = result["rows"]
    assert [
        row["note"]
        for row in rows
        if "note" in row and row.get("mode") != "amp.compile"
    ] == []
    values = ("value", "images_per_second")
    measured = [row for row in rows if any(key in row for key in values)]
    assert {row["part"] for row in measured} == parts
    assert all(row[key] > 0 for row in measured for key in values if key in row)
    assert {goal["answer"] for goal in result["goals"]} == {"cannot be told"}
    assert (tmp_path / "gpu.md").read_text() == markdown(result)
    assert (tmp_path / "gpu.png").exists()
    assert capsys.readouterr().out.count("cannot be told: ") == len(result["goals"])


@pytest.mark.gpu
def test_gpu_benchmark_measures_latte_in_the_rows_of_its_memory():
    box = Box(torch.device("cpu"), tiny=True, ends=math.inf)
    rows = [latte_memory.Row(**row) for row in latte.measure(box)]
    assert {row.precision for row in rows} == {"fp32", "amp_bf16"}
    assert all(row.step_seconds for row in rows)


def test_largest_batch_is_predicted_from_two_peaks():
    """Seven bytes of weights, three for every clip."""
    peaks = {2: 13, 5: 22}
    limits = {22: 5, 24: 5, 25: 6, 307: 100}
    assert {
        memory: latte_memory.predicted(peaks, memory) for memory in limits
    } == limits


SPEEDS = {"fp32": 900.0, "tf32": 2000.0, "amp_fp16": 3200.0, "amp_bf16": 3100.0}


def of_a_gpu(*, share=0.99, waits=0, planted=1, **speeds):
    """Rows of two rounds in which everything is reached."""
    counted = {"synchronisations": waits, "batches": 40, "of_a_planted_one": planted}
    rows = [{"part": "loops", **counted}]
    for number, drift in enumerate((1.0, 1.03)):
        for precision, speed in {**SPEEDS, **speeds}.items():
            is_amp = precision.startswith("amp_")
            about = {"precision": precision, "batch": 256, "round": number}
            found = {
                "images_per_second": speed * drift,
                "peak_bytes": 11e9 if is_amp else 20e9,
            }
            rows.append({"part": "resnet", **about, **found})
            loops = {"bare": 1.0, "determined_amp": share} if is_amp else {}
            for loop, part in loops.items():
                measured = {"loop": loop, "images_per_second": speed * drift * part}
                rows.append({"part": "loops", **about, **measured})
    return rows


def answers(rows):
    short = {"yes": "y", "no": "n", "cannot be told": "?"}
    return "".join(short[goal["answer"]] for goal in goals(rows, "NVIDIA H200"))


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
def test_goals_are_judged_by_all_rounds(changes, expected):
    assert answers(of_a_gpu(**changes)) == expected


def test_table_and_picture_show_all_precisions():
    result = {"machine": {"device": "NVIDIA H200"}, "goals": [], "rows": of_a_gpu()}
    lines = table(result).splitlines()
    assert lines[2] == "| `fp32` | 914 (900 to 927) | 1.00x | 0.45x | 18.6 | 100% |"
    assert (
        lines[4]
        == "| `amp_fp16` | 3,248 (3,200 to 3,296) | 3.56x | 1.60x | 10.2 | 55% |"
    )
    assert len(lines) == 6
    assert len(picture(result).axes) == 2
