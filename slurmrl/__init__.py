"""slurmrl: RL post-training of language models as plain Slurm batch jobs.

From Python::

    trial = slurmrl.submit("grpo.yaml", "trial=2", "actor.optimizer.lr=3e-5")
    trial.wait()["state"]               # "COMPLETED"
    slurmrl.trial("addition-grpo/2").metrics()[-1]["reward"]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike

    from slurmrl.desk.handle import Trial

__version__ = "0.1.0"


def submit(
    config: str | PathLike[str],
    *overrides: str,
    root: str | None = None,
    scheduler: str | None = None,
    new: bool = False,
    check: bool = True,
) -> Trial:
    """Submit a configuration as ``slurmrl submit --detach`` does, and return its trial.

    ``overrides`` are ``dotted.key=value``. ``root`` is the folder of all runs, ``scheduler`` is
    ``auto``, ``local`` or ``slurm``; by default both are those of the configuration or of the site
    profile, which SLURMRL_PROFILE chooses as for commands. ``new`` takes the next free name.
    ``check=False`` leaves out the checks of data, weights, tokenizer and reward.

    Raises ConfigError with every problem, UsageError for a trial that lives, EnvironmentFailure.
    """
    from os import PathLike
    from pathlib import Path

    from slurmrl.desk import handle
    from slurmrl.errors import UsageError

    if not isinstance(config, str | PathLike):
        raise UsageError(
            f"config: {type(config).__name__} is not allowed: expected the path of a YAML file. "
            "Settings that differ from it are overrides: submit('my.yaml', 'seed=2')"
        )
    return handle.submit(
        Path(config), overrides, root=root, scheduler=scheduler, new=new, check=check
    )


def trial(name: str, *, root: str | None = None) -> Trial:
    """The trial ``EXPERIMENT/TRIAL`` that exists. Raises UsageError, UnknownNameError."""
    from slurmrl.desk import handle

    return handle.find(name, root)
