"""``slurmrl examples``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from slurmrl.cli import completion
from slurmrl.cli.options import examples as example_lines
from slurmrl.cli.options import json_option


@click.command(
    epilog=example_lines(
        "slurmrl examples",
        "slurmrl examples --output examples",
        "slurmrl submit examples/sft.yaml --scheduler local",
    )
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    shell_complete=completion.folders,
    help="Copy all examples with their data into this new folder.",
)
@json_option
def examples(output: Path | None, as_json: bool) -> int:
    """List the examples that come with slurmrl, or copy them.

    Those of the addition task train a small model on CPUs within minutes, without a network.
    """
    from slurmrl.desk.init import shipped
    from slurmrl.display.columns import table, width

    found = dict(shipped.examples())
    if output is not None:
        shipped.copy(output)
    if as_json:
        click.echo(json.dumps({"examples": found, "folder": str(output) if output else None}))
        return 0
    if output is not None:
        click.echo(f"copied {len(found)} configurations with their data into {output}")
        click.echo(f"  begin with  slurmrl submit {shlex.quote(str(output / 'sft.yaml'))}")
        return 0
    click.echo("\n".join(table(list(found.items()), width())))
    click.echo("\nslurmrl examples --output FOLDER copies all of them")
    return 0
