"""What `det experiment create CONFIG .` sends, measured with Determined's own code."""

import base64
import shutil
import tarfile
from pathlib import Path

import pytest
from determined.common import detignore, v1file_utils

from tests.run_here import ROOT
from tests.test_imports import imports

CODE = {"determined_amp", "trials"}
SENT = CODE | {"startup-hook.sh", "pyproject.toml"}
MIB = 1 << 20

# What a clone comes to hold and its .detignore has to know. Determined leaves the last
# three behind by itself, unless a line of the .detignore takes them back in.
PLANTED = """
.env .netrc .aws/credentials gcp-credentials.json server.pem server.key id_ed25519
token.txt .venv/lib/python3.11/site-packages/torch/__init__.py .venv-3.10/pyvenv.cfg
venv/pyvenv.cfg env/pyvenv.cfg runs/mlp-amp/2025-01-01/checkpoints/state_dict.pth
data/digits.npz results/resnet50/metrics.jsonl checkpoint.pt model.safetensors
loss.png notes.ipynb .ipynb_checkpoints/notes.ipynb .pytest_cache/README.md
.ruff_cache/CACHEDIR.TAG build/lib/trials/amp.py determined_amp.egg-info/PKG-INFO
tests/test_amp.py docs/index.md benchmarks/results.json trials/.env
trials/.ipynb_checkpoints/amp.ipynb trials/local/.cache/blob trials/credentials.json
trials/client_secret.json trials/best.pth trials/last.ckpt
experiment_configs/mlp/.amp.yaml.swp experiment_configs/resnet50/curve.png
hp_search/id_rsa hp_search/server.pem .git/config .mypy_cache/3.10/torch.data.json
trials/__pycache__/amp.cpython-310.pyc
"""


def entries(root):
    return list(detignore.os_walk_to_v1Files(root, Path()))


def sent(root):
    """Path and content of every file in the context of `root`."""
    return {
        entry.path: base64.b64decode(entry.content or "")
        for entry in entries(root)
        if entry.type == ord(tarfile.REGTYPE)
    }


def write(root, path, content):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(content)


@pytest.fixture(scope="module")
def files():
    return sent(ROOT)


@pytest.fixture
def clone(files, tmp_path):
    """A copy of the repository in which people have worked."""
    root = tmp_path / "clone"
    for path, content in files.items():
        write(root, path, content)
    for path in PLANTED.split():
        write(root, path, b"PLANTED")
    shutil.copy(ROOT / ".detignore", root)
    return root


def test_context_is_about_1_mib():
    assert 0 < sum(map(v1file_utils.v1File_size, entries(ROOT))) < 1.1 * MIB


def test_context_holds_all_code_and_nothing_else(files):
    there = {name for name in SENT if (ROOT / name).exists()}
    assert {Path(entry.path).parts[0] for entry in entries(ROOT)} == there
    code = {
        path.relative_to(ROOT).as_posix()
        for name in CODE
        for path in ROOT.glob(f"{name}/**/*.py")
    }
    assert code <= files.keys()


def test_code_that_is_sent_imports_no_code_that_is_not_sent(files):
    imported = {
        parts[0]
        for path in files
        if path.endswith(".py")
        for _, parts in imports(ROOT / path)
    }
    here = {path.stem for path in ROOT.iterdir()}
    assert {"determined_amp", "trials"} <= imported & here <= CODE


def test_secrets_data_and_caches_of_a_clone_are_not_sent(files, clone):
    assert sent(clone) == files
