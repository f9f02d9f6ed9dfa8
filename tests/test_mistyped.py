"""What a user mistypes in a YAML: a command says so in one sentence, or does what was
asked.

Hypothesis drops, misspells or repeats a key, indents it with a tab, or gives it another
value. Each example runs a whole command. The last test plants a fault that the others
look for.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from determined.common import util
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from determined_amp import __main__ as door
from determined_amp.amp.plain_data import Config, Metrics
from determined_amp.experiment.dotted import flat
from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.files import directory_kept
from determined_amp.experiment.overrides import with_overrides
from determined_amp.runs.folder import read_record
from determined_amp.runs.run import RunState
from tests import test_hostile, training

TINY = with_overrides(
    read_yaml(str(training.ROOT / "experiment_configs/mlp/amp.yaml")),
    [
        *training.SMALL[:3],
        (
            "hyperparameters.training={max_length: {batches: 4}, validation_period:"
            " {batches: 2}, checkpoint_period: {batches: 2}, reporting_period:"
            " {batches: 1}}"
        ),
    ],
)
# Values as YAML, wrong in most places, with two spaces between.
VALUES = r"""
null  true  'true'  []  {}  [null]  {a: 1}  x  ''  '5'  5  0.5  0  -1  1  2  0x10  032
0o17  1:30  1e39  1e300  1e-300  yes  .nan  .inf  -.inf  ~  2001-01-01  2001-99-99  *a
!!int x  !!binary aGk=  !x y  "\0"  "\ud800"  1_000  '[/b]'  '[red]'  größe  ../../up
/etc/passwd  'a/b'  '%20'  '{}'  +1  -0.0  {2001-01-01: 1}  {type: const, val: 5}
{type: double, minval: 0, maxval: 1}  {batches: 1}  {epochs: 1}"""

BOUNDED = settings(
    test_hostile.BOUNDED, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
)


class Mistake(NamedTuple):
    """What is mistyped: `how` is drop, misspell, twice, tab, or value."""

    how: str
    key: str  # the dotted path
    value: str = ""  # the new one, as YAML


def written(config: Config, mistake: Mistake, path: str = "") -> Iterator[str]:
    """The lines of the configuration as YAML, with a mistake that no YAML library would
    write.
    """
    depth = path.count(".")
    for key, value in config.items():
        how = mistake.how if mistake.key == f"{path}{key}" else "keep"
        name = key[:-2] + key[-1] if how == "misspell" else key
        indent = ("\t" if how == "tab" else "  ") * depth
        for _ in range({"drop": 0, "twice": 2}.get(how, 1)):
            if how == "value":
                yield f"{indent}{name}: {mistake.value}"
            elif isinstance(value, Mapping):
                yield f"{indent}{name}:"
                yield from written(value, mistake, f"{path}{key}.")
            else:
                yield f"{indent}{name}: {json.dumps(value)}"


def mistakes_in(config: Config) -> st.SearchStrategy[Mistake]:
    """A mistake at any key of a configuration."""
    how = st.sampled_from(["drop", "misspell", "twice", "tab", *["value"] * 12])
    values = st.sampled_from(VALUES.strip().replace("\n", "  ").split("  "))
    return st.builds(
        Mistake, how, st.sampled_from([*test_hostile.dotted(config)]), values
    )


def judge(
    command: Sequence[str], config: Config, mistake: Mistake, main: Any = None
) -> None:
    """Run a command on a mistyped YAML, in a folder that is gone afterwards, and judge
    its end.
    """
    output = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        directory_kept(),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        os.chdir(folder)
        Path("config.yaml").write_text("\n".join([*written(config, mistake), ""]))
        status = (main or door.main)([*command])
        said = output.getvalue()
        assert "Traceback (most recent call last)" not in said
        if status == 2:
            judge_refusal(mistake, said)
        else:
            assert status == 0, said
            assert command[0] != "train" or not_as_asked() == ""


def judge_refusal(mistake: Mistake, said: str) -> None:
    """A refusal names the key in few words, and leaves nothing but the record of a
    failed run.
    """
    assert any(part in said for part in mistake.key.split(".")) or "YAML" in said, said
    assert len(said) < 6000
    left = {path.name for path in Path().iterdir()} - {"config.yaml"}
    if left:
        assert left == {"run"}
        assert read_record(Path("run")).state in (
            RunState.FAILED,
            RunState.INVALID,
        ), said


def not_as_asked() -> str:
    """What the run trained that the YAML, as Determined's own reader reads it, did not
    ask for.
    """
    asked = flat(util.yaml_safe_load(Path("config.yaml").read_text()))
    trained: Metrics = {}
    # the second has what was read, with defaults
    for name in ("config.yaml", "resolved.yaml"):
        trained |= flat(util.yaml_safe_load(Path("run", name).read_text()))
    for name, value in asked.items():
        found = trained.get(name)
        # with what is added by default
        if isinstance(value, dict) and isinstance(found, dict):
            found = {key: found[key] for key in value if key in found}
        # By their text: 1 is not true, and NaN equals nothing.
        if (
            value not in (None, {})
            and repr(value) != repr(found)
            and not same_number(value, found)
        ):
            return f"{name}: asked for {value!r}, trained {found!r}"
    return ""


def same_number(value: object, found: object) -> bool:
    """Whether both are numbers, and equal: a YAML may write 1 for 1.0."""
    kinds = {type(value), type(found)}
    return kinds <= {int, float} and value == found


TRAIN = ("train", "config.yaml", "--run-folder", "run")


@settings(BOUNDED, max_examples=50)
@given(mistake=mistakes_in(TINY))
def test_mistyped_experiment_is_refused_or_trained_as_it_stands(
    mistake: Mistake,
) -> None:
    judge(TRAIN, TINY, mistake)


@settings(BOUNDED, max_examples=15)
@given(mistake=mistakes_in(TINY))
def test_mistyped_experiment_is_refused_or_its_scale_is_found(mistake: Mistake) -> None:
    judge(("find", "config.yaml", "--batches", "1"), TINY, mistake)


def careless(arguments: Sequence[str]) -> int:
    return door.main([*arguments, "--config", "hyperparameters.learning_rate=0.5"])


def test_training_with_another_learning_rate_than_the_yaml_asks_for_is_noticed() -> (
    None
):
    """Negative control: the judge of the tests above fails what a careless command
    trains.
    """
    mistake = Mistake("value", "hyperparameters.learning_rate", "0.25")
    judge(TRAIN, TINY, mistake)
    with pytest.raises(AssertionError):
        judge(TRAIN, TINY, mistake, careless)
