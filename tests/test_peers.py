"""`benchmarks.peers`: its loops do the same work, and its table says what it
measured.
"""

import gc
import json
from typing import Any

import pytest
import torch

from benchmarks import loops, peers, readme
from benchmarks.measured import RESULTS
from determined_amp.amp.settings import Precision
from determined_amp.trial.controller import SafeController
from determined_amp.trial.determined_private import controlled_by

FEW = 12


class Unmeasured:
    """Ends a loop after a few batches."""

    over = False

    def __init__(self):
        self._batches = 0

    def batch_begins(self):
        self.over = self._batches == FEW
        self._batches += 1


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_all_loops_that_are_compared_train_the_same_weights(precision, schedule):
    """Exactly; PyTorch's cosine multiplies one rate into the next, which rounds
    otherwise.
    """
    tolerance = 0.0 if schedule == "constant" else 1e-6
    case = loops.Case(precision, schedule, FEW + 1)
    with controlled_by(SafeController):
        trained = {}
        for name, loop in peers.LOOPS.items():
            turns: Any = Unmeasured()
            trained[name] = loop(case, turns).state_dict()
    reference = trained.pop(peers.REFERENCE)
    assert len(trained) == 4
    for weights in trained.values():
        torch.testing.assert_close(weights, reference, rtol=0, atol=tolerance)
    torch.manual_seed(case.experiment.seed)
    assert not torch.equal(case.model().state_dict()["1.weight"], reference["1.weight"])


def test_ratio_of_two_loops_is_taken_within_each_round():
    """The second round is twice as slow for all."""
    rows = peers.summary({peers.REFERENCE: [100.0, 200.0], "loop": [110.0, 240.0]})
    loop = rows["loop"]
    assert loop["cpu_us"] == 175
    ratios = [loop[key] for key in ("ratio_low", "ratio", "ratio_high")]
    assert ratios == pytest.approx([1.125, 1.15, 1.175])
    assert rows[peers.REFERENCE]["ratio"] == 1
    assert peers.summary({peers.REFERENCE: [100.0]})[peers.REFERENCE]["ratio_high"] == 1


def test_pages_quote_the_table_of_the_committed_numbers():
    result = json.loads((RESULTS / "peers_cpu.json").read_text())
    table = peers.markdown(result)
    assert (RESULTS / "peers_cpu.md").read_text() == table
    pages = [path.read_text() for path in (readme.README, readme.EVIDENCE_PAGE)]
    assert pages == [readme.with_costs(page, result) for page in pages]
    assert peers.line(result) in pages[0]
    assert table in pages[1]
    in_bfloat16, in_float16 = (result["precisions"][each] for each in peers.PRECISIONS)
    assert list(in_float16) == list(peers.LOOPS)
    assert list(in_bfloat16)[: len(peers.LOOPS)] == list(peers.LOOPS)
    assert len(in_bfloat16) == len(peers.LOOPS) + 4


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [(peers.REFERENCE, 0, 1), (peers.AMP_LOOP, 20, 58), (peers.TEN_LINES, 20, 76)],
)
def test_batch_makes_few_calls_of_the_librarys_functions(name, least, most):
    gc.collect()  # trainings of other tests, which ended within a window
    calls = peers.calls_of(Precision.AMP_FP16.value, name).total() / 100
    assert least <= calls <= most
