"""``slurmrl rm``."""

from __future__ import annotations

import click

from slurmrl.cli import completion
from slurmrl.cli.options import common, examples


@click.command(epilog=examples("slurmrl rm grpo/1", "slurmrl rm grpo/1 grpo/2 --yes"))
@click.argument(
    "names",
    nargs=-1,
    required=True,
    metavar="EXPERIMENT/TRIAL...",
    shell_complete=completion.trials,
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@common
def rm(names: tuple[str, ...], yes: bool, root: str | None) -> int:
    """Remove trials that have no jobs: checkpoints, exports, metrics, logs, everything. Trials
    whose files another trial's configuration names are kept."""
    from slurmrl.submission import removing, trials

    folder = trials.root_folder(root)
    chosen = list(dict.fromkeys(trials.find(folder, name) for name in names))
    others = [paths for paths in trials.all_trials(folder) if paths not in chosen]
    removing.check(chosen, others)
    if not yes:
        listed = ", ".join(str(paths.run) for paths in chosen)
        click.confirm(f"Remove {listed} with all checkpoints and exports?", abort=True)
    for paths in chosen:
        removing.remove(paths)
        click.echo(f"{paths.experiment}/{paths.trial} is removed")
    return 0
