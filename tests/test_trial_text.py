"""What the files of a trial tell before it is imported, and what they cannot tell."""

import sys
from pathlib import Path

import pytest

from determined_amp.experiment.factory import load_factory
from determined_amp.experiment.trial_text import typo_in

FILES = {
    "model_def.py": "import torch\nclass MyTrial: pass\nAlias = MyTrial\n",
    "by_star.py": "from model_def import *\n",
    "by_getattr.py": "def __getattr__(name): return name\n",
    "by_globals.py": "globals()['Hidden'] = int\n",
    "by_modules.py": "import sys\nsys.modules[__name__] = int\n",
    "by_helper.py": "from helper import install\ninstall(__name__)\n",
    "by_frames.py": "from helper import install_here\ninstall_here()\n",
    "by_import.py": "import helper as h\nX = setattr(h.find(__name__), 'Y', 1)\n",
    "by_path/__init__.py": "import helper\n__path__ = helper.elsewhere()\n",
    "logs.py": "import logging\nlog = logging.getLogger(__name__)\nclass Logs: pass\n"
    "if __name__ == '__main__':\n    main()\n",
    "guarded.py": "if 1:\n    from model_def import MyTrial\n",
    "broken.py": "def f(:\n",
    "package/__init__.py": "raise AssertionError('imported')\n",
    "package/deep/__init__.py": "",
    "package/deep/trial.py": "class Deep:\n    class Inner: pass\n",
    "made/__init__.py": "import sys\nsys.modules['made.up'] = sys\n",
    "folder/inner/trial.py": "class InAFolder: pass\n",
}


@pytest.fixture(autouse=True)
def _there(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    ours = {Path(file).parts[0].removesuffix(".py") for file in FILES}
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    "path",
    [
        "model_def:MyTrial",
        "model_def:Alias",
        "guarded:MyTrial",
        "model_def:torch",
        # Only an import can tell.
        "by_star:MyTrial",
        "by_getattr:Any",
        "by_globals:Hidden",
        "by_modules:real",
        "by_helper:Installed",
        "by_frames:Installed",
        "by_import:Set",
        "by_path.elsewhere:Trial",
        "made.up:path",
        "package.deep.trial:Deep.Inner",
        "package:deep",
        "folder.inner.trial:InAFolder",
        "sys:path",
        "__main__.x:Base",
        "zlib:anything",
        "os.path:join",
        "broken:Trial",
        "",
        ".model_def:MyTrial",
        "concurrent.futures.process:any",
    ],
)
def test_name_that_may_be_there_is_left_to_the_import(path):
    before = set(sys.modules)
    assert not typo_in(path)
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("model_def:MyTrail", "'model_def' has no 'MyTrail'; did you mean MyTrial?"),
        ("model_deff:MyTrial", "named 'model_deff'; did you mean model_def?"),
        ("package.deep.trail:Deep", "'package.deep' has no 'trail'; did you mean tr"),
        ("package.deep.trial:Dep", "'package.deep.trial' has no 'Dep'; did you mean"),
        ("package:dep", "'package' has no 'dep'; did you mean deep?"),
        ("folder.inner.trial:X", "'folder.inner.trial' has no 'X'; searched: "),
        ("folder.inner2.trial:X", "'folder' has no 'inner2'; did you mean inner?"),
        ("logs:Log", "'logs' has no 'Log'; did you mean Logs?"),
        ("model_def.part:X", "'model_def' has no 'part'"),
        ("model_def", "it has to be MODULE:CLASS"),
    ],
)
def test_typo_is_named_and_nothing_is_imported(path, said):
    before = set(sys.modules)
    assert f"cannot be imported: {said}" in typo_in(path).replace("No module ", "")
    assert set(sys.modules) == before


def test_name_that_a_loaded_module_lacks_gets_a_near_one():
    load = "determined.pytorch:PyTorchTrail"
    with pytest.raises(ValueError, match="did you mean PyTorchTrial"):
        load_factory(load)
