"""Small searches and findings for the tests of `report`."""

import math

from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.finder.found_scale import FinderRun, FoundScale
from determined_amp.finder.scale_finding import ScaleFinding, Verdict
from determined_amp.runs.folder import STUDY_FILE, trial_folder
from determined_amp.runs.run import SEED
from determined_amp.search.search_folder import write_config
from tests.precisions import CPU, made_on, write_record
from tests.run_here import ROOT, SMALL

SEARCH = with_overrides(
    read_yaml(str(ROOT / "hp_search/loss_scale_grid.yaml")),
    (
        *SMALL,
        "name=small",
        "reproducibility.experiment_seed=3",
        "searcher.max_concurrent_trials=1",
    ),
)


def scored(scale_log2, *, top=18):
    """The metrics of a trial that was scored; nothing overflows up to `top`."""
    share = 0.25 if scale_log2 < 0 else 0.0
    steps = max(0, scale_log2 - top) + 2000 * share
    return {
        "init_scale_log2": float(scale_log2),
        "loss_scale_score": math.log2(1 + steps),
        "steps_lost": steps,
        "overflow": float(scale_log2 > top),
        "flushed_share": share,
    }


def write_study(
    folder,
    trials,
    search=SEARCH,
):
    """The folder of a search that has ended: per trial, what was sampled and its
    metrics.

    Each trial was scored, and completed, with seed 3.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, search, workers=1)
    (folder / STUDY_FILE).touch()
    machine, date = made_on(CPU), "2026-01-02T03:04:05+00:00"
    part = {"first_batch": 0, "settings": {SEED: 3}, "machine": machine, "date": date}
    for number, (sampled, metrics) in enumerate(trials):
        record = {
            "state": "completed",
            "reason": "",
            "number": number,
            "hparams": {"amp.init_scale": sampled},
            "parts": [{**part, "command": []}],
        }
        report = {"group": "validation", **metrics, "batches": 4}
        write_record(trial_folder(folder, number), record, [report])
    return folder


def found_scale(low=-6, top=18):
    """The finder's answer for a model whose gradients are two powers of two."""
    finding = ScaleFinding(low, top, choice_log2=17, verdict=Verdict.SCALE, scales=())
    made_on = "small", "cpu", "2.6", "2026-01-01"
    run = FinderRun(*made_on, 4, 128, 65536.0, is_ours=True, min_scale=1.0)
    return FoundScale(finding, run)
