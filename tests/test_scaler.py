"""`amp.scaler`: counts of applied and skipped steps, on the host and on the device."""

from __future__ import annotations

import pytest
import torch

from determined_amp.amp.scaler import StepCounts
from tests.fake_cuda import Syncs

CPU = torch.device("cpu")
NEVER = 10**9


def counted(skips: list[bool], *, on_host: bool, ask_every: int) -> StepCounts:
    """The counts after these steps, asked for after every `ask_every` of them."""
    counts = StepCounts(CPU, can_skip=True)
    for step, skipped in enumerate(skips, start=1):
        counts.count(skipped if on_host else torch.tensor(float(skipped)))
        if step % ask_every == 0:
            assert int(counts.applied) == step - sum(skips[:step])
            assert bool(counts.last_step_applied) is not skipped
    return counts


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("ask_every", [1, 3, NEVER])
@pytest.mark.parametrize(
    ("skips", "applied", "in_a_row"),
    [
        ([False, True, False], 2, 0),
        ([True, True], 0, 2),
        ([False, True, True], 1, 2),
        ([False, *[True] * 200], 1, 200),
        ([*[True] * 100, False, *[True] * 30], 1, 30),
        ([*[True] * 64, *[False] * 64], 64, 0),
    ],
)
def test_counts_are_the_same_whoever_knows_and_whenever_asked(
    skips: list[bool], applied: int, in_a_row: int, ask_every: int, *, on_host: bool
) -> None:
    counts = counted(skips, on_host=on_host, ask_every=ask_every)
    assert int(counts.consecutive_skips()) == in_a_row
    assert int(counts.applied) == applied
    assert bool(counts.last_step_applied) is not skips[-1]
    assert counts.attempted == len(skips)
    assert counts.applied_on_host == (applied if on_host else None)


@pytest.mark.parametrize("on_host", [False, True])
def test_counts_go_on_after_a_checkpoint(*, on_host: bool) -> None:
    saved = counted([False, True, True], on_host=on_host, ask_every=NEVER).state_dict()
    assert saved == {"attempted": 3, "applied": 1, "last_applied": 1}
    counts = StepCounts(CPU, can_skip=True)
    counts.count(torch.ones(()))
    counts.load_state_dict(saved)
    assert (int(counts.applied), int(counts.consecutive_skips())) == (1, 2)
    counts.count(True if on_host else torch.ones(()))
    assert (int(counts.applied), int(counts.consecutive_skips())) == (1, 3)
    counts.count(False if on_host else torch.zeros(()))
    assert (int(counts.applied), int(counts.consecutive_skips())) == (2, 0)


@pytest.mark.parametrize("steps", [1, 2, 130])
def test_counting_waits_for_nothing(steps: int) -> None:
    with Syncs("cpu") as syncs, syncs.during("counts"):
        counts = counted([], on_host=False, ask_every=1)
        for _ in range(steps):
            counts.count(torch.zeros(()))
        applied, skips = counts.applied, counts.consecutive_skips()
    assert syncs.calls["counts"]
    assert syncs.waits["counts"] == {}
    with syncs, syncs.during("control"):
        assert (int(applied), int(skips)) == (steps, 0)
    assert syncs.waits["control"] == {"read": 2}
