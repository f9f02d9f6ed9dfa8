"""`check` of a script, around a loop, and what a resume of a trial loses."""

from __future__ import annotations

import json
import sys
import traceback

import pytest
import torch
from determined import pytorch
from determined.errors import InvalidExperimentException

from determined_amp.__main__ import main
from determined_amp.check import watching
from determined_amp.check.any_loop import NOT_SAVED, TOO_SHORT
from tests.right_scripts import PRELUDE
from tests.test_check import Right, examined
from tests.test_two_scales import LOOP, WRONG_LINES

pytestmark = pytest.mark.usefixtures("_libraries_are_collected_once")


def test_error_keeps_its_traceback_and_findings_are_printed_before(capsys):
    def train():
        with watching():
            torch.nn.Linear(4, 4)(torch.zeros(3, 3))

    with pytest.raises(RuntimeError) as raised:
        train()
    files = {frame.filename for frame in traceback.extract_tb(raised.tb)}
    assert not any("determined_amp/check" in file for file in files)
    assert capsys.readouterr().err.startswith(
        "nothing was trained, nothing was examined, 1 suspicion"
    )


class Counts:
    """A schedule of the trial's own, which no checkpoint has."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.steps)


class OwnScheduleIsLost(Right):
    def schedule(self):
        self.rates = Counts(self.optimizer)
        self.optimizer.register_step_post_hook(lambda *_: self.rates.step())


class OwnScheduleIsSaved(OwnScheduleIsLost):
    def build_callbacks(self):
        rates = self.rates

        class Keep(pytorch.PyTorchCallback):
            def state_dict(self):
                return {"steps": rates.steps}

            def load_state_dict(self, state_dict):
                rates.steps = state_dict["steps"]

        return {"rates": Keep()}


def test_schedule_of_the_trials_own_is_a_fault_if_a_resume_has_other_rates():
    (fault,) = examined(OwnScheduleIsLost).faults
    assert fault.key == "schedule_not_saved"
    assert not examined(OwnScheduleIsSaved).faults


class DeterminedRefuses(Right):
    def step(self):
        raise InvalidExperimentException("Determined says no")  # HERE


def test_error_of_determined_is_a_fault_with_its_line():
    (fault,) = examined(DeterminedRefuses).faults
    assert fault.key == "raised"
    assert "Determined says no" in fault.effect
    assert fault.where[0].file.endswith("test_check_scripts.py")


SCRIPT = """
import argparse
import shutil
import sys

import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from helper import data, net


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="")
    fault = parser.parse_args().fault
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    loader = torch.utils.data.DataLoader(data(), batch_size=8, num_workers=1)
    try:
        for number, (inputs, labels) in enumerate(loader):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = functional.cross_entropy(model(inputs), labels)
            scaler.scale(loss).backward()
            if fault != "clip":
                scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)  # CLIP
            scaler.step(optimizer)
            scaler.update()
            if number == 3:
                states = optimizer.state_dict(), scaler.state_dict()
                torch.save(states, "checkpoint.pt")
                shutil.copyfile("checkpoint.pt", "best.pt")
                states = torch.load("best.pt")
                optimizer.load_state_dict(states[0])
                scaler.load_state_dict(states[1])
            if number == 7 and fault == "error":
                raise ValueError("the script's own")
    except KeyboardInterrupt:
        torch.save(model.state_dict(), "checkpoint.pt")
        sys.exit(1)


if __name__ == "__main__":
    main()
"""
HELPER = """
import torch
from torch import nn


def net():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def data():
    points = torch.randn(4000, 16)
    return torch.utils.data.TensorDataset(points, points[:, :4].argmax(1))
"""


def write_script(folder):
    """`train.py`, which trains rightly, or wrongly with `--fault clip`."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "helper.py").write_text(HELPER)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a script is that the user starts."""
    write_script(tmp_path)
    (tmp_path / "checkpoint.pt").write_text("the user's")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    return tmp_path


# It has no loader, which would give batches to count.
SAVES = """
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--saved", type=int, default=400)
parser.add_argument("--fp32", action="store_true")
parser.add_argument("--json", action="store_true")
given = parser.parse_args()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cuda", enabled=not given.fp32)
for number in range(1000):
    optimizer.zero_grad()
    with torch.autocast("cuda", enabled=not given.fp32):
        loss = model(torch.randn(4, 8)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if number == given.saved:
        torch.save(optimizer.state_dict(), "checkpoint.pt")
"""


