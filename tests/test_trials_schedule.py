"""`trials.schedule`: warm-up, constant and cosine as a torch scheduler."""

import numpy as np
import pytest
import torch

from trials.schedule import LRSchedule, warmup_then

# Of the peak: either side rounds an angle of at most pi twice, and a factor in [0, 1]
# twice, which is less than 4 epsilons (2**-52) each.
_TOLERANCE = 8 * 2.0**-52


def rates(schedule, peak, warmup, total, steps):
    """What `steps` optimizer steps use."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = warmup_then(optimizer, schedule, warmup, total)
    used = []
    for _ in range(steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return used


def closed_form(schedule, peak, warmup, total):
    """cos(x / 2)^2 is (1 + cos x) / 2: the same curve, computed in another way."""
    step = np.arange(total, dtype=np.float64)
    angle = np.pi / 2 * np.clip((step - warmup) / max(total - warmup, 1), 0, None)
    after = np.cos(angle) ** 2 if schedule is LRSchedule.COSINE else np.ones(total)
    return list(peak * np.where(step < warmup, (step + 1) / (warmup + 1), after))


@pytest.mark.parametrize("schedule", LRSchedule)
@pytest.mark.parametrize(
    ("warmup", "total"),
    [(0, 1), (0, 2), (0, 500), (1, 500), (37, 500), (499, 500), (900, 500)],
)
def test_warmup_and_what_follows_equal_the_closed_form(schedule, warmup, total):
    used = rates(schedule, 0.3, warmup, total, total)
    expected = closed_form(schedule, 0.3, warmup, total)
    assert used == pytest.approx(expected, rel=0, abs=0.3 * _TOLERANCE)
    assert max(used) == (0.3 if total > warmup else pytest.approx(0.3 * 500 / 901))
