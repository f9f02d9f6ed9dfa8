"""What `check` says of right scripts, and of scripts with one mistake each.

An answer that is not right yet is in `NOT_YET`, with the kind of what is missing; its
test turns red when the answer becomes right, and the name is then taken out.
"""

import gc
import linecache
import math
from contextlib import ExitStack, suppress
from functools import cache

import pytest
import torch
from torch.torch_version import TorchVersion

from determined_amp import AmpLoop, AmpSettings, Precision
from determined_amp.check import watching
from determined_amp.check.advice import fitted_to_script
from determined_amp.check.causes import CauseSearch
from determined_amp.check.finding import ROWS, CheckFinding, CheckFindings, Level, Where
from determined_amp.check.judge import judge_record
from determined_amp.check.record import Record
from determined_amp.check.stand_in import ONLY_ON_A_GPU
from determined_amp.check.two_scales import WaitingRuns
from tests.right_scripts import PRELUDE, RIGHT
from tests.wrong_scripts import WRONG

pytestmark = pytest.mark.usefixtures("_libraries_are_collected_once")

# A CPU has fused optimizers from here on; the oldest torch has other NaN gradients.
IS_NEWER = TorchVersion(torch.__version__) >= "2.4"

NOT_YET = {}

# What may be suspected of right scripts, which nobody can tell from a mistake.
SUSPECTED = {
    "batches_without_targets": "loss_not_finite",
    "leaves_out_a_rare_nan": "left_out",
    "outliers_bring_the_scale_down": "no_steps",
    "schedule_guarded_by_the_scale_where_batches_are_bad": "no_steps",
    "sum_over_pixels_with_outliers": "no_steps",
    "window_summed_in_own_buffers": "zero_grad_in_window",
}


def names_in(scripts):
    """Their names, as parameters of a test."""
    parameters = []
    for name in scripts:
        missing = [kind for kind, names in NOT_YET.items() if name in names.split()]
        marks = [pytest.mark.xfail(reason=kind, strict=IS_NEWER) for kind in missing]
        if "fused" in name:
            needs = "fused optimizers of a CPU need torch 2.4"
            marks.append(pytest.mark.skipif(not IS_NEWER, reason=needs))
        parameters.append(pytest.param(name, marks=marks))
    return parameters


def prepared():
    """The names that scripts begin with."""
    names = {}
    exec(compile(PRELUDE, "prelude.py", "exec"), names)
    return names


@pytest.mark.parametrize("name", names_in(RIGHT))
def test_right_script_has_no_fault_and_no_suspicion_but_one_that_is_fair(name):
    findings = findings_of(RIGHT[name], f"{name}.py")
    assert [finding.text() for finding in findings.faults] == []
    fair = {SUSPECTED[name]} if name in SUSPECTED else set()
    assert {finding.key for finding in findings} == fair
    assert findings.are_right


def test_findings_that_were_not_filled_do_not_say_that_there_are_none():
    assert str(CheckFindings()).startswith("nothing was trained")


@cache
def findings_of(script, file, *, compares=False):
    """What is said of a script, which may raise; several tests read the same.

    Two loss scales are compared only where the answer needs it, which takes longer.
    """
    names = prepared()
    linecache.cache[file] = (len(script), None, script.splitlines(True), file)
    program = compile(script, file, "exec")
    with ExitStack() as stack:
        if compares:
            again = WaitingRuns(lambda: exec(program, prepared()))
            stack.callback(again.close)
        with suppress(Exception), watching() as findings:
            exec(program, names)
        if compares and not findings.record.error:
            findings.record.at_two_scales = again.compare(24, 60.0)
            findings = judge_record(findings.record)
    # A hook of a graph holds them in a circle that Python does not see.
    names.clear()
    gc.collect()
    gc.freeze()  # the doctor looks at all other objects when it begins
    return findings


