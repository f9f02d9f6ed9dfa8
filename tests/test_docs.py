"""README and docs tell the truth: what they name exists, what they quote is the
source.
"""

import dataclasses
import importlib.util
import inspect
import json
import re
import shlex

import pytest
import torch
import yaml
from determined.cli.ntsc import parse_config_overrides
from torch import nn

import determined_amp
from benchmarks import loss_scale
from benchmarks.loss_scale_rows import Row
from determined_amp import __main__ as door
from determined_amp.amp import fields
from determined_amp.amp.core import AmpCore
from determined_amp.amp.loop import AmpLoop
from determined_amp.amp.metric_names import AuditMetricName, MetricName
from determined_amp.amp.settings import AmpSettings, Precision
from determined_amp.check.finding import ROWS
from determined_amp.experiment import experiment
from determined_amp.experiment.overrides import with_overrides
from determined_amp.search.search_plan import SearchPlan
from determined_amp.trial.mixed_precision import MixedPrecision
from tests.mutants import AFTERWARDS, ROOMS
from tests.pages import blocks, commands
from tests.run_here import ROOT

DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
AMP, CHECK, CLUSTER, EVIDENCE, LOSS_SCALE, METRICS, PRECISION = (
    (DOCS / f"{name}.md").read_text()
    for name in (
        "amp",
        "check",
        "cluster",
        "evidence",
        "loss_scale",
        "metrics",
        "precision",
    )
)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
RESULTS = ROOT / "benchmarks" / "results"
CODE = ("determined_amp", "trials", "benchmarks")
# What the pages name as examples of a user's own.
MADE_UP = {"tests/test_NAME.py", "tests/test_a.py", "tests/test_b.py"}
MADE_UP |= {"tests/test_b.py::TestSome"}


def test_every_promise_names_tests_that_exist():
    promises = (DOCS / "promises.md").read_text()
    for row in re.findall(r"^\| (?!promise \||what \|).*", promises, re.MULTILINE):
        named = re.findall(r"`(test_\w+\.py(?:::\w+)+)`", row)
        assert named, row
        assert missing_tests(" ".join(f"tests/{name}" for name in named)) == set()


def named_files(text):
    linked = set(re.findall(r"\]\(([\w./-]+)", text)) - {"https"}
    paths = re.findall(
        r"(?<![\w/.-])[\w.-]+/[\w./-]*\.(?:yaml|py|sh|md|txt|png)\b", text
    )
    return linked.union(paths)


def missing_files(text):
    folders = (ROOT, DOCS, ROOT / "determined_amp")
    return {
        name
        for name in named_files(text)
        if not any((f / name).exists() for f in folders)
    }


def missing_tests(text):
    """The tests that `text` names and no file has."""
    named = re.findall(r"tests/\w+\.py(?:::\w+)+", text)
    return {test for test in named if not exists(*test.split("::"))}


def exists(path, *names):
    """Whether a file of tests defines a class and a test, or a test."""
    source = (ROOT / path).read_text() if (ROOT / path).exists() else ""
    return all(
        re.search(rf"^ *(?:def|class) {name}\b", source, re.MULTILINE) for name in names
    )


def unknown_settings(text):
    """What `text` calls `amp.NAME` and neither a setting nor a loop or a trial has."""
    named = set(re.findall(r"`amp\.(\w+)", text))
    settings = {field.name for field in dataclasses.fields(AmpSettings)}
    of_a_loop = {*dir(AmpLoop), *vars(AmpLoop(AmpSettings(Precision.FP32), "cpu"))}
    return named - settings - of_a_loop - {*dir(MixedPrecision)}


