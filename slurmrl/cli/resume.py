"""``slurmrl resume``."""

from __future__ import annotations

import click

from slurmrl.cli.options import common, submitting
from slurmrl.cli.start import start


@click.command()
@click.argument("trial", metavar="EXPERIMENT/TRIAL")
@submitting
@common
def resume(
    trial: str,
    overrides: tuple[str, ...],
    scheduler: str | None,
    wait: bool | None,
    as_json: bool,
    root: str | None,
) -> int:
    """Go on with a trial from its last commit, by the configuration in its run directory.

    Settings that do not change what is computed (total_steps, stop_when, cluster, checkpoint, …)
    can be changed.
    """
    from slurmrl.submission import trials
    from slurmrl.submission.submit import propose_resume

    paths = trials.find(trials.root_folder(root), trial)
    proposal = propose_resume(paths, overrides, scheduler=scheduler)
    return start(proposal, wait=wait, as_json=as_json)
