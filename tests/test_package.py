"""The library as its users get it: a wheel in an empty folder, and no checkout in sight."""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import determined_amp
from determined_amp.experiment.machine import Machine

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "docs" / "your_trial"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def start(command: list[str], cwd: Path, **environment: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=kept | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    """What it printed, or a failure with that."""
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    return printed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves folders behind where it builds, and reads old ones."""
    copy = tmp_path_factory.mktemp("checkout") / "copy"
    here_only = shutil.ignore_patterns(
        ".*", "build", "dist", "*.egg-info", "__pycache__", "pictures"
    )

    def ignored(folder: str, names: list[str]) -> set[str]:
        run_folders = {"runs"} if Path(folder) == ROOT else set()
        return {*here_only(folder, names), *run_folders}

    shutil.copytree(ROOT, copy, ignore=ignored)
    dist = copy.parent / "dist"
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(dist)]
    ended(start([*PIP, "wheel", *options, str(copy)], copy.parent))
    (built,) = dist.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the wheel's content, and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    options = ["--no-deps", "--no-index", "--no-compile", "--target", str(target)]
    ended(start([*PIP, "install", *options, str(wheel)], target))
    return target


@dataclass(frozen=True)
class Trained:
    """A stranger's folder in which the installed command has trained.

    Args:
        printed: What the command printed.
        run: The run folder.
    """

    printed: str
    run: Path

    @property
    def checkpoint(self) -> Path:
        return max((self.run / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)


@pytest.fixture(scope="module")
def trained(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    project = tmp_path_factory.mktemp("project")
    for name in ("model_def.py", "amp.yaml"):
        shutil.copy(TEMPLATE / name, project)
    (project / "weights.bin").write_bytes(b"0" * 1000)
    command = [str(installed / "bin" / "det-amp"), "train", "amp.yaml"]
    printed = ended(start(command, project, PYTHONPATH=str(installed)))
    (run,) = (project / "runs" / "my-trial-amp").iterdir()
    return Trained(printed, run)


class TestWheel:
    def test_wheel_is_named_by_the_one_version(self, wheel: Path) -> None:
        assert wheel.name == f"determined_amp-{determined_amp.__version__}-py3-none-any.whl"

    def test_wheel_holds_the_whole_library_and_nothing_else(self, wheel: Path) -> None:
        names = zipfile.ZipFile(wheel).namelist()
        about = f"determined_amp-{determined_amp.__version__}.dist-info/"
        code = {name for name in names if not name.startswith(about)}
        here = (ROOT / "determined_amp").rglob("*.py")
        expected = {path.relative_to(ROOT).as_posix() for path in here}
        assert code == expected | {"determined_amp/py.typed"}
        assert f"{about}licenses/LICENSE" in names

    def test_wheel_says_what_it_needs_and_under_which_license(self, wheel: Path) -> None:
        (distribution,) = importlib.metadata.distributions(path=[str(wheel)])
        needed = [line for line in distribution.requires or () if "extra ==" not in line]
        assert {re.split(r"[^\w.-]", line)[0] for line in needed} == {
            "determined", "torch", "numpy", "pyyaml", "ruamel.yaml", "tensorboard", "rich",
        }  # fmt: skip
        extras = distribution.metadata.get_all("Provides-Extra")
        assert extras == ["search", "reports", "examples", "dev"]
        assert distribution.metadata["License-Expression"] == "Apache-2.0"

    def test_brings_the_command(self, wheel: Path) -> None:
        (distribution,) = importlib.metadata.distributions(path=[str(wheel)])
        scripts = configparser.ConfigParser()
        scripts.read_string(distribution.read_text("entry_points.txt") or "")
        assert dict(scripts["console_scripts"]) == {"det-amp": "determined_amp.__main__:run"}


def test_the_installed_command_trains_a_stranger_in_float16_and_audits_it(trained: Trained) -> None:
    lines = [json.loads(line) for line in (trained.run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["batches"] == 200
    (accuracy,) = (line["accuracy"] for line in lines[-1:] if line["group"] == "validation")
    assert accuracy > 0.9
    assert lines[0]["watch_audit_share"] == 1.0
    assert "amp_fp16 asks for float16: 100.0% of the FLOPs" in (trained.run / "log.txt").read_text()


def test_checkpoint_holds_the_code_of_the_stranger_and_nothing_else(trained: Trained) -> None:
    assert [path.name for path in (trained.checkpoint / "code").iterdir()] == ["model_def.py"]


def test_determined_itself_opens_the_checkpoint_with_the_wheel(
    installed: Path, trained: Trained, tmp_path: Path
) -> None:
    """In a process that knows neither the folder nor what `train` allows to be loaded."""
    code = (
        "import torch, determined_amp; from determined import pytorch\n"
        f"trial = pytorch.load_trial_from_checkpoint_path({str(trained.checkpoint)!r},\n"
        "    torch_load_kwargs={'weights_only': True})\n"
        "print(type(trial).__module__, type(trial).__name__)\n"
        "print(tuple(trial.model(torch.zeros(3, 32)).shape))\n"
        "print(float(sum(weight.double().sum() for weight in trial.model.parameters())))\n"
        "print(determined_amp.__file__)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    printed = ended(start(command, tmp_path, PYTHONPATH=str(installed))).splitlines()
    saved = torch.load(trained.checkpoint / "state_dict.pth", weights_only=True)
    total = float(sum(weight.double().sum() for weight in saved["models_state_dict"][0].values()))
    of_the_wheel = str(installed / "determined_amp" / "__init__.py")
    assert printed[-4:] == ["model_def MyTrial", "(3, 10)", str(total), of_the_wheel]


def test_a_run_says_that_torchvision_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Machine.of_this_process().versions["torchvision"] == importlib.metadata.version(
        "torchvision"
    )

    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert "torchvision" not in Machine.of_this_process().versions
