"""``slurmrl export``."""

from __future__ import annotations

from pathlib import Path

import click

from slurmrl.cli.options import common


@click.command()
@click.argument("trial", metavar="EXPERIMENT/TRIAL")
@click.option("--step", type=click.IntRange(min=0), help="Of this checkpoint. Default: the newest.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The new folder. Default: export/step-N in the run directory.",
)
@click.option("--role", default="actor", show_default=True, help="The model: actor or critic.")
@common
def export(trial: str, step: int | None, out: Path | None, role: str, root: str | None) -> int:
    """Write a model of a checkpoint as a folder that transformers loads; prints the folder. Works
    while the trial runs and after it has ended."""
    from slurmrl.submission import trials
    from slurmrl.workers.master.exporting import export_step

    paths = trials.find(trials.root_folder(root), trial)
    click.echo(str(export_step(paths, role, step, out.absolute() if out is not None else None)))
    return 0