def test_script_that_ends_itself_has_raised_no_error():
    script = RIGHT["torch_recipe"] + "raise SystemExit(2)\n"
    with suppress(SystemExit), watching() as findings:
        exec(compile(script, "ends.py", "exec"), prepared())
    assert [finding.key for finding in findings] == []


def test_scale_moved_below_the_floor_of_a_loop_comes_back_after_a_skip():
    names = prepared()
    with watching():
        loop = AmpLoop(AmpSettings(Precision.AMP_FP16, min_scale=1024.0), "cpu")
        model = loop.prepare(names["net"]())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (inputs, targets) in enumerate(names["loader"]()):
            with loop.autocast():
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss = loss * math.nan if number == 1 else loss
            loop.scaler.scale(loss).backward()
            loop.scaler.step(optimizer)
            optimizer.zero_grad()
            loop.update(loss)
            if number == 4:
                break
    assert loop.scaler.get_scale() == 2.0**15


def test_script_that_only_validates_is_not_called_right():
    script = """\
model = net()
with torch.no_grad(), autocast("cuda", dtype=torch.float16):
    for inputs, targets in loader():
        F.cross_entropy(model(inputs), targets)
"""
    findings = findings_of(script, "validates.py")
    assert str(findings).startswith("nothing was trained, nothing was examined")
    assert not findings.are_right


@pytest.mark.parametrize(
    ("asks", "is_noted"),
    [
        ("", False),
        ("torch.nn.Linear(2, 2, device='cpu')", False),
        ("torch.cuda.is_available()", True),
        ("GradScaler('cuda')", True),
        ("autocast('cuda')", True),
        ("torch.device('cuda:0')", True),
        ("torch.nn.Linear(2, 2).to('cuda')", True),
        ("torch.nn.Linear(2, 2).cuda()", True),
        ("torch.ones(2, device='cuda')", True),
    ],
)
def test_script_is_told_that_there_is_no_gpu_only_if_it_asks_for_one(asks, is_noted):
    script = f"""\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{asks}
for inputs, targets in loader():
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    findings = findings_of(script, "asks.py")
    assert findings.trained
    is_here = torch.cuda.is_available()
    assert (ONLY_ON_A_GPU in findings.notes) is (is_noted and not is_here)


@pytest.mark.parametrize(
    ("name", "skipped"),
    [
        ("torch_clipping", 2),
        ("torch_accumulation", 2),
        ("lookahead", 2),
        ("zeroes_in_place", 2),
        ("steps_a_pair_of_optimizers", 4),
        ("gan_with_two_scalers", 4),
    ],
)
def test_two_steps_of_each_optimizer_overflow_and_a_note_numbers_them(name, skipped):
    findings = findings_of(RIGHT[name], f"{name}.py")
    assert f", {skipped} skipped, " in findings.seen
    note = "the doctor made an overflow in these steps of an optimizer: 6, 9"
    assert note in findings.notes


@pytest.mark.parametrize("overflows", [(), (5,)])
def test_note_says_where_no_overflow_was_made(overflows):
    with watching(overflows=overflows) as findings:
        exec(compile(RIGHT["torch_recipe"], "recipe.py", "exec"), prepared())
    told = [note for note in findings.notes if note.startswith("no overflow was made")]
    assert len(told) == (not overflows)


def test_clip_in_each_micro_batch_is_not_ordered_to_its_place():
    """There `unscale_` would raise in the second one."""
    script = """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for number, (inputs, targets) in enumerate(loader(), 1):
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets) / 2
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if number % 2 == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
    findings = findings_of(script, "micro.py")
    (fault,) = [each for each in findings if each.key == "clip_scaled"]
    assert not fault.orders
    assert "after the last backward of a step" in fault.write


