"""`AmpLoop`: the same bits as in torch's own loop and in a trial, its state, errors and
page.

The trainings have two optimizers, clipping, accumulation, schedules and skipped steps.
"""

import copy
import importlib.util
import math
import re
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import distributed, nn
from torch.optim import lr_scheduler

from determined_amp import (
    AmpLoop,
    AmpSettings,
    AuditError,
    ConfigError,
    GuardError,
    Precision,
)
from determined_amp.amp.plain_data import Values
from determined_amp.amp.rehearse.precision_audit import audit_loss
from determined_amp.amp.slots import ProcessGroup
from determined_amp.experiment.experiment import read_yaml
from tests.harness import Reports, core_context_of, needs_fused, same_bits
from tests.loops import (
    BATCH,
    BATCHES,
    FP16,
    RATE,
    Case,
    OneModel,
    TorchAmp,
    Training,
    by_hand,
    fitted,
    make_batches,
    make_model,
    one_model,
)
from tests.run_here import ROOT, computed

WINDOW = 2
ADDED = ("batches", "epochs")  # by Determined, to each report


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, RATE, BATCHES // WINDOW)


FP32 = AmpSettings(Precision.FP32, audit=False)
CASES = {
    "fp16, fused": Case(fused=True, schedule=one_cycle),
    "fp16, two optimizers": Case(max_norms=(0.1, 0.1), schedule=one_cycle),
    "bf16": Case(
        settings=AmpSettings(Precision.AMP_BF16, audit=False), schedule=one_cycle
    ),
    "fp32, two optimizers": Case(max_norms=(0.1, 0.1), settings=FP32),
}
every_case = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_fused if case.fused else ())
        for name, case in CASES.items()
    ],
)


class Loop(Training):
    """A case in a loop of one's own, which reports after every window."""

    def __init__(self, case):
        super().__init__(case, AmpLoop(case.settings, "cpu"), WINDOW)
        self.reports = []

    def end_window(self):
        super().end_window()
        self.reports += computed([self.amp.report()])

    def state(self):
        parts = [
            copy.deepcopy(each.state_dict())
            for each in (*self.models, *self.optimizers)
        ]
        return {"parts": parts, "amp": self.amp.state_dict()}

    def load(self, state):
        parts = [*self.models, *self.optimizers]
        for each, saved in zip(parts, state["parts"], strict=True):
            each.load_state_dict(saved)
        self.amp.load_state_dict(state["amp"])


def looped(case, first=0, last=BATCHES, state=None):
    """Train from one batch to another, maybe from a state on."""
    made = Loop(case)
    if state is not None:
        made.load(state)
    made.run(first, last)
    return made


@every_case
def test_every_step_has_the_bits_of_torchs_own_loop_in_a_loop_and_in_a_trial(name):
    """With a fused optimizer torch's loop has other bits: ours reads its rate on the
    device.
    """
    case = CASES[name]
    alone, trial = looped(case), fitted(case, WINDOW, reporting_period=WINDOW)
    assert len(alone.bits) == BATCHES // WINDOW
    assert same_bits(alone.bits, trial.trial.bits)
    assert case.fused or same_bits(alone.bits, by_hand(case, WINDOW))
    assert alone.reports == computed(trial.reports.training, *ADDED)
    skipped = [v for k, v in alone.reports[-1].items() if k.startswith("skipped_steps")]
    if case.settings.scales_the_loss:
        assert all(0 < each < BATCHES // WINDOW for each in skipped), (
            "steps of both kinds"
        )
        assert len({float(bits[-1]) for bits in alone.bits}) > 2  # it fell, and grew
    if case.schedule is not None:
        assert not torch.equal(alone.bits[-1][-2], alone.bits[-2][-2])


