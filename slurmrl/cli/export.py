"""``slurmrl export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmrl.cli.options import common

if TYPE_CHECKING:
    from slurmrl.config.schema.frequency import ExportDtype


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
@click.option(
    "--dtype",
    type=click.Choice(["source", "float32", "bfloat16", "float16"]),
    help="Type of the weights; source is that of the model the role started from. "
    "Default: checkpoint.export_dtype of the trial, which is source.",
)
@common
def export(
    trial: str,
    step: int | None,
    out: Path | None,
    role: str,
    dtype: ExportDtype | None,
    root: str | None,
) -> int:
    """Write a model of a checkpoint as a folder that transformers loads; prints the folder. Works
    while the trial runs and after it has ended. The checkpoint's files are compared with their
    checksums first: of a damaged one nothing is written."""
    from slurmrl.submission import trials
    from slurmrl.workers.master.exporting import export_step

    paths = trials.find(trials.root_folder(root), trial)
    target = out.absolute() if out is not None else None
    click.echo(str(export_step(paths, role, step, target, dtype)))
    return 0
