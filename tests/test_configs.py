"""Sibling YAMLs differ in exactly the keys they are about, and in nothing else.

Each YAML of `hp_search` is an experiment of its own.
"""

import re

import pytest

from determined_amp.amp.settings import SCALER_KEYS, Precision
from determined_amp.experiment import experiment
from determined_amp.experiment.dotted import flat
from determined_amp.experiment.entrypoint import Task
from determined_amp.search.search_plan import SearchPlan
from tests.run_here import ROOT

CONFIGS = ROOT / "experiment_configs"

NAMES = frozenset({"name", "description"})
PRECISION = NAMES | {"hyperparameters.amp.precision"}
SCALER = PRECISION | {f"hyperparameters.amp.{key}" for key in SCALER_KEYS}
# What each file changes of the fp32.yaml beside it.
DIFFERS = {
    "fp32.yaml": frozenset(),
    "tf32.yaml": PRECISION,
    "bf16.yaml": PRECISION,
    "amp.yaml": SCALER,
    "amp_2slots.yaml": SCALER | {"resources.slots_per_trial"},
}
TRIALS = ("mlp", "resnet50", "latte")
# Files of one trial alone: which file beside it they are held against, and what they
# change of it.
SIZE = {"num_layers", "num_attention_heads", "attention_head_dim"}
OWN = {
    "latte/amp_checkpointing.yaml": (
        "amp.yaml",
        NAMES | {"hyperparameters.gradient_checkpointing"},
    ),
    # The paper's training, which has nothing in common with the small model's.
    "latte/latte_s.yaml": ("latte_s.yaml", frozenset()),
    "latte/latte_xl.yaml": (
        "latte_s.yaml",
        NAMES | {f"hyperparameters.model.{key}" for key in SIZE},
    ),
}
BASES = {
    f"{trial}/{name}": ("fp32.yaml", DIFFERS[name])
    for trial in TRIALS
    for name in DIFFERS
}
# ImageNet at 224 px: the same four precisions, which differ in the same keys.
BASES |= {
    f"resnet50/imagenet_{name}": ("imagenet_fp32.yaml", DIFFERS[name])
    for name in DIFFERS
    if name != "amp_2slots.yaml"
}
BASES |= OWN


SEARCHES = ROOT / "hp_search"
SEARCHER = {f"searcher.{key}" for key in ("name", "max_concurrent_trials")}
SCORE = {"entrypoint", "searcher.metric"}
SCALE = "hyperparameters.amp.init_scale"


# What each file changes of experiment_configs/mlp/amp.yaml.
SEARCHES_DIFFER = {
    "loss_scale_grid": SCORE | SEARCHER | {SCALE},
    "loss_scale_random": SCORE | SEARCHER | {SCALE, "searcher.max_trials"},
    "loss_scale_asha": (
        SEARCHER
        | {f"searcher.{key}" for key in ("max_trials", "time_metric", "max_time")}
        | {f"searcher.{key}" for key in ("divisor", "mode")}
        | {
            SCALE,
            "hyperparameters.learning_rate",
            "hyperparameters.amp.growth_interval",
        }
        | {
            f"hyperparameters.training.{p}_period.batches"
            for p in ("validation", "reporting")
        }
    ),
    "compare_precisions": (
        SEARCHER | {"hyperparameters.trial_seed", "hyperparameters.amp.precision"}
    ),
    "find_loss_scale": {"entrypoint", "searcher.metric", "searcher.smaller_is_better"},
    "compare": {"entrypoint", "max_restarts"},
    "check": {"entrypoint", "max_restarts"},
}
VERBS = {
    "loss_scale_grid": "score",
    "loss_scale_random": "score",
    "loss_scale_asha": "train",
    "compare_precisions": "train",
    "find_loss_scale": "find",
    "compare": "compare",
    "check": "check",
}


def load(path):
    return experiment.read_yaml(str(path))


