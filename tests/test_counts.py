"""`amp.counts`: sums on the device, and steps that were applied or skipped."""

import math
import weakref

import pytest
import torch

from determined_amp.amp.counts import DeviceSum, LeftOutBatches, StepCounts
from tests.fake_cuda import Syncs

CPU = torch.device("cpu")
NEVER = 10**9


def counted(skips, *, on_host, ask_every):
    """The counts after these steps, asked for after every `ask_every` of them.

    Without `on_host` it is known on the host of every other step only.
    """
    counts = StepCounts(CPU, can_skip=True)
    for step, skipped in enumerate(skips, start=1):
        is_known = step % 2 if on_host is None else on_host
        counts.count(skipped if is_known else torch.tensor(float(skipped)))
        if step % ask_every == 0:
            assert int(counts.applied) == step - sum(skips[:step])
            assert bool(counts.last_step_applied) is not skipped
    return counts


@pytest.mark.parametrize("on_host", [False, True, None])
@pytest.mark.parametrize("ask_every", [1, 3, NEVER])
@pytest.mark.parametrize(
    ("skips", "applied", "in_a_row"),
    [
        ([False, True, False], 2, 0),
        ([True, True], 0, 2),
        ([False, *[True] * 200], 1, 200),
        ([*[True] * 100, False, *[True] * 30], 1, 30),
        ([*[True] * 64, *[False] * 64], 64, 0),
    ],
    ids=[
        "one skip",
        "no applied step",
        "200 skips",
        "30 skips at the end",
        "no skip at the end",
    ],
)
def test_counts_are_the_same_on_host_and_device_whenever_they_are_read(
    skips, applied, in_a_row, ask_every, *, on_host
):
    counts = counted(skips, on_host=on_host, ask_every=ask_every)
    assert int(counts.consecutive_skips()) == in_a_row
    assert int(counts.applied) == applied
    assert bool(counts.last_step_applied) is not skips[-1]
    assert counts.attempted == len(skips)
    assert counts.applied_on_host == (applied if on_host else None)


@pytest.mark.parametrize("on_host", [False, True])
def test_counts_of_steps_go_on_after_a_checkpoint(*, on_host):
    saved = counted([False, True, True], on_host=on_host, ask_every=NEVER).state_dict()
    assert saved == {"attempted": 3, "applied": 1, "last_applied": 1}
    counts = StepCounts(CPU, can_skip=True)
    counts.count(torch.ones(()))
    counts.load_state_dict(saved)
    assert counts.began == (1, 2)
    seen = []
    for skipped in (True, False):
        counts.count(skipped if on_host else torch.tensor(float(skipped)))
        seen.append((int(counts.applied), int(counts.consecutive_skips())))
    assert seen == [(1, 3), (2, 0)]


def test_counting_steps_never_waits_for_the_device():
    steps = 130
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


@pytest.mark.parametrize(
    "add", [StepCounts(CPU, can_skip=True).count, DeviceSum(CPU).add]
)
def test_bounded_number_of_tensors_is_kept(add):
    values = [torch.zeros(()) for _ in range(1000)]
    references = [weakref.ref(value) for value in values]
    while values:
        add(values.pop())
    assert sum(reference() is not None for reference in references) <= 64


@pytest.mark.parametrize("can_skip", [False, True])
def test_last_step_counts_as_applied_before_the_first_where_none_can_be_skipped(
    *, can_skip
):
    counts = StepCounts(CPU, can_skip=can_skip)
    assert bool(counts.last_step_applied) is not can_skip
    assert (int(counts.applied), int(counts.consecutive_skips())) == (0, 0)
    assert (counts.attempted, counts.applied_on_host) == (0, 0)


class TestDeviceSum:
    @pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
    def test_device_sum_is_the_weighted_sum_however_many_there_are(self, count):
        """Whole numbers: exact in float32 and in float64. The weight changes on the
        way.
        """
        total, expected = DeviceSum(torch.device("cpu")), 0
        for value in range(1, count + 1):
            weight = 3 if value % 50 else 7
            total.add(torch.tensor(float(value)), weight)
            expected += value * weight
        assert total.total().item() == expected
        assert total.total().item() == expected  # asking changes nothing

    def test_device_sum_is_added_up_in_double_precision(self):
        """2^24 + 1 is no float32."""
        total = DeviceSum(torch.device("cpu"))
        for value in (2.0**24, 1.0):
            total.add(torch.tensor(value))
        assert total.total().item() == 2**24 + 1


# A batch is "b" for the backward of a scaled loss, "s" for a step, "n" for an end with
# a loss that is not finite, "f" for one that is, "?" for one without a loss, and "z"
# for `zero_grad`.
@pytest.mark.parametrize(
    ("calls", "left_out"),
    [
        ("bsn", 0),
        ("bbn", 1),
        ("zn zn", 2),
        ("bn bn bsn", 0),
        ("bn zbsf", 1),
        ("bn bbsf", 0),
        ("bn n n bsf", 2),
        ("bf n bsf", 1),
        ("b? n bsf", 1),
        ("bn bsf zn bsf", 1),
    ],
)
def test_batch_is_left_out_without_a_step_now_or_later(calls, left_out):
    batches, gradient = LeftOutBatches(CPU), torch.zeros(1)
    ends = {"n": torch.tensor(math.nan), "f": torch.tensor(1.0), "?": None}
    for call in calls.replace(" ", ""):
        if call == "b":
            batches.begin_backward(lambda: [gradient])
            gradient.fill_(1.0)
        elif call == "z":
            gradient.zero_()
        elif call == "s":
            batches.step()
            gradient.zero_()
        else:
            batches.end_batch(ends[call])
    assert batches.count.total() == left_out
