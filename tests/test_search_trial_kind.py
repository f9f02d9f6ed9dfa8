"""The verb in the entrypoint of a search says what its trials do."""

from __future__ import annotations

import pytest
import yaml

from determined_amp.search.trial_kind import TrialKind
from tests.training import ROOT

PREFIX = "python3 -m determined.launch.torch_distributed python3 -m determined_amp"


@pytest.mark.parametrize(
    ("entrypoint", "kind"),
    [
        *((f"{PREFIX}.search.on_cluster {kind.value}", kind) for kind in TrialKind),
        (["python3", "-m", "determined_amp.search.on_cluster", "train"], TrialKind.TRAIN),
        ("python3 -m determined_amp.search.on_cluster", None),
        ("python3 -m determined_amp.search.on_cluster evaluate", None),
        (f"{PREFIX} train", None),
        (None, None),
    ],
)
def test_verb_after_the_module_is_the_kind(entrypoint: object, kind: TrialKind | None) -> None:
    assert TrialKind.of({"entrypoint": entrypoint}) is kind


def test_every_search_of_the_repository_has_the_kind_that_its_name_promises() -> None:
    found = {
        path.stem: TrialKind.of(yaml.safe_load(path.read_text()))
        for path in (ROOT / "hp_search").glob("*.yaml")
    }
    assert found == {
        "compare": None,  # a task of its own
        "compare_precisions": TrialKind.COMPARE,
        "find_loss_scale": TrialKind.FIND,
        "loss_scale_asha": TrialKind.TRAIN,
        "loss_scale_grid": TrialKind.SCORE,
        "loss_scale_random": TrialKind.SCORE,
    }
