r"""Train one trial of a search on a Determined cluster.

    entrypoint: python3 -m determined.launch.torch_distributed \
        python3 -m determined_amp.search.train_trial

As `train` does it, and every validation also says which scale was used and which share of
the gradients it flushed to zero before the first step.
"""

from __future__ import annotations

import sys

import determined as det

from determined_amp.config import experiment
from determined_amp.search import on_cluster
from determined_amp.search.scale_metrics import report_flushed_share
from determined_amp.search.searcher import check_lengths
from determined_amp.train import train_on_cluster


def main() -> int:
    """Returns the exit status."""
    return on_cluster.run(_train)


def _train(info: det.ClusterInfo) -> int:
    config = info.trial._config
    check_lengths(experiment.parse(config, "search", completed_by_master=True))
    return train_on_cluster(info, prepare=report_flushed_share)


if __name__ == "__main__":
    sys.exit(main())
