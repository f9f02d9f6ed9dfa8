"""The launcher of a task of several slots: Determined's, but torchrun ends without a traceback.

Every rank has logged why it ended. torchrun then adds a report of its own as a traceback, which
hides the reason. Here it is left out if a rank gave one.

    python -m determined_amp.launcher SCRIPT ...      Determined's launcher
    python -m determined_amp.launcher --nnodes ...    torchrun, which that launcher starts
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

_TORCHRUN = "torch.distributed.run"


def launch(script: Sequence[str]) -> int:
    """Run a script in every rank of this task; the exit status of torchrun."""
    from determined.launch import torch_distributed  # noqa: PLC0415  # torchrun needs none of it

    command = torch_distributed.create_launch_cmd

    def quiet(*args: Any) -> list[str]:
        return ["determined_amp.launcher" if w == _TORCHRUN else w for w in command(*args)]

    vars(torch_distributed)["create_launch_cmd"] = quiet
    return torch_distributed.main([], list(script))


def torchrun() -> int:
    """Run torchrun with the arguments of this process; its exit status."""
    # These import torch, which the launcher above does without.
    from torch.distributed import run  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415

    try:
        run.main()
    except SignalException:  # of Determined's pid server, after a rank has failed
        return 1
    except ChildFailedError as error:
        if not any(failure.error_file_data for failure in error.failures.values()):
            print(error, file=sys.stderr)  # a rank that was killed gives no reason
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(torchrun() if "--nnodes" in sys.argv else launch(sys.argv[1:]))
