"""Every mistake in the command or the YAML of a search is one message, before a trial
starts.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import searching, training

GRID, COMPARISON = "loss_scale_grid.yaml", "compare_precisions.yaml"


pytestmark = pytest.mark.usefixtures("_in_tmp_path")


@pytest.mark.parametrize(
    ("search", "override", "words"),
    [
        (GRID, "hyperparameters.amp.init_scale.minval=-3", "below min_scale"),
        (
            GRID,
            "hyperparameters.learning_rate={type: double, minval: 1, maxval: 2, count: "
            "2000}",
            "points; allowed: at most 2000, by a smaller count",
        ),
        (
            GRID,
            "hyperparameters.amp.precision=amp_bf16",
            "got amp_bf16, which does not scale",
        ),
        (
            GRID,
            "entrypoint=python3 -m determined_amp score --batches 9999",
            "--batches: got '9999'; allowed",
        ),
        (
            GRID,
            "searcher.smaller_is_better=false",
            "smaller_is_better: got false; allowed",
        ),
        (GRID, "resources.slots_per_trial=2", "slots_per_trial: got 2; allowed"),
        (
            GRID,
            "searcher.metric=f1",
            "searcher.metric: got f1, which no score has; allowed: init",
        ),
        (GRID, "reproducibility.experiment_seed=x", "experiment_seed: got 'x'"),
        (
            GRID,
            "entrypoint=python3 train.py",
            "entrypoint: got 'python3 train.py'; allowed",
        ),
        (
            GRID,
            "entrypoint=python3 'train",
            'entrypoint: got "python3 \'train"; allowed',
        ),
        (
            "find_loss_scale.yaml",
            "a=1",
            "allowed in a search: python3 -m determined_amp train",
        ),
        (
            "loss_scale_asha.yaml",
            "searcher.max_time=7",
            "max_length: is not searcher.max_time",
        ),
        (
            COMPARISON,
            "hyperparameters.trial_seed.vals=[1, -1]",
            "trial_seed: got -1; allowed",
        ),
    ],
)
def test_mistake_in_a_search_is_one_message_and_no_trial(
    search: str, override: str, words: str, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    assert words in refusal("search", searching.write(tmp_path, search, override))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a.yaml", "--resume", "b"], "give either a search YAML, or --resume FOLDER"),
        (["--resume", "b", "--config", "a=1"], "leave --config and --trial out"),
        (["a", "--workers", "9" * 5000], "99; allowed: an integer >= 1 and <= "),
    ],
)
def test_mistake_in_the_command_is_one_message(
    arguments: list[str], words: str, refusal: Callable[..., str]
) -> None:
    (line,) = refusal("search", *arguments).splitlines()
    assert words in line


def test_ctrl_c_does_not_reach_the_server_while_it_imports(tmp_path: Path) -> None:
    """Ctrl-C would reach every process of the terminal, and the server print a
    traceback.
    """
    program = (
        "import signal\n"
        "from multiprocessing import forkserver\n"
        "from determined_amp.search import server as command\n"
        "command.PRELOADED = ['takes_long']\n"
        "command.start_server()\n"
        "server = forkserver._forkserver._forkserver_pid\n"
        "print(open(f'/proc/{server}/status').read())\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    )
    (tmp_path / "takes_long.py").write_text("import time; time.sleep(1)")
    done = training.outcome(
        "-c", program, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    (ignored,) = (
        line for line in done.stdout.splitlines() if line.startswith("SigIgn:")
    )
    assert int(ignored.split()[1], 16) & 1 << signal.SIGINT - 1
