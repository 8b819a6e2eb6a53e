"""``slurmrl cancel``."""

from __future__ import annotations

import click

from slurmrl.cli.options import again, common


@click.command()
@click.argument("trial", metavar="EXPERIMENT/TRIAL")
@common
def cancel(trial: str, root: str | None) -> int:
    """Cancel a trial and its jobs. Its checkpoints stay."""
    from slurmrl.history.record import Kind
    from slurmrl.submission import trials
    from slurmrl.submission.live import cancel as cancel_trial

    folder = trials.root_folder(root)
    kind = cancel_trial(trials.find(folder, trial))
    if kind is Kind.CANCELLED:
        click.echo(f"{trial} is cancelled; to continue it: slurmrl resume {trial}{again(folder)}")
    else:
        click.echo(f"{trial} has already ended: {kind}")
    return 0