@pytest.mark.skipif(
    not hasattr(torch.nn.utils, "clip_grads_with_norm_"), reason="not in torch 2.3"
)
def test_clip_in_two_parts_of_scaled_gradients_is_named():
    script = """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
    (fault,) = findings_of(script, "parts.py")
    assert fault.key == "clip_scaled"


def test_clip_whose_limit_moves_is_not_ordered_to_its_place():
    """The limit may be made of scaled norms, which the order would leave scaled."""
    script = WRONG["clip_before_unscale"].script
    fixed, moving = "(), 1.0)", "(), 1.0 + 0.1 * float(torch.rand(())))"
    assert fixed in script
    findings = findings_of(script.replace(fixed, moving), "moving.py")
    (fault,) = [each for each in findings if each.key == "clip_scaled"]
    assert not fault.orders


def test_closure_that_divides_its_gradients_by_hand_is_no_mistake():
    divides = """\
    for p in model.parameters():
        p.grad /= scaler.get_scale()
    return loss
"""
    script = WRONG["scaler_steps_lbfgs_with_a_closure"].script
    script = script.replace("    return loss\n", divides)
    script = script.replace(
        "scaler.step(optimizer, closure)", "optimizer.step(closure)"
    )
    script = script.replace("    closure()\n", "").replace("    scaler.update()\n", "")
    assert "closure" not in {each.key for each in findings_of(script, "by_hand.py")}


def test_steps_that_are_skipped_with_finite_losses_point_to_the_gradients():
    script = """\
model, kept = net(), {}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda", init_scale=1024.0)
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    for p in model.parameters():
        kept[p] = 0.5 * kept.get(p, 0.0) + 0.5 * p.grad
        p.grad += kept[p]
    scaler.step(optimizer)
    scaler.update()
"""
    findings = findings_of(script, "kept.py")
    (fault,) = [each for each in findings if each.key == "no_steps"]
    assert fault.write.startswith("the losses are finite")


def test_overflow_in_a_forward_is_told_with_its_module_and_what_helps():
    (fault,) = findings_of_mistake("inputs_beyond_float16").faults
    assert "first: a cast in 0 (Linear), beyond float16" in fault.effect
    assert "tried: the loss is finite in float32 and in bfloat16" in fault.effect
    assert not fault.orders  # a cast by hand stays in float16
    assert "dtype=torch.bfloat16" in fault.write


def findings_of_mistake(name):
    """What is said of one of the scripts with a mistake."""
    mistake = WRONG[name]
    compares = "depends_on_scale" in mistake.findings
    return findings_of(mistake.script, f"{name}.py", compares=compares)


@pytest.mark.parametrize("name", names_in(WRONG))
def test_mistake_is_told_with_its_cause_and_its_line(name):
    mistake = WRONG[name]
    findings = findings_of_mistake(name)
    told = [each for each in findings if each.key in mistake.findings.split("|")]
    assert {each.level.value for each in told} & set(mistake.level.split("|"))
    assert all(each.write and each.effect for each in told)
    assert [each.key for each in findings.faults if each not in told] == []
    lines = enumerate(mistake.script.splitlines(), start=1)
    here = {number for number, line in lines if line.endswith("# HERE")}
    assert here <= {where.line for each in told for where in each.where}
    assert [word for word in mistake.misleading if word in str(findings)] == []


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("schedule_moves_where_the_scale_fell", "() < scale", "() >= scale"),
        ("rate_from_the_norm_of_scaled_gradients", "1 + norm", "1 + loss.item()"),
        ("norm_of_squares_overflows", "600 * inputs", "6 * inputs"),
        ("times_in_half", "60_000", "2_000"),
        ("reports_the_scaled_loss", "total += loss.item()", "total += 1"),
        ("multiplies_by_a_number_and_never_divides", "1024", "2"),
    ],
)
def test_script_without_its_mistake_has_no_finding_of_that_kind(name, wrong, right):
    mistake = WRONG[name]
    script = mistake.script.replace(wrong, right)
    findings = findings_of(script, f"{name}.py", compares=True)
    assert mistake.findings not in {finding.key for finding in findings}


def test_mask_that_becomes_minus_infinity_is_no_overflow_of_a_forward():
    """A score below 0 and the least number of float16 are minus infinity together."""
    script = """\
