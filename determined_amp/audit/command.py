"""The audit of one batch alone.

python -m determined_amp audit CONFIG.yaml [--config KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from determined import pytorch

from determined_amp.audit import Audit, AuditError, audited
from determined_amp.config.errors import UserError
from determined_amp.config.experiment import Experiment, parse, read_yaml
from determined_amp.config.hparams import Hparams
from determined_amp.config.overrides import add_override_option, with_overrides
from determined_amp.local.alone import trial_alone


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

    with trial_alone(config, experiment) as (trial, context):
        audited(trial, context.device, experiment.hparams.amp.precision, stop)
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(2), checkpoint_policy="none")
    return done[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 for an audit that passed, 1 for one that failed, 2 as training."""
    parser = argparse.ArgumentParser(
        prog="python -m determined_amp audit",
        description="Train one batch and print what it was computed in.",
    )
    parser.add_argument("config", help="experiment YAML")
    add_override_option(parser)
    options = parser.parse_args(arguments)
    try:
        config = with_overrides(read_yaml(options.config), options.overrides)
        print(audit_here(config, parse(config, options.config)).table())
    except AuditError as error:
        print(error)
        return 1
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
