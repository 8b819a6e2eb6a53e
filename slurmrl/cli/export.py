"""``slurmrl export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmrl.cli.options import common, examples, trial_argument

if TYPE_CHECKING:
    from slurmrl.config.schema.config import ExportDtype, ExportForm


@click.command(
    epilog=examples(
        "slurmrl export grpo/1", "slurmrl export grpo/1 --step 40 --dtype bfloat16 --output model"
    )
)
@trial_argument
@click.option(
    "--step", type=click.IntRange(min=0), help="The checkpoint to export. Default: the newest."
)
@click.option(
    "--output",
    "--out",
    "out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The folder to create. Default: export/step-N in the run directory.",
)
@click.option(
    "--role",
    default="actor",
    show_default=True,
    help="The model to export: a role that is trained, or ref with ref.ema.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "source", "float32", "bfloat16", "float16"]),
    help="Type of the weights; source: the type of the model that the role was loaded from; auto: "
    "source if it keeps the training's update, else float32. "
    "Default: checkpoint.export_dtype of the trial, auto unless set.",
)
@click.option(
    "--form",
    type=click.Choice(["merged", "adapter"]),
    help="What a role with lora is exported as: merged, a whole model; adapter, a folder for PEFT. "
    "Default: checkpoint.export_form of the trial, merged unless set.",
)
@common
def export(
    trial: str,
    step: int | None,
    out: Path | None,
    role: str,
    dtype: ExportDtype | None,
    form: ExportForm | None,
    root: str | None,
) -> int:
    """Export a checkpoint's model to a folder that transformers or PEFT can load, and print the
    folder.

    Works while the trial runs and after it has ended. The checkpoint is verified by checksum first;
    nothing is written from a damaged one.
    """
    from slurmrl.desk import trials
    from slurmrl.workers.master.exporting import export_step

    paths = trials.find(trials.root_folder(root), trial)
    target = out.absolute() if out is not None else None
    exported = export_step(paths, role, step, target, dtype, form)
    if exported.warning:
        click.echo(f"Warning: {exported.warning}", err=True)
    elif exported.types is not None and exported.types.kept is not None:
        types = exported.types
        click.echo(f"{types.kept:.1%} of the update survives in {types.name}", err=True)
    click.echo(str(exported.folder))
    return 0
