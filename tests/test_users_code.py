"""Which files count as the user's own in messages, findings and checkpoints."""

import json
import os
import site
from pathlib import Path

import pytest
import torch

from determined_amp.amp import users_code

APT = "/usr/lib/python3/dist-packages/torch/nn/modules/linear.py"


@pytest.mark.parametrize(
    ("file", "users"),
    [
        ("/home/me/train.py", True),
        # Below the prefix of a system's Python.
        ("/usr/src/app/model_def.py", True),
        (os.path.join(os.path.dirname(os.__file__), "..", "..", "app", "a.py"), True),
        (str(Path(json.__file__)), False),
        (str(Path(torch.__file__)), False),
        (APT, False),
        (os.path.join(site.getusersitepackages(), "timm", "optim.py"), False),
        (users_code.__file__, False),
        ("<frozen runpy>", False),
    ],
)
def test_file_is_the_users_unless_it_is_installed(file, users):
    assert users_code.is_users(os.path.normpath(file)) is users
