"""What only a CUDA device can show: real synchronisations, its kernels, its memory.

`make test-gpu` runs these. `gpu.py` runs them without a GPU, to see that they run.
"""

import gc
import itertools
import math
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks.small_trials import SummedLoss
from determined_amp.amp.precision import DeviceSupport, prepare_backend
from determined_amp.amp.settings import Precision
from determined_amp.finder.scale_finding import find_range
from tests import gpu, run_here, test_never_waits
from tests.gpu import DEVICE, only_a_gpu_raises, only_a_gpu_shows, sized
from tests.loss_scale import looked_at, skipped_steps
from tests.test_never_waits import BATCHES, ReadsTheLoss
from trials.mlp import MLPTrial

pytestmark = [
    pytest.mark.gpu,
    # torch says so whenever it is told to refuse them.
    pytest.mark.filterwarnings(
        "ignore:Synchronization debug mode is a prototype:UserWarning"
    ),
]
EVERY_PRECISION = pytest.mark.parametrize("precision", Precision)
SIXTEEN_BITS = pytest.mark.parametrize(
    "precision", [Precision.AMP_FP16, Precision.AMP_BF16]
)
train = partial(test_never_waits.train, gpus=gpu.GPUS)


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    """What one test sets for its process is not there in the next."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    with gpu.stand_ins():
        yield
    prepare_backend(Precision.FP32, DEVICE, set_switches=True)


@contextmanager
def refusing_to_wait(phase):
    """Every synchronisation in a batch is an error; a report may read."""
    torch.cuda.set_sync_debug_mode("error" if phase == "batches" else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def waiting(phase):
    """A trial that looks at values for its test waits."""
    yield


def skip_if_emulated(precision):
    support = DeviceSupport.of(DEVICE)
    if not gpu.DRY_RUN and support.lacks(precision):
        pytest.skip(f"{support.name} has no {precision.value}")


def amp(**settings):
    return [f"hyperparameters.amp.{key}={value}" for key, value in settings.items()]


def length(batches):
    return f"hyperparameters.training.max_length={{batches: {batches}}}"


# Without cuDNN's benchmark, whose timing of algorithms waits once per shape.
IMAGES = ("data.image_size=32", length(sized(BATCHES, 1)))
HEADS = sized(
    "{num_layers: 2, num_attention_heads: 4, attention_head_dim: 16}",
    "{num_layers: 1, num_attention_heads: 2, attention_head_dim: 4}",
)
VIDEO = (
    "data.frames=2",
    f"hyperparameters.model={HEADS}",
    "hyperparameters.clip_start_step=2",
)


@EVERY_PRECISION
@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("mlp", ()),
        ("mlp", ("hyperparameters.aggregation_frequency=2",)),
        ("mlp", ("data.workers=2",)),
        ("resnet50", IMAGES),
        ("latte", VIDEO),
    ],
    ids=["mlp", "mlp, a window of 2", "mlp, workers", "resnet50", "latte"],
)
def test_batches_never_wait(precision, config, overrides):
    skip_if_emulated(precision)
    if config == "latte":
        pytest.importorskip("diffusers")
    changes = (*overrides, *amp(precision=precision.value))
    run = train(refusing_to_wait, f"{config}/fp32.yaml", *changes)
    assert run.trial.dtypes == {precision.autocast_dtype or torch.float32}
    assert run.trial.optimizer.defaults["fused"] is True
    # The first steps at the default loss scale may overflow, and are then skipped.
    assert int(run.trial.amp.applied_steps) >= 1


def test_planted_synchronisation_is_an_error(monkeypatch):
    monkeypatch.setattr("determined_amp.amp.core.TrainingMetrics", ReadsTheLoss)
    with only_a_gpu_raises(RuntimeError, match="synchronizing CUDA operation"):
        train(refusing_to_wait, "mlp/amp.yaml")


class PoisonedTrial(MLPTrial):
    """Its fourth batch is infinite.

    Attributes:
        scales: Loss scale after every batch.
        weights: Of the first layer, after every batch.
    """

    def __init__(self, context):
        super().__init__(context)
        self.scales = []
        self.weights = []

    def train_batch(self, batch, epoch_idx, batch_idx):
        images, labels = batch
        if batch_idx == 3:
            images = torch.full_like(images, math.inf, dtype=torch.float32)
        reported = super().train_batch((images, labels), epoch_idx, batch_idx)
        self.scales.append(float(self.amp.loss_scale()))
        self.weights.append(next(self.model.parameters()).detach().clone())
        return reported


def test_overflow_skips_exactly_one_step_of_fused_adam():
    """From 4, doubled after two applied steps in a row, halved by the skipped one.

    good 4, good 8, good 8, inf 4 (the run of good steps begins anew), good 4, good 8,
    good 8. Six steps are applied, so Adam's own count is 6, and the rate is that of the
    seventh step.
    """
    trial = train(
        waiting,
        "mlp/amp.yaml",
        "hyperparameters.trial=tests.test_gpu:PoisonedTrial",
        "hyperparameters.learning_rate=0.001",
        *amp(init_scale=4.0, growth_interval=2),
        length(7),
    ).trial
    assert trial.scales == [4, 8, 8, 4, 4, 8, 8]
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(trial.weights)]
    assert changed == [True, True, False, True, True, True]
    assert bool(torch.isfinite(trial.weights[-1]).all())
    assert int(trial.amp.applied_steps) == 6
    assert {float(state["step"]) for state in trial.optimizer.state.values()} == {6}
    # two steps of warm-up, then five
    rate = 0.001 * (1 + math.cos(math.pi * 4 / 5)) / 2
    for group in trial.optimizer.param_groups:
        assert float(group["lr"]) == pytest.approx(rate, rel=1e-6)  # a float32


def train_resnet(precision):
    """Three batches of 64 images of 64 pixels: the run, and what it allocated at most,
    in bytes.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    run = train(
        waiting,
        "resnet50/fp32.yaml",
        "data.samples=256",
        f"data.image_size={sized(64, 32)}",
        f"hyperparameters.global_batch_size={sized(64, 4)}",
        *amp(precision=precision.value),
        length(3),
    )
    return run, torch.cuda.max_memory_allocated(DEVICE) - before


