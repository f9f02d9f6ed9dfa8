"""What this repository promises on a Determined cluster, on a real one: `make
test-cluster`.

Needs DET_MASTER and a login (`det user login`, or DET_USER and DET_PASS); any cluster
will do. The experiments are small, carry a label of their own, and are deleted at the
end.
"""

import math
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from determined.experimental import client

from determined_amp import __main__ as door
from determined_amp.amp.errors import UserError
from determined_amp.trial.notes import cause_first
from tests.cluster import (
    Cluster,
    container_of,
    docker,
    last_line,
    metrics,
)
from tests.run_here import ROOT

pytestmark = pytest.mark.cluster

CONFIGS = sorted((ROOT / "experiment_configs").rglob("*.yaml"))
SEARCHES = sorted((ROOT / "hp_search").glob("*.yaml"))

# What makes a trial small enough for a CPU. One that is not here runs with short
# lengths only.
SMALL = {
    "trials.mlp:MLPTrial": (
        "data.image_size=8",
        "hyperparameters.hidden_features=32",
        "hyperparameters.global_batch_size=32",
    ),
    "trials.latte:LatteTrial": (
        "hyperparameters.model.num_layers=1",
        "hyperparameters.global_batch_size=4",
        "hyperparameters.warmup_steps=5",
        "hyperparameters.clip_start_step=5",
    ),
    # Of 16 px its last stage sees 1 x 1, and the bfloat16 gradient of a strided
    # convolution of that is uninitialised memory on a CPU with AMX (torch 2.3.0 and
    # 2.15.0).
    "trials.resnet50:ResNet50Trial": (
        "data.dataset=synthetic",
        "data.image_size=32",
        "data.samples=40",
        "hyperparameters.global_batch_size=4",
        "hyperparameters.warmup_steps=0",
    ),
}
# For experiments on files that a cluster may not have.
NO_FILES = {
    "trials.latte:LatteTrial": (
        "data.dataset=synthetic",
        "data.directory=null",
        "data.samples=40",
        "data.image_size=8",
        "data.frames=4",
        "data.workers=0",
        "hyperparameters.model.num_attention_heads=2",
    ),
    "trials.resnet50:ResNet50Trial": (
        "data.directory=null",
        "data.workers=0",
    ),
}
# Of each unit that a YAML may give its lengths in. A CPU may take 10 s for a batch of
# ResNet-50.
SHORT = {"batches": 30, "epochs": 1}
SHORTER = {"trials.resnet50:ResNet50Trial": {"batches": 4, "epochs": 1}}

# The trials of a search are those of mlp/amp.yaml.
OF_A_SEARCH = (
    "hyperparameters.hidden_features=32",
    "hyperparameters.global_batch_size=32",
)
# Three precisions, one seed each, a few batches long.
COMPARED = (
    "hyperparameters.amp.precision.vals=[fp32, amp_fp16, amp_bf16]",
    "hyperparameters.trial_seed.vals=[7]",
    *(
        f"hyperparameters.training.{name}.batches=20"
        for name in (
            "max_length",
            "validation_period",
            "checkpoint_period",
            "reporting_period",
        )
    ),
)
# The command `compare` as one task, on a trial that knows nothing of AMP.
COMPARE = (
    "entrypoint=python3 -m determined_amp compare --seeds 2 --batches 20 --minutes 20"
)
# Trials are compared after 8 and 32 batches. They run one after another, in the order
# in which the seed of the search draws them, so that no chance decides: the second is
# better than the third.
ASHA = (
    "searcher.max_trials=4",
    "searcher.max_concurrent_trials=1",
    "searcher.mode=aggressive",
    "searcher.max_time=32",
    "hyperparameters.training.max_length.batches=32",
    "hyperparameters.training.checkpoint_period.batches=32",
    "hyperparameters.training.validation_period.batches=2",
    "hyperparameters.training.reporting_period.batches=2",
)

FEW_TRIALS = {
    "compare": (COMPARE,),
    "compare_precisions": COMPARED,
    "loss_scale_asha": ASHA,
    "loss_scale_grid": ("hyperparameters.amp.init_scale.count=3",),
    "loss_scale_random": ("searcher.max_trials=3",),
}