model = net(outputs=8)
mask = torch.tensor(4 * [0.0] + 4 * [-65504.0], dtype=torch.float16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        scores = 300 * model(inputs) + mask
        loss = F.cross_entropy(scores, targets)
    assert scores.isneginf().any()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
    findings = findings_of(script, "mask.py")
    assert "overflow_in_forward" not in {finding.key for finding in findings}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unscales_only_where_it_logs", "scaler.unscale_(optimizer)  # your line"),
        ("scores_overflow", "float32 from there"),
        ("eps_is_zero_in_half", "float32 from there"),
        ("penalty_added_to_scaled_loss", "all terms of the loss"),
        ("divides_and_steps_itself", "divides or replaces"),
        ("unscale_in_each_micro_batch", "all clips"),
        ("steps_only_below_a_scaled_norm", "the condition before the step"),
    ],
)
def test_order_that_does_not_hold_in_this_script_is_not_given(name, words):
    (fault,) = findings_of_mistake(name).faults
    assert not fault.orders
    assert words in fault.write


def test_unscale_below_a_clip_is_ordered_to_its_place_where_it_is_near():
    """Negative control: without a line that unscales there is one to write."""
    script = WRONG["clip_before_unscale"].script
    step, unscale = "    scaler.step(optimizer)\n", "    scaler.unscale_(optimizer)\n"
    (fault,) = findings_of(script.replace(step, unscale + step), "late.py").faults
    first, second, third = fault.write.splitlines()
    assert fault.orders
    assert first == "scaler.unscale_(optimizer)  # your line 10: move it here"
    assert second.endswith("  # your line 9")
    assert third == "scaler.step(optimizer)  # your line 11"
    far = 30 * "    # far\n" + unscale + step
    (fault,) = findings_of(script.replace(step, far), "far.py").faults
    assert not fault.orders
    assert "after the last backward of a step" in fault.write
    (fault,) = findings_of_mistake("clip_before_unscale").faults
    assert fault.write.startswith("scaler.unscale_(optimizer)\n")


def test_line_that_the_script_has_far_below_is_not_to_be_written_again():
    (fault,) = findings_of_mistake("generator_steps_itself").faults
    first, second = fault.write.splitlines()
    assert first == "scaler.step(opt_g)  # in place of opt_g.step()"
    assert second.startswith("scaler.update()  # your line ")


def test_line_that_the_script_has_above_is_not_to_be_written_again():
    (fault,) = findings_of_mistake("schedule_moves_on_skipped_steps").faults
    assert fault.orders
    lines = fault.write.splitlines()
    assert [line.partition("  # your line")[0] for line in lines if "your" in line] == [
        "scaler.update()",
        "    scheduler.step()",
    ]


def test_order_of_which_the_script_has_all_stands_at_the_line_of_its_fault():
    (fault,) = findings_of_mistake("auxiliary_loss_not_scaled").faults
    assert fault.orders
    assert fault.write == (
        "scaler.scale(auxiliary).backward()  # in place of auxiliary.backward()"
    )


def test_order_has_the_names_of_the_script():
    script = (
        WRONG["clip_before_unscale"]
        .script.replace("optimizer", "self.opt")
        .replace("scaler", "amp")
        .replace("model", "encoder")
    )
    names = "class Self: pass\nself = Self()\n"
    (fault,) = findings_of(names + script, "named.py").faults
    lines = [line.partition("  # your line")[0] for line in fault.write.splitlines()]
    assert lines == [
        "amp.unscale_(self.opt)",
        "torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)",
        "amp.step(self.opt)",
    ]