@SIXTEEN_BITS
def test_autocast_saves_memory_and_keeps_float32_weights(precision):
    """Saved activations halve; weights, gradients and momentum stay, and 16-bit weights
    are added.

    That leaves some 3/4 at this size; 0.87 is the bound of Composer's test of the same
    thing.
    """
    skip_if_emulated(precision)
    full = train_resnet(Precision.FP32)[1]
    run, mixed = train_resnet(precision)
    assert run.trial.dtypes == {precision.autocast_dtype}
    for parameter in run.trial.model.parameters():
        assert parameter.dtype is torch.float32
        if parameter.dim() == 4:
            assert parameter.is_contiguous(memory_format=torch.channels_last)
    assert only_a_gpu_shows(mixed / full < 0.87)


# float16 and TF32 drop the last of its powers of two, bfloat16 the last two, float32
# none.
INEXACT = 1 + 2.0**-9 + 2.0**-12


def matmul():
    factor = torch.full((sized(1024, 64),) * 2, INEXACT, device=DEVICE)
    return factor @ factor, len(factor) * INEXACT**2


def convolution():
    """Of 4 x 4 pixels: so many terms that their number is a power of two."""
    channels = sized(128, 8)
    images = torch.full((sized(32, 2), channels, sized(32, 8), sized(32, 8)), INEXACT)
    kernel = torch.full((channels, channels, 4, 4), INEXACT)
    layout = torch.channels_last
    result = functional.conv2d(
        images.to(DEVICE, memory_format=layout), kernel.to(DEVICE, memory_format=layout)
    )
    return result, channels * 16 * INEXACT**2


def attention():
    """Equal scores, so the result is the mean of equal values."""
    query = torch.zeros(2, 4, 128, 64, device=DEVICE)
    value = torch.full_like(query, INEXACT)
    return functional.scaled_dot_product_attention(query, query, value), INEXACT


