"""`python -m determined_amp`: the one place where a command is found and its errors are
printed.
"""

import os
import shlex
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from determined_amp import __main__ as door
from determined_amp import cluster
from determined_amp.amp.errors import UserError
from determined_amp.cli import audit_batch
from determined_amp.experiment.experiment import read_yaml
from tests.cluster_task import start_task
from tests.run_here import ROOT
from trials.data.images import digit_scans

BF16, FP16 = (f"experiment_configs/mlp/{name}.yaml" for name in ("bf16", "amp"))


@pytest.mark.parametrize(
    ("redirected", "length", "status", "said"),
    [
        (">/dev/full", 9, 2, "error: standard output cannot be written: No space"),
        ("| true", 99999, 1, ""),  # the status of Python's own recipe
    ],
)
def test_lost_standard_output_is_a_sentence_or_the_end_and_no_traceback(
    redirected, length, status, said, tmp_path
):
    (tmp_path / "x.py").write_text(
        "import sys\nfrom determined_amp import __main__ as door\n"
        f"door._status = lambda options: print('x' * {length}) or 0\n"
        "sys.exit(door.main(['search', 'a']))\n"
    )
    # Buffered, as it is for users: then Python itself writes at exit, too.
    environment = f"PYTHONUNBUFFERED= PYTHONPATH={ROOT}"
    python = f"{environment} {sys.executable} {tmp_path / 'x.py'} {redirected}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {python}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == bool(said)


NAMES = [*door.COMMANDS]


@pytest.mark.parametrize("command", NAMES)
def test_help_of_a_command_lists_its_arguments(command, capsys):
    with pytest.raises(SystemExit) as ended:
        door.main([command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: det-amp {command} ")


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
    task, text, message, monkeypatch, capsys
):
    monkeypatch.setattr(door, "_status", Mock(side_effect=UserError(text)))
    if task is not None:
        monkeypatch.setenv("DET_TASK_TYPE", task)
    assert door.main(["train", "--trial=a:B", *["a.yaml"] * (task is None)]) == 2
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("slots", "nodes", "rank"), [(2, 1, None), (1, 2, None), (1, 1, None), (2, 1, "0")]
)
def test_commands_of_several_slots_are_started_by_the_launcher(
    slots, nodes, rank, monkeypatch
):
    """By the task, and not by the ranks that it has started."""
    started = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words))
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    task: Any = SimpleNamespace(slot_ids=[0] * slots, container_addrs=["a"] * nodes)
    monkeypatch.setattr(cluster, "task_info", lambda: task)
    cluster.start_ranks(["train", "--trial", "model:Trial"])
    launcher = (sys.executable, "-m", "determined.launch.torch_distributed")
    ours = (sys.executable, "-m", "determined_amp", "train", "--trial", "model:Trial")
    is_launched = slots * nodes > 1 and rank is None
    assert started == ([[*launcher, *ours]] if is_launched else [])


def test_package_that_is_missing_is_named_with_the_remedy(monkeypatch, capsys):
    def lacks(options):
        raise ModuleNotFoundError(name=options.config)

    monkeypatch.setattr(audit_batch, "experiment_of", lacks)
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
        ("trian", "invalid choice: 'trian' (choose from "),
        ("search", "invalid choice: 'search' (choose from "),
        ("audit --trial trials.mlp:MLPTrial", "invalid choice: 'audit' (choose from "),
        ("train --tral x:Y", "unrecognized arguments: --tral x:Y"),
        ("find --batches 0", "--batches: got 0; allowed: an integer >= 1"),
        ("train --trial trials.mlp:MLPTrail", "did you mean MLPTrial?"),
        ("train --trial trials.late:LatteTrial", "did you mean latte?"),
    ],
)
def test_mistake_in_an_entrypoint_is_noted_on_the_master_and_not_retried(
    entrypoint, reason, tmp_path, monkeypatch, capsys
):
    config = read_yaml(str(ROOT / FP16))
    master = start_task(monkeypatch, tmp_path, config, config["hyperparameters"])
    monkeypatch.chdir(ROOT)
    assert door.main(shlex.split(entrypoint)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("no retry can help: ")
    assert reason in last
    assert reason in master.metadata["failure"]
    assert master.status


def test_image_without_a_package_is_one_line_that_is_not_retried(
    tmp_path, monkeypatch, capsys
):
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
        "det-amp train needs scikit-learn, which is not in the image; allowed: an image"
        " with it, or "
    )
    assert last.startswith(f"no retry can help: {reason}")
    assert master.metadata["failure"].startswith(reason)


def test_ctrl_c_prints_interrupted_and_no_traceback(monkeypatch, capsys):
    def interrupted(options):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(audit_batch, "experiment_of", interrupted)
    assert door.main(["audit", "a.yaml"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
