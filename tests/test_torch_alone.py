"""Loops of PyTorch need torch and numpy: all else may be missing, Determined too."""

import importlib.metadata
import os
import re
from pathlib import Path

import torch

from tests.run_here import ROOT, outcome
from tests.test_check_scripts import write_script

# What a user of torch alone does: `AmpLoop`, the finder, the audit, the doctor and its
# command.
PROGRAM = """
import os
from importlib.util import find_spec

import torch
import determined_amp
from determined_amp import AmpLoop, AmpSettings, Precision, check, find_loss_scale
from determined_amp.__main__ import main
from determined_amp.audit import audit_loss

packages = "determined", "rich", "yaml", "ruamel", "optuna", "scipy", "matplotlib"
for package in packages:
    assert find_spec(package) is None, package

amp = AmpLoop(AmpSettings(Precision.AMP_FP16), "cpu")
model = amp.prepare(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
amp.wrap_optimizer(optimizer)
batches = [torch.randn(4, 8) for _ in range(8)]

def loss_fn(batch):
    return model(batch).float().square().mean()

assert find_loss_scale(model, loss_fn, batches).init_scale
assert audit_loss(amp, loss_fn, batches[0]).passed
with check.watching() as findings:
    for batch in batches:
        with amp.autocast():
            loss = loss_fn(batch)
        amp.scaler.scale(loss).backward()
        amp.clip_gradients(optimizer)
        amp.scaler.step(optimizer)
        optimizer.zero_grad()
        amp.update(loss, samples=len(batch))
    print(amp.report(batch, loss_fn)["loss"])
print(findings)
assert not findings.faults
if child := os.fork():
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
else:
    os._exit(main(["check", "train.py", "--fault", "clip"]))
"""


def requirements(name, known):
    """A distribution and all that it requires to be imported."""
    if name not in known:
        known.add(name)
        yield name
        for line in importlib.metadata.requires(name) or ():
            requirement, _, condition = line.partition(";")
            if "extra" not in condition and "platform_system" not in condition:
                needed = re.split(r"[^A-Za-z0-9_.-]", requirement.strip())[0]
                yield from requirements(needed, known)


def link_modules(folder, *distributions):
    """Link the modules of distributions and of their requirements into a folder."""
    known = set()
    wanted = {
        plain(name) for each in distributions for name in requirements(each, known)
    }
    packages = Path(torch.__file__).parents[1]
    for module, owners in importlib.metadata.packages_distributions().items():
        if wanted.isdisjoint(map(plain, owners)):
            continue
        for name in (module, f"{module}.py", f"{module}.libs"):
            if (packages / name).exists():
                (folder / name).symlink_to(packages / name)


def plain(name):
    """The name of a distribution in the form in which names are compared."""
    return name.lower().replace("_", "-")


def test_loop_finder_audit_and_doctor_need_torch_and_numpy_alone(tmp_path):
    link_modules(tmp_path, "torch", "numpy")
    (tmp_path / "determined_amp").symlink_to(ROOT / "determined_amp")
    write_script(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    # Without `site` there are no installed packages.
    ran = outcome("-S", "-W", "ignore", "-c", PROGRAM, cwd=tmp_path, env=env)
    assert ran.returncode == 0, ran.stderr