def unknown_commands(text):
    """Our modules after `python -m`, their verbs, and targets after `make`, if not
    there.
    """
    modules = set(re.findall(r"python -m ((?:benchmarks|determined_amp)[\w.]*)", text))
    verbs = set(re.findall(r"(?:-m determined_amp|det-amp) (\w+)", text))
    targets = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE))
    unknown = {name for name in modules if importlib.util.find_spec(name) is None}
    return unknown | (verbs - door.COMMANDS.keys()) | (targets - TARGETS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_everything_that_a_page_names_exists(page):
    text = page.read_text()
    assert missing_files(text) - MADE_UP == set()
    assert missing_tests(text) - MADE_UP == set()
    assert unknown_settings(text) == set()
    assert unknown_commands(text) == set()


def test_what_does_not_exist_would_be_noticed():
    """Negative control."""
    right = "tests/test_docs.py::test_what_does_not_exist_would_be_noticed"
    in_class = (
        "tests/test_finder.py::TestRange::test_first_overflowing_power_of_two_is_exact"
    )
    wrong = {
        f"{right}_not",
        f"{in_class}_not",
        "tests/test_finder.py::TestRan::test_first_overflowing_power_of_two_is_exact",
    }
    assert missing_tests(" ".join([right, in_class, *wrong])) == wrong
    assert missing_files(
        "docs/amp.md hp_search/none.yaml [see](none) ![](pictures/none.png)"
    ) == {
        "none",
        "hp_search/none.yaml",
        "pictures/none.png",
    }
    assert unknown_settings("`amp.min_scale` and `amp.min_scales: 2`") == {"min_scales"}
    commands = "`make tests` `make test` det-amp finds, python -m benchmarks.no"
    assert unknown_commands(commands) == {"tests", "finds", "benchmarks.no"}


def commands_with_a_yaml():
    """Those of the README and the pages on clusters and precisions."""
    found = [
        command
        for command in commands(README + CLUSTER + PRECISION)
        if ".yaml" in command and "make " not in command and "YOUR" not in command
    ]
    assert len(found) > 3
    return found


@pytest.mark.parametrize(
    "command", commands_with_a_yaml(), ids=lambda command: command[:90]
)
def test_command_of_a_page_is_of_a_yaml_that_takes_its_overrides(command):
    words = shlex.split(command)
    (config,) = (word for word in words if word.endswith(".yaml") and "=" not in word)
    overrides = [words[i + 1] for i, word in enumerate(words) if word == "--config"]
    raw = yaml.safe_load((ROOT / config).read_text())
    merge = parse_config_overrides if words[0] == "det" else with_overrides
    changed = merge(raw, overrides)
    if changed["searcher"]["name"] == "single":
        experiment.parse(changed, config)
    else:
        SearchPlan(changed)


def test_readme_has_at_most_120_lines():
    assert len(README.splitlines()) <= 120


def test_loop_of_the_readme_trains():
    (shown,) = blocks(README, "python")
    model = nn.Linear(4, 2)
    start = model.weight.detach().clone()
    names = {"device": "cpu", "model": model}
    names["batches"] = [(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64))] * 3
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(shown, {**names, "loss_fn": nn.CrossEntropyLoss()})
    assert not torch.equal(model.weight, start)


def test_page_has_the_table_of_all_settings():
    """A row for each key of the section `amp`, with its default and its meaning."""
    said = inspect.getdoc(AmpSettings) or ""
    found = re.findall(r"^    (\w+): ((?:.|\n     )+)", said, re.MULTILINE)
    meanings = {name: " ".join(text.split()) for name, text in found}
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.+?) \| (.*) \|$", AMP, re.MULTILINE)
    settings = dataclasses.fields(AmpSettings)
    for field, (name, shown, allowed, meaning) in zip(settings, rows, strict=True):
        default = getattr(field.default, "value", field.default)
        text = "" if default is dataclasses.MISSING else json.dumps(default)
        expected = (field.name, text.strip('"'), meanings[field.name])
        assert (name, shown.strip("`"), meaning) == expected
        for sign, _, limit in field.metadata[fields.BOUNDS]:
            assert f"{sign} {limit:g}" in allowed