def difference(one, other):
    """Dotted keys whose values differ; a key that only one has differs."""
    a, b = flat(one), flat(other)
    return frozenset(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


def test_every_yaml_is_declared_and_every_declared_one_exists():
    assert {*CONFIGS.rglob("*.yaml")} == {CONFIGS / name for name in BASES}
    assert {path.stem for path in SEARCHES.glob("*")} == {*SEARCHES_DIFFER}


@pytest.mark.parametrize("name", BASES)
def test_sibling_differs_in_exactly_the_declared_keys(name):
    base, keys = BASES[name]
    path = CONFIGS / name
    assert difference(load(path), load(path.with_name(base))) == keys


def test_imagenet_is_warmed_up_for_five_epochs_at_the_rate_of_its_batch():
    hparams = load(CONFIGS / "resnet50" / "imagenet_fp32.yaml")["hyperparameters"]
    batch = hparams["global_batch_size"]
    assert hparams["warmup_steps"] == 5 * (1281167 // batch)
    assert hparams["learning_rate"] == 0.1 * batch / 256


@pytest.mark.parametrize("name", BASES)
class TestEveryFile:
    def test_name_and_header_are_those_of_this_file(self, name):
        path, place = CONFIGS / name, f"experiment_configs/{name}"
        assert load(path)["name"] == f"{path.parent.name}-{path.stem}".replace("_", "-")
        header = path.read_text().split("\nname:")[0]
        assert f"det experiment create {place} ." in header
        command = rf"(det-amp|-m determined_amp) train {re.escape(place)}"
        assert re.search(command, header)

    def test_hyperparameters_are_complete(self, name):
        """Flat and complete: every field is written out, so that no default hides."""
        config = load(CONFIGS / name)
        hparams = experiment.parse(config, name).hparams
        given = config["hyperparameters"]
        assert set(given) == set(vars(hparams))
        scaler = (
            set() if hparams.amp.precision is Precision.AMP_FP16 else set(SCALER_KEYS)
        )
        # Whether to touch torch's switches is a matter of the process, not of the
        # experiment.
        of_the_process = {"set_backends"}
        assert set(given["amp"]) | scaler | of_the_process == set(vars(hparams.amp))
        assert set(given["training"]) == set(vars(hparams.training))


@pytest.mark.parametrize(
    "path",
    [
        *(f"experiment_configs/{name}" for name in BASES),
        *(f"hp_search/{name}.yaml" for name in SEARCHES_DIFFER),
        "docs/your_trial/amp.yaml",
    ],
)
def test_log_policy_cancels_retries_after_errors_of_the_library_alone(path):
    (policy,) = load(ROOT / path)["log_policies"]
    assert policy["action"] == "cancel_retries"
    for line, is_fatal in {
        "no retry can help: the loss scale is at its floor": True,
        "/usr/bin/python3: No module named determined_amp": True,
        "ModuleNotFoundError: No module named 'rich'": False,
        "UserWarning: No module named 'triton': kernels are not compiled": False,
    }.items():
        assert bool(re.fullmatch(policy["pattern"], line)) is is_fatal


@pytest.mark.parametrize("name", SEARCHES_DIFFER)
class TestEverySearch:
    def test_search_differs_from_its_sibling_in_exactly_the_declared_keys(self, name):
        base = load(CONFIGS / "mlp" / "amp.yaml")
        assert (
            difference(load(SEARCHES / f"{name}.yaml"), base)
            == NAMES | SEARCHES_DIFFER[name]
        )

    def test_search_parses_and_its_entrypoint_is_a_command(self, name):
        config = load(SEARCHES / f"{name}.yaml")
        assert Task.of(config["entrypoint"], []).verb == VERBS[name]
        if config["searcher"]["name"] == "single":
            experiment.parse(config, name)
        else:
            plan = SearchPlan(config)
            for point in plan.points:
                sampled = plan.space.nested(point)
                experiment.parse(config, name, hyperparameters=sampled)

    def test_comments_name_the_commands_of_this_file(self, name):
        text = (SEARCHES / f"{name}.yaml").read_text()
        header = text.split("\nname:")[0]
        assert f"det experiment create hp_search/{name}.yaml ." in header
        assert "#   no cluster:     det-amp " in header
        assert "#   another trial:  " in header
        assert load(SEARCHES / f"{name}.yaml")["name"] == name.replace("_", "-")
