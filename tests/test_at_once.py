"""A mistake of the user is named before torch and the trial are imported, by every command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from tests import training
from tests.precisions import write_run

ROOT = Path(__file__).parents[1]
MLP = ROOT / "experiment_configs" / "mlp" / "amp.yaml"
COMMANDS = ("train", "audit", "find", "compare")

# Runs a command, and fails if it has imported what takes seconds.
PROGRAM = """
import sys
from determined_amp.__main__ import main
status = main(sys.argv[1:])
early = {"torch", "determined.pytorch", "trials.mlp"} & sys.modules.keys()
sys.exit(f"imported: {early}" if early else status)
"""


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    """Exit status and standard error of a command."""
    surroundings = {**os.environ, **environment}
    process = training.outcome("-c", PROGRAM, *arguments, env=surroundings, timeout=60)
    return process.returncode, process.stderr


@pytest.mark.parametrize("command", [*COMMANDS, "search"])
def test_missing_yaml_is_named(command: str) -> None:
    status, printed = run(command, "no/such.yaml")
    assert status == 2, printed
    assert "no/such.yaml: cannot be read" in printed


@pytest.mark.parametrize("command", COMMANDS)
def test_all_mistakes_are_named_together(command: str, tmp_path: Path) -> None:
    config = yaml.safe_load(MLP.read_text())
    config["hyperparameters"]["amp"]["precission"] = "amp_fp16"
    config["hyperparameters"]["global_batch_size"] = 63
    config["hyperparameters"]["training"]["max_length"] = {"batch": 3}
    config["resources"]["slots_per_trial"] = 2
    config["searchr"] = {}
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(config))
    status, printed = run(command, str(path))
    assert status == 2, printed
    for key in (
        "hyperparameters.amp.precission",
        "hyperparameters.global_batch_size",
        "hyperparameters.training.max_length.batch",
        "searchr",
    ):
        assert f"{key}: " in printed


def test_comparison_without_a_batch_size_is_named(tmp_path: Path) -> None:
    config = {
        "name": "plain",
        "entrypoint": "trials.mlp:MLPTrial",
        "hyperparameters": {},
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 3}},
    }
    path = tmp_path / "plain.yaml"
    path.write_text(yaml.safe_dump(config))
    status, printed = run("compare", str(path))
    assert status == 2, printed
    assert "hyperparameters.global_batch_size: missing; " in printed


def test_report_needs_no_torch_at_all(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, name, 1) for name in ("fp32", "amp_fp16")]
    status, printed = run("report", "precision", *map(str, folders))
    assert status == 0, printed
    assert (tmp_path / "fp32" / "precision.html").exists()


def test_imports_are_seen() -> None:
    """Negative control: a sound YAML imports the trial."""
    status, printed = run("audit", str(MLP), "--config", "data.classes=1")
    assert status == 1
    assert "imported: " in printed