# Long enough to be disturbed: a report every other batch makes even a fast cluster take
# a while.
LENGTH = 160
PERIOD = 20
DISTURBED_MLP = (
    *SMALL["trials.mlp:MLPTrial"],
    "hyperparameters.lr_schedule=cosine",
    "hyperparameters.warmup_steps=10",
    "hyperparameters.amp.growth_interval=40",
    f"hyperparameters.training.max_length.batches={LENGTH}",
    f"hyperparameters.training.validation_period.batches={PERIOD}",
    f"hyperparameters.training.checkpoint_period.batches={PERIOD}",
    "hyperparameters.training.reporting_period.batches=2",
)
# The others are a stranger's trial as it is: shuffled batches, dropout, and noise of
# three sources.
DISTURBED = ("mlp", "shuffled", "shuffled on 2 slots")


@pytest.fixture(scope="module")
def cluster():
    address = os.environ.get("DET_MASTER")
    if not address:
        pytest.skip("needs a Determined cluster: set DET_MASTER and log in")
    try:
        cluster = Cluster(address)
    except UserError as error:
        pytest.skip(f"needs a Determined cluster: {error}")
    yield cluster
    cluster.clean_up()


@pytest.fixture(scope="module")
def runs(cluster):
    return {
        path: cluster.create(path.relative_to(ROOT), *shortened(path, cluster.slots))
        for path in CONFIGS
    }


@pytest.fixture(scope="module")
def undisturbed(cluster, shuffled):
    """One of each kind that tests disturb and that the cluster has the slots for."""
    fitting = [kind for kind in DISTURBED if slots_of(kind) <= cluster.slots]
    return {kind: long_run(kind, cluster, shuffled) for kind in fitting}


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory):
    """A context with a trial that never heard of the library, and the library."""
    folder = tmp_path_factory.mktemp("shuffled") / "context"
    shutil.copytree(ROOT / "determined_amp", folder / "determined_amp")
    shutil.copy(ROOT / "tests" / "strangers.py", folder / "model_def.py")
    lengths = {"min_validation_period": 40, "min_checkpoint_period": PERIOD}
    config = {
        "name": "shuffled",
        "entrypoint": "python3 -m determined_amp train --trial model_def:Shuffled",
        "hyperparameters": {"global_batch_size": 10, "amp": {"precision": "amp_bf16"}},
        "searcher": {
            "name": "single",
            "metric": "val_loss",
            "max_length": {"batches": LENGTH},
        },
        **{key: {"batches": batches} for key, batches in lengths.items()},
        "scheduling_unit": 2,
        # else each run has one of its own
        "reproducibility": {"experiment_seed": 20261122},
        "max_restarts": 2,
    }
    (folder / "amp.yaml").write_text(yaml.safe_dump(config))
    return folder


def slots_of(kind):
    """How many slots a disturbed run of this kind asks for."""
    return 2 if kind.endswith("2 slots") else 1


def long_run(kind, cluster, shuffled):
    """A run that lasts long enough to be disturbed."""
    slots = f"resources.slots_per_trial={slots_of(kind)}"
    if kind == "mlp":
        return cluster.create("experiment_configs/mlp/amp.yaml", *DISTURBED_MLP)
    return cluster.create(shuffled / "amp.yaml", slots, context=shuffled)


@pytest.fixture(scope="module")
def searches(cluster):
    return {
        path: cluster.create(path.relative_to(ROOT), *small_search(path))
        for path in SEARCHES
    }


@pytest.fixture(scope="module")
def not_finite(cluster, tmp_path_factory):
    """A search with a learning rate of 1e30: the products of the weights overflow
    float32.
    """
    search = ROOT / "hp_search" / "loss_scale_asha.yaml"
    config = yaml.safe_load(search.read_text())
    # in place of a range, as no --config
    rates = {
        "type": "categorical",
        "vals": [1.0e-3, 1.0e30],
    }
    config["hyperparameters"]["learning_rate"] = rates
    path = tmp_path_factory.mktemp("search") / "asha.yaml"
    path.write_text(yaml.safe_dump(config))
    return cluster.create(path, *small_search(search))