@pytest.mark.parametrize("key", ROWS)
@pytest.mark.parametrize("order", ["write", "in_a_loop_write"])
def test_names_can_be_looked_for_in_the_order_of_each_row(key, order):
    lines = ROWS[key].get(order, [])
    where, write = (Where("nowhere.py", 1),), "\n".join(lines)
    finding = CheckFinding(key, Level.FAULT, "", where, "", write, orders=True)
    fitted = fitted_to_script(finding).write.splitlines()
    assert [line.removesuffix("  # your optimizer") for line in fitted] == lines


def test_module_that_refuses_a_copy_validates_in_half_as_it_did():
    script = WRONG["validates_in_half"].script.replace(
        "model.eval()", "model.kept = model[0].weight * 2"
    )
    assert [each.key for each in findings_of(script, "refuses.py")] == []


def test_gradients_of_a_step_left_out_are_told_of_all_that_is_added_to_them():
    (fault,) = findings_of_mistake("left_out_step_is_not_zeroed").faults
    assert int(fault.effect.partition(" of 48 backwards")[0]) > 24


def test_order_names_no_optimizer_where_it_may_be_one_of_two():
    (fault,) = findings_of_mistake("zeroes_one_of_two_optimizers").faults
    assert fault.write.startswith("optimizer.zero_grad()")


def test_order_without_a_line_of_the_script_says_whose_optimizer_it_means():
    order = "scaler.step(optimizer)\nscaler.update()"
    nowhere = (Where("nowhere.py", 1),)
    finding = CheckFinding("closure", Level.FAULT, "", nowhere, "", order, orders=True)
    assert fitted_to_script(finding).write.splitlines() == [
        "scaler.step(optimizer)  # your optimizer",
        "scaler.update()",
    ]


@pytest.mark.parametrize("accumulates", [False, True])
def test_forced_overflow_is_seen_at_a_step_past_the_scaler(*, accumulates):
    script = WRONG["accumulates_and_steps_past_the_scaler"].script
    if not accumulates:  # and no gradient is 0
        script = script.replace("i % 2", "True").replace("inputs[:, ::2] = 0.0", "pass")
    (fault,) = findings_of(script, "script.py").faults
    assert "2 forced overflows were stepped with" in fault.effect


def test_kind_of_batch_that_is_always_skipped_is_told_with_its_operation():
    findings = findings_of_mistake("one_kind_of_batch_is_always_skipped")
    (fault,) = findings.faults
    assert "first: log outside the model," in fault.effect


def test_twelve_forwards_are_looked_at_for_a_cause_and_no_more():
    search = CauseSearch(Record(), [], looks_anyway=False)
    search.end_backward([torch.tensor(math.nan)], 0.0)
    looked = []
    for _ in range(20):
        search.watch_if_due()
        search.watch_if_due()  # as after a step and before the next batch
        looked.append(search._watch is not None)
        search.end_backward([torch.tensor(1.0)], 0.0)
    assert looked == [True] * 12 + [False] * 8


def test_findings_have_the_record_that_they_were_made_of():
    record = findings_of(RIGHT["torch_recipe"], "recipe.py").record
    assert [event.where.file for event in record.of("backward")] == ["recipe.py"] * 12


@pytest.mark.parametrize(
    "name",
    [
        "optimizer_steps_itself_then_update",
        "unscales_and_steps_itself",
        "optimizer_steps_itself",
        "one_of_two_optimizers_steps_itself",
        "critic_steps_itself",
    ],
)
def test_order_in_place_of_the_line_leaves_no_fault(name):
    script = WRONG[name].script
    (fault,) = findings_of_mistake(name).faults
    assert fault.orders
    (here,) = (line for line in script.splitlines(True) if line.endswith("# HERE\n"))
    indent = here[: len(here) - len(here.lstrip())]
    orders = (line for line in fault.write.splitlines() if "# your line" not in line)
    pasted = "".join(f"{indent}{line}\n" for line in orders)
    after = findings_of(script.replace(here, pasted), f"{name}_pasted.py")
    assert [finding.text() for finding in after if finding.key == "raised"] == []
    assert after.faults == []
