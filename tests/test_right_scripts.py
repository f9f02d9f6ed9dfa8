"""What `check` says of right scripts."""

import pytest
import torch
from torch.torch_version import TorchVersion

from determined_amp.check import watching
from determined_amp.check.finding import CheckFindings
from determined_amp.check.stand_in import ONLY_ON_A_GPU
from tests.answers import findings_of, prepared
from tests.right_scripts import RIGHT

pytestmark = pytest.mark.usefixtures("_libraries_are_collected_once")

# What may be suspected of right scripts, which nobody can tell from a mistake.
SUSPECTED = {
    "batches_without_targets": "loss_not_finite",
    "floor_of_an_amp_loop": "left_out",
    "leaves_out_a_rare_nan": "left_out",
    "outliers_bring_the_scale_down": "no_steps",
    "schedule_guarded_by_the_scale_where_batches_are_bad": "no_steps",
    "sum_over_pixels_with_outliers": "no_steps",
    "window_summed_in_own_buffers": "zero_grad_in_window",
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_script_has_no_fault_and_no_suspicion_but_one_that_is_fair(name):
    if "fused" in name and TorchVersion(torch.__version__) < "2.4":
        pytest.skip("fused optimizers of a CPU need torch 2.4")
    findings = findings_of(RIGHT[name], f"{name}.py")
    assert [finding.text() for finding in findings.faults] == []
    fair = {SUSPECTED[name]} if name in SUSPECTED else set()
    assert {finding.key for finding in findings} == fair
    assert findings.are_right


def test_findings_that_were_not_filled_do_not_say_that_there_are_none():
    assert str(CheckFindings()).startswith("nothing was trained")


def test_findings_have_the_record_that_they_were_made_of():
    record = findings_of(RIGHT["torch_recipe"], "recipe.py").record
    assert [event.where.file for event in record.of("backward")] == ["recipe.py"] * 12


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
    ("name", "steps"),
    [
        ("torch_clipping", "10 steps, 2"),
        ("torch_accumulation", "10 steps, 2"),
        ("lookahead", "10 steps, 2"),
        ("zeroes_in_place", "10 steps, 2"),
        ("steps_a_pair_of_optimizers", "20 steps, 4"),
        ("gan_with_two_scalers", "20 steps, 4"),
        ("first_step_raises_and_it_goes_on", "10 steps, 2"),
        ("leaves_out_steps_that_overflow", "10 steps, 0"),
    ],
)
def test_two_steps_of_each_optimizer_overflow_and_a_note_numbers_them(name, steps):
    findings = findings_of(RIGHT[name], f"{name}.py")
    assert f", {steps} skipped, " in findings.seen
    note = "the doctor made an overflow in these steps of an optimizer: 6, 9"
    assert (note in findings.notes) is (not steps.endswith(" 0"))


@pytest.mark.parametrize("overflows", [(), (5,)])
def test_note_says_where_no_overflow_was_made(overflows):
    with watching(overflows=overflows) as findings:
        exec(compile(RIGHT["torch_recipe"], "recipe.py", "exec"), prepared())
    told = [note for note in findings.notes if note.startswith("no overflow was made")]
    assert len(told) == (not overflows)


@pytest.mark.filterwarnings("ignore:.*Disabling")
def test_autocast_that_was_made_before_is_no_fault():
    script = RIGHT["torch_recipe"].replace("model(inputs", "before(model)(inputs")
    script = script.replace(
        'autocast("cuda", dtype=torch.float16)', "torch.enable_grad()"
    )
    names = {**prepared(), "before": torch.autocast("cuda", dtype=torch.float16)}
    with watching() as findings:
        exec(compile(script, "recipe.py", "exec"), names)
    assert not findings.faults
