"""``slurmrl bundle``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from slurmrl.cli.options import common, examples

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def _torch(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    if re.fullmatch(r"cpu|cuda|cu\d{3}|none", value):
        return value
    raise click.BadParameter("cpu, cuda, none, or cu and a version of CUDA, as cu126")


@click.command(
    epilog=examples(
        "slurmrl bundle ppo.yaml --python 3.12 --output ppo.tar",
        "slurmrl bundle grpo.yaml --no-wheels trial=2",
    )
)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[dotted.key=value]...")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The file to write. Default: EXPERIMENT-TRIAL.tar.",
)
@click.option("--no-wheels", is_flag=True, help="Leave out the packages of slurmrl.")
@click.option(
    "--python",
    default=PYTHON,
    show_default=True,
    metavar="VERSION",
    help="The Python of the cluster, for the packages.",
)
@click.option(
    "--torch",
    default="cuda",
    show_default=True,
    callback=_torch,
    metavar="BUILD",
    help="The build of torch: cuda, cpu, one of a version of CUDA, as cu126, or none.",
)
@common
def bundle(
    config: Path,
    overrides: tuple[str, ...],
    output: Path | None,
    no_wheels: bool,
    python: str,
    torch: str,
    root: str | None,
) -> None:
    """Write CONFIG and all that it names into one archive, which `slurmrl submit` takes on a
    cluster without a network: models, datasets, your code, and wheels of slurmrl and what it needs.
    Repositories of the hub are fetched now."""
    from slurmrl.desk.bundle.make import make_bundle

    made = make_bundle(
        config,
        overrides,
        root=root,
        output=output,
        packages=None if no_wheels else (python, torch),
    )
    for note in made.notes:
        click.echo(note, err=True)
    size = made.file.stat().st_size
    click.echo(f"{made.file}: {made.files} files, {size / 1e6:,.1f} MB")
    click.echo(f"on the cluster: slurmrl submit {made.file.name}")