@pytest.fixture(scope="module")
def aborted(cluster):
    """A learning rate that the guard ends."""
    path = ROOT / "experiment_configs" / "mlp" / "amp.yaml"
    rate = "hyperparameters.learning_rate=1.0e+6"
    return cluster.create(path.relative_to(ROOT), *shortened(path), rate)


def small_search(path):
    """Overrides that leave a few short trials of a search."""
    return [*OF_A_SEARCH, *FEW_TRIALS.get(path.stem, ())]


def shortened(path, most_slots=1):
    """Overrides that make the experiment of a YAML small, on one slot if the cluster
    has fewer than it asks for.
    """
    config = yaml.safe_load(path.read_text())
    slots = config.get("resources", {}).get("slots_per_trial", 1)
    hparams = config["hyperparameters"]
    short = SHORTER.get(hparams["trial"], SHORT)
    lengths = [
        f"hyperparameters.training.{name}.{unit}={short[unit]}"
        for name in ("max_length", "validation_period", "checkpoint_period")
        for unit in hparams["training"][name]
    ]
    return [
        *SMALL.get(hparams["trial"], ()),
        *(NO_FILES[hparams["trial"]] if "directory" in config["data"] else ()),
        *lengths,
        "hyperparameters.training.reporting_period.batches=2",
        f"resources.slots_per_trial={slots if slots <= most_slots else 1}",
    ]


# All experiments that nobody has to disturb, at once, so that no slot waits for a test.
@pytest.mark.usefixtures(
    "runs", "searches", "not_finite", "strangers", "aborted", "undisturbed"
)
class TestEveryExperiment:
    @pytest.mark.parametrize(
        "path", CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}"
    )
    def test_experiment_completes_and_reports(self, path, runs):
        run = runs[path]
        if (
            run.wait() is client.ExperimentState.ERROR
            and "pip failed to add" in run.log()
        ):
            pytest.skip(
                "the image lacks a package, and the nodes reach no package index"
            )
        run.completed()
        assert run.restarts() == 0
        training = run.metrics("training")
        assert training[0]["watch_audit_share"] > 0.5
        assert training[-1]["watch_applied_steps"] > 0
        metric = yaml.safe_load(path.read_text())["searcher"]["metric"]
        assert math.isfinite(run.metrics("validation")[-1][metric])
        assert run.newest_checkpoint().metadata


class TestSearch:
    @pytest.mark.parametrize("path", SEARCHES, ids=lambda path: path.stem)
    def test_search_completes_and_scores_every_trial(self, path, searches):
        run = searches[path].completed()
        searcher = yaml.safe_load(path.read_text())["searcher"]
        assert len(run.trials) >= (1 if searcher["name"] == "single" else 3)
        # Of these the metric is that of the trial, which is not trained, or by the
        # command itself.
        of_the_trial = {
            "compare": "speed",
            "find_loss_scale": "init_scale_log2",
            "check": "faults",
        }
        metric = of_the_trial.get(path.stem, searcher["metric"])
        for trial in run.trials:
            scores = [report[metric] for report in metrics(trial, "validation")]
            assert scores
            assert all(math.isfinite(score) for score in scores)

    def test_asha_stops_some_trials_early(self, searches):
        run = searches[ROOT / "hp_search" / "loss_scale_asha.yaml"].completed()
        lengths = [
            max(report["batches"] for report in metrics(trial, "validation"))
            for trial in run.trials
        ]
        assert min(lengths) < max(lengths) == 32

    def test_asha_survives_a_loss_that_is_not_finite(self, not_finite):
        run = not_finite.completed()
        rates = {(trial.hparams or {})["learning_rate"] for trial in run.trials}
        assert rates == {1.0e-3, 1.0e30}
        for trial in run.trials:
            if (trial.hparams or {})["learning_rate"] == 1.0e30:
                noted = run.metadata(trial)
                assert noted["failure"].startswith("validation_loss is ")
                assert run.status(trial) == noted["failure"]
                assert last_line(trial) == f"invalid trial: {noted['failure']}"
        scores = [m for trial in run.trials for m in metrics(trial, "validation")]
        assert all(math.isfinite(report["validation_loss"]) for report in scores)
        assert max(report["batches"] for report in scores) == 32


