"""What every trial of the repository must do: train in each precision, resume, never
wait, stop.

The trials are small, and complete: `train` runs them from their own YAML.
"""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from determined_amp import __main__ as door
from determined_amp.amp.settings import Precision
from determined_amp.runs.folder import complete_checkpoints
from tests import run_here
from tests.fake_cuda import fake_cuda, needs_fake_cuda
from tests.test_never_waits import train as train_on_fake_cuda
from trials.data import loading

BATCHES = 8


@dataclass(frozen=True)
class Example:
    """A trial of the repository, made small.

    Args:
        config: Its YAML in `experiment_configs`.
        trial: Its import path.
        overrides: What makes it small.
        calls: Kernels that two batches on a CUDA device call, in the precision of the
            YAML.
    """

    config: str
    trial: str
    overrides: tuple[str, ...]
    calls: dict[str, int]


TINY_LATTE = (
    "data.dataset=synthetic",
    "data.image_size=8",
    "data.frames=2",
    "hyperparameters.model={num_layers: 1, num_attention_heads: 2, attention_head_dim: "
    "4}",
    "hyperparameters.clip_start_step=1",
)
EXAMPLES = {
    "mlp": Example(
        "mlp/amp.yaml",
        "trials.mlp:MLPTrial",
        ("data.image_size=8", "hyperparameters.hidden_features=16"),
        {"_fused_adam_": 2},
    ),
    "resnet50": Example(
        "resnet50/amp.yaml",
        "trials.resnet50:ResNet50Trial",
        # Smaller ones end in 3 x 3 convolutions of one pixel: NaN in bfloat16 on some
        # CPUs.
        ("data.image_size=32",),
        {"_fused_sgd_": 2, "convolution": 2 * 16},
    ),
    "latte": Example(
        "latte/fp32.yaml",
        "trials.latte:LatteTrial",
        TINY_LATTE,
        # The average moves towards the weights after each step; timesteps come from the
        # device.
        {"_fused_adamw_": 2, "_foreach_sub": 2, "randint": 2},
    ),
    "latte without classes, checkpointed": Example(
        "latte/amp_checkpointing.yaml",
        "trials.latte:LatteTrial",
        (
            *TINY_LATTE,
            "hyperparameters.diffusion={conditioning: none, class_dropout: 0.0}",
        ),
        {"_fused_adamw_": 2, "_foreach_sub": 2, "randint": 2},
    ),
}
# A schedule that moves, accumulation, growth of the scale: a resume has to restore all
# of it.
SCALING = ", init_scale: 1024.0, growth_interval: 3"
RUN = (
    "data.dataset=synthetic",
    "data.samples=80",
    "hyperparameters.global_batch_size=4",
    "hyperparameters.lr_schedule=cosine",
    "hyperparameters.warmup_steps=2",
    "hyperparameters.aggregation_frequency=2",
    f"hyperparameters.training.max_length={{batches: {BATCHES}}}",
    "hyperparameters.training.validation_period={batches: 4}",
    "hyperparameters.training.checkpoint_period={batches: 4}",
    "hyperparameters.training.reporting_period={batches: 2}",
)
# In their models and loops; they are slow.
DIFFERENT = ("mlp", "resnet50", "latte")
every_example = pytest.mark.parametrize("name", EXAMPLES)


@pytest.fixture(scope="module", autouse=True)
def _thin_resnet():
    """A block a stage instead of 16; 16 convolutions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trials.resnet50.resnet50", run_here.thin_resnet(1, 1, 1, 1))
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of an undisturbed run by trial and precision, trained when first asked
    for.
    """

    @cache
    def run(name, precision):
        folder = tmp_path_factory.mktemp("run")
        assert start(name, folder, precision) == 0
        return folder

    return run


def start(name, folder, precision, *overrides):
    """Train from the start; the exit status."""
    example = EXAMPLES[name]
    scaling = SCALING * (precision is Precision.AMP_FP16)
    amp = f"hyperparameters.amp={{precision: {precision.value}{scaling}}}"
    changes = (*RUN, *example.overrides, amp, *overrides)
    words = run_here.changing(example.config, *changes)
    torch.manual_seed(0)
    return door.main(["train", *words, "--run-folder", str(folder)])


def trial_class(name):
    module, _, attribute = EXAMPLES[name].trial.partition(":")
    return getattr(importlib.import_module(module), attribute)


