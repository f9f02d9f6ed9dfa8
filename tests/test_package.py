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
from pathlib import Path

import pytest

import determined_amp
from determined_amp.local import folder

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
        ".*", "runs", "build", "dist", "*.egg-info", "__pycache__", "pictures"
    )
    shutil.copytree(ROOT, copy, ignore=here_only)
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


@pytest.fixture(scope="module")
def project(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stranger's folder, trained in once."""
    project = tmp_path_factory.mktemp("project")
    for name in ("model_def.py", "amp.yaml"):
        shutil.copy(TEMPLATE / name, project)
    command = [sys.executable, "-m", "determined_amp", "train", "amp.yaml"]
    ended(start(command, project, PYTHONPATH=str(installed)))
    return project


@pytest.fixture(scope="module")
def looked_at(
    installed: Path, project: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str]:
    """What the audit prints, and what a program that opens the checkpoint prints elsewhere."""
    (run,) = (project / "runs" / "my-trial-amp").iterdir()
    newest = max((run / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
    code = (
        "import torch, determined_amp; from determined import pytorch\n"
        f"trial = pytorch.load_trial_from_checkpoint_path({str(newest)!r})\n"
        "print(type(trial).__name__, tuple(trial.model(torch.zeros(3, 32)).shape))\n"
        "print(determined_amp.__file__)"
    )
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    both = [
        start(
            [str(installed / "bin" / "det-amp"), "audit", "amp.yaml"],
            project,
            PYTHONPATH=str(installed),
        ),
        start([sys.executable, "-W", "ignore", "-c", code], elsewhere, PYTHONPATH=str(installed)),
    ]
    audit, opened = map(ended, both)
    return audit, opened


class TestWheel:
    def test_is_named_by_the_one_version(self, wheel: Path) -> None:
        assert wheel.name == f"determined_amp-{determined_amp.__version__}-py3-none-any.whl"

    def test_holds_the_whole_library_and_nothing_else(self, wheel: Path) -> None:
        names = zipfile.ZipFile(wheel).namelist()
        about = f"determined_amp-{determined_amp.__version__}.dist-info/"
        code = {name for name in names if not name.startswith(about)}
        here = (ROOT / "determined_amp").rglob("*.py")
        expected = {path.relative_to(ROOT).as_posix() for path in here}
        assert code == expected | {"determined_amp/py.typed"}
        assert f"{about}licenses/LICENSE" in names

    def test_says_what_it_needs_and_under_which_license(self, wheel: Path) -> None:
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
        assert dict(scripts["console_scripts"]) == {"det-amp": "determined_amp.__main__:main"}


def test_a_stranger_trains_to_the_end_in_float16(project: Path) -> None:
    (run,) = (project / "runs" / "my-trial-amp").iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["batches"] == 200
    (accuracy,) = (line["accuracy"] for line in lines[-1:] if line["group"] == "validation")
    assert accuracy > 0.9


def test_the_installed_command_audits_the_stranger(looked_at: tuple[str, str]) -> None:
    audit, _ = looked_at
    assert "amp_fp16 asks for float16: 100.0% of the FLOPs" in audit


def test_determined_itself_opens_the_checkpoint_with_the_wheel(
    installed: Path, looked_at: tuple[str, str]
) -> None:
    _, opened = looked_at
    of_the_wheel = str(installed / "determined_amp" / "__init__.py")
    assert opened.splitlines()[-2:] == ["MyTrial (3, 10)", of_the_wheel]


def test_a_run_says_that_torchvision_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder.environment()["torchvision"] == importlib.metadata.version("torchvision")

    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert folder.environment()["torchvision"] is None
