"""`python -m determined_amp`: the one place where a command is found and its errors are
printed.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from determined_amp import __main__ as door
from determined_amp import cluster
from determined_amp.amp.errors import UserError
from determined_amp.cli import audit_batch
from determined_amp.experiment.experiment import read_yaml
from tests.cluster_task import start_task
from tests.training import ROOT
from trials.data.images import digit_scans

BF16, FP16 = (f"experiment_configs/mlp/{name}.yaml" for name in ("bf16", "amp"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "no command given; allowed: train, audit, "),
        ("tran --help", "got 'tran'; allowed: train, audit, "),
        ("tran", "report precision, report loss-scale"),
        ("report speed", "speed: there is no such folder; allowed: a run fol"),
        # An empty argument is a variable that is not set; an empty value of a key is a
        # value.
        (
            "train a.yaml --run-folder ''",
            "got an empty argument in train a.yaml --run-folder ''",
        ),
        ("report a --margin nan", "--margin: got nan; allowed: a number above 0"),
        ("report a --margin 0", "--margin: got 0; allowed: a number above 0"),
        ("report a --output=", "got an empty argument in report a --output="),
        ("find ''", "got an empty argument"),
        ("check no/such.py --name ''", "no/such.py: no such file"),
        ("train missing.yaml --config=name=", "missing.yaml: cannot be read"),
        ("train --resume missing", "cannot be read"),
        ("train", "give an experiment YAML"),
        (f"audit {BF16} --config hyperparameters.amp.precision=bf16", "amp.precision"),
        (f"audit {BF16} --config data.classes=11", "data.classes"),
        (f"find {BF16}", "scales no loss"),
        (f"find {FP16} --json no/where.json", "in a folder that exists"),
        (
            f"find {FP16} --plot found.foo",
            "--plot: got found.foo; allowed: a name in .png",
        ),
        (f"find {FP16} --json tests", "--json: got tests; allowed: a name in .json"),
        (f"find {FP16} --trial trials.mlp:No", "cannot be imported"),
        (f"find {FP16} --checkpoint tests", "neither a checkpoint"),
        (
            f"find {FP16} --batches 0",
            "--batches: got 0; allowed: an integer >= 1 and <= 1000",
        ),
    ],
)
def test_mistake_of_the_user_is_one_sentence_and_status_2(
    line: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    status: object
    try:
        status = door.main(shlex.split(line))
    except SystemExit as of_the_parser:
        status = of_the_parser.code
    shown = capsys.readouterr()
    assert (status, shown.out) == (2, "")
    assert said in shown.err
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("redirected", "command", "status"),
    [
        (">/dev/full", "audit", 2),
        (">/dev/full", "train", 0),
        (">/dev/full", "report loss-scale", 0),
        ("| true", "audit", 0),
    ],
)
def test_lost_standard_output_fails_a_command_that_only_prints(
    redirected: str, command: str, status: int, tmp_path: Path
) -> None:
    """A training goes on: its result is in its folder."""
    (tmp_path / "x.py").write_text(
        "import sys\nfrom types import SimpleNamespace\n"
        "from determined_amp import __main__ as door\n"
        "sys.modules['command'] = SimpleNamespace(main=lambda given: print('x' * 9999) "
        "or 0)\nsys.modules['determined_amp.cli.command'] = sys.modules['command']\n"
        f"door._COMMANDS['{command}'] = ('command', '')\n"
        f"sys.exit(door.main('{command} a'.split()))\n"
    )
    words = f"PYTHONPATH={ROOT} {sys.executable} {tmp_path / 'x.py'} {redirected}"
    done = subprocess.run(
        words, shell=True, stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    assert ("audit: standard output cannot be written" in done.stderr) is (status == 2)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert door.main(["--help"]) == 0
    assert capsys.readouterr().out == door.usage() + "\n"


@pytest.mark.parametrize("command", door._COMMANDS)
def test_help_of_a_command_lists_its_arguments(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        door.main([*command.split(), "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(
        f"usage: python -m determined_amp {command.partition(' ')[0]} "
    )


@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        (None, "as told", "error: as told\n"),
        # The log policy of the YAMLs waits for the first words.
        ("TRIAL", "as told", "no retry can help: as told\n"),
        # Control characters of others do not reach the terminal.
        (None, "\x1b]0;title\x07 of\nme", "error: \ufffd]0;title\ufffd of\nme\n"),
    ],
)
def test_user_error_is_one_message_and_status_2(
    task: str | None,
    text: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(arguments: Sequence[str]) -> int:
        assert arguments == ["given"]
        raise UserError(text)

    monkeypatch.setattr(audit_batch, "main", fail)
    if task is not None:
        monkeypatch.setenv("DET_TASK_TYPE", task)
    assert door.main(["audit", "given"]) == 2
    assert capsys.readouterr().err == message


LAUNCHER = (sys.executable, "-m", "determined.launch.torch_distributed", sys.executable)


@pytest.mark.parametrize(("slots", "nodes"), [(2, 1), (0, 2), (1, 1)])
def test_commands_of_several_slots_are_started_by_the_launcher(
    slots: int, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words))
    monkeypatch.delenv("RANK", raising=False)
    task: Any = SimpleNamespace(
        slot_ids=[*range(slots)], container_addrs=["a", "b"][:nodes]
    )
    cluster.start_ranks(task, "train", "--trial", "model:Trial")
    words = [*LAUNCHER, "-m", "determined_amp", "train", "--trial", "model:Trial"]
    assert started == ([] if slots < 2 and nodes < 2 else [words])

    # Ranks do not start others.
    monkeypatch.setenv("RANK", "0")
    started.clear()
    cluster.start_ranks(task, "train")
    assert not started


def test_package_that_is_missing_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks(arguments: Sequence[str]) -> int:
        raise ModuleNotFoundError(name=arguments[0])

    monkeypatch.setattr(audit_batch, "main", lacks)
    assert door.main(["audit", "optuna"]) == 2
    assert (
        "audit needs optuna, which is not installed; pip install"
        in capsys.readouterr().err
    )
    with pytest.raises(ModuleNotFoundError):  # of the trial
        door.main(["audit", "model_def"])


@pytest.mark.parametrize(
    ("entrypoint", "reason"),
    [
        ("trian", "got 'trian'; allowed: train, "),
        ("", "no command given"),
        ("train --tral x:Y", "unrecognized arguments: --tral x:Y"),
        ("find --batches 0", "--batches: got 0; allowed: an integer >= 1"),
        ("check --jsn", "unrecognized arguments: --jsn"),
        ("compare --seeds", "--seeds: expected one argument"),
        ("train --trial trials.mlp:MLPTrail", "did you mean 'MLPTrial'?"),
        ("train --trial trials.late:LatteTrial", "did you mean 'latte'?"),
    ],
)
def test_mistake_in_an_entrypoint_is_noted_on_the_master_and_not_retried(
    entrypoint: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = read_yaml(str(ROOT / FP16))
    master = start_task(monkeypatch, tmp_path, config, config["hyperparameters"])
    monkeypatch.chdir(ROOT)
    assert door.main(shlex.split(entrypoint)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("no retry can help: ")
    assert reason in last
    assert reason in master.metadata["failure"]
    assert master.status


def test_image_without_a_package_is_one_line_without_a_retry_and_noted_on_the_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_yaml(str(ROOT / FP16))
    master = start_task(monkeypatch, tmp_path, config, config["hyperparameters"])
    for name in list(sys.modules):
        if name.startswith("sklearn."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    digit_scans.cache_clear()
    assert door.main(["train"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    reason = (
        "train needs scikit-learn, which is not in the image; allowed: an image with"
        " it, or "
    )
    assert last.startswith(f"no retry can help: {reason}")
    assert master.metadata["failure"].startswith(reason)


def test_ctrl_c_prints_interrupted_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(arguments: Sequence[str]) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(audit_batch, "main", interrupted)
    assert door.main(["audit"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
