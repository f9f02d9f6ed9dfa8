"""Started by torchrun on two ranks; prints what each saw as JSON, a line each.

One start serves all tests of `test_processes.py`: importing torch costs more than training.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from torch import distributed

from tests import training
from tests.one_weight import Recipe, run
from tests.test_amp import INF, ONE
from trials import train
from trials.local.processes import process_group

# Rows are dealt in turn: rank 0 gets the first of each pair. It overflows in the second batch.
ROWS = [ONE, ONE, INF, ONE, ONE, [3.0, 3.0]]


def main(folder: Path) -> None:
    work, checkpoints = folder / "work", folder / "checkpoints"
    work.mkdir(exist_ok=True)
    checkpoints.mkdir(exist_ok=True)
    os.chdir(work)  # which the loop copies into every checkpoint
    distributed.init_process_group("gloo")
    with process_group() as processes:
        made = run(Recipe(ROWS), checkpoints, processes=processes)
        seen = {
            "rank": processes.rank,
            "scales": made.trial.scales,
            "weights": made.trial.weights,
            "reports": made.reports,
        }
        print(json.dumps(seen), flush=True)
    training.run_small("mlp/fp32.yaml", folder / "two")
    odd = training.arguments("mlp/fp32.yaml", "hyperparameters.global_batch_size=33")
    assert train.main([*odd, "--run-folder", str(folder / "odd")]) == 2
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