# A trial that is none of ours, long enough to be disturbed.
STRANGER = (
    "hyperparameters.training.max_length.batches=160",
    "hyperparameters.training.reporting_period.batches=2",
    "hyperparameters.training.checkpoint_period.batches=20",
)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """A context as docs/your_trial.md says: the wheel of the library, a trial in both
    forms.

    The trial needs a package that no image has.
    """
    folder = tmp_path_factory.mktemp("stranger") / "context"
    shutil.copytree(ROOT / "docs" / "your_trial", folder)
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w"]
    subprocess.run([*wheel, str(folder), str(ROOT)], check=True)
    hook, trial = folder / "startup-hook.sh", folder / "model_def.py"
    hook.write_text(
        f"{hook.read_text()}python3 -m pip install --quiet humanize==4.9.0\n"
    )
    trial.write_text(
        trial.read_text().replace("import torch\n", "import humanize\nimport torch\n")
    )
    config = yaml.safe_load((folder / "amp.yaml").read_text())
    hparams = config["hyperparameters"]
    config["searcher"]["max_length"] = hparams.pop("training")["max_length"]
    del hparams["amp"], hparams["trial"]
    config["entrypoint"] = "before:MyTrial"
    (folder / "before.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(scope="module")
def strangers(cluster, stranger):
    """All at once."""
    ours, before = stranger / "amp.yaml", stranger / "before.yaml"
    find = "entrypoint=python3 -m determined_amp find"
    two_slots = ("resources.slots_per_trial=2",) if cluster.slots > 1 else ()
    as_it_is = (
        "entrypoint=determined_amp:TrialAsItIs",
        "hyperparameters.trial=before:MyTrial",
        "hyperparameters.amp.precision=amp_fp16",
    )
    plan = {
        "alone": (ours, STRANGER),
        "two slots": (ours, two_slots),
        "as it is": (before, as_it_is),
        "found": (ours, (find,)),
    }
    return {
        name: cluster.create(config, *overrides, context=stranger)
        for name, (config, overrides) in plan.items()
    }


class TestStranger:
    @pytest.mark.parametrize("name", ["alone", "two slots", "as it is"])
    def test_stranger_trains_in_float16(self, name, strangers):
        run = strangers[name].completed()
        assert run.restarts() == 0
        training = run.metrics("training")
        assert training[0]["watch_audit_share"] == 1
        assert re.search(r"\d x .+; torch \d", run.log())  # the machine
        assert training[-1]["watch_applied_steps"] > 100
        assert run.metrics("validation")[-1]["validation_loss"] < 1

    def test_loss_scale_of_a_stranger_is_found(self, strangers):
        (found,) = strangers["found"].completed().metrics("validation")
        assert 0 < found["init_scale_log2"] < 40


# Its batches wait, so no precision takes more than five times as long as another, on
# any CPU.
SLOW = """
import time

from before import MyTrial


class Slow(MyTrial):
    def train_batch(self, batch, epoch_idx, batch_idx):
        time.sleep(0.05)
        return super().train_batch(batch, epoch_idx, batch_idx)
"""


class TestComparison:
    def test_comparison_that_is_paused_gives_its_answer_first(
        self, cluster, stranger, tmp_path
    ):
        context = tmp_path / "context"
        shutil.copytree(stranger, context)
        (context / "slow.py").write_text(SLOW)
        hook = context / "startup-hook.sh"
        # as docs/compare.md says
        needed = "python3 -m pip install --quiet optuna matplotlib scipy"
        hook.write_text(f"{hook.read_text()}{needed}\n")
        command = "compare --trial slow:Slow --seeds 1 --batches 100 --minutes 20"
        entrypoint = f"entrypoint=python3 -m determined_amp {command}"
        run = cluster.create(context / "before.yaml", entrypoint, context=context)
        run.wait_for_log(" trial   0 ")
        run.det("pause")
        run.wait_for_log("the page with all numbers")
        run.det("activate")
        (answer,) = run.completed().metrics("validation")
        assert answer["speed"] > 0
        log = run.log()
        assert [log.count(f" trial   {number} ") for number in range(3)] == [1, 1, 1]
        assert "precision: " in log
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DET_MASTER", run.cluster.address)
            assert door.main(["report", str(run.id), "--output", str(tmp_path)]) == 0
        assert (tmp_path / "precision.md").stat().st_size > 1_000


@pytest.fixture(scope="module")
def own_loop(tmp_path_factory):
    """A context with the page's script for a loop of one's own, long enough, and the
    library.
    """
    folder = tmp_path_factory.mktemp("own_loop") / "context"
    shutil.copytree(ROOT / "docs" / "any_loop", folder)
    shutil.copytree(ROOT / "determined_amp", folder / "determined_amp")
    script = (folder / "train.py").read_text()
    lengths = "BATCHES, REPORT_EVERY, CHECKPOINT_EVERY = "
    assert f"{lengths}200, 25, 50" in script
    (folder / "train.py").write_text(
        script.replace(f"{lengths}200, 25", f"{lengths}1000, 2")
    )
    return folder


class TestOwnLoop:
    def test_own_loop_that_is_paused_ends_with_the_same_weights(
        self, cluster, own_loop
    ):
        alone, run = (
            cluster.create(own_loop / "any_loop.yaml", context=own_loop)
            for _ in range(2)
        )
        run.pause()
        run.det("activate")
        ended = [each.completed().metrics("validation")[-1] for each in (run, alone)]
        assert ended[0] == ended[1]
        assert run.restarts() == 0


class TestGuard:
    def test_abort_by_the_guard_is_not_retried(self, aborted):
        assert aborted.wait() is client.ExperimentState.ERROR
        assert "no retry can help: " in aborted.log()
        assert aborted.restarts() == 0
        failure = aborted.metadata()["failure"]
        status = str(aborted.status()).removesuffix("[...]").rstrip()
        assert cause_first(failure).startswith(status)
        assert last_line(aborted.trial) == f"no retry can help: {failure}"


@pytest.mark.parametrize("kind", DISTURBED)
class TestDisturbedTrial:
    """Whatever stops a trial, it ends with the weights of one that was left alone."""

    @pytest.fixture
    def alone(self, kind, undisturbed):
        if kind not in undisturbed:
            pytest.skip("needs 2 slots, more than this cluster has")
        return undisturbed[kind]

    @pytest.fixture
    def run(self, kind, cluster, shuffled, alone):
        return long_run(kind, cluster, shuffled)

    @staticmethod
    def assert_same(run, alone, folder):
        assert run.completed().batches() == LENGTH
        assert [m["batches"] for m in run.metrics("training")] == [
            m["batches"] for m in alone.completed().metrics("training")
        ]
        assert run.digest(folder) == alone.digest(folder)

    @staticmethod
    def wait_for_checkpoint(run):
        run.wait_for_report(2 * PERIOD)
        assert run.batches() < LENGTH, (
            "ended before it could be disturbed: raise LENGTH"
        )

    def test_run_that_is_paused_and_activated_ends_the_same(self, run, alone, tmp_path):
        run.pause()
        assert run.state() is client.ExperimentState.PAUSED
        assert run.newest_checkpoint_batches() < LENGTH
        run.det("activate")
        self.assert_same(run, alone, tmp_path)

    def test_run_that_is_killed_and_continued_ends_the_same(self, run, alone, tmp_path):
        self.wait_for_checkpoint(run)
        run.det("kill")
        assert run.wait() is client.ExperimentState.CANCELED
        run.det("continue")
        self.assert_same(run, alone, tmp_path)

    def test_run_whose_container_is_killed_ends_the_same(self, run, alone, tmp_path):
        """Needs the Docker of the agent; the platform starts the trial again by
        itself.
        """
        if docker("info") is None:
            pytest.skip("needs the Docker that runs the containers, on this machine")
        self.wait_for_checkpoint(run)
        container = container_of(run.trial)
        if container is None:
            pytest.skip("the trial's container is not on this machine")
        assert docker("kill", container) is not None
        self.assert_same(run, alone, tmp_path)
        assert run.restarts() == 1
