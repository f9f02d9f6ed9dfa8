"""The audit of one batch alone.

python -m trials.audit CONFIG.yaml [--config KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from determined import core, pytorch

from trials.audit import Audit, AuditError, audited
from trials.experiment import Experiment, load_trial_class, parse, read_yaml
from trials.hparams import Hparams
from trials.local.checkpoints import LocalCheckpoints
from trials.local.run import trial_context
from trials.train import USER_ERRORS, with_overrides


def audit_here(config: Mapping[str, Any], experiment: Experiment[Hparams]) -> Audit:
    """Train one batch on this machine, two on a GPU, in Determined's loop; leave nothing behind.

    Args:
        config: The configuration as it was given.
        experiment: The same, parsed.

    Raises:
        AuditError: if the batch is not computed in the precision of the experiment.
    """
    done: list[Audit] = []

    def stop(audit: Audit) -> None:
        done.append(audit)
        raise pytorch._ShouldExit(skip_exit_checkpoint=True)

    with _trial_here(config, experiment) as (trial, context):
        audited(trial, context.device, experiment.hparams.amp.precision, stop)
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(2), checkpoint_policy="none")
    return done[0]


@contextmanager
def _trial_here(
    config: Mapping[str, Any], experiment: Experiment[Hparams]
) -> Iterator[tuple[pytorch.PyTorchTrial, pytorch.PyTorchTrialContext]]:
    alone = core.DummyDistributedContext()
    with tempfile.TemporaryDirectory() as folder:
        core_context = core.Context(
            checkpoint=LocalCheckpoints(alone, Path(folder), None),
            distributed=alone,
            train=core.DummyTrainContext(Path(folder)),
        )
        with core_context:
            context = trial_context(core_context, config, experiment, first_batch=0)
            yield load_trial_class(experiment.hparams.trial)(context, experiment), context


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 for an audit that passed, 1 for one that failed, 2 as training."""
    parser = argparse.ArgumentParser(
        prog="python -m trials.audit",
        description="Train one batch and print what it was computed in.",
    )
    parser.add_argument("config", help="experiment YAML")
    parser.add_argument(
        "--config",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change one value of the YAML, as trials.train does",
    )
    options = parser.parse_args(arguments)
    try:
        config = with_overrides(read_yaml(options.config), options.overrides)
        print(audit_here(config, parse(config, options.config)).table())
    except AuditError as error:
        print(error)
        return 1
    except USER_ERRORS as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
