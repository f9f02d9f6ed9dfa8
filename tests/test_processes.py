"""Several ranks on this machine: gloo, DistributedDataParallel."""

import json
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from determined import core
from torch import distributed

from determined_amp.amp.errors import UserError
from determined_amp.local.processes import StopOnSignal, on_stop_signals, process_group
from determined_amp.runs.run import RunState
from tests import run_here, strangers, two_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two ranks left: their output in `output`, a small MLP run in `two`."""
    folder = tmp_path_factory.mktemp("ranks")
    output = folder / "output"
    status = run_here.wait(run_here.fork(lambda: two_ranks.start(folder), output))
    assert status == 0, output.read_text()
    return folder


def lines_of(folder, key):
    """What both ranks said in the lines that begin with this key, which is their
    rank.
    """
    lines = (folder / "output").read_text().splitlines()
    ranks = [json.loads(line) for line in lines if line.startswith(f'{{"{key}"')]
    assert {rank[key] for rank in ranks} == {0, 1}
    return ranks


def test_overflow_on_one_rank_skips_the_step_on_both(folder):
    """Rank 0 sees x = inf in the second batch: the mean gradient is inf on both.

    Steps: -0.5 * 1, skipped, -0.5 * mean(1, 3) = -1. Scale from 4: one good step,
    halved, one good.
    """
    ranks = lines_of(folder, "rank")
    for rank in ranks:
        assert rank["weights"] == [0.5, 0.5, -0.5]
        assert rank["scales"] == [4, 2, 2]
    (report,) = next(rank["reports"] for rank in ranks if rank["rank"] == 0)
    assert (report["watch_applied_steps"], report["skipped_steps"]) == (2, 1)


def test_two_ranks_of_an_amp_loop_train_and_end_as_those_of_a_trial(folder):
    """The rows of the trial above; then rank 0 alone overflows twice, and both end with
    its cause.

    Once with the processes of Determined, and once with those of torch, which a loop
    finds itself.
    """
    ranks = lines_of(folder, "own loop")
    assert len(ranks) == 4
    for rank in ranks:
        assert rank["weights"] == [0.5, 0.5, -0.5, -0.5, -0.5]
        assert rank["scales"] == [4, 2, 2, 1, 1]
        assert rank["steps"] == [2, 1]
        assert (
            "Cause: input 0 of the batch is not finite in samples [0]" in rank["ended"]
        )
        assert rank["weight afterwards"] == -0.5


def test_accumulation_window_exchanges_gradients_once(folder):
    """Gradients of window one: rank 0 mean(1, 1), rank 1 mean(1, 3): w moves by -0.5 *
    1.5.

    In the second, rank 0 sees inf before the exchange: it is in the sum, and both ranks
    skip. The negative control is Determined's own accumulation, which exchanges after
    every batch.
    """
    for rank in lines_of(folder, "window"):
        assert rank["weights"] == [1, 0.25, 0.25, 0.25]
        assert rank["scales"] == [4, 4, 4, 2]
        assert rank["exchanges"] == 2
        assert rank["exchanges of replays"] == 0  # each rank looks at its own batch
        assert rank["weights of Determined alone"] == rank["weights"]
        assert rank["exchanges of Determined alone"] == 4


def test_two_ranks_skip_the_step_of_one_optimizer_together(folder):
    """Rank 0 gets every first row. Its discriminator overflows in the second batch.

    Steps of the discriminator: mean(1, 1), skipped, mean(1, 3); of the generator: 1, 1
    and 2.
    """
    for rank in lines_of(folder, "optimizers"):
        assert rank["weights"] == [1.0 - 0.5 * (1 + 2), 1.0 - 0.5 * (1 + 1 + 2)]
        assert rank["applied"] == [2, 3]
        # As trained, at a small scale and in float32; on both, though only one saw the
        # fault.
        assert rank["diagnosed"] == 3
        assert "input 0 of the batch is not finite" in rank["warning"]


def test_two_ranks_train_an_unmodified_trial_as_the_converted_one(folder):
    first, second = lines_of(folder, "unmodified")
    assert (
        len({first["Plain"], first["Converted"], second["Plain"], second["Converted"]})
        == 1
    )


def test_two_ranks_find_the_same_scale_where_one_has_larger_gradients(folder):
    first, second = lines_of(folder, "found")
    assert first["scale"] == second["scale"] < 2.0**12
    assert first["weights"] == second["weights"]


def test_two_ranks_resume_shuffled_batches_as_if_undisturbed(folder):
    """Ten batches of each are four epochs of five.

    Batches that differ in size, and a validation of the chief alone, leave each rank
    with a random state of its own.
    """
    ranks = lines_of(folder, "shuffled")
    for rank in ranks:
        assert rank["resumed"] == rank["seen"]
        assert rank["weights"][0] == rank["weights"][1]
    epochs = [rank["seen"] for rank in ranks]
    assert sorted(epochs[0] + epochs[1]) == sorted(4 * list(range(strangers.SAMPLES)))


def test_accumulation_window_that_overflows_on_one_rank_is_skipped_on_both(folder):
    """The trial clamps what overflowed before the ranks exchange it."""
    first, second = lines_of(folder, "unmodified")
    assert first["loud"] == second["loud"]
    assert [(rank["skipped"], rank["applied"]) for rank in (first, second)] == [
        (1, 1),
        (1, 1),
    ]


def test_two_ranks_train_as_one_with_the_same_global_batch(folder, tmp_path):
    """The same samples in the same steps; only the order of float32 sums differs.

    A sum of 32 terms regrouped is off by a few 2^-24 relative; 12 Adam steps of 1e-3
    keep the loss within 1e-5 of 2.3.
    """
    assert run_here.end(folder / "two") == ("completed", "", 12)
    one = run_here.run_small("mlp/fp32.yaml", tmp_path)
    for alone, together in zip(
        run_here.metrics(one), run_here.metrics(folder / "two"), strict=True
    ):
        assert together["batches"] == alone["batches"]
        for name in {"loss", "validation_loss", "watch_grad_norm"} & alone.keys():
            assert together[name] == pytest.approx(alone[name], abs=1e-5)


def test_two_ranks_train_compiled_as_they_do_without(folder):
    assert [rank["graphs"] for rank in lines_of(folder, "compiled")] == [1, 1]
    two, compiled = (
        run_here.checkpoint(folder / name, 12) for name in ("two", "compiled")
    )
    assert run_here.digest(two["models_state_dict"]) == run_here.digest(
        compiled["models_state_dict"]
    )


def test_global_batch_size_that_the_ranks_do_not_divide_is_refused(folder):
    """The YAML asks for one slot and torchrun started two: Determined would shrink the
    batch.
    """
    assert (
        "got 33, which does not divide among 2 slots" in (folder / "output").read_text()
    )
    assert run_here.end(folder / "odd")[0] == "failed"


class TestStop:
    def test_ranks_stop_when_the_chief_says_so(self):
        """Ranks that stop at different batches wait for each other forever."""
        sent = []
        chief: Any = SimpleNamespace(rank=0, size=2, broadcast=sent.append)
        rank: Any = SimpleNamespace(rank=1, size=2, broadcast=lambda mine: sent[-1])
        told, tells = StopOnSignal(rank), StopOnSignal(chief)
        for of_the_chief in (False, True):
            asked = (RunState.STOPPED, "why")
            tells.asked = asked if of_the_chief else None
            told.asked = None if of_the_chief else asked
            tells.should_preempt()
            assert told.should_preempt() is of_the_chief
        assert sent == [False, True]

    def test_stop_is_acknowledged_once_where_there_is_a_terminal(self, capfd):
        """The next report may be minutes away."""
        alone = core.DummyDistributedContext()
        with on_stop_signals(StopOnSignal(alone, lambda line: True).on_signal):
            signal.raise_signal(signal.SIGTERM)
        assert not capfd.readouterr().err
        with on_stop_signals(StopOnSignal(alone).on_signal):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        assert capfd.readouterr().err.count("stopping at the next report") == 1

    @pytest.mark.parametrize(
        "first", [signal.SIGTERM, signal.SIGINT], ids=["after SIGTERM", "after Ctrl-C"]
    )
    @pytest.mark.parametrize(
        ("second", "at_once"),
        # On one Ctrl-C torchrun terminates what the terminal has interrupted.
        [(signal.SIGINT, True), (signal.SIGTERM, False)],
        ids=["Ctrl-C", "SIGTERM"],
    )
    def test_second_signal_stops_at_once_if_it_is_ctrl_c(
        self, first, second, *, at_once
    ):
        before, interrupted = signal.getsignal(signal.SIGTERM), False
        stop = StopOnSignal(core.DummyDistributedContext())
        with on_stop_signals(stop.on_signal):
            assert not stop.should_preempt()
            signal.raise_signal(first)
            assert stop.should_preempt()
            try:
                signal.raise_signal(second)
            except KeyboardInterrupt:  # which would end the whole session of pytest
                interrupted = True
        assert interrupted is at_once
        assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("size", ["2", "abc", "0"])
def test_world_size_without_a_rank_is_one_sentence(size, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", size)
    lines_of = (
        f"WORLD_SIZE: got '{size}' .*without RANK, .*; allowed: .*unset WORLD_SIZE"
    )
    with pytest.raises(UserError, match=lines_of), process_group():
        pass


def test_each_process_takes_its_gpu_before_the_group(monkeypatch):
    """NCCL and Determined would otherwise put every process onto the first GPU."""
    done = []
    for name, value in two_ranks.of_torchrun(1).items():
        monkeypatch.setenv(name, value)
    # put back afterwards: it is set in there
    monkeypatch.setenv("USE_TORCH_DISTRIBUTED", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)

    def begin(backend):
        done.append(backend)
        raise ConnectionError

    monkeypatch.setattr(distributed, "init_process_group", begin)
    with pytest.raises(ConnectionError), process_group():
        pass
    assert done == [1, "cpu:gloo,cuda:nccl"]
