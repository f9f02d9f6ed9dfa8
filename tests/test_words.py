"""Messages that name the user's own words, keys and folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from determined_amp import AmpLoop
from determined_amp import __main__ as door
from determined_amp.amp.errors import ConfigError, UserError
from determined_amp.experiment.failures import faults_of_the_trial
from determined_amp.trial.mixed_precision import MixedPrecision
from tests.harness import Context
from tests.strangers import Stranger
from tests.training import write_yaml

PLAIN: dict[str, Any] = {
    "name": "plain",
    "entrypoint": "tests.test_words:Wide",
    "hyperparameters": {"width": 8},
    "searcher": {"name": "single", "metric": "val_loss", "max_length": {"batches": 2}},
    "scheduling_unit": 2,
}


class Wide(Stranger):
    """Its width is a hyperparameter."""

    def head(self, features: int, classes: int) -> torch.nn.Module:  # type: ignore[override]
        width = self.context.get_hparam("width")
        return torch.nn.Sequential(
            torch.nn.Linear(features, width), torch.nn.Linear(width, classes)
        )


def test_error_that_the_trial_raises_itself_keeps_its_words() -> None:
    words = "expected torch.float16 weights"
    with pytest.raises(RuntimeError, match=words) as caught, faults_of_the_trial():
        raise RuntimeError(words)
    assert not isinstance(caught.value, UserError)


def test_error_of_torch_in_16_bits_says_what_to_write() -> None:
    """Negative control: the same block replaces the words of torch."""
    half = torch.ones(1, dtype=torch.float16)
    with pytest.raises(UserError, match=r"one dtype for both"), faults_of_the_trial():
        torch.mm(half[None], torch.ones(1, 1))


@pytest.mark.parametrize("settings", [{"precision": "amp_fp16"}, "amp_fp16", None])
def test_settings_of_another_type_are_one_sentence(settings: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"settings: got a \w+; allowed: AmpSettings\("
    ):
        AmpLoop(settings, "cpu")
    if settings is not None:
        context: Any = Context()
        with pytest.raises(
            ConfigError, match=r"settings: got a \w+; allowed: AmpSettings\("
        ):
            MixedPrecision(context, settings)


@pytest.mark.usefixtures("_in_tmp_path")
def test_trial_that_is_not_found_is_named_with_the_folder_searched(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    path = write_yaml(tmp_path, {**PLAIN, "entrypoint": "model_of_words:Trial"})
    assert f"searched: {tmp_path};" in refusal("audit", path)


def test_resume_names_the_width_that_changed_and_the_key_of_the_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
    run = tmp_path / "run"
    assert (
        door.main(["train", write_yaml(tmp_path, PLAIN), "--run-folder", str(run)]) == 0
    )
    assert door.main(["train", "--resume", str(run)]) == 0
    assert "give it a larger searcher.max_length" in capsys.readouterr().out
    wider = [
        "--config",
        "hyperparameters.width=16",
        "--config",
        "searcher.max_length.batches=4",
    ]
    message = refusal("train", "--resume", str(run), *wider)
    changed = "hyperparameters.width changed from 8 to 16"
    assert message.index(changed) < message.index("size mismatch")


def test_find_of_a_trial_without_a_scale_names_the_option(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    said = refusal("find", write_yaml(tmp_path, PLAIN))
    assert "this trial scales no loss: " in said
    assert (
        "hyperparameters.amp.precision: amp_fp16, or --precision amp_fp16, it trains"
        in said
    )
