"""`audit`: what a batch was computed in, counted exactly, and the runs that it
stops.
"""

import copy
import logging
import threading
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from determined_amp import __main__ as door
from determined_amp.amp.rehearse import precision_audit as module
from determined_amp.amp.rehearse.precision_audit import Audit, AuditError, ProductCount
from determined_amp.amp.settings import AmpSettings, Precision
from determined_amp.experiment import experiment
from determined_amp.experiment.overrides import with_overrides
from determined_amp.local.open_trial import audit_here
from tests import run_here
from tests.harness import batches_of, fit, same_bits
from tests.strangers import Stranger
from tests.trials import Converted

pytestmark = pytest.mark.usefixtures("_switches_restored")

BF16, FP32 = torch.bfloat16, torch.float32


def options(config, *overrides):
    """Arguments of the command, with a small batch."""
    return run_here.changing(config, "hyperparameters.global_batch_size=8", *overrides)


def audit_of(config):
    path, *changes = options(config)
    audit, asked = audit_here(
        experiment.experiment_in(
            with_overrides(experiment.read_yaml(path), changes[1::2]), path
        )
    )
    assert asked is audit.precision
    return audit


def multiply():
    """One product of 2 * 2 * 3 * 5 = 60 FLOPs."""
    return torch.ones(2, 3) @ torch.ones(3, 5)


class TestProductCount:
    @pytest.mark.parametrize(
        ("config", "dtype"),
        [
            ("mlp/fp32.yaml", FP32),
            ("mlp/tf32.yaml", FP32),
            ("mlp/amp.yaml", torch.float16),
            ("mlp/bf16.yaml", BF16),
        ],
    )
    def test_flops_of_an_mlp_are_those_by_hand(self, config, dtype):
        """Of 8 samples, 784 pixels, 512 hidden features, 10 classes; (m, k) by (k, n)
        is 2mkn.

        Forward: 2 * 8 * 784 * 512 and 2 * 8 * 512 * 10, both with bias: addmm.
        Backward: each weight has a gradient of as many FLOPs, and the hidden features
        too; the images have none.
        """
        first, last = 2 * 8 * 784 * 512, 2 * 8 * 512 * 10
        audit = audit_of(config)
        assert audit.flops == {
            ("addmm", dtype): first + last,
            ("mm", dtype): first + 2 * last,
        }
        assert audit.total_flops == 13_090_816
        assert (audit.share, audit.passed) == (1.0, True)

    def test_products_of_integers_are_not_counted(self):
        with ProductCount() as count:
            torch.ones(2, 2, dtype=torch.int64) @ torch.ones(2, 2, dtype=torch.int64)
        assert not count.flops

    def test_flops_of_convolutions_are_those_by_hand(self):
        """Each of 2 * samples * outputs * inputs * kernel * output pixels; as many per
        gradient.

        The weights have a gradient, and the input of the second; the images have none.
        """
        net = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 3, stride=2, padding=1)
        )
        first, last = 2 * 2 * 4 * 3 * 9 * 64, 2 * 2 * 5 * 4 * 9 * 16
        with ProductCount() as count:
            with torch.autocast("cpu", dtype=BF16):
                loss = net(torch.ones(2, 3, 8, 8)).float().sum()
            loss.backward()
        assert count.flops == {
            ("convolution", BF16): first + last,
            ("convolution_backward", BF16): first + 2 * last,
        }

    def test_what_an_optimizer_multiplies_in_its_step_is_not_counted(self):
        audits = []
        for trial in ("Stranger", "WithMuon"):
            config = {"hyperparameters": {"global_batch_size": 4}}
            name = f"tests.strangers:{trial}"
            audit, _ = audit_here(
                experiment.experiment_in(config, "config.yaml", trial=name)
            )
            audits.append(audit.flops)
        assert audits[0] == audits[1] != {}

    def test_error_in_the_audited_batch_is_raised_as_the_trials_own(self):
        config = {"hyperparameters": {"global_batch_size": 4}}
        parsed = experiment.experiment_in(
            config, "config.yaml", trial=f"{__name__}:FailsOnce"
        )
        with pytest.raises(ValueError, match="not yet"):
            audit_here(parsed)


