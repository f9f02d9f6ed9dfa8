"""The library as its users get it: a wheel in an empty folder, and no checkout in
sight.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

import determined_amp
from tests import training

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "docs" / "your_trial"
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def ended(*command: str, cwd: Path, path: Path | str = "") -> str:
    """What a Python program printed that finds packages under `path`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path)}
    done = training.outcome(*command, cwd=cwd, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this checkout, as the pages say; nothing else is made there."""
    dist = tmp_path_factory.mktemp("dist")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir"]
    before = what_builds_leave()
    ended(*PIP, "wheel", *options, str(dist), str(ROOT), cwd=dist)
    assert what_builds_leave() == before
    (built,) = dist.iterdir()
    return built


def what_builds_leave() -> set[Path]:
    """The folders of builds in the checkout; a later one could read removed modules."""
    return {*ROOT.glob("build"), *ROOT.glob("*.egg-info")}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the wheel's content, and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    options = ["--no-deps", "--no-index", "--no-compile", "--target", str(target)]
    ended(*PIP, "install", *options, str(wheel), cwd=target)
    return target


@pytest.fixture(scope="module")
def trained(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a stranger who has trained with the installed command."""
    project = tmp_path_factory.mktemp("project")
    for name in ("model_def.py", "amp.yaml"):
        shutil.copy(TEMPLATE / name, project)
    (project / "weights.bin").write_bytes(b"0" * 1000)
    command = (str(installed / "bin" / "det-amp"), "train", "amp.yaml")
    ended(*command, cwd=project, path=installed)
    (run,) = (project / "runs" / "my-trial-amp").iterdir()
    return run


def newest_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)


def test_wheel_holds_the_whole_library_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    about = f"determined_amp-{determined_amp.__version__}.dist-info/"
    code = {name for name in names if not name.startswith(about)}
    library = ROOT / "determined_amp"
    data = library / "py.typed", library / "check" / "findings.json"
    here = [*library.rglob("*.py"), *data]
    assert code == {path.relative_to(ROOT).as_posix() for path in here}
    assert f"{about}licenses/LICENSE" in names


def test_the_installed_command_trains_a_stranger_in_float16_and_audits_it(
    trained: Path,
) -> None:
    lines = [
        json.loads(line)
        for line in (trained / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines[-1]["batches"] == 200
    (accuracy,) = (
        line["accuracy"] for line in lines[-1:] if line["group"] == "validation"
    )
    assert accuracy > 0.9
    assert lines[0]["watch_audit_share"] == 1.0
    assert (
        "amp_fp16 asks for float16: 100.0% of the FLOPs"
        in (trained / "log.txt").read_text()
    )
    # The code of the stranger, and nothing else.
    code = newest_checkpoint(trained) / "code"
    assert [path.name for path in code.iterdir()] == ["model_def.py"]


def test_determined_itself_opens_the_checkpoint_with_the_wheel(
    installed: Path, trained: Path, tmp_path: Path
) -> None:
    """In a process that knows neither the folder nor what `train` allows to be
    loaded.
    """
    checkpoint = newest_checkpoint(trained)
    code = (
        "import torch, determined_amp; from determined import pytorch\n"
        f"trial = pytorch.load_trial_from_checkpoint_path({str(checkpoint)!r},\n"
        "    torch_load_kwargs={'weights_only': True})\n"
        "print(type(trial).__module__, type(trial).__name__)\n"
        "print(tuple(trial.model(torch.zeros(3, 32)).shape))\n"
        "print(float(sum(weight.double().sum() for weight in "
        "trial.model.parameters())))\nprint(determined_amp.__file__)"
    )
    printed = ended(
        "-W", "ignore", "-c", code, cwd=tmp_path, path=installed
    ).splitlines()
    saved = torch.load(checkpoint / "state_dict.pth", weights_only=True)
    total = float(
        sum(weight.double().sum() for weight in saved["models_state_dict"][0].values())
    )
    of_the_wheel = str(installed / "determined_amp" / "__init__.py")
    assert printed[-4:] == ["model_def MyTrial", "(3, 10)", str(total), of_the_wheel]
