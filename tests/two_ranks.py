"""Two ranks that print what each saw as JSON, a line each.

One start serves all tests of `test_processes.py`: importing torch costs more than
training. So the ranks are forks of the tests' process, which has imported it.
"""

import importlib
import json
import logging
import math
import os
import random
import sys
from contextlib import closing
from functools import partial
from logging.handlers import BufferingHandler

import numpy as np
import torch
from determined import pytorch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from determined_amp import AmpLoop, AmpSettings, GuardError, Precision
from determined_amp import __main__ as door
from determined_amp.amp import guard
from determined_amp.amp.patched import patched
from determined_amp.amp.plain_data import Values
from determined_amp.amp.rehearse.restored import undisturbed
from determined_amp.local.processes import process_group
from determined_amp.trial.batches import Batches
from determined_amp.trial.determined_private import amp_of
from tests import habits, run_here, strangers
from tests.harness import fit, fit_as_it_is
from tests.trials import (
    INF,
    ONE,
    Converted,
    OneWeight,
    Plain,
    Weights,
    weigh,
    weigh_two,
)

# What a run imports only when it needs it; each rank would import it again.
IMPORTED_LATE = (
    "determined_amp.local.trainer",
    "functorch.compile",
    "sklearn.model_selection",
    "torch._dynamo.repro.after_aot",
    "torch._inductor.lowering",
    "torch.utils.tensorboard",
    "trials.mlp",
)

# Rows are dealt in turn: rank 0 gets the first of each pair. It overflows in the second
# batch.
ROWS = [ONE, ONE, INF, ONE, ONE, [3.0, 3.0]]

# For two optimizers; dealt to the ranks in turn.
PAIRS = [(1.0, 1.0), (1.0, 1.0), (math.inf, 1.0), (1.0, 1.0), (1.0, 1.0), (3.0, 3.0)]

# Two windows of two batches; rank 0 overflows in the first batch of the second.
WINDOWS = [ONE, ONE, ONE, [3.0, 3.0], INF, ONE, ONE, ONE]


class CountsExchanges(OneWeight):
    """Counts how often this rank takes part in averaging the gradient."""

    def __init__(self, context, *given):
        super().__init__(context, *given)
        self.exchanges = 0
        model = self.model
        # torch reads the hook's annotations and takes none of a lambda.
        model.register_comm_hook(None, lambda _, bucket: self.exchange(bucket))

    def exchange(self, bucket):
        self.exchanges += 1
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None is the default group


class TrainsAgain(CountsExchanges):
    """After every batch trains it once more, as the guard does in search of a fault."""

    of_replays = 0

    def train_batch(self, batch, epoch_idx, batch_idx):
        reported = super().train_batch(batch, epoch_idx, batch_idx)
        before = self.exchanges
        with self.amp.without_steps(), undisturbed(self.model):
            Weights.train_batch(self, batch, epoch_idx, batch_idx)
        self.of_replays += self.exchanges - before
        return reported


def say(seen):
    """In one write: both ranks share the pipe, and `print` writes the end of a line by
    itself.
    """
    sys.stdout.write(json.dumps(seen) + "\n")
    sys.stdout.flush()


def two_weights():
    """Two optimizers, one of which overflows on one rank."""
    heard = BufferingHandler(100)
    heard.setLevel(logging.WARNING)
    guard.logger.addHandler(heard)
    # It starts at its floor, where the guard warns of any skip.
    amp = {
        "precision": "amp_fp16",
        "init_scale": 4.0,
        "min_scale": 4.0,
        "on_overflow": "warn",
    }
    with process_group() as processes:
        made = weigh_two(
            PAIRS, amp, batches=len(PAIRS) // processes.size, processes=processes
        )
    return {
        "optimizers": processes.rank,
        "weights": made.trial.weights(),
        "applied": [
            int(made.trial.amp.steps(o).applied) for o in made.trial.optimizers
        ],
        "diagnosed": made.trial.diagnosed,
        "warning": heard.buffer[0].getMessage(),
    }


def unmodified():
    """A float32 trial as it is, and the same converted: hashes of what they trained."""
    trained = {}
    loud = {
        "precision": "amp_fp16",
        "init_scale": 2.0**24,
        "growth_interval": 2,
    }
    loud["fp32_modules"] = ["^3$"]
    for trial in (Plain, Converted):
        with process_group() as processes:
            made = fit_as_it_is(trial, loud, batches=4, processes=processes)
            weights = [model.state_dict() for model in made.context.models]
            optimizers = [
                optimizer.state_dict() for optimizer in made.context.optimizers
            ]
            trained[trial.__name__] = run_here.digest([weights, optimizers])
    with process_group() as processes:
        amp = {"precision": "amp_fp16", "init_scale": 1024.0, "audit": False}
        options = {"aggregation_frequency": 2, "processes": processes}
        made = fit_as_it_is(habits.LoudAtFirst, amp, batches=4, **options)
        trained["loud"] = run_here.digest(made.trial.model.state_dict())
        mixed = amp_of(made.context)
        assert mixed is not None
        counts = mixed.steps(made.trial.optimizer)
    applied = int(counts.applied)
    return {
        "unmodified": processes.rank,
        **trained,
        "applied": applied,
        "skipped": counts.attempted - applied,
    }


class LoudOnOneRank(Plain):
    """The inputs of the second rank are 2^8 times as large, and so are its
    gradients.
    """

    def train_batch(self, batch, epoch_idx, batch_idx):
        inputs, classes = batch
        louder = inputs * 2.0 ** (8 * self.context.distributed.rank)
        return super().train_batch((louder, classes), epoch_idx, batch_idx)

    def net(self):
        return torch.nn.Linear(habits.FEATURES, habits.CLASSES)