# On a CPU tf32 is fp32; test_gpu.py trains in it.
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, Precision.AMP_FP16) for name in EXAMPLES),
        *((name, Precision.AMP_BF16) for name in DIFFERENT),
        *((name, Precision.FP32) for name in DIFFERENT),
    ],
)
def test_example_trains_and_passes_its_audit_in_every_precision(name, precision, runs):
    reports = run_here.metrics(runs(name, precision))
    assert reports[0]["watch_audit_share"] > 0.99
    last = [report for report in reports if report["group"] == "training"][-1]
    assert (last["watch_applied_steps"], last.get("skipped_steps", 0)) == (
        BATCHES // 2,
        0,
    )
    assert [r["batches"] for r in reports if r["group"] == "validation"] == [4, BATCHES]
    losses = [
        value for r in reports for key, value in r.items() if key.endswith("loss")
    ]
    assert torch.tensor(losses).isfinite().all()


@every_example
def test_resumed_run_ends_as_one_that_nothing_disturbed(name, runs, tmp_path):
    """Lost in the seventh batch, resumed after the fourth: the same to the bit.

    Weights, averages, optimizer, scaler, counts, schedule, random state, noise and
    reports.
    """
    killed = tmp_path / "killed"
    with run_here.killed_in_batch(6, trial_class(name)):
        start(name, killed, Precision.AMP_FP16)
    assert complete_checkpoints(killed / "checkpoints")[-1].name == "batch-00000004"
    # reported before, and trained again
    assert run_here.metrics(killed)[-1]["batches"] == 6
    run_here.resume(killed)
    whole = runs(name, Precision.AMP_FP16)
    states = [run_here.checkpoint(run, BATCHES) for run in (whole, killed)]
    assert run_here.digest(states[0]) == run_here.digest(states[1])
    # A resumed process is audited again.
    of_both = [
        run_here.same_numbers(run, "watch_audit_share") for run in (whole, killed)
    ]
    assert of_both[0] == of_both[1]


@needs_fake_cuda
@pytest.mark.parametrize("name", DIFFERENT[1:])  # test_never_waits.py has the first
def test_batches_never_wait(name, monkeypatch):
    example = EXAMPLES[name]
    kind = trial_class(name)  # before a generator is replaced: annotations name it
    # Without a driver there is no generator of the device; fake kernels draw from none.
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    length = "hyperparameters.training.max_length={batches: 2}"
    with fake_cuda() as syncs:
        run = train_on_fake_cuda(
            syncs.during, example.config, length, "data.samples=16", *example.overrides
        )
    assert isinstance(run.trial, kind)
    assert syncs.waits["batches"] == {}
    assert syncs.waits["report"] == {"read": 1}
    assert Counter(example.calls) <= syncs.calls["batches"]
    assert run.trial.dtypes == {
        torch.float32 if "fp32" in example.config else torch.float16
    }
    assert run.trial.optimizer.defaults["fused"] is True


IN_FP16 = Precision.AMP_FP16, 12, "error: 80% of the optimizer steps", 20
IN_FP32 = Precision.FP32, 4, "the training loss is nan in fp32", 4


@pytest.mark.parametrize(
    ("name", "precision", "first", "said", "newest"),
    [("mlp", *IN_FP16), ("mlp", *IN_FP32), ("latte", *IN_FP32)],
)
def test_guard_ends_a_run_that_no_longer_trains(
    name, precision, first, said, newest, *, tmp_path, monkeypatch, capfd
):
    """From one batch on a sample is NaN. The newest checkpoint is one of sound weights.

    In float16, eight of ten steps are skipped, the fewest to judge, after ten at the
    start that are not judged; in float32 none is.
    """
    poison_batches_from(first, monkeypatch)
    every_batch = "hyperparameters.aggregation_frequency=1"
    longer = "hyperparameters.training.max_length={batches: 40}"
    assert start(name, tmp_path, precision, every_batch, longer) == 2
    message = capfd.readouterr().err
    assert said in message
    assert "not finite in samples [2]" in message
    saved = complete_checkpoints(tmp_path / "checkpoints")[-1]
    assert saved.name == f"batch-{newest:08d}"
    weights = run_here.checkpoint(tmp_path, newest)["models_state_dict"][0]
    assert all(torch.isfinite(value).all() for value in weights.values())


def poison_batches_from(first, monkeypatch):
    """From that batch on, the third training sample of every batch has a NaN."""
    original = loading.training_loader

    def training_loader(*arguments):
        loader = original(*arguments)
        dataset: Any = loader.dataset
        load, batches = dataset.__getitems__, iter(range(10**6))

        def load_and_poison(samples):
            images, *others = load(samples)
            if next(batches) >= first:
                # As floating-point numbers: no byte is NaN.
                images = loading.to_device((images,), torch.device("cpu"))[0].clone()
                images[2, 0, 0, 0] = torch.nan
            return (images, *others)

        dataset.__getitems__ = load_and_poison
        return loader

    monkeypatch.setattr(loading, "training_loader", training_loader)
