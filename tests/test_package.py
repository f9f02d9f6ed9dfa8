"""The library as its users get it: a wheel in an empty folder, and no checkout in
sight.
"""

import os
import shutil
import subprocess
import zipfile

import pytest

import determined_amp
from tests import run_here
from tests.run_here import ROOT

TEMPLATE = ROOT / "docs" / "your_trial"
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


# Of the whole repository, beside what begins with a dot.
TOP_LEVEL = """
CHANGELOG.md CONTRIBUTING.md LICENSE Makefile README.md benchmarks
constraints-oldest.txt constraints.txt determined_amp docs experiment_configs
hp_search pyproject.toml startup-hook.sh tests trials
"""


def ended(*command, cwd, path=""):
    """What a Python program printed that finds packages under `path`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path)}
    done = run_here.outcome(*command, cwd=cwd, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from this checkout, as the pages say; nothing else is made there."""
    dist = tmp_path_factory.mktemp("dist")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir"]
    before = what_builds_leave()
    ended(*PIP, "wheel", *options, str(dist), str(ROOT), cwd=dist)
    assert what_builds_leave() == before
    (built,) = dist.iterdir()
    return built


def what_builds_leave():
    """The folders of builds in the checkout; a later one could read removed modules."""
    return {*ROOT.glob("build"), *ROOT.glob("*.egg-info")}


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder that holds the wheel's content, and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    options = ["--no-deps", "--no-index", "--no-compile", "--target", str(target)]
    ended(*PIP, "install", *options, str(wheel), cwd=target)
    return target


# Two processes that import everything once: one trains, and the other opens what it
# saved, without what `train` allows to be loaded.
TRAIN_AND_OPEN = """
import os, sys, torch, determined_amp
from determined import pytorch
from determined_amp.__main__ import main
child = os.fork()
if not child:
    os._exit(main(["train", "amp.yaml", "--run-folder", "run"]))
assert os.waitpid(child, 0)[1] == 0
os.chdir("/")
trial = pytorch.load_trial_from_checkpoint_path(
    sys.argv[1], torch_load_kwargs={"weights_only": True}
)
print(type(trial).__module__, type(trial).__name__)
print(tuple(trial.model(torch.zeros(3, 32)).shape))
print(float(sum(weight.double().sum() for weight in trial.model.parameters())))
print(determined_amp.__file__)
"""


@pytest.fixture(scope="module")
def trained(installed, tmp_path_factory):
    """The run folder of a stranger who has trained with the wheel; what Determined
    made of its checkpoint is in `opened`.
    """
    project = tmp_path_factory.mktemp("project")
    for name in ("model_def.py", "amp.yaml"):
        shutil.copy(TEMPLATE / name, project)
    (project / "weights.bin").write_bytes(b"0" * 1000)
    saved = str(project / "run" / "checkpoints" / "batch-00000200")
    program = ("-W", "ignore", "-c", TRAIN_AND_OPEN, saved)
    printed = ended(*program, cwd=project, path=installed)
    (project / "run" / "opened").write_text(printed)
    return project / "run"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository")
def test_repository_holds_its_parts_at_the_top_level_and_no_output_of_a_script():
    command = ["git", "ls-files"]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    )
    top = {line.partition("/")[0] for line in listed.stdout.splitlines()}
    parts = [name for name in sorted(top) if not name.startswith(".")]
    assert parts == TOP_LEVEL.split()


def test_wheel_holds_the_whole_library_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    about = f"determined_amp-{determined_amp.__version__}.dist-info/"
    code = {name for name in names if not name.startswith(about)}
    library = ROOT / "determined_amp"
    data = library / "py.typed", library / "check" / "findings.json"
    here = [*library.rglob("*.py"), *data]
    assert code == {path.relative_to(ROOT).as_posix() for path in here}
    assert f"{about}licenses/LICENSE" in names
    (commands,) = (name for name in names if name.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(commands).decode()
    assert "det-amp=determined_amp.__main__:main" in text.replace(" ", "")


def test_wheel_trains_a_stranger_in_float16_and_audits_it(trained):
    first, *_, last = run_here.metrics(trained)
    assert (last["group"], last["batches"]) == ("validation", 200)
    assert last["accuracy"] > 0.9
    assert first["watch_audit_share"] == 1.0
    log = (trained / "log.txt").read_text()
    assert "amp_fp16 asks for float16: 100.0% of the FLOPs" in log
    # The code of the stranger, and nothing else.
    (code,) = trained.glob("checkpoints/batch-00000200/code/*")
    assert code.name == "model_def.py"


def test_installed_command_explains_a_finding_without_a_page(installed, tmp_path):
    command = (str(installed / "bin" / "det-amp"), "check", "--explain", "clip_scaled")
    printed = ended(*command, cwd=tmp_path, path=installed)
    assert printed.startswith("clip_scaled (fault): gradients are clipped by norm")


def test_determined_itself_opens_the_checkpoint_with_the_wheel(installed, trained):
    (weights,) = run_here.checkpoint(trained, 200)["models_state_dict"]
    total = float(sum(weight.double().sum() for weight in weights.values()))
    of_the_wheel = str(installed / "determined_amp" / "__init__.py")
    opened = (trained / "opened").read_text().splitlines()
    assert opened[-4:] == ["model_def MyTrial", "(3, 10)", str(total), of_the_wheel]
