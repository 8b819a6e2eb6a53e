"""``slurmrl cancel``."""

from __future__ import annotations

import click

from slurmrl.cli.options import again, common


@click.command()
@click.argument("trial", metavar="EXPERIMENT/TRIAL")
@common
def cancel(trial: str, root: str | None) -> int:
    """End a trial for good and its jobs with it. What is committed stays."""
    from slurmrl.history.record import Kind
    from slurmrl.submission import trials
    from slurmrl.submission.cancel import cancel as cancel_trial

    folder = trials.root_folder(root)
    kind = cancel_trial(trials.find(folder, trial))
    if kind is Kind.CANCELLED:
        click.echo(f"{trial} is cancelled; to go on: slurmrl resume {trial}{again(folder)}")
    else:
        click.echo(f"{trial} had ended already: {kind}")
    return 0