# The least and the largest relative error.
ERRORS = {
    Precision.FP32: (0.0, 2.0**-16),
    Precision.TF32: (2.0**-13, 2.0**-10),
    Precision.AMP_FP16: (2.0**-13, 2.0**-10),
    Precision.AMP_BF16: (2.0**-10, 2.0**-7),
}


@EVERY_PRECISION
@pytest.mark.parametrize("product", [matmul, convolution, attention])
@pytest.mark.parametrize("before", [None, "tf32", "ieee"])
def test_error_of_a_product_is_that_of_its_precision(precision, product, before):
    """Against float64, whatever the newest of torch's switches were before."""
    skip_if_emulated(precision)
    backends: Any = torch.backends
    if before is not None and not hasattr(backends, "fp32_precision"):
        pytest.skip("this torch has no such switch")
    try:
        if before is not None:
            backends.fp32_precision = before
        prepare_backend(precision, DEVICE, set_switches=True)
        dtype = precision.autocast_dtype
        with torch.autocast(DEVICE.type, dtype=dtype, enabled=dtype is not None):
            result, exact = product()
    finally:
        if before is not None:
            backends.fp32_precision = "none"
    assert result.dtype is (dtype or torch.float32)
    error = float((result.double() / exact - 1).abs().max())
    least, most = ERRORS[precision]
    # Torch's attention in float32 splits each factor in two for TF32, and so loses
    # nothing.
    splits = precision is Precision.TF32 and product is attention
    assert only_a_gpu_shows(error >= least or splits)
    assert only_a_gpu_shows(error <= most)


MOVING = (
    "hyperparameters.lr_schedule=cosine",
    "hyperparameters.warmup_steps=2",
    "hyperparameters.amp.growth_interval=3",
)


@pytest.mark.usefixtures("_deterministic")
def test_resumed_run_ends_as_one_that_nothing_disturbed(tmp_path):
    """To the bit, where torch computes deterministically; lost in the 11th of 12
    batches.

    Weights, fused optimizer, scaler, schedule, counts, and the random state of the
    device.
    """

    def run(name, *overrides):
        return run_here.run_small("mlp/amp.yaml", tmp_path / name, *MOVING, *overrides)

    with run_here.killed_in_batch(10):
        run("resumed")
    whole, other = run("whole"), run("other", "reproducibility.experiment_seed=1")
    folders = (run_here.resume(tmp_path / "resumed"), whole, other)
    ends = [run_here.digest(run_here.checkpoint(folder, 12)) for folder in folders]
    assert ends[0] == ends[1] != ends[2]


def test_training_skips_its_first_step_one_bit_above_the_found_top():
    top = looked_at(
        SummedLoss,
        lambda _, context, batches: find_range(batches, context.distributed).top_log2,
        batches=1,
    )
    assert skipped_steps(SummedLoss, 1, init_scale=2.0**top) == 0
    assert skipped_steps(SummedLoss, 1, init_scale=2.0 ** (top + 1)) == 1


# All of them take a CPU too long.
@pytest.mark.parametrize(
    "precision",
    sized(
        [Precision.FP32, Precision.AMP_FP16, Precision.AMP_BF16], [Precision.AMP_BF16]
    ),
)
def test_compiled_training_has_the_losses_of_the_eager_one(precision, tmp_path):
    """Inductor keeps in float32 what autocast rounds between two operations, and the
    reverse.
    """

    def run(mode):
        given = amp(precision=precision.value, compile=mode)
        return run_here.run_small("mlp/fp32.yaml", tmp_path / mode, *given)

    graphs = torch._dynamo.utils.counters["stats"]
    eager, before = run("false"), graphs["unique_graphs"]
    compiled = run("default")
    assert graphs["unique_graphs"] > before
    for one, other in zip(
        run_here.metrics(eager), run_here.metrics(compiled), strict=True
    ):
        for name in {"loss", "validation_loss"} & one.keys():
            assert other[name] == pytest.approx(one[name], rel=2e-2)