@every_case
@pytest.mark.parametrize("stops_after", [WINDOW, BATCHES // 2])
def test_training_that_was_saved_and_loaded_has_the_same_bits(
    name, stops_after, tmp_path
):
    whole, first = looped(CASES[name]), looped(CASES[name], last=stops_after)
    torch.save(first.state(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    second = looped(CASES[name], stops_after, state=loaded)
    assert same_bits(first.bits + second.bits, whole.bits)
    assert first.reports + second.reports == whole.reports
    # Negative control: without the state of the loop something is another.
    if CASES[name].settings.scales_the_loss:
        fresh = looped(CASES[name], last=0).state()["amp"]
        lost = looped(CASES[name], stops_after, state={**loaded, "amp": fresh})
        assert not same_bits(first.bits + lost.bits, whole.bits)


class TestState:
    def test_state_of_several_optimizers_that_the_loop_does_not_know_is_refused(self):
        state = looped(CASES["fp32, two optimizers"], last=WINDOW).state()
        amp = AmpLoop(FP32, "cpu")
        words = (
            r"^the loop: load_state_dict: the state has the steps of 2 optimizers, and"
            r" 0 are known"
        )
        with pytest.raises(ConfigError, match=words):
            amp.load_state_dict(state["amp"])

    def test_state_of_a_scaler_is_refused_by_the_loop_and_loaded_by_its_scaler(self):
        amp, scaler = AmpLoop(FP16, "cpu"), torch.amp.GradScaler("cpu", init_scale=8.0)
        words = r"load_state_dict: got no state of a loop; .* amp\.sc"
        for state in (scaler.state_dict(), {}):
            with pytest.raises(ConfigError, match=words):
                amp.load_state_dict(state)
        amp.scaler.load_state_dict(scaler.state_dict())
        assert float(amp.loss_scale()) == 8.0

    def test_plateau_that_is_wrapped_after_the_state_was_loaded_is_resumed(self):
        def plateau(made):
            made.amp.wrap_optimizer(made.optimizer)
            return lr_scheduler.ReduceLROnPlateau(made.optimizer, patience=1)

        first, second = one_model(), one_model()
        first.amp.wrap_lr_scheduler(plateau(first))
        for metric in (1.0, 2.0):
            first.amp.validated(metric)
        later = plateau(second)
        second.amp.load_state_dict(first.amp.state_dict())
        second.amp.wrap_lr_scheduler(later)
        assert later.num_bad_epochs == 1
        second.amp.validated(2.0)
        assert second.optimizer.param_groups[0]["lr"] == 0.1 * RATE

    def test_counts_are_those_of_the_state_before_the_optimizer_is_known(self):
        first, second, third = (one_model(init_scale=2.0**10) for _ in range(3))
        for batch in (*make_batches()[:2], infinite()):
            first.train(batch)
        state = first.amp.state_dict()
        assert state["optimizers"][0]["applied"] == 2
        second.amp.load_state_dict(state)
        amp = second.amp
        assert (int(amp.applied_steps), amp.attempted_steps) == (2, 3)
        assert not amp.last_step_applied
        assert amp.state_dict() == state
        third.amp.load_state_dict(amp.state_dict())
        third.train(make_batches()[0])
        assert third.amp.report()["watch_applied_steps"] == 3
        assert len(third.amp.state_dict()["optimizers"]) == 1

    @pytest.mark.parametrize("wraps_last", [False, True])
    def test_schedule_that_begins_with_the_rate_of_a_loaded_optimizer_is_refused(
        self, wraps_last
    ):
        first, made = one_model("fp32"), one_model("fp32")
        for each in (first, made):
            each.optimizer = torch.optim.AdamW(each.model.parameters())
        first.amp.wrap_lr_scheduler(lr_scheduler.StepLR(first.optimizer, 1, 0.5))
        first.train(make_batches()[0])
        state = first.amp.state_dict()
        made.optimizer.load_state_dict(first.optimizer.state_dict())

        def wrap(kind, *args):
            made.amp.wrap_optimizer(made.optimizer)
            if wraps_last:
                made.amp.load_state_dict(state)
            made.amp.wrap_lr_scheduler(kind(made.optimizer, *args))
            made.amp.load_state_dict(state)

        with pytest.raises(ConfigError, match=r"rates \[0.0005\], .* with \[0.001\]"):
            wrap(lr_scheduler.StepLR, 1, 0.5)
        # One that computes every rate from the first is right at any time.
        made.amp.windows[made.optimizer].schedule = None
        wrap(lr_scheduler.LambdaLR, lambda step: 0.5**step)
        made.train(make_batches()[0])
        assert made.optimizer.param_groups[0]["lr"] == 0.001 / 4

    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
    def test_schedule_that_is_wrapped_first_follows_a_rate_that_was_changed(self, kind):
        states = []
        for rate in (0.5, 0.25):
            made = one_model("fp32")
            made.optimizer = kind(made.model.parameters(), lr=rate)
            made.amp.wrap_lr_scheduler(lr_scheduler.StepLR(made.optimizer, 1, 0.5))
            for optimizer, amp in states:
                made.optimizer.load_state_dict(optimizer)
                made.amp.load_state_dict(amp)
            made.train(make_batches()[0])
            states.append((made.optimizer.state_dict(), made.amp.state_dict()))
        assert made.optimizer.param_groups[0]["lr"] == 0.25 / 4

    def test_loop_that_has_moved_further_goes_back_to_a_loaded_state(self):
        case = Case(schedule=one_cycle)
        state, moved = looped(case, last=WINDOW).state(), looped(case)
        whole = list(moved.bits)
        moved.load(state)
        moved.run(WINDOW, BATCHES)
        assert same_bits(moved.bits[len(whole) :], whole[1:])


def test_process_group_joined_later_exchanges_through_the_gpu_of_the_loop(
    monkeypatch, tmp_path
):
    """The current GPU is the first one in every process that has not set another."""
    gpu, used = torch.device("cuda", 1), []

    def use(device):
        used.append(device)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", use)
    slots = ProcessGroup(gpu)
    assert (slots.rank, slots.size, slots.allgather(3)) == (0, 1, [3])
    assert used == []
    meeting = f"file://{tmp_path / 'meeting'}"
    distributed.init_process_group("gloo", meeting, rank=0, world_size=1)
    try:
        assert slots.allgather("mine") == ["mine"]
    finally:
        distributed.destroy_process_group()
    assert used == [gpu]


def test_misspelt_setting_of_the_script_is_named_and_not_tried_again():
    (policy,) = read_yaml(str(SCRIPTS / "any_loop.yaml"))["log_policies"]
    misspelt: Values = {"precision": "fp32", "growth_intervall": 5}
    with pytest.raises(ConfigError, match="did you mean growth_interval") as raised:
        AmpSettings(**misspelt)
    last = traceback.format_exception_only(raised.value)[-1]
    assert re.match(policy["pattern"], last)
    assert not re.match(policy["pattern"], "TypeError: growth_intervall")


class TestLoss:
    """What `update` is given is what `report` says."""

    def test_losses_of_any_type_are_reported_as_they_were(self):
        amp, loss = AmpLoop(FP32, "cpu"), torch.tensor(1.0)
        for given in (torch.Tensor.detach, torch.atleast_1d, torch.Tensor.half, float):
            amp.update(given(loss), samples=4)
            loss += 1.0
        assert amp.report()["loss"] == 2.5

    def test_losses_of_single_samples_are_refused(self):
        amp = AmpLoop(FP32, "cpu")
        with pytest.raises(
            ConfigError, match=r"^the loop: update: got a loss of shape \(4,\); all"
        ):
            amp.update(torch.ones(4), samples=4)


class TestAudit:
    """Of a model and a loss function, as `find_loss_scale` takes them."""

    def test_audit_counts_what_the_loop_computes_and_leaves_it_alone(self):
        made = one_model()
        before = copy.deepcopy(made.model.state_dict())
        audit = audit_loss(made.amp, made.loss_fn, BATCH)
        assert audit.share == 1
        assert audit.dtype is torch.float16
        assert same_bits(made.model.state_dict(), before)
        assert all(parameter.grad is None for parameter in made.model.parameters())
        with pytest.raises(AuditError, match=r"0\.0% of the FLOPs are in float16"):
            audit_loss(made.amp, partial(in_float32, made.loss_fn), BATCH)

    def test_audit_of_an_unknown_model_is_refused(self):
        model = make_model()
        with pytest.raises(
            ConfigError, match=r"^the loop: audit_loss: no model was given; allowed"
        ):
            audit_loss(
                AmpLoop(FP16, "cpu"),
                lambda batch: model(batch[0]).sum(),
                BATCH,
            )


def in_float32(loss_fn, batch):
    with torch.autocast("cpu", enabled=False):
        return loss_fn(batch)


# Loops as they are written elsewhere; each against torch's own scaler and autocast.


def infinite():
    inputs, labels = BATCH
    return inputs * math.inf, labels


# The calls of a batch whose loss is not finite, and which makes no step; `fill` zeroes
# its gradients in place.
LEFT_OUT = (
    "loss end",
    "backward zero end",
    "backward unscale end zero",
    "zero backward end",
    "backward fill end",
)


def leave_out(made, calls="loss end"):
    for call in calls.split():
        if call in ("loss", "backward"):
            loss = getattr(made, call)(infinite())
        elif call == "unscale":
            made.amp.scaler.unscale_(made.optimizer)
        elif call == "end":
            made.end(loss)
        else:
            made.optimizer.zero_grad(set_to_none=call == "zero")


class TestGuard:
    def test_guard_ends_the_loop_with_the_cause_and_says_if_its_state_is_good(self):
        made = one_model(init_scale=2.0**10, max_consecutive_skips=1)
        for batch in (BATCH, infinite(), infinite()):
            made.train(batch)
        with pytest.raises(GuardError, match="2 optimizer steps in a row") as ended:
            made.amp.report(infinite(), made.loss_fn)
        assert "Cause: input 0 of the batch is not finite in samples [0" in str(
            ended.value
        )
        assert ended.value.state_is_good
        assert ended.value.metrics["watch_consecutive_skips"] == 2
        weights = [each[:-1] for each in made.bits]
        assert same_bits(*weights)
        assert made.amp.steps(made.optimizer).attempted == 3
        assert not made.amp.last_step_applied
        with torch.no_grad():
            next(made.model.parameters()).fill_(math.nan)
        without_a_batch = r"give the newest batch .* amp\.report\(batch, loss"
        with pytest.raises(GuardError, match=without_a_batch) as ended:
            made.amp.report()
        assert not ended.value.state_is_good

    @pytest.mark.parametrize("precision", ["amp_fp16", "amp_bf16", "fp32"])
    @pytest.mark.parametrize("calls", LEFT_OUT)
    def test_guard_ends_a_loop_that_leaves_out_most_of_its_batches(
        self, calls, precision
    ):
        made = one_model(precision, init_scale=2.0**10)
        for _ in range(3):  # fewer than ten are not judged
            leave_out(made, calls)
            leave_out(made, calls)
            made.optimizer.zero_grad()
            made.train()
            made.amp.report()
        leave_out(made, calls)
        with pytest.raises(
            GuardError, match="the loss of 7 of 10 batches since the last look is not"
        ) as ended:
            made.amp.report(infinite(), made.loss_fn)
        assert "Cause: input 0 of the batch is not finite" in str(ended.value)
        assert ended.value.state_is_good == (precision == "amp_fp16")

    @pytest.mark.parametrize("precision", ["amp_fp16", "amp_bf16", "fp32"])
    @pytest.mark.parametrize("calls", LEFT_OUT)
    def test_guard_lets_a_loop_leave_out_half_of_its_batches(self, calls, precision):
        made = one_model(precision, init_scale=2.0**10)
        for number in range(5):
            leave_out(made, calls)
            made.optimizer.zero_grad()
            made.train()
            if number % 2:
                made.amp.report()

    def test_guard_ends_a_loop_that_trains_what_is_not_finite_among_what_it_leaves_out(
        self,
    ):
        made = one_model("amp_bf16")
        leave_out(made)
        made.train(infinite())
        with pytest.raises(GuardError, match="a parameter is not finite in amp_bf16"):
            made.amp.report()

    @pytest.mark.parametrize("skips_backward", [False, True])
    def test_guard_tells_accumulated_batches_from_those_that_are_left_out(
        self, *, skips_backward
    ):
        """Three of four batches wait for the step of the fourth, and log a NaN. Without
        a backward in two of them, half is left out, which the guard lets pass.
        """
        made = one_model(init_scale=2.0**10)
        for look in range(2):
            for number in range(40):
                waits = number % 4 < 3
                is_used = not (skips_backward and number % 4 in (1, 2))
                loss = made.backward() if is_used else made.loss()
                if not waits:
                    made.step()
                    made.optimizer.zero_grad()
                made.end(loss * math.nan if waits else loss)
            if look == 0:
                assert made.amp.report()["watch_applied_steps"] == 10
        made.end(made.loss(infinite()))
        raises = pytest.raises(GuardError, match="the loss of 21 of 41 batches since")
        with raises if skips_backward else nullcontext():
            made.amp.report()

    @pytest.mark.parametrize("applied", [0, 1])
    def test_saving_before_any_applied_step_warns_once(self, applied, caplog):
        made = one_model()
        made.amp.state_dict()
        assert "trained nothing" not in caplog.text  # it has not begun
        for batch in (*[infinite()] * 3, *make_batches()[:applied]):
            made.train(batch)
        for _ in range(2):
            made.amp.state_dict()
        assert caplog.text.count("this run has trained nothing") == 1 - applied


def leaves_out_large_steps(made, *, zeroes_first, set_to_none):
    for number, batch in enumerate(make_batches()):
        if zeroes_first:
            made.optimizer.zero_grad(set_to_none)
        loss = made.backward(batch)
        made.amp.scaler.unscale_(made.optimizer)
        norm = nn.utils.clip_grad_norm_(made.model.parameters(), 1.0)
        if math.isfinite(norm) and number % 3:
            made.step()
        if not zeroes_first:
            made.optimizer.zero_grad(set_to_none)
        made.end(loss)


@pytest.mark.parametrize("zeroes_first", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_step_left_out_for_its_norm_moves_the_scale_as_in_torchs_own_loop(
    *, zeroes_first, set_to_none
):
    by_hand, made = OneModel(TorchAmp(FP16)), OneModel(AmpLoop(FP16, "cpu"))
    for each in (by_hand, made):
        leaves_out_large_steps(each, zeroes_first=zeroes_first, set_to_none=set_to_none)
    assert same_bits(made.bits, by_hand.bits)
    assert len({float(bits[-1]) for bits in made.bits}) > 2  # it fell, and grew


def test_running_statistics_that_an_overflow_has_changed_are_saved_as_before():
    amp = AmpLoop(FP16, "cpu")
    model = amp.prepare(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    with amp.autocast():
        model(torch.full((4, 2), math.inf))
    amp.state_dict()
    assert model.state_dict()["0.running_mean"].tolist() == [0.0, 0.0]


def test_state_saved_between_step_and_update_counts_the_step():
    made = one_model()
    loss = made.backward()
    made.step()
    early = made.amp.state_dict()
    made.end(loss)
    assert early == made.amp.state_dict()
    assert early["optimizers"][0]["attempted"] == 1


# The page and its script.

PAGE = (ROOT / "docs" / "any_loop.md").read_text()
SCRIPTS = ROOT / "docs" / "any_loop"


def load_script(name):
    spec = importlib.util.spec_from_file_location(f"any_loop_{name}", SCRIPTS / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_shows_both_scripts_and_the_yaml_whole():
    shown = re.findall(
        r"^```(?:python|yaml)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE
    )
    for file in ("plain.py", "train.py", "any_loop.yaml"):
        assert (SCRIPTS / file).read_text() in shown, file


def test_plain_script_that_was_killed_goes_on_to_the_same_bits(folder, monkeypatch):
    script = load_script("plain.py")
    settings = AmpSettings(Precision.AMP_FP16, init_scale=2.0**22, growth_interval=30)
    whole = script.train(settings, folder / "whole.pt")

    def batch_of(step, device):
        if step == 120:
            raise InterruptedError
        return make_batch(step, device)

    make_batch = script.batch_of
    monkeypatch.setattr(script, "batch_of", batch_of)
    with pytest.raises(InterruptedError):
        script.train(settings, folder / "killed.pt")
    monkeypatch.undo()
    killed = script.train(settings, folder / "killed.pt")
    assert same_bits(whole.state_dict(), killed.state_dict())


def core_of(folder, *, preempts=False):
    reports = Reports()
    made = core_context_of(folder, reports=reports)
    made.preempt.should_preempt = lambda *_, **named: preempts
    return made, reports


def test_script_that_was_paused_goes_on_to_the_same_bits(folder):
    script = load_script("train.py")
    settings = AmpSettings(Precision.AMP_FP16, init_scale=2.0**22, growth_interval=30)
    context, whole_reports = core_of(folder / "whole")
    with context:
        whole = script.train(context, settings)
    assert whole_reports.training[-1]["loss"] < 0.5 * whole_reports.training[0]["loss"]
    assert whole_reports.validation[0]["validation_loss"] < 0.6
    latest, reports = None, []
    for _ in range(200 // script.CHECKPOINT_EVERY):  # paused at every checkpoint
        context, each = core_of(folder / "paused", preempts=True)
        with context:
            paused = script.train(context, settings, latest)
        saved = sorted(
            (folder / "paused").iterdir(), key=lambda path: path.stat().st_mtime_ns
        )
        latest = saved[-1].name
        reports += each.training
    assert len(saved) == 4
    assert same_bits(whole.state_dict(), paused.state_dict())
    assert computed(whole_reports.training) == computed(reports)
    assert reports[-1]["skipped_steps"] > 0


# In turn: the gradient of a backward, and what is called then.
@pytest.mark.parametrize(
    ("calls", "norm"),
    [
        ("4 clip step end", 4.0),
        ("4 clip clip step end", 4.0),
        ("1 clip step end 9 clip end 3 clip step end", 2.0),
        ("1 clip step end 9 clip 3 clip step end", 2.0),
        ("3 clip update 1 clip step end", 1.0),
        ("1 clip step end 1 step end", None),
    ],
)
def test_reported_norm_is_that_before_the_first_clip_of_each_step(calls, norm):
    """If each has one. Those of steps that are left out do not count."""
    weight, amp, optimizer = one_weight()
    do = {
        "clip": lambda: amp.clip_gradients(optimizer, 0.5),
        "step": lambda: amp.scaler.step(optimizer),
        "update": amp.scaler.update,
        "end": amp.update,
    }
    for call in calls.split():
        if call in do:
            do[call]()
        else:
            optimizer.zero_grad()
            loss = (weight * float(call)).sum()
            torch.autograd.backward(amp.scaler.scale(loss))
    assert amp.report().get("watch_grad_norm") == norm


def one_weight():
    """In a loop that moves it by nothing."""
    weight = nn.Parameter(torch.ones(1))
    amp = AmpLoop(AmpSettings(Precision.AMP_FP16, init_scale=4.0), "cpu")
    return weight, amp, amp.wrap_optimizer(torch.optim.SGD([weight], lr=0.0))


def test_rehearsal_after_any_call_changes_neither_steps_nor_report():
    def rehearse(amp, optimizer):
        with amp.without_steps(2.0**10):
            amp.scaler.scale(torch.ones(()))
            amp.scaler.unscale_(optimizer)
            amp.clip_gradients(optimizer)
            amp.scaler.step(optimizer)
            amp.scaler.update()
            amp.update(torch.ones(()))

    def left(after):
        made = one_model(init_scale=2.0**17, growth_interval=2)
        calls = made.amp, made.optimizer
        after(*calls)
        torch.autograd.backward(made.loss())
        with pytest.raises(ConfigError, match="it does not scale the loss"):
            made.step()
        made.optimizer.zero_grad()
        for batch in make_batches():
            loss = made.backward(batch)
            after(*calls)
            made.amp.clip_gradients(made.optimizer, 0.5)
            after(*calls)
            made.step()
            after(*calls)
            made.optimizer.zero_grad()
            made.end(loss)
            after(*calls)
        return made.bits, computed([made.amp.report()])

    assert same_bits(left(rehearse), left(lambda *given: None))


def test_optimizer_that_a_loop_does_not_know_steps_nothing_in_a_rehearsal():
    weight, amp, known = one_weight()
    unknown = torch.optim.Adam([weight], lr=0.1)
    amp.start()
    with amp.without_steps():
        weight.grad = amp.scaler.scale(torch.ones(1))
        unknown.step()
    assert weight.item() == 1
    assert not unknown.state
    assert [*amp.windows] == [known]


def test_guard_of_a_loop_watches_the_weights_of_its_optimizers_without_a_prepare():
    weight = nn.Parameter(torch.tensor(math.nan))
    amp = AmpLoop(AmpSettings(Precision.FP32), "cpu")
    amp.start()
    amp.wrap_optimizer(torch.optim.SGD([weight], lr=1.0))
    amp.update()
    with pytest.raises(GuardError, match="a parameter is not finite"):
        amp.report()


def test_first_batch_after_a_resume_makes_no_step_if_it_is_left_out():
    saved = one_model(init_scale=4.0)
    saved.train(BATCH)
    made = one_model()
    made.amp.wrap_optimizer(made.optimizer)
    made.amp.load_state_dict(saved.amp.state_dict())
    leave_out(made)
    made.amp.report()
    assert (made.amp.metrics.left_out, made.amp.metrics.batches) == (1, 1)


@pytest.mark.parametrize("steps", [True, False])
def test_overflow_that_one_optimizer_leaves_out_moves_the_scale_of_both(*, steps):
    weight, amp, first = one_weight()
    other = nn.Parameter(torch.ones(1))
    second = torch.optim.SGD([other], lr=0.1)
    torch.autograd.backward(amp.scaler.scale(weight.sum() * math.inf))
    amp.scaler.unscale_(first)
    first.zero_grad()
    torch.autograd.backward(amp.scaler.scale(other.sum()))
    if steps:
        amp.scaler.step(second)
    amp.update()
    assert int(amp.steps(second).applied) == steps
    assert float(amp.loss_scale()) == 2


@pytest.mark.parametrize("prepared", [True, False])
def test_loop_without_a_prepared_model_says_what_it_does_not_watch(caplog, *, prepared):
    amp = AmpLoop(AmpSettings(Precision.FP32), "cpu")
    if prepared:
        amp.prepare(nn.Linear(1, 1))
    with amp.autocast(), amp.autocast():
        pass
    assert caplog.text.count("no model was given to amp.prepare") == 1 - prepared


class StepsInThreads(torch.optim.Optimizer):
    """Hands the step of each parameter to a thread of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        weights = self.param_groups[0]["params"]
        self.inner = [torch.optim.SGD([weight], lr=0.1) for weight in weights]

    def step(self, closure=None):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda optimizer: optimizer.step(), self.inner))


@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_step_that_an_optimizer_hands_to_threads_is_no_mistake(precision):
    made = one_model(precision, init_scale=1024.0)
    made.optimizer = StepsInThreads(made.model.parameters())
    for batch in make_batches()[:3]:
        made.train(batch)
    assert made.amp.applied_steps == 3
    assert made.amp.last_step_applied


def test_scale_stays_while_gradients_accumulate_after_a_step_that_was_left_out():
    made = one_model(init_scale=1024.0)
    made.backward(infinite())
    made.amp.clip_gradients(made.optimizer)
    made.optimizer.zero_grad()
    made.end(made.backward())
    made.train()
    assert [float(bits[-1]) for bits in made.bits] == [1024.0, 512.0]
