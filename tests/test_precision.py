"""`amp.precision`: the switches of each precision, and what a device says it computes.

GPUs of other generations are stood in for by the answers torch would give on them.
"""

import platform
from typing import Any

import pytest
import torch

from determined_amp.amp import precision as module
from determined_amp.amp.precision import (
    DeviceSupport,
    PrecisionError,
    autocast_is_on,
    prepare_backend,
    warn_of_slow_operations,
)
from determined_amp.amp.settings import Precision

pytestmark = pytest.mark.usefixtures("_switches_restored")
_CPU, _GPU = torch.device("cpu"), torch.device("cuda", 0)


def switches():
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def switch(matmul, tf32):
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = tf32


def pretend_gpu(monkeypatch, capability, hip=None):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.version, "hip", hip)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("before", [("high", True), ("highest", False)])
@pytest.mark.parametrize("device", [_CPU, _GPU])
@pytest.mark.parametrize("set_switches", [False, True])
def test_switches_are_those_of_the_precision_if_they_are_to_be_set(
    precision, before, device, monkeypatch, *, set_switches
):
    """TF32 for `tf32` on Ampere alone. cuDNN's benchmark is never touched."""
    pretend_gpu(monkeypatch, (8, 0))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before[1])
    switch(*before)
    prepare_backend(precision, device, set_switches=set_switches)
    tf32 = precision is Precision.TF32 and device is _GPU
    wanted = ("high", True) if tf32 else ("highest", False)
    assert switches() == (wanted if set_switches else before)
    assert torch.backends.cudnn.benchmark is before[1]


def test_tf32_on_a_cpu_is_a_warning(caplog):
    for precision in Precision:
        prepare_backend(precision, _CPU, set_switches=True)
    (record,) = caplog.records
    assert record.getMessage().startswith("amp.precision is tf32, but cpu has no TF32")


@pytest.mark.skipif(
    not hasattr(torch.backends.cudnn, "conv"), reason="torch has no such switches"
)
@pytest.mark.parametrize("before", ["tf32", "ieee"])
def test_torchs_newer_switches_are_set_too(before, monkeypatch):
    """With the old ones alone, convolutions stay at what `torch.backends` was set to
    before.
    """
    backends: Any = torch.backends
    operations = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    pretend_gpu(monkeypatch, (9, 0))
    backends.fp32_precision = before
    try:
        for precision in Precision:
            prepare_backend(precision, _GPU, set_switches=True)
            tf32 = precision is Precision.TF32
            assert {each.fp32_precision for each in operations} == {
                "tf32" if tf32 else "ieee"
            }
            assert switches() == (("high", True) if tf32 else ("highest", False))
    finally:
        backends.fp32_precision = "none"


def test_bf16_on_a_gpu_that_emulates_it_is_an_error_and_changes_nothing(monkeypatch):
    pretend_gpu(monkeypatch, (7, 5))
    switch("high", True)
    with pytest.raises(PrecisionError) as caught:
        prepare_backend(Precision.AMP_BF16, _GPU, set_switches=True)
    assert str(caught.value) == (
        "amp.precision: got amp_bf16, which Some GPU only emulates (slower than fp32); "
        "allowed on it: fp32, amp_fp16"
    )
    assert switches() == ("high", True)
    for allowed in (Precision.FP32, Precision.AMP_FP16):  # as the message promises
        prepare_backend(allowed, _GPU, set_switches=True)


@pytest.mark.parametrize(
    ("capability", "hip", "tf32", "bf16"),
    [
        ((7, 5), None, False, False),
        ((8, 0), None, True, True),
        ((9, 0), None, True, True),
        # AMD counts its capabilities otherwise, and has no TF32
        (
            (9, 0),
            "6.0",
            False,
            True,
        ),
    ],
)
def test_supported_precisions_follow_the_capability_of_the_gpu(
    capability, hip, tf32, bf16, monkeypatch
):
    pretend_gpu(monkeypatch, capability, hip)
    assert DeviceSupport.of(_GPU) == DeviceSupport(
        "Some GPU", tf32=tf32, fp16=True, bf16=bf16
    )


def test_device_is_described_with_what_it_computes(monkeypatch):
    versions = f"; torch {torch.__version__}, Python {platform.python_version()}"
    assert module.described(torch.device("cpu"), 1) == "1 x cpu" + versions
    pretend_gpu(monkeypatch, (7, 5))
    said = "2 x Some GPU, natively: fp32 yes, tf32 no, amp_fp16 yes, amp_bf16 no"
    assert module.described(torch.device("cuda"), 2) == said + versions


def test_cpu_that_trains_in_16_bits_is_a_warning(caplog):
    for precision in Precision:
        for device in (_CPU, _GPU):
            warn_of_slow_operations(precision, device)
    for name, said in zip(("amp_fp16", "amp_bf16"), caplog.messages, strict=True):
        assert f"amp.precision is {name} on a CPU" in said
        # A CPU with instructions for them may be faster, too.
        assert "det-amp compare" in said


@pytest.mark.parametrize("is_old", [False, True])
def test_autocast_is_on_for_one_type_of_device(is_old, monkeypatch):
    if is_old:  # torch 2.3 asks for the GPU here, and takes no argument
        monkeypatch.setattr(
            torch, "is_autocast_enabled", torch.is_autocast_cache_enabled
        )
        monkeypatch.setattr(
            torch, "is_autocast_cpu_enabled", lambda: False, raising=False
        )
        assert (autocast_is_on("cuda"), autocast_is_on("cpu")) == (True, False)
        return
    with module.autocast("cpu", torch.bfloat16):
        assert (autocast_is_on("cuda"), autocast_is_on("cpu")) == (False, True)
        with module.autocast("cpu", None):
            assert not autocast_is_on("cpu")