class FailsOnce(Stranger):
    calls = 0

    def train_batch(self, batch, epoch_idx, batch_idx):
        self.calls += 1
        if self.calls == 1:
            raise ValueError("not yet")
        return super().train_batch(batch, epoch_idx, batch_idx)


class TestVerdict:
    def test_audit_fails_with_half_of_the_flops_in_the_precision(self):
        for low, share, passed in ((1, 0.5, False), (2, 2 / 3, True)):
            flops = {("mm", BF16): low, ("mm", FP32): 1}
            audit = Audit(Precision.AMP_BF16, flops, "off", True)
            assert (audit.share, audit.passed) == (share, passed)

    @pytest.mark.parametrize("precision", Precision)
    @pytest.mark.parametrize("tf32", ["on", "off", "mixed"])
    @pytest.mark.parametrize("has_tf32", [True, False])
    def test_tf32_switch_matters_to_fp32_and_tf32(self, precision, tf32, has_tf32):
        wanted = {Precision.FP32: "off", Precision.TF32: "on" if has_tf32 else tf32}
        flops = {("mm", precision.autocast_dtype or FP32): 2}
        audit = Audit(precision, flops, tf32, has_tf32)
        assert audit.passed is (wanted.get(precision, tf32) == tf32)

    @pytest.mark.parametrize(
        ("matmul", "cudnn", "expected"),
        [
            ("highest", False, "off"),
            ("high", True, "on"),
            ("medium", True, "on"),
            ("high", False, "mixed"),
            ("highest", True, "mixed"),
        ],
    )
    def test_audit_reads_both_switches_of_tf32(self, matmul, cudnn, expected):
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn
        assert module._tf32() == expected

    @pytest.mark.skipif(
        not hasattr(torch.backends.cudnn, "conv"),
        reason="torch before 2.9 has one set of names",
    )
    def test_tf32_switched_on_by_its_new_name_is_seen(self):
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        try:
            assert module._tf32() == "mixed"
        finally:
            torch.backends.cuda.matmul.fp32_precision = "ieee"

    def test_failed_audit_says_a_sentence_the_table_and_what_to_do(self):
        flops = {("mm", FP32): 3_000_000_000, ("addmm", BF16): 1_000_000_000}
        audit = Audit(Precision.AMP_BF16, flops, "off", False)
        problem, *table, remedy = str(AuditError(audit)).splitlines()
        assert problem == (
            "audit: hyperparameters.amp.precision is amp_bf16, "
            "but 25.0% of the FLOPs are in bfloat16"
        )
        assert table == [
            "operation  dtype         GFLOP   share",
            "mm         float32           3   75.0%",
            "addmm      bfloat16          1   25.0%",
            "amp_bf16 asks for bfloat16: 25.0% of the FLOPs",
            "TF32 switches: off",
        ]
        assert remedy.startswith("Is the forward in train_batch under amp.autocast()?")


