"""No training step of Latte makes the host wait: noise, average and clip stay on the device."""

from __future__ import annotations

import pytest
import torch

from tests.fake_cuda import fake_cuda
from tests.test_no_sync import needs_fake_cuda, train
from trials.latte import LatteTrial  # before a generator is replaced: annotations name it

SMALL = (
    "data.frames=2",
    "hyperparameters.model.num_layers=1",
    "hyperparameters.training.max_length={batches: 4}",
)


@needs_fake_cuda
@pytest.mark.parametrize("config", ["fp32.yaml", "amp_checkpointing.yaml"])
def test_batches_never_wait(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a driver there is no generator of the device; fake kernels draw from none.
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    with fake_cuda() as syncs:
        run = train(syncs.during, f"latte/{config}", *SMALL)
    assert isinstance(run.trial, LatteTrial)
    assert syncs.waits["batches"] == {}
    calls = syncs.calls["batches"]
    assert calls["_fused_adamw_"] == 4
    assert calls["_foreach_sub"] == 4  # the average moved towards the weights
    assert calls["randint"] == 4
    assert run.dtypes == {torch.float16 if "amp" in config else torch.float32}
