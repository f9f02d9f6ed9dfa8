"""What `check` says of scripts with one mistake each."""

import math

import pytest
import torch

from determined_amp.check import watching
from determined_amp.check.causes import CauseSearch
from determined_amp.check.record import Record
from tests.answers import findings_of, findings_of_mistake, prepared
from tests.wrong_scripts import WRONG

pytestmark = pytest.mark.usefixtures("_libraries_are_collected_once")


@pytest.mark.parametrize("name", WRONG)
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
    text = str(findings)
    assert [word for word in mistake.misleading if word in text] == []
    assert [line for line in mistake.says if line not in text] == []


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("schedule_moves_where_the_scale_fell", "() < scale", "() >= scale"),
        ("rate_from_the_norm_of_scaled_gradients", "1 + norm", "1 + loss.item()"),
        ("norm_of_squares_overflows", "600 * inputs", "6 * inputs"),
        ("times_in_half", "60_000", "2_000"),
        ("reports_the_scaled_loss", "total += loss.item()", "total += 1"),
        ("multiplies_by_a_number_and_never_divides", "1024", "2"),
        ("validates_in_half", "model.eval()", "model.kept = model[0].weight * 2"),
    ],
)
def test_script_without_its_mistake_has_no_finding_of_that_kind(name, wrong, right):
    """The last one has a module that refuses a copy, which `check` needs."""
    mistake = WRONG[name]
    script = mistake.script.replace(wrong, right)
    compares = mistake.findings == "depends_on_scale"
    findings = findings_of(script, f"{name}.py", compares=compares)
    assert not {finding.key for finding in findings} & {mistake.findings, "raised"}


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


def test_gradients_of_a_step_left_out_are_told_of_all_that_is_added_to_them():
    (fault,) = findings_of_mistake("left_out_step_is_not_zeroed").faults
    assert int(fault.effect.partition(" of 48 backwards")[0]) > 24


def test_optimizer_that_was_made_before_is_watched():
    script = WRONG["never_steps"].script.replace("cuda", "cpu")
    made, loop = script.split("for ", maxsplit=1)
    names = prepared()
    exec(made, names)
    with watching() as findings:
        exec(f"for {loop}", names)
    assert [each.key for each in findings.faults] == ["step_missing"]
