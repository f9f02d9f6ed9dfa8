r"""Train one trial of a comparison of precisions on a Determined cluster.

    entrypoint: python3 -m determined.launch.torch_distributed \
        python3 -m determined_amp.search.compare_trial

As `train` does it and nothing more, so that its memory and speed are those of the training.
"""

from __future__ import annotations

import sys

from determined_amp.search import on_cluster
from determined_amp.train import train_on_cluster


def main() -> int:
    """Returns the exit status."""
    return on_cluster.run(train_on_cluster)


if __name__ == "__main__":
    sys.exit(main())
