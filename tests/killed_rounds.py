"""Kill one run 8 times at random moments, resume it each time, and see that nothing is
lost.

A fresh process spends seconds on imports. So the process of the rounds imports
everything and then forks a child per round, which is a fresh process in all that a run
could notice. The test in `test_resume.py` makes it a fork of its own process.

After every round each visible checkpoint must load whole, and the newest may not be
older than it was. At the end the weights, the optimizer, the scaler, the counts and the
random state must be those of a run that nobody disturbed, and every report must be
there once.
"""

import importlib
import os
import random
import signal
import sys
import time

from determined_amp import __main__ as door
from determined_amp.local.checkpoint_storage import read_metadata
from determined_amp.runs.folder import complete_checkpoints
from tests import run_here
from tests.harness import same_bits
from tests.run_here import fork, wait

# What a run imports only when it needs it; a child would import it again in every
# round.
IMPORTED_LATE = (
    "sklearn.datasets",
    "sklearn.model_selection",
    "torch.utils.tensorboard",
    "trials.mlp",
)

# In an empty working directory: the loop copies all code that is there into every
# checkpoint.
MINE = "from trials.mlp import MLPTrial\n\n\nclass MyTrial(MLPTrial):\n    pass\n"

ROUNDS = 8
BATCHES = 120
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


def start_or_resume(folder):
    """What a user would do after a kill: resume, or start anew if nothing was saved
    yet.
    """
    if complete_checkpoints(folder / "checkpoints"):
        return door.run(["train", "--resume", str(folder)])
    words = run_here.arguments("mlp/amp.yaml", *LONG)
    return door.run(["train", *words, "--run-folder", str(folder)])


def newest_batch(folder):
    """Batches of the newest checkpoint, 0 without one."""
    saved = complete_checkpoints(folder / "checkpoints")
    return int(saved[-1].name.removeprefix("batch-")) if saved else 0


def load_every_checkpoint(folder):
    """Read each visible checkpoint whole."""
    for path in (folder / "checkpoints").glob("batch-*"):
        batches = int(path.name.removeprefix("batch-"))
        assert read_metadata(path)["steps_completed"] == batches
        callbacks = run_here.checkpoint(folder, batches)["callbacks"]
        counts = callbacks["determined_amp.mixed_precision"]["optimizers"][0]
        assert counts["attempted"] == batches // 5
        assert (path / "code" / "mine.py").read_text() == MINE


def compare(folder, undisturbed):
    """Same final state, and the same reports, each of them once."""
    runs = (folder, undisturbed)
    assert same_bits(*(run_here.checkpoint(run, BATCHES) for run in runs))
    one, other = (
        [(line["group"], line["batches"]) for line in run_here.metrics(run)]
        for run in runs
    )
    assert one == other


def in_a_child(work, log):
    """A parent that computes has threads, and a fork of it could hang."""
    assert wait(fork(work, log)) == 0, log.read_text()[-4000:]


def wait_for_checkpoint(folder, child):
    """Return when the child has made a new checkpoint, or has ended."""
    before = newest_batch(folder)
    # a child that has ended can still be waited for
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while newest_batch(folder) == before and os.waitid(os.P_PID, child, ended) is None:
        time.sleep(0.002)


def measure(folder, log):
    """Run undisturbed; seconds until the first checkpoint, and from there to the
    end.
    """
    begin = time.monotonic()
    child = fork(lambda: start_or_resume(folder), log)
    wait_for_checkpoint(folder, child)
    first = time.monotonic()
    assert wait(child) == 0, log.read_text()[-4000:]
    return first - begin, time.monotonic() - first


def kill_all_rounds(folder, log, startup, rest):
    """8 kills spread over the run; how many of them met it training.

    The fifth comes at a random moment of the start. The other 7 come after a
    checkpoint and a delay uniform in [0, rest / 12]. A run makes 24 checkpoints, so
    that is 1 more on average, and SIGTERM lets it make another: in all 7 * 2 + 4 of
    the 24.
    """
    draw = random.Random(0)
    before, met = 0, 0
    for index in range(ROUNDS):
        number = (signal.SIGKILL, signal.SIGTERM)[index % 2]
        is_early = index % 5 == 4
        child = fork(lambda: start_or_resume(folder), log)
        if not is_early:
            wait_for_checkpoint(folder, child)
        time.sleep(draw.random() * (startup if is_early else rest / 12))
        os.kill(child, number)
        status = wait(child)
        after = newest_batch(folder)
        # SIGTERM that meets it training is obeyed with a checkpoint at the next report.
        obeys = number is signal.SIGTERM and not is_early and after < BATCHES
        allowed = (130,) if obeys else (-number, 0, 130)
        assert status in allowed, f"exit {status}:\n{log.read_text()[-4000:]}"
        assert after >= before, "a checkpoint was lost"
        in_a_child(lambda: load_every_checkpoint(folder), log)
        met += before < after < BATCHES
        before = after
    return met


def main(root):
    """Measure, kill, finish, compare."""
    for module in IMPORTED_LATE:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork of threads could hang"
    log, folder, undisturbed = root / "log.txt", root / "killed", root / "undisturbed"
    work = root / "work"
    work.mkdir()
    (work / "mine.py").write_text(MINE)
    sys.path.insert(0, str(work))
    os.chdir(work)
    startup, rest = measure(undisturbed, log)
    met = kill_all_rounds(folder, log, startup, rest)
    in_a_child(lambda: start_or_resume(folder), log)
    in_a_child(lambda: compare(folder, undisturbed), log)
    assert met >= ROUNDS // 4, f"only {met} of {ROUNDS} kills met the run training"