def found():
    """A loss scale that is found at the start, where one rank sees larger gradients."""
    with process_group() as processes:
        amp = {"precision": "amp_fp16", "init_scale": "find"}
        made = fit_as_it_is(LoudOnOneRank, amp, batches=2, processes=processes)
    mixed = amp_of(made.context)
    assert mixed is not None
    weights = run_here.digest(made.trial.model.state_dict())
    return {
        "found": processes.rank,
        "scale": mixed.scaler.get_scale(),
        "weights": weights,
    }


def own_loop(*, torch_alone=False):
    """The rows of the trial in a loop of one's own, and then two overflows on rank
    0.
    """
    with process_group() as processes, closing(processes):
        settings = AmpSettings(
            Precision.AMP_FP16, init_scale=4.0, max_consecutive_skips=1
        )
        amp = AmpLoop(settings, "cpu", slots=None if torch_alone else processes)
        inner = nn.Linear(1, 1, bias=False)
        nn.init.ones_(inner.weight)
        model = amp.prepare(DistributedDataParallel(inner))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        seen: Values = {"own loop": processes.rank, "weights": [], "scales": []}

        def loss_fn(batch):
            return model(batch).float().mean()

        def train(row):
            batch = torch.tensor(row)[:, None]
            with amp.autocast():
                loss = loss_fn(batch)
            amp.scaler.scale(loss).backward()
            amp.clip_gradients(optimizer)
            amp.scaler.step(optimizer)
            optimizer.zero_grad()
            amp.update(loss, samples=len(batch))
            seen["weights"].append(float(inner.weight.detach()))
            seen["scales"].append(float(amp.loss_scale()))
            return batch

        for row in ROWS[processes.rank :: processes.size]:
            train(row)
        report = amp.report()
        seen["steps"] = [report["watch_applied_steps"], report["skipped_steps"]]
        for _ in range(2):
            batch = train(INF if processes.rank == 0 else ONE)
        try:
            amp.report(batch, loss_fn)
        except GuardError as error:
            seen["ended"] = str(error)
        return {**seen, "weight afterwards": float(inner.weight.detach())}


class Noted(strangers.Shuffled):
    """Notes the samples of its batches."""

    def __init__(self, context):
        super().__init__(context)
        np.random.seed(0)  # a cluster does
        random.seed(0)
        self.seen = []

    def build_training_data_loader(self):
        points = strangers.samples(0).tensors
        numbers = torch.arange(len(points[0]))
        return pytorch.DataLoader(
            TensorDataset(*points, numbers), batch_size=5, shuffle=True
        )

    def train_batch(self, batch, epoch_idx, batch_idx):
        *points, numbers = batch
        self.seen += numbers.tolist()
        return super().train_batch(points, epoch_idx, batch_idx)


def shuffled():
    """An undisturbed run, and one in two parts."""

    def run(batches, resume=None):
        with process_group() as processes:
            every = {"batches": batches, "validation_period": 2, "resume": resume}
            return fit(Noted, processes=processes, **every)

    whole, first = run(10), run(4)
    second = run(10, first)
    return {
        "shuffled": second.context.distributed.rank,
        "seen": whole.trial.seen,
        "resumed": first.trial.seen + second.trial.seen,
        "weights": [
            run_here.digest(each.trial.model.state_dict()) for each in (whole, second)
        ],
    }


def of_torchrun(rank):
    """What torchrun tells one of two ranks in its environment."""
    told = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
    }
    return {name: str(value) for name, value in told.items()}


def main(rank, folder):
    os.environ.update(of_torchrun(rank))
    work = folder / "work"
    work.mkdir(exist_ok=True)
    os.chdir(work)  # which the loop copies into every checkpoint
    meeting = f"file://{folder / 'meeting'}"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    with process_group() as processes:
        made = weigh(ROWS, processes=processes)
        seen = {
            "rank": processes.rank,
            "scales": made.trial.scales,
            "weights": made.trial.trace,
            "reports": made.reports.training,
        }
        say(seen)

    def windows(trial):
        with process_group() as processes:
            options = {"aggregation_frequency": 2, "processes": processes}
            return weigh(WINDOWS, trial=trial, **options).trial

    once, replayed = windows(CountsExchanges), windows(TrainsAgain)
    with patched(Batches, "_share_gradients_once", lambda self: None):
        always = windows(CountsExchanges)
    seen = {
        "window": processes.rank,
        "weights": once.trace,
        "scales": once.scales,
        "exchanges": once.exchanges,
        "exchanges of replays": replayed.of_replays,
        "weights of Determined alone": always.trace,
        "exchanges of Determined alone": always.exchanges,
    }
    say(seen)
    for part in (two_weights, unmodified, found, shuffled, own_loop):
        say(part())
    say(own_loop(torch_alone=True))
    run_here.run_small("mlp/fp32.yaml", folder / "two")
    torch._dynamo.utils.counters.clear()  # of what the forked process had compiled
    # captures graphs, as Inductor does
    compiler = partial(torch.compile, backend="aot_eager")
    with patched(torch, "compile", lambda forward, mode: compiler(forward)):
        compiled = "hyperparameters.amp.compile=default"
        run_here.run_small("mlp/fp32.yaml", folder / "compiled", compiled)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    say({"compiled": processes.rank, "graphs": graphs})
    odd = run_here.arguments("mlp/fp32.yaml", "hyperparameters.global_batch_size=33")
    assert door.main(["train", *odd, "--run-folder", str(folder / "odd")]) == 2
    distributed.destroy_process_group()


def start(folder):
    """Start both ranks, and wait for their end."""
    for module in IMPORTED_LATE:
        importlib.import_module(module)
    ranks = start_processes  # torch has no types here
    ranks(main, (folder,), nprocs=2, start_method="fork")
