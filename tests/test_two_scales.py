"""`check.two_scales`: a correct script trains alike at any loss scale."""

import contextlib
import multiprocessing
import os
import select
import signal
import time
from functools import partial

import pytest

from determined_amp.check.two_scales import ScaleComparison, WaitingRuns
from tests.right_scripts import PRELUDE

# A loop; a script puts its own lines behind its backward, its step and its update.
LOOP = """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
kept = {{}}
average = {{p: torch.zeros_like(p) for p in model.parameters()}}
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
        loss = loss + sum((a * p ** 2).sum() for p, a in average.items())
    scaler.scale(loss).backward()
    {behind_backward}
    scaler.step(optimizer)
    scaler.update()
"""
PARAMETERS = "\n    for p in model.parameters():\n        "

RIGHT_LINES = {
    "nothing": "pass",
    "unscaled before the average": "scaler.unscale_(optimizer)"
    f"{PARAMETERS}average[p].lerp_(p.grad.abs(), 0.1)",
    "average of divided gradients": "scale = scaler.get_scale()"
    f"{PARAMETERS}average[p].lerp_(p.grad.abs() / scale, 0.1)",
    "clips unscaled gradients": "scaler.unscale_(optimizer)\n"
    "    nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
    "clips at the scaled limit": "limit = 0.1 * scaler.get_scale()\n"
    "    nn.utils.clip_grad_norm_(model.parameters(), limit)",
    # torch adds 1e-6 to the norm, which changes some digits of small gradients.
    "clips small gradients at the scaled limit": f"pass{PARAMETERS}p.grad *= 2**-8\n"
    "    limit = 0.1 * scaler.get_scale() / 2**8\n"
    "    nn.utils.clip_grad_norm_(model.parameters(), limit)"
    f"{PARAMETERS}p.grad *= 2**8",
}
WRONG_LINES = {
    "steps that a limit of the scaled norm slows": "norm = torch.stack([p.grad.norm() "
    "for p in average])\n"
    "    optimizer.param_groups[0]['lr'] = 0.01 if float(norm.sum()) > 100 else 0.1",
    "average of scaled gradients": f"pass{PARAMETERS}"
    "average[p].lerp_(p.grad.abs(), 0.1)",
    "rate by a scaled norm": "norm = torch.stack([p.grad.norm() for p in average])\n"
    "    optimizer.param_groups[0]['lr'] = 0.1 / (1 + float(norm.sum()))",
    "gradients kept over an update": f"pass{PARAMETERS}p.grad += kept.get(p, 0)\n"
    "        kept[p] = p.grad.clone() / 2",
    "rate that moves where an update leaves the scale": "if kept.get(0) == "
    "scaler.get_scale():\n        optimizer.param_groups[0]['lr'] *= 0.5\n"
    "    kept[0] = scaler.get_scale()",
    "weights moved by a scaled gradient": f"pass{PARAMETERS}"
    "p.data.add_(p.grad, alpha=-1e-4)",
}


@pytest.fixture
def compared(tmp_path):
    """Compares the trainings of a script."""

    def compare(script, steps=10, seconds=60.0):
        file = tmp_path / "script.py"
        file.write_text(PRELUDE + script)
        program = compile(file.read_text(), str(file), "exec")
        runs = WaitingRuns(partial(exec, program, {"__name__": "__main__"}))
        with contextlib.closing(runs):
            return runs.compare(steps, seconds)

    return compare


@pytest.mark.parametrize("name", RIGHT_LINES)
def test_losses_and_weights_of_a_right_script_are_equal_at_both_scales(name, compared):
    script = LOOP.format(behind_backward=RIGHT_LINES[name])
    assert compared(script) == ScaleComparison(10, None)


@pytest.mark.parametrize("name", WRONG_LINES)
def test_use_of_scaled_gradients_differs_between_the_scales(name, compared):
    comparison = compared(LOOP.format(behind_backward=WRONG_LINES[name]))
    assert comparison.first.where.file.endswith("script.py")
    assert comparison.proven is ("leaves the scale" not in name)
    assert 0 < comparison.steps < 10


