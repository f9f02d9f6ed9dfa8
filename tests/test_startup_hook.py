"""`startup-hook.sh`, run as Determined's entrypoint runs it, in images with and without
faults.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.run_here import ROOT

HOOK = (ROOT / "startup-hook.sh").read_text()
NEEDED = {"yaml": "pyyaml", "tensorboard": "tensorboard", "rich": "rich"}
# With the examples beside the library.
NEEDED_BY_TRIALS = {"sklearn": "scikit-learn"}
OF_THE_IMAGE = {
    "torch": "2.3.0a0+40ec155e58.nv24.3",
    "torchvision": "0.18.0a0",
    "numpy": "1.24.4",
    "requests": "2.31.0",
    "determined": "0.38.1",
}

# What Determined 0.38.1 does around a hook, and what that may show of it.
ENTRYPOINT = """
show() { pwd; umask; ulimit -a; trap; set -o; shopt; declare -p; declare -f; alias; }
set -e
set -x
show > "$SHELLS/before" 2> /dev/null
test -f startup-hook.sh && source startup-hook.sh
show > "$SHELLS/after" 2> /dev/null
set +x
exec echo TRAINING
"""
# Bash itself changes these from one command to the next.
RESTLESS = re.compile(
    r"declare \S+ (_|BASH_\w+|EPOCH\w+|LINENO|PIPESTATUS|RANDOM|SECONDS|SRANDOM)="
)

# Notes how it was called; then installs, or fails if the folder says so.
PIP = """
import json, pathlib, sys
here = pathlib.Path(__file__).parents[1]
arguments = sys.argv[1:]
constraints = ""
if "--constraint" in arguments:
    path = arguments.pop(arguments.index("--constraint") + 1)
    constraints = pathlib.Path(path).read_text()
calls = here / "calls.json"
before = json.loads(calls.read_text()) if calls.exists() else []
calls.write_text(json.dumps([*before, [arguments, constraints.split()]]))
if (here / "pip_fails").exists():
    sys.exit("ERROR: no route to the index")
modules = {"pyyaml": "yaml", "scikit-learn": "sklearn"}
for argument in arguments:
    if argument.startswith("-") or argument == "install":
        continue
    package = argument.split("<")[0]
    (here / f"{modules.get(package, package)}.py").touch()