class TestAudited:
    def test_audit_counts_the_first_batch_alone(self, caplog):
        caplog.set_level(logging.INFO)
        trial, amp = batches_of(lambda batch: multiply(), AmpSettings(Precision.FP32))
        for index in range(3):
            trained = trial.train_batch(batch=0, epoch_idx=0, batch_idx=index)
            assert torch.equal(trained, multiply())
        (table,) = (line for line in caplog.messages if line.startswith("audit of"))
        assert table.splitlines()[2].split() == ["mm", "float32", "6e-08", "100.0%"]
        assert amp.metrics.once == {"watch_audit_share": 1.0}

    def test_batch_without_a_product_is_not_judged(self, caplog):
        """Embeddings, a recurrent layer, a batch that trains nothing: no sign of a
        mistake.
        """
        caplog.set_level(logging.INFO)
        settings = AmpSettings(Precision.AMP_FP16)
        trial, _ = batches_of(lambda batch: torch.ones(2) + 1, settings)
        trial.train_batch(batch=0, epoch_idx=0, batch_idx=0)
        assert "audit of the first batch" in caplog.text

    def test_error_of_the_rehearsal_alone_skips_the_audit_and_the_run_goes_on(
        self, caplog
    ):
        divisors = iter([0, 1])
        trial, amp = batches_of(
            lambda batch: torch.ones(1) * (batch / next(divisors)),
            AmpSettings(Precision.FP32),
        )
        trained = trial.train_batch(batch=1, epoch_idx=0, batch_idx=0)
        assert torch.equal(trained, torch.ones(1))
        assert not amp.metrics.once
        (line,) = caplog.messages
        assert line == "the first batch is trained, but not audited: division by zero"

    def test_error_of_the_rehearsal_and_of_the_batch_is_the_trials_own(self):
        trial, _ = batches_of(lambda batch: batch / 0, AmpSettings(Precision.FP32))
        with pytest.raises(ZeroDivisionError):
            trial.train_batch(batch=1, epoch_idx=0, batch_idx=0)


class Keeps(Converted):
    """Keeps counts, one beside the scaler, a queue and an average of its weights, and
    what cannot be copied.
    """

    def __init__(self, context):
        super().__init__(context)
        self.calls, self.queue = 0, deque(maxlen=3)
        self.meter = SimpleNamespace(count=0, scaler=self.amp.scaler)
        self.teacher = copy.deepcopy(self.model)
        self.lock = threading.Lock()
        self.numbers = (number for number in range(9))

    def train_batch(self, batch, epoch_idx, batch_idx):
        self.calls += 1
        forwards = vars(self.model)
        forwards["calls"] = forwards.get("calls", 0) + 1
        self.meter.count += 1
        self.queue.append(float(batch[0].sum()))
        with torch.no_grad():
            for mean, weight in zip(
                self.teacher.parameters(), self.model.parameters(), strict=True
            ):
                mean.lerp_(weight, 0.1 * self.calls)
        batch[0].mul_(1 + 0.01 * self.calls)
        return super().train_batch(batch, epoch_idx, batch_idx)

    def kept(self):
        teacher = self.teacher.state_dict()
        return [
            self.calls,
            vars(self.model)["calls"],
            self.meter.count,
            list(self.queue),
            teacher,
        ]


@pytest.mark.parametrize("precision", ["fp32", "amp_fp16", "amp_bf16"])
def test_audit_leaves_alone_what_a_trial_keeps_or_warns(precision, caplog):
    amp = {"precision": precision, "init_scale": 64.0}
    audited_run, unwatched = (
        fit(Keeps, {**amp, "audit": audit}, batches=3) for audit in (True, False)
    )
    assert "watch_audit_share" in audited_run.reports.training[0]  # the control
    assert audited_run.trial.calls == 3
    words = "it cannot copy numbers, which the training finds as that batch has left it"
    assert words in caplog.text
    assert same_bits(audited_run.trial.kept(), unwatched.trial.kept())
    assert same_bits(audited_run.checkpoint, unwatched.checkpoint)


class TestCommand:
    def test_audit_prints_the_table_and_leaves_nothing_behind(
        self, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.chdir(tmp_path)
        assert door.run(["audit", *options("mlp/bf16.yaml")]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["operation", "dtype", "GFLOP", "share"]
        assert "amp_bf16 asks for bfloat16: 100.0% of the FLOPs" in lines
        assert not list(tmp_path.iterdir())

    def test_failed_audit_exits_with_status_1(self, capsys):
        trial = "hyperparameters.trial=tests.trials:LeavesAutocast"
        assert door.run(["audit", *options("mlp/bf16.yaml", trial)]) == 1
        assert (
            "audit: hyperparameters.amp.precision is amp_bf16, but"
            in capsys.readouterr().out
        )
