"""`docs/your_trial.md` and the README keep what they promise: ten lines, and they
run.
"""

import difflib
import logging
import re
import shutil
import sys
import textwrap

import pytest

from determined_amp import ConfigError
from determined_amp.experiment.experiment import read_yaml
from determined_amp.search.search_plan import SearchPlan
from tests.pages import blocks
from tests.run_here import ROOT

TEMPLATE = ROOT / "docs" / "your_trial"
PAGE = (ROOT / "docs" / "your_trial.md").read_text()
README = (ROOT / "README.md").read_text()
BEFORE = (TEMPLATE / "before.py").read_text().splitlines()
AFTER = (TEMPLATE / "model_def.py").read_text().splitlines()


def difference(before, after, context):
    """A unified diff; an empty line in place of the header of each hunk but the
    first.
    """
    lines = difflib.unified_diff(before, after, n=context, lineterm="")
    shown = ["" if line.startswith("@@") else line.rstrip() for line in lines]
    return [line for line in shown if line not in ("---", "+++")][1:]


def test_ten_lines_are_added_or_changed_and_none_is_taken_away():
    lines = [line for line in difflib.ndiff(BEFORE, AFTER) if line[2:].strip()]
    kinds = [line[0] for line in lines]
    assert kinds.count("+") == 10
    assert kinds.count("-") <= kinds.count("+")


@pytest.mark.parametrize(
    ("page", "context"), [(PAGE, 2), (README, 0)], ids=["page", "README"]
)
def test_page_shows_before_and_after_as_they_are(page, context):
    (shown,) = blocks(page, "diff")
    assert shown.splitlines() == difference(BEFORE, AFTER, context)


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("amp.yaml", "your_trial"),
        ("startup-hook.sh", "your_trial"),
        ("loss_scale.yaml", "loss_scale"),
    ],
)
def test_page_quotes_the_file_to_copy(name, page):
    language = "yaml" if name.endswith("yaml") else "bash"
    shown = (ROOT / "docs" / f"{page}.md").read_text()
    assert (TEMPLATE / name).read_text() in blocks(shown, language)


def test_search_of_the_loss_scale_tries_25_powers_of_two(monkeypatch):
    monkeypatch.chdir(TEMPLATE)
    monkeypatch.syspath_prepend(TEMPLATE)
    plan = SearchPlan(read_yaml(str(TEMPLATE / "loss_scale.yaml")))
    scales = [point["amp.init_scale"] for point in plan.points]
    assert sorted(scales) == [2.0**exponent for exponent in range(25)]


# The constructor of a trial with a second model and optimizer.
TWO = """
        self.generator = context.wrap_model(self.amp.prepare(nn.Linear(8, 32)))
        generated = torch.optim.SGD(self.generator.parameters(), 0.1)
        self.optimizer_g = context.wrap_optimizer(generated)
        self.optimizer_d = self.optimizer
"""
LOSSES = """
    def discriminator_loss(self, batch):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def generator_loss(self, batch):
        return self.model(self.generator(torch.randn(len(batch[1]), 8))).square().mean()
"""


def snippet(word):
    """The one on the page with this word, indented as the body of a class is."""
    (found,) = (block for block in blocks(PAGE, "python") if word in block)
    return textwrap.indent(found, "    ")


def clips():
    """A step of the template, replaced by the one on the page."""
    step = (
        "        self.context.step_optimizer(self.optimizer, scaler=self.amp.scaler)\n"
    )
    (source,) = re.findall(r"    def train_batch.*?\n\n", "\n".join(AFTER), re.DOTALL)
    assert step in source
    return str(source.replace(step, textwrap.indent(snippet("max_norm"), "    ")))


def variant(constructor, methods):
    """A module with the trial of the template, changed as the page says."""
    return (
        "import torch\nfrom typing import Any\nfrom torch import nn\nimport "
        "model_def\n\nclass MyTrial(model_def.MyTrial):\n"
        "    def __init__(self, context):\n        "
        f"super().__init__(context)\n{constructor}\n{methods}\n"
    )


# The trials of the template, and those that are changed as the page says.
VARIANTS = {
    "before": "",
    "model_def": "",
    "clipping": variant("", clips()),
    "gradient_penalty": variant("", snippet("create_graph")),
    "two_optimizers": variant(TWO, LOSSES + snippet("optimizer_d")),
    "faulty": variant("", clips().replace("scaler=self.amp.scaler", "scaler=None")),
}


def train(name, folder, monkeypatch):
    """By the program on the page."""
    (script,) = (block for block in blocks(PAGE, "python") if "pytorch.init(" in block)
    # Determined copies the whole folder into each checkpoint, so those are not within
    # it.
    shutil.copytree(TEMPLATE, project := folder / "project")
    if VARIANTS[name]:
        (project / f"{name}.py").write_text(VARIANTS[name])
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "storage"))
    try:
        exec(script.replace("from model_def ", f"from {name} "), {})
    finally:
        for module in (name, "model_def"):
            sys.modules.pop(module, None)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "faulty"])
def test_every_way_on_the_page_trains_and_is_audited(
    name, tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    train(name, tmp_path, monkeypatch)
    audited = "amp_fp16 asks for float16: 100.0% of the FLOPs" in caplog.text
    assert audited == (name != "before")


def test_trial_that_forgets_the_scaler_does_not_train(tmp_path, monkeypatch):
    """Negative control: the program on the page does not train whatever it is given."""
    with pytest.raises(ConfigError, match=r"scaler=amp\.scaler"):
        train("faulty", tmp_path, monkeypatch)
