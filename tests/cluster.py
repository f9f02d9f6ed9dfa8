"""A Determined cluster for the tests: experiments made as users make them, waited for,
read.
"""

import re
import shutil
import subprocess
import time
import uuid
from pathlib import Path

import torch
from determined.common.api import bindings, errors
from determined.experimental import client

from determined_amp.runs.master import log_in
from tests.run_here import ROOT, digest, outcome

ENDED = (
    client.ExperimentState.COMPLETED,
    client.ExperimentState.ERROR,
    client.ExperimentState.CANCELED,
)


class Run:
    """One experiment.

    Args:
        cluster: Where it is.
        number: Its id.
    """

    def __init__(self, cluster, number):
        self.cluster = cluster
        self.id = number
        self.experiment = cluster.client.get_experiment(number)

    def state(self):
        self.experiment.reload()
        state = self.experiment.state
        assert state is not None
        return state

    def wait(self, limit=1800):
        """Its last state; the limit does not count while it waits for slots."""
        self._wait_for_slots()
        wait_until(lambda: self.state() in ENDED, f"experiment {self.id} to end", limit)
        return self.state()

    def wait_for_report(self, after=0):
        """Wait until it has reported more batches; the log explains why one ended
        before that.
        """
        what = f"experiment {self.id} to train {after} batches and more"
        self._wait_until(lambda: self.batches() > after, what)

    def wait_for_log(self, text):
        """Wait until its log has this; the end of the log explains why one ended
        without it.
        """
        what = f"{text!r} in the log of experiment {self.id}"
        self._wait_until(lambda: text in self.log(), what)

    def _wait_until(self, condition, what):
        self._wait_for_slots()
        wait_until(lambda: condition() or self.state() in ENDED, what, 900)
        assert condition(), f"{self.state()}: {self.log()[-3000:]}"

    def _wait_for_slots(self):
        waits = client.ExperimentState.QUEUED
        wait_until(
            lambda: self.state() is not waits, f"slots for experiment {self.id}", 3600
        )

    def completed(self):
        """Wait for it; the end of its log explains anything but success."""
        state = self.wait()
        assert state is client.ExperimentState.COMPLETED, (
            f"{state}: {self.log()[-3000:]}"
        )
        return self

    @property
    def trials(self):
        return list(self.experiment.list_trials())

    @property
    def trial(self):
        (trial,) = self.trials
        return trial

    def pause(self):
        """Pause it after its first report, and wait for the checkpoint of the pause."""
        self.wait_for_report()
        self.experiment.pause()  # at once: the command line takes seconds to begin
        wait_until(
            lambda: self.newest_checkpoint_batches() > 0, "the checkpoint of the pause"
        )

    def of_the_master(self, trial=None):
        """What the master knows of a trial, by default of its only one."""
        number = (trial or self.trial).id
        return bindings.get_GetTrial(self.cluster.session, trialId=number).trial

    def restarts(self):
        """How often the cluster started the trial again by itself."""
        return self.of_the_master().restarts

    def metadata(self, trial=None):
        """What is noted of AMP in the metadata of a trial, by default of its only
        one.
        """
        number = (trial or self.trial).id
        noted = bindings.get_GetRunMetadata(self.cluster.session, runId=number).metadata
        return dict((noted or {})["amp"])

    def status(self, trial=None):
        """The "Last Runner State" in the overview of a trial, by default of its only
        one.
        """
        return self.of_the_master(trial).runnerState

    def log(self):
        return "".join(line for trial in self.trials for line in trial.iter_logs())

    def metrics(self, group):
        """The reports of its only trial, in order."""
        return metrics(self.trial, group)

    def batches(self):
        """How far its only trial has reported."""
        return max(
            (m["batches"] for t in self.trials for m in metrics(t, "training")),
            default=0,
        )

    def newest_checkpoint_batches(self):
        """Batches trained before its newest checkpoint, 0 without one."""
        saved = self.trial.list_checkpoints()
        return max(
            (int((c.metadata or {})["steps_completed"]) for c in saved), default=0
        )

    def newest_checkpoint(self):
        """Of its only trial."""
        by_batches = client.CheckpointSortBy.BATCH_NUMBER
        return self.trial.list_checkpoints(by_batches, client.OrderBy.DESCENDING)[0]

    def digest(self, folder):
        """One hash of its newest checkpoint: weights, optimizer, scaler, counts, random
        state.
        """
        path = self.newest_checkpoint().download(str(folder / str(self.id)))
        return digest(torch.load(Path(path) / "state_dict.pth", weights_only=True))

    def det(self, action):
        """`det experiment ACTION ID`."""
        self.cluster.det("experiment", action, str(self.id))


