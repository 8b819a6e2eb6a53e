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

__version__ = "0.1.1.dev0"


def submit(
    config: str | PathLike[str],
    *overrides: str,
    root: str | None = None,
    scheduler: str | None = None,
    new: bool = False,
    check: bool = True,
) -> Trial:
    """Check a configuration, submit its trial and return the trial without waiting for it.

    The call does the same as ``slurmrl submit --detach``. An existing trial that was interrupted,
    failed or cancelled continues from its last commit if its configuration is the same.

    Args:
        config: Path of a YAML file, or of an archive that ``slurmrl bundle`` made.
        overrides: Strings ``dotted.key=value``, which replace settings of the file.
        root: Root directory of all runs. Default: SLURMRL_ROOT, then the configuration, then the
            site profile, then ``./runs``.
        scheduler: ``auto``, ``local`` or ``slurm``. Default: ``cluster.scheduler`` of the
            configuration or of the site profile that SLURMRL_PROFILE selects.
        new: Start a new trial under the next free name.
        check: Check data, weights, tokenizer and reward before the first job is queued.

    Returns:
        The trial, whose jobs run independently of the calling process.

    Raises:
        ConfigError: The configuration has problems; the error lists all of them.
        UsageError: The trial has jobs already, or ``config`` is not a path.
        EnvironmentFailure: The scheduler or the file system failed.

    Example:
        trial = slurmrl.submit("grpo.yaml", "trial=2", "actor.optimizer.lr=3e-5")
        trial.wait()["state"]  # "COMPLETED"
    """
    from os import PathLike
    from pathlib import Path

    from slurmrl.desk import handle
    from slurmrl.errors import UsageError

    if not isinstance(config, str | PathLike):
        raise UsageError(
            f"config: {type(config).__name__} is not allowed: expected the path of a YAML file. "
            "To change a setting, pass an override: submit('my.yaml', 'seed=2')"
        )
    return handle.submit(
        Path(config), overrides, root=root, scheduler=scheduler, new=new, check=check
    )


def trial(name: str, *, root: str | None = None) -> Trial:
    """Return an existing trial.

    Args:
        name: ``EXPERIMENT/TRIAL``.
        root: Root directory of all runs. Default: SLURMRL_ROOT, then the site profile, then
            ``./runs``.

    Raises:
        UsageError: The name is not of the form ``EXPERIMENT/TRIAL``.
        UnknownNameError: There is no such trial; the message lists the existing trials.

    Example:
        slurmrl.trial("addition-grpo/1").metrics()[-1]["reward"]
    """
    from slurmrl.desk import handle

    return handle.find(name, root)
