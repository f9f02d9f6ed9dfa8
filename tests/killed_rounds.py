"""Kill one run 12 times at random moments, resume it each time, and see that nothing is
lost.

    OMP_NUM_THREADS=1 python -m tests.killed_rounds FOLDER [SEED]

A fresh process spends seconds on imports. So the process of the rounds imports
everything and then forks a child per round, which is a fresh process in all that a run
could notice. The test in `test_hostile.py` makes it a fork of its own process.

After every round each visible checkpoint must load whole, and the newest may not be
older than it was. At the end the weights, the optimizer, the scaler, the counts and the
random state must be those of a run that nobody disturbed, and every report must be
there once.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from determined_amp import __main__ as door
from determined_amp.local.checkpoint_storage import complete_checkpoints, read_metadata
from tests import training
from tests.training import fork, wait

# What a run imports only when it needs it; a child would import it again in every
# round.
IMPORTED_LATE = (
    *("sklearn.datasets", "sklearn.model_selection", "torch.utils.tensorboard"),
    "trials.mlp",
)

# In an empty working directory: the loop copies all code that is there into every
# checkpoint.
MINE = "from trials.mlp import MLPTrial\n\n\nclass MyTrial(MLPTrial):\n    pass\n"

ROUNDS = 12
BATCHES = 180
LONG = (
    "hyperparameters.trial=mine:MyTrial",
    "hyperparameters.lr_schedule=cosine",
    "hyperparameters.warmup_steps=2",
    "hyperparameters.aggregation_frequency=5",
    "hyperparameters.amp.growth_interval=3",
    # a report is of one step, and some overflow
    "hyperparameters.amp.max_skip_ratio=1",
    f"hyperparameters.training.max_length.batches={BATCHES}",
    "hyperparameters.training.validation_period.batches=60",
    "hyperparameters.training.checkpoint_period.batches=5",
    "hyperparameters.training.reporting_period.batches=5",
)


def start_or_resume(folder: Path) -> int:
    """What a user would do after a kill: resume, or start anew if nothing was saved
    yet.
    """
    if complete_checkpoints(folder / "checkpoints"):
        return door.run(["train", "--resume", str(folder)])
    return door.run(
        [
            "train",
            *training.arguments("mlp/amp.yaml", *LONG),
            "--run-folder",
            str(folder),
        ]
    )


def newest_batch(folder: Path) -> int:
    """Batches of the newest checkpoint, 0 without one."""
    saved = complete_checkpoints(folder / "checkpoints")
    return int(saved[-1].name.removeprefix("batch-")) if saved else 0


def load_every_checkpoint(folder: Path) -> None:
    """Read each visible checkpoint whole."""
    for path in (folder / "checkpoints").glob("batch-*"):
        batches = int(path.name.removeprefix("batch-"))
        assert read_metadata(path)["steps_completed"] == batches
        content = training.checkpoint(folder, batches)
        assert (
            content["callbacks"]["determined_amp.mixed_precision"]["optimizers"][0][
                "attempted"
            ]
            == batches // 5
        )
        assert (path / "code" / "mine.py").read_text() == MINE


def compare(folder: Path, undisturbed: Path) -> None:
    """Same final state, and the same reports, each of them once."""

    def reports(run: Path) -> list[tuple[str, int]]:
        return [(line["group"], line["batches"]) for line in training.metrics(run)]

    states = [training.checkpoint(run, BATCHES) for run in (folder, undisturbed)]
    assert training.digest(states[0]) == training.digest(states[1])
    assert reports(folder) == reports(undisturbed)


def check(work: Callable[[], int | None], log: Path) -> None:
    """Run a check in a child: a parent that computes has threads, and a fork of it
    could hang.
    """
    if wait(fork(work, log)):
        raise SystemExit(f"failed, see the end of it:\n{log.read_text()[-4000:]}")


def has_ended(child: int) -> bool:
    """Whether a child has ended; it still can be waited for."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, child, options) is not None


def wait_for_checkpoint(folder: Path, child: int) -> None:
    """Return when the child has made a new checkpoint, or has ended."""
    before = newest_batch(folder)
    while newest_batch(folder) == before and not has_ended(child):
        time.sleep(0.002)


def measure(folder: Path, log: Path) -> tuple[float, float]:
    """Run undisturbed; seconds until the first checkpoint, and from there to the
    end.
    """
    begin = time.monotonic()
    child = fork(lambda: start_or_resume(folder), log)
    wait_for_checkpoint(folder, child)
    first = time.monotonic()
    if wait(child):
        raise SystemExit(f"the undisturbed run failed:\n{log.read_text()[-4000:]}")
    return first - begin, time.monotonic() - first


def kill_round(
    folder: Path, log: Path, delay: float, number: signal.Signals, early: bool
) -> int:
    """Resume, and kill `delay` seconds after the start or the first checkpoint; exit
    status.
    """
    child = fork(lambda: start_or_resume(folder), log)
    if not early:
        wait_for_checkpoint(folder, child)
    time.sleep(delay)
    # one that has ended is still there: nobody has waited for it
    os.kill(child, number)
    return wait(child)


def kill_all_rounds(
    folder: Path, log: Path, seed: int, startup: float, rest: float
) -> int:
    """12 kills spread over the run; how many of them met it training.

    Every fifth comes at a random moment of the start. The other 10 come after a
    checkpoint and a delay uniform in [0, rest / 10]. A run makes 36 checkpoints, so
    that is 2 more on average, and SIGTERM lets it make another: in all 10 * 3 + 5 of
    the 36.
    """
    draw = random.Random(seed)
    before, met = 0, 0
    for index in range(ROUNDS):
        number = (signal.SIGKILL, signal.SIGTERM)[index % 2]
        early = index % 5 == 4
        delay = draw.random() * (startup if early else rest / 10)
        status = kill_round(folder, log, delay, number, early)
        after = newest_batch(folder)
        print(
            f"round {index + 1:2}: {number.name} {delay:.3f} s after the "
            f"{'start' if early else 'first checkpoint'}: exit {status}, "
            f"newest checkpoint {before} -> {after}",
            flush=True,
        )
        # SIGTERM that meets it training is obeyed with a checkpoint at the next report.
        obeys = number is signal.SIGTERM and not early and after < BATCHES
        allowed = (130,) if obeys else (-number, 0, 130)
        assert status in allowed, f"exit {status}:\n{log.read_text()[-4000:]}"
        assert after >= before, "a checkpoint was lost"
        check(lambda: load_every_checkpoint(folder), log)
        met += before < after < BATCHES
        before = after
    return met


def main(root: Path, seed: int) -> None:
    """Measure, kill 12 times, finish, compare."""
    for module in IMPORTED_LATE:
        importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == threading.active_count() == 1, (
        f"{threads} threads: a fork could hang"
    )
    log, folder, undisturbed = root / "log.txt", root / "killed", root / "undisturbed"
    work = root / "work"
    work.mkdir()
    (work / "mine.py").write_text(MINE)
    sys.path.insert(0, str(work))
    os.chdir(work)
    startup, rest = measure(undisturbed, log)
    print(
        f"undisturbed: first checkpoint after {startup:.2f} s, end {rest:.2f} s later"
    )
    met = kill_all_rounds(folder, log, seed, startup, rest)
    check(lambda: start_or_resume(folder), log)
    check(lambda: compare(folder, undisturbed), log)
    assert met >= ROUNDS // 4, f"only {met} of {ROUNDS} kills met the run training"
    print(f"{met} of {ROUNDS} kills met the run training; the end is the same")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    sys.stdout.flush()
    os._exit(0)  # Python's teardown takes seconds once torch is imported