"""


class Image:
    """A container image with a Python of its own: the standard library and `site`."""

    def __init__(self, folder):
        self.workdir = folder / "workdir"
        self.site = folder / "site"
        self.bin = folder / "bin"
        for made in (self.workdir, self.site / "pip", self.site / "torch", self.bin):
            made.mkdir(parents=True)
        self.set_python(f"'{sys.executable}' -S")
        for module in NEEDED | NEEDED_BY_TRIALS:
            (self.site / f"{module}.py").touch()
        for name, version in OF_THE_IMAGE.items():
            module = "torch/__init__" if name == "torch" else name
            (self.site / f"{module}.py").write_text("raise AssertionError('imported')")
            metadata = self.site / f"{name}-{version}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
        (self.site / "pip" / "__main__.py").write_text(PIP)
        (self.workdir / "startup-hook.sh").write_text(HOOK)

    def set_python(self, command):
        python = self.bin / "python3"
        python.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        python.chmod(0o755)

    def lose(self, *modules):
        for module in modules:
            (self.site / f"{module}.py").unlink()
            for metadata in self.site.glob(f"{module}-*"):
                shutil.rmtree(metadata)

    def start(self, **environment):
        return subprocess.run(
            ["bash", "-c", ENTRYPOINT],
            cwd=self.workdir,
            env={
                "PATH": f"{self.bin}:{os.environ['PATH']}",
                "PYTHONPATH": str(self.site),
                "SHELLS": str(self.site),
                "PYTHONDONTWRITEBYTECODE": "1",
                **environment,
            },
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def shell(self, moment):
        """All there is to see of the shell `before` or `after` the hook."""
        lines = (self.site / moment).read_text().splitlines()
        return [line for line in lines if not RESTLESS.match(line)]

    @property
    def pip_calls(self):
        """The arguments and the constraints of each."""
        calls = self.site / "calls.json"
        return list(json.loads(calls.read_text())) if calls.exists() else []

    @property
    def pins(self):
        """What it has, as pip would have to keep it."""
        pins = OF_THE_IMAGE.items()
        return [
            f"{name}=={pin}"
            for name, pin in pins
            if [*self.site.glob(f"{name}-{pin}*")]
        ]


@pytest.fixture
def image(tmp_path):
    return Image(tmp_path)


def trained(run):
    return run.returncode == 0 and run.stdout.splitlines()[-1:] == ["TRAINING"]


LATTE = {
    "DET_HPARAMS": json.dumps(
        {"trial": "trials.latte:LatteTrial", "learning_rate": 1.0e-4}
    )
}


def config(entrypoint, **others):
    return {"DET_EXPERIMENT_CONFIG": json.dumps({"entrypoint": entrypoint, **others})}


OF_COMPARE = ["optuna", "matplotlib", "scipy"]
COMPARE = "python3 -m determined_amp compare"


# What an image lacks, a folder that is in it, what is started, and what pip then adds.
ADDED = {
    "complete": ((), "", {}, ()),
    "all packages": ([*NEEDED], "", {}, [*NEEDED.values()]),
    "folder of its name": (["tensorboard"], "workdir/tensorboard", {}, ["tensorboard"]),
    "no torchvision": (["yaml", "torchvision"], "", {}, ["pyyaml"]),
    "examples": (["sklearn"], "workdir/trials/data", {}, ["scikit-learn"]),
    "no examples": (["sklearn"], "", {}, ()),
    "latte, older torch": ((), "", LATTE, ["diffusers<0.36"]),
    "latte": ((), "site/torch/accelerator", LATTE, ["diffusers"]),
    "compare": ((), "", config(COMPARE), OF_COMPARE),
    "compare as a list": ((), "", config(COMPARE.split()), OF_COMPARE),
    "compare with spaces": ((), "", config(COMPARE.replace(" ", "  ")), OF_COMPARE),
    "compare elsewhere": ((), "", config("python3 a.py", description=COMPARE), ()),
}


@pytest.mark.parametrize("name", ADDED)
def test_pip_adds_what_is_missing_once_and_keeps_the_rest(image, name):
    lost, folder, environment, added = ADDED[name]
    image.lose(*lost)
    (image.site.parent / folder).mkdir(parents=True, exist_ok=True)
    for _ in range(1 + bool(added)):
        run = image.start(**environment)
        assert trained(run)
        versions, _ = run.stdout.splitlines()
        assert versions.startswith("startup-hook: Python 3.")
        assert versions.split()[3:] == image.pins
    assert len(image.pip_calls) == bool(added)
    for (command, *arguments), constraints in image.pip_calls:
        assert command == "install"
        assert [each for each in arguments if not each.startswith("-")] == [*added]
        assert not any(each.startswith(("-U", "--upgrade")) for each in arguments)
        assert constraints == image.pins


def test_hook_of_the_docs_installs_the_wheel_and_asks_for_nothing_that_is_there(image):
    """A traceback of its probe would cancel retries: the container was never
    restarted.
    """
    docs = ROOT / "docs" / "your_trial"
    shutil.copy(docs / "startup-hook.sh", image.workdir)
    (image.workdir / (wheel := "determined_amp-0.1.0-py3-none-any.whl")).touch()
    installed = ["install", "--quiet", "--no-deps", "--no-index", f"./{wheel}"]
    assert trained(image.start())
    assert image.pip_calls == [[installed, []]]
    image.lose("rich")
    run = image.start()
    assert trained(run)
    added = ["install", "--quiet", *NEEDED.values()]
    assert image.pip_calls[1:] == [[installed, []], [added, []]]
    (policy,) = yaml.safe_load((docs / "amp.yaml").read_text())["log_policies"]
    assert not [
        line for line in run.stderr.splitlines() if re.search(policy["pattern"], line)
    ]
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("fault", ["pip fails", "no pip", "no python"])
def test_broken_image_is_warned_about_and_trains_and_no_secret_is_printed(image, fault):
    image.lose("yaml")
    warning = "startup-hook: WARNING: pip failed to add: pyyaml"
    if fault == "pip fails":
        (image.site / "pip_fails").touch()
    elif fault == "no pip":
        (image.site / "pip" / "__main__.py").unlink()
    else:
        image.set_python(warning := "/nonexistent")
    run = image.start(SECRET_TOKEN="hunter2-9f3c")
    assert trained(run)
    assert warning in run.stderr
    assert image.shell("after") == image.shell("before")
    assert "hunter2-9f3c" not in run.stdout + run.stderr


def test_hook_adds_what_the_project_declares():
    # the last two of determined
    of_the_image = {
        "determined",
        "torch",
        "numpy",
        "ruamel.yaml",
    }
    assert declared("dependencies") == set(NEEDED.values()) | of_the_image
    assert declared("examples") == set(NEEDED_BY_TRIALS.values()) | {
        "torchvision",
        "diffusers",
    }


def declared(group):
    """The packages in a list of `pyproject.toml`."""
    project = (ROOT / "pyproject.toml").read_text()
    found = re.search(rf"^{group} = \[.*?\n(.*?)^\]", project, re.M | re.S)
    assert found is not None
    return set(re.findall(r'^  "([\w.-]+)', found[1], re.M))
