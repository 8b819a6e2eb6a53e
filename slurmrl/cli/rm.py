"""``slurmrl rm``."""

from __future__ import annotations

import click

from slurmrl.cli.options import common, examples, trials_argument


@click.command(epilog=examples("slurmrl rm grpo/1", "slurmrl rm grpo/1 grpo/2 --yes"))
@trials_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
@common
def rm(names: tuple[str, ...], yes: bool, root: str | None) -> int:
    """Remove trials with all their files: checkpoints, exports, metrics, logs. Nothing is removed
    if one of them has a job, or if the configuration of another trial names its files."""
    from slurmrl.desk import removing, trials

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
