"""`check.advice`: what is to be written has the names and the lines of the script."""

import pytest

from determined_amp.check.advice import fitted_to_script
from determined_amp.check.finding import ROWS, CheckFinding, Level, Where
from tests.answers import findings_of, findings_of_mistake
from tests.wrong_scripts import WRONG

pytestmark = pytest.mark.usefixtures("_libraries_are_collected_once")

# By name of a script with a mistake: what is to be written in it.
ORDERS = {
    "clip_before_unscale": """\
scaler.unscale_(optimizer)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # your line 9
scaler.step(optimizer)  # your line 10""",
    "unscales_below_its_clip": """\
scaler.unscale_(optimizer)  # your line 10: move it here
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # your line 9
scaler.step(optimizer)  # your line 11""",
    "clip_in_a_trainer": """\
self.amp.unscale_(self.opt)
torch.nn.utils.clip_grad_norm_(self.encoder.parameters(), 1.0)  # your line 13
self.amp.step(self.opt)  # your line 14""",
    "generator_steps_itself": """\
scaler.step(opt_g)  # in place of opt_g.step()
scaler.update()  # your line 31""",
    "schedule_moves_on_skipped_steps": """\
scale = scaler.get_scale()
scaler.update()  # your line 11
if scaler.get_scale() >= scale:  # the step was applied
    scheduler.step()  # your line 12""",
    "auxiliary_loss_not_scaled": (
        "scaler.scale(auxiliary).backward()  # in place of auxiliary.backward()"
    ),
    # It may be one of two.
    "zeroes_one_of_two_optimizers": (
        "optimizer.zero_grad()"
        "  # before the first backward of its own loss, in each step"
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_order_has_the_names_and_the_lines_of_the_script(name):
    (fault,) = findings_of_mistake(name).faults
    assert fault.orders
    assert fault.write == ORDERS[name]


def test_lines_that_all_stand_there_in_this_order_are_only_to_be_looked_at():
    (fault,) = findings_of_mistake("unscales_only_where_it_logs").faults
    assert not fault.orders
    assert fault.write.startswith("scaler.unscale_(optimizer)  # your line 10")


def test_line_that_is_far_from_its_place_is_not_ordered_to_it():
    script = WRONG["unscales_below_its_clip"].script
    unscale = "    scaler.unscale_(optimizer)\n"
    far = script.replace(unscale, 30 * "    # far\n" + unscale)
    (fault,) = findings_of(far, "far.py").faults
    assert not fault.orders
    assert "after the last backward of a step" in fault.write


def fitted(key, order):
    """The lines of an order to a script that has none of them."""
    where = (Where("nowhere.py", 1),)
    finding = CheckFinding(key, Level.FAULT, "", where, "", order, orders=True)
    return fitted_to_script(finding).write.splitlines()


@pytest.mark.parametrize("key", ROWS)
@pytest.mark.parametrize("order", ["write", "in_a_loop_write"])
def test_names_can_be_looked_for_in_the_order_of_each_row(key, order):
    lines = ROWS[key].get(order, [])
    told = fitted(key, "\n".join(lines))
    assert [line.removesuffix("  # your optimizer") for line in told] == lines


def test_order_without_a_line_of_the_script_says_whose_optimizer_it_means():
    assert fitted("closure", "scaler.step(optimizer)\nscaler.update()") == [
        "scaler.step(optimizer)  # your optimizer",
        "scaler.update()",
    ]


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
