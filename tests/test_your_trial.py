"""`docs/your_trial.md` and the README keep what they promise: ten lines, and they run."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from tests import training

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "docs" / "your_trial"
PAGE = (ROOT / "docs" / "your_trial.md").read_text()
README = (ROOT / "README.md").read_text()
BEFORE = (TEMPLATE / "before.py").read_text().splitlines()
AFTER = (TEMPLATE / "model_def.py").read_text().splitlines()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def difference(before: list[str], after: list[str], context: int) -> list[str]:
    """A unified diff; an empty line in place of the header of each hunk but the first."""
    lines = difflib.unified_diff(before, after, n=context, lineterm="")
    shown = ["" if line.startswith("@@") else line.rstrip() for line in lines]
    return [line for line in shown if line not in ("---", "+++")][1:]


def test_ten_lines_of_code_are_added_or_changed() -> None:
    changed = [line[2:] for line in difflib.ndiff(BEFORE, AFTER) if line.startswith("+ ")]
    assert len([line for line in changed if line.strip()]) == 10


def test_nothing_is_taken_away_without_a_line_in_its_place() -> None:
    kinds = [line[0] for line in difflib.ndiff(BEFORE, AFTER)]
    assert kinds.count("-") <= kinds.count("+")


def test_the_page_shows_before_and_after_as_they_are() -> None:
    (shown,) = blocks(PAGE, "diff")
    assert shown.splitlines() == difference(BEFORE, AFTER, 2)


def test_the_readme_shows_the_same_lines() -> None:
    (shown,) = blocks(README, "diff")
    assert shown.splitlines() == difference(BEFORE, AFTER, 0)


@pytest.mark.parametrize(("name", "language"), [("amp.yaml", "yaml"), ("startup-hook.sh", "bash")])
def test_the_page_quotes_the_files_to_copy(name: str, language: str) -> None:
    assert (TEMPLATE / name).read_text() in blocks(PAGE, language)


def test_the_page_is_about_two_hundred_lines() -> None:
    assert len(PAGE.splitlines()) <= 230


def test_the_startup_hook_installs_the_wheel_and_asks_for_nothing_that_is_there(
    tmp_path: Path,
) -> None:
    """As Determined sources it; `pip` is told to install elsewhere."""
    shutil.copy(TEMPLATE / "startup-hook.sh", tmp_path)
    wheel(tmp_path)
    run = subprocess.run(
        ["bash", "-c", "set -e; set -x; source startup-hook.sh; echo TRAINING"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PIP_TARGET": str(tmp_path / "site"),
            "PIP_NO_INDEX": "1",
        },
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.stdout.splitlines()[-1:] == ["TRAINING"], run.stderr
    assert (tmp_path / "site" / "determined_amp" / "marker.py").exists()


def wheel(folder: Path) -> None:
    """A wheel named as ours is; see `test_package.py` for the real one."""
    about = "determined_amp-0.1.0.dist-info/"
    with zipfile.ZipFile(folder / "determined_amp-0.1.0-py3-none-any.whl", "w") as file:
        file.writestr("determined_amp/marker.py", "")
        file.writestr(
            f"{about}METADATA", "Metadata-Version: 2.1\nName: determined-amp\nVersion: 0.1.0\n"
        )
        file.writestr(
            f"{about}WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{about}RECORD", "")


def own_trainer() -> str:
    """The program on the page that uses Determined's own `Trainer`."""
    (script,) = (block for block in blocks(PAGE, "python") if "pytorch.Trainer(" in block)
    return script


# Trains by the program of the page with each module, one after the other: to start a process
# takes longer than to train.
TRAIN_EACH = """
import logging, os, sys, traceback
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
page = open("script.txt").read()
for name in sys.argv[1:]:
    print(f"=== {name}", flush=True)
    os.environ["XDG_DATA_HOME"] = os.path.abspath(f"../storage/{name}")
    try:
        exec(page.replace("from model_def ", f"from {name} "), {})
    except BaseException:
        traceback.print_exc()
    else:
        print("TRAINED", flush=True)
"""

# The constructor of a trial with a second model and optimizer.
TWO = """
        self.generator = context.wrap_model(self.amp.prepare(nn.Linear(8, 32)))
        self.optimizer_g = context.wrap_optimizer(torch.optim.SGD(self.generator.parameters(), 0.1))
        self.optimizer_d = self.optimizer
"""
LOSSES = """
    def discriminator_loss(self, batch):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def generator_loss(self, batch):
        return self.model(self.generator(torch.randn(len(batch[1]), 8))).square().mean()
"""


def snippet(word: str) -> str:
    """The one on the page with this word, indented as the body of a class is."""
    (found,) = (block for block in blocks(PAGE, "python") if word in block)
    return textwrap.indent(found, "    ")


def clips() -> str:
    """A step of the template, replaced by the one on the page."""
    step = "        self.context.step_optimizer(self.optimizer, scaler=self.amp.scaler)\n"
    (source,) = re.findall(r"    def train_batch.*?\n\n", "\n".join(AFTER), re.DOTALL)
    assert step in source
    return str(source.replace(step, textwrap.indent(snippet("max_norm"), "    ")))


def variant(constructor: str, methods: str) -> str:
    """A module with the trial of the template, changed as the page says."""
    return (
        "import torch\nfrom typing import Any\nfrom torch import nn\nimport model_def\n\n"
        "class MyTrial(model_def.MyTrial):\n"
        f"    def __init__(self, context):\n        super().__init__(context)\n{constructor}\n"
        f"{methods}\n"
    )


def faulty() -> str:
    """A step without the scaler, which must be seen to fail."""
    return clips().replace("scaler=self.amp.scaler", "scaler=None")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What Determined's own `Trainer` printed for each trial."""
    # Determined copies the whole folder into each checkpoint, so those are not within it.
    project = tmp_path_factory.mktemp("own_trainer") / "project"
    shutil.copytree(TEMPLATE, project)
    variants = {
        "clipping": variant("", clips()),
        "gradient_penalty": variant("", snippet("create_graph")),
        "two_optimizers": variant(TWO, LOSSES + snippet("optimizer_d")),
        "faulty": variant("", faulty()),
    }
    for name, source in variants.items():
        (project / f"{name}.py").write_text(source)
    (project / "script.txt").write_text(own_trainer())
    process = training.start(
        "-c", TRAIN_EACH, "before", "model_def", *variants, cwd=project, PYTHONPATH=str(ROOT)
    )
    output, _ = process.communicate()
    assert process.returncode == 0, output
    printed = re.split(r"^=== (\w+)\n", output, flags=re.MULTILINE)[1:]
    return dict(zip(printed[::2], printed[1::2], strict=True))


def test_the_trial_of_before_trains_with_determineds_own_trainer(trained: dict[str, str]) -> None:
    assert trained["before"].endswith("TRAINED\n"), trained["before"]
    assert "amp_fp16" not in trained["before"]


def test_the_trial_with_amp_is_trained_and_audited_by_determineds_own_trainer(
    trained: dict[str, str],
) -> None:
    assert trained["model_def"].endswith("TRAINED\n"), trained["model_def"]
    assert "amp_fp16 asks for float16: 100.0% of the FLOPs" in trained["model_def"]


@pytest.mark.parametrize("name", ["clipping", "gradient_penalty", "two_optimizers"])
def test_every_way_to_train_on_the_page_trains(trained: dict[str, str], name: str) -> None:
    assert trained[name].endswith("TRAINED\n"), trained[name]


def test_a_trial_that_does_not_train_is_seen(trained: dict[str, str]) -> None:
    assert not trained["faulty"].endswith("TRAINED\n"), trained["faulty"]
