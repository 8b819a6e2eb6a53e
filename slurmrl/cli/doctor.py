"""``slurmrl doctor``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmrl.cli.options import common, json_option

if TYPE_CHECKING:
    from slurmrl.doctor.check import Check

MARKS = {"ok": "ok", "warning": "WARNING", "failed": "FAILED"}
STYLES = {"ok": "green", "warning": "yellow", "failed": "red"}
MOST_HOSTS = 4


@click.command(epilog="Example: slurmrl doctor ppo.yaml --job")
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.argument("overrides", nargs=-1, metavar="[dotted.key=value]...")
@click.option("--job", is_flag=True, help="Look from inside a short job, too.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the job may wait for its start.",
)
@click.option(
    "--scheduler",
    type=click.Choice(["auto", "local", "slurm"]),
    help="Where the job runs. Default: cluster.scheduler; auto is slurm where sbatch answers.",
)
@json_option
@common
def doctor(
    config: Path | None,
    overrides: tuple[str, ...],
    job: bool,
    timeout: float,
    scheduler: str | None,
    as_json: bool,
    root: str | None,
) -> int:
    """Check whether trials, or that of CONFIG, can run here, and say what to do about it.

    The exit code is 1 if a check failed.
    """
    from slurmrl.doctor.examine import Examination, examine
    from slurmrl.submission.trials import chosen_root, root_folder

    what = Examination(
        config, overrides, chosen_root(root), root_folder(root), scheduler, job, timeout
    )
    checks = examine(what, lambda text: click.echo(text, err=True))
    counts = {state: sum(one.state == state for one in checks) for state in MARKS}
    if as_json:
        shown = {"checks": [one.to_json() for one in checks], **counts}
        click.echo(json.dumps(shown))
    else:
        _show(checks)
        words = ", ".join(f"{count} {state}" for state, count in counts.items())
        hint = "" if job else "; the compute nodes were not looked at: add --job"
        click.echo(f"{words}{hint}")
    return 1 if counts["failed"] else 0


def _show(checks: Sequence[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "", "where", "measured", box=None, pad_edge=False)
    for group in _together(checks):
        first = group[0]
        hosts = list(dict.fromkeys(one.where for one in group))
        where = ", ".join(hosts) if len(hosts) <= MOST_HOSTS else f"{len(hosts)} hosts"
        mark = Text(MARKS[first.state], style=STYLES[first.state])
        table.add_row(Text(first.name), mark, Text(where), Text(first.measured))
        if first.advice:
            table.add_row("", "", Text("->", justify="right"), Text(first.advice, style="italic"))
    Console(soft_wrap=False).print(table)


def _together(checks: Sequence[Check]) -> list[list[Check]]:
    """Hosts that say the same share a row; so do all that are fine in one check, which differ in
    numbers only, where they are many."""
    groups: dict[tuple[str, ...], list[Check]] = {}
    names = [one.name for one in checks if one.state == "ok"]
    for one in checks:
        many = one.state == "ok" and names.count(one.name) > MOST_HOSTS
        key = (one.name, one.state, one.advice, "" if many else one.measured)
        groups.setdefault(key, []).append(one)
    order = list(dict.fromkeys(one.name for one in checks))
    return sorted(groups.values(), key=lambda group: order.index(group[0].name))