def test_rounding_that_differs_each_time_hides_no_difference(compared):
    """Some kernels of a GPU add numbers in another order each time."""
    wrong = WRONG_LINES["average of scaled gradients"]
    noise = "1 + __import__('time').time_ns() % 97 / 97e6"
    line = f"optimizer.param_groups[0]['lr'] *= {noise}"
    comparison = compared(LOOP.format(behind_backward=f"{wrong}\n    {line}"))
    assert comparison.proven
    assert comparison.reason == ""


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("inputs.half()", "16-bit tensors"),
        (
            "optimizer.param_groups[0]['lr'] = __import__('time').time_ns() % 97 / 1e3",
            "equal seeds gave other numbers",
        ),
        ("raise ValueError('no more')", "it raises ValueError in float32: no more"),
        ("scaler.update(10000.0)", "no power of two"),
        ("raise SystemExit('gone')", "it exits with gone"),
        ("__import__('os')._exit(3)", "a training died"),
    ],
    ids=[
        "16-bit weights",
        "other numbers each time",
        "error",
        "scale",
        "exit",
        "death",
    ],
)
def test_script_that_cannot_be_compared_is_not_judged(line, reason, compared):
    wrong = WRONG_LINES["average of scaled gradients"]
    comparison = compared(LOOP.format(behind_backward=f"{wrong}\n    {line}"))
    assert comparison.first is None
    assert reason in comparison.reason


def test_training_ends_where_skipped_steps_have_made_the_scale_too_low(compared):
    """Float32, too, would lose small gradients there, in a training that is right."""
    lines = f"kept[len(kept)] = 0{PARAMETERS}"
    lines += "4 < len(kept) < 60 and p.grad.fill_(torch.inf)"
    script = LOOP.format(behind_backward=lines)
    script = script.replace("loader():", "3 * [*loader()]:")
    assert compared(script) == ScaleComparison(4, None)


def test_loop_of_the_library_is_compared(compared):
    script = """\
from determined_amp import AmpLoop, AmpSettings
amp = AmpLoop(AmpSettings("amp_fp16"), "cpu")
model = amp.prepare(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in loader():
    with amp.autocast():
        loss = F.cross_entropy(model(inputs), targets)
    amp.scaler.scale(loss).backward()
    amp.scaler.step(optimizer)
    optimizer.zero_grad()
    amp.update(loss)
"""
    assert compared(script) == ScaleComparison(10, None)


def test_process_that_waits_ends_although_a_loader_holds_its_connection():
    runs = WaitingRuns(lambda: None)
    held = runs._here.fileno()
    kept = os.dup(held)
    runs.close()
    os.close(kept)
    assert not runs._process.is_alive()


@pytest.mark.parametrize("is_asked", [False, True], ids=["waiting", "training"])
def test_process_that_compares_ends_with_the_one_that_asks(is_asked):
    ended, held = os.pipe()  # it ends where nobody holds the other side any more

    def ask():
        runs = WaitingRuns(partial(time.sleep, 60))
        os.write(held, str(runs._process.pid).encode())
        if is_asked:
            runs._here.send((1, 60.0))
            time.sleep(0.5)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=ask)
    process.start()
    os.close(held)
    waiting = int(os.read(ended, 20))
    process.join()
    has_ended = bool(select.select([ended], [], [], 20.0)[0])
    os.close(ended)
    if not has_ended:
        os.kill(waiting, signal.SIGKILL)
    assert has_ended


def test_training_that_takes_too_long_counts_as_far_as_it_came(compared):
    alarm = "import signal\n    if len(kept) == 5:\n        "
    alarm += "signal.raise_signal(signal.SIGALRM)\n    kept[len(kept)] = 0"
    assert compared(LOOP.format(behind_backward=alarm)) == ScaleComparison(5, None)