def table_of_findings():
    """Every finding of the doctor, as docs/check.md shows it."""
    lines = ["| finding | level | evidence | what it means |", "|---|---|---|---|"]
    for key, row in ROWS.items():
        name = f'<a id="{key.replace("_", "-")}"></a>`{key}`'
        lines.append(
            f"| {name} | {row['level']} | {row['evidence']} | {row['means']} |"
        )
    return "\n".join(lines)


def test_page_has_the_table_of_all_findings():
    assert table_of_findings() in CHECK, table_of_findings()


def test_metrics_of_the_table_are_those_that_are_reported():
    names = re.findall(r"^\| `(\w+)`", METRICS, re.MULTILINE)
    constants = {**vars(MetricName), **vars(AuditMetricName)}
    ours = [value for name, value in constants.items() if name.isupper()]
    of_these_trials = ["validation_loss", "validation_accuracy"]
    assert sorted(names) == sorted([*ours, *of_these_trials])


class TestResults:
    """What the pages say of results is what the committed files say."""

    def test_page_on_the_loss_scale_quotes_what_the_last_results_say(self):
        result = json.loads(loss_scale.PUBLISHED.read_text())
        said = loss_scale.said(
            loss_scale.cells_of([Row(**row) for row in result["rows"]])
        )
        assert "\n".join(said) in LOSS_SCALE

    @pytest.mark.parametrize(
        ("page", "name"),
        [("precision", "mlp"), ("compare", "wide_mlp"), ("resnet50", "resnet50")],
    )
    def test_page_quotes_what_the_last_comparison_said(self, page, name):
        text = (DOCS / f"{page}.md").read_text()
        results = json.loads((RESULTS / f"precision_{name}_cpu.json").read_text())
        pairs = [said for said in results["sentences"] if " against fp32, " in said]
        assert pairs
        for sentence in pairs:
            assert f"> {sentence}" in text
        assert page == "resnet50" or f"> {results['answer']}" in text


def test_every_file_of_tests_is_found_by_its_module_its_room_or_contributing():
    modules = {path.stem for name in CODE for path in (ROOT / name).rglob("*.py")}
    rooms = {name for tests in (ROOMS, AFTERWARDS) for name in tests.values()}
    listed = {name for names in rooms for name in names.split()}
    named = set(re.findall(r"`test_(\w+)\.py`", (ROOT / "CONTRIBUTING.md").read_text()))
    there = {path.stem.removeprefix("test_") for path in ROOT.glob("tests/test_*.py")}
    assert there - modules - listed - named == set()
    assert listed | named <= there
    folders = {path.name for path in (ROOT / "determined_amp").iterdir()}
    assert ROOMS.keys() <= folders | {"determined_amp"}


def test_page_of_the_library_names_everything_public():
    page = (DOCS / "api.md").read_text()
    loop = {name for name in vars(AmpLoop) | vars(AmpCore) if not name.startswith("_")}
    inside = {"words", "rehearsal", "rehearsal_by", "without_steps"}
    inside |= {"on_step_without_scaler"}
    names = {*determined_amp.__all__, *(loop - inside)} - {"__version__"}
    assert {
        name for name in names if not re.search(rf"`[^`]*\b{name}\b", page)
    } == set()


def test_command_for_an_own_yaml_on_a_cluster_is_not_retried():
    """A YAML of ours has a log policy for mistakes; one of another has none.

    The options alone, in backticks, are for one, too.
    """
    pages = [*PAGES, *ROOT.glob("*/*.yaml"), *ROOT.glob("*/*/*.yaml")]
    texts = [re.sub(r"\\\n[#\s]*", " ", page.read_text()) for page in pages]
    own = r"det experiment create YOUR[^`\n]+|`--config [^`]*entrypoint=[^`]*`"
    found = [command for text in texts for command in re.findall(own, text)]
    assert len(found) > 5
    assert [command for command in found if "max_restarts=0" not in command] == []