class TestScript:
    """Without Determined it is in `test_torch_alone.py`."""

    @pytest.mark.usefixtures("folder")
    def test_fault_of_a_script_is_found_with_its_line(self, capsys):
        assert main(["check", "--json", "train.py", "--fault", "clip"]) == 1
        findings = json.loads(capsys.readouterr().out)["findings"]
        (fault,) = (finding for finding in findings if finding["level"] == "fault")
        assert fault["key"] == "clip_scaled"
        (line,) = [
            n for n, text in enumerate(SCRIPT.splitlines(), 1) if "# CLIP" in text
        ]
        assert fault["where"] == [{"file": "train.py", "line": line}]

    @pytest.mark.parametrize(
        ("saved", "steps"),
        [(0, 20), (60, 61), (400, 100)],
        ids=["at once", "later", "never"],
    )
    def test_script_goes_on_to_its_first_checkpoint_for_a_hundred_steps(
        self, folder, capsys, saved, steps
    ):
        (folder / "train.py").write_text(SAVES)
        main(["check", "train.py", "--saved", str(saved)])
        shown = capsys.readouterr().out
        assert f": {steps} backwards, " in shown
        assert ("the scale is not in the checkpoint" in shown) is (saved < 400)
        assert (NOT_SAVED in shown) is (saved == 400)

    def test_script_is_compared_at_two_loss_scales_unless_it_runs_in_place(
        self, folder, capsys
    ):
        lines = WRONG_LINES["average of scaled gradients"]
        script = PRELUDE + LOOP.format(behind_backward=lines)
        (folder / "train.py").write_text(script)
        assert main(["check", "train.py"]) == 1
        told = capsys.readouterr().out
        assert "fault: the weights depend on the loss scale" in told
        assert "trained again in float32" in told
        main(["check", "--in-place", "train.py"])
        told = capsys.readouterr().out
        assert "trained again in float32" not in told
        assert "note: two loss scales were not compared" in told

    def test_script_without_amp_is_told_so_first(self, folder, capsys):
        (folder / "train.py").write_text(SAVES)
        given = ("--fp32", "--saved", "0")
        assert main(["check", "train.py", *given, "--json"]) == 0
        shown = capsys.readouterr()
        assert shown.out.startswith("no AMP was used: 20 backwards, 20 steps, ")
        assert main(["check", "--json", "train.py", *given]) == 0
        assert json.loads(capsys.readouterr().out)["amp"] is False

    def test_right_script_is_stopped_early_and_replaces_no_file(self, folder, capsys):
        assert main(["check", "train.py"]) == 0
        assert capsys.readouterr().out.startswith("0 faults: ")
        assert (folder / "checkpoint.pt").read_text() == "the user's"
        assert not (folder / "best.pt").exists()

    def test_error_of_a_script_has_its_own_traceback_after_the_findings(
        self, folder, capsys
    ):
        assert main(["check", "--in-place", "train.py", "--fault", "error"]) == 1
        shown = capsys.readouterr()
        assert shown.out.startswith("0 faults, 1 suspicion: 8 batches")
        trace = shown.err.partition("Traceback")[2]
        assert trace.rstrip().endswith("ValueError: the script's own")
        assert "determined_amp" not in trace
        assert (folder / "checkpoint.pt").read_bytes()[:2] == b"PK"

    @pytest.mark.parametrize(
        ("script", "status", "end"),
        [
            ("import time\nimport torch\ntime.sleep(10_000)", 1, "\n"),
            ("raise KeyboardInterrupt", 130, "\ninterrupted\n"),
        ],
        ids=["waits for hours", "is interrupted"],
    )
    def test_script_that_is_stopped_shows_no_traceback(
        self, folder, capsys, script, status, end
    ):
        (folder / "train.py").write_text(script)
        assert main(["check", "--minutes", "0.02", "train.py"]) == status
        shown = capsys.readouterr()
        assert shown.out.startswith("nothing was trained, nothing was examined")
        assert (f"\nnote: {TOO_SHORT}\n" in shown.out) is (status == 1)
        assert shown.err.endswith(end)
        assert "Traceback" not in shown.err