class Cluster:
    """A master, what these tests make on it, and its removal.

    Raises:
        UserError: if there is no login.
    """

    def __init__(self, address):
        self.address = address
        self.session = log_in(address)
        self.client = client.Determined(address)  # with the token of that login
        self.label = f"determined-amp-test-{uuid.uuid4().hex[:8]}"
        self.runs = []

    @property
    def slots(self):
        """Slots of all agents that take work."""
        agents = bindings.get_GetAgents(self.session).agents
        return sum(len(agent.slots or {}) for agent in agents if agent.enabled)

    def det(self, *arguments):
        """What the command line says, as a user types it in the root of the
        repository.
        """
        done = outcome("-m", "determined.cli", "--master", self.address, *arguments)
        said = done.stdout + done.stderr
        assert done.returncode == 0, f"det {' '.join(arguments)}: {said}"
        return said

    def create(self, config, *overrides, context=ROOT):
        """`det experiment create CONFIG CONTEXT --config KEY=VALUE ...`.

        In one thread: those of trials that share the cores of a small cluster wait for
        each other, which made a batch of Latte take 6 s instead of 0.1 s.
        """
        ours = (
            f"labels=[{self.label}]",
            "environment.environment_variables=[OMP_NUM_THREADS=1]",
        )
        options = [
            word for override in (*overrides, *ours) for word in ("--config", override)
        ]
        said = self.det("experiment", "create", str(config), str(context), *options)
        found = re.search(r"Created experiment (\d+)", said)
        assert found, said
        self.runs.append(Run(self, int(found[1])))
        return self.runs[-1]

    def clean_up(self):
        """End and delete what was made; where the user may not delete, archive."""
        for run in self.runs:
            if run.state() not in ENDED:
                run.experiment.kill()
        for run in self.runs:
            run.wait(120)
            try:
                run.experiment.delete()
            except errors.BadRequestException:
                run.experiment.archive()


def metrics(trial, group):
    """The reports of a trial, in order."""
    reports = sorted(
        trial.iter_metrics(group), key=lambda report: report.steps_completed
    )
    return [{"batches": report.steps_completed, **report.metrics} for report in reports]


def last_line(trial):
    """The last line that a trial wrote into its log; the platform's own name no
    container.
    """
    own = re.compile(r"^\[[^]]*\] [0-9a-f]{8} \|\| (.*)")
    found = [match[1] for line in trial.iter_logs() if (match := own.search(line))]
    return found[-1]


def wait_until(condition, what, limit=300):
    """Look once a second.

    Raises:
        TimeoutError: after `limit` seconds.
    """
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {limit:.0f} s for {what}")
        time.sleep(1)


def docker(*arguments):
    """What this machine's Docker says; None if there is none or it may not be used."""
    command = shutil.which("docker")
    if command is None:
        return None
    done = subprocess.run(
        [command, *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout if done.returncode == 0 else None


def container_of(trial):
    """The container in which this machine's Docker runs a trial; None if it does
    not.
    """
    label = '{{.ID}} {{.Label "ai.determined.container.description"}}'
    lines = (docker("ps", "--format", label) or "").splitlines()
    return next(
        (line.split()[0] for line in lines if f"-trial-{trial.id}-" in line), None
    )
