"""``slurmrl report``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmrl.cli import completion
from slurmrl.cli.follow import PolledScheduler, Seen, follow
from slurmrl.cli.options import common, examples
from slurmrl.cli.status import Rest

if TYPE_CHECKING:
    from slurmrl.run.paths import RunPaths
    from slurmrl.watch.overview import SchedulerFactory

FIRST_S, LONGEST_S = 5.0, 60.0
"""Pauses of ``--watch``."""


@click.command(
    epilog=examples("slurmrl report grpo/1", "slurmrl report grpo/1 grpo/2 --output both.html")
)
@click.argument(
    "names",
    nargs=-1,
    required=True,
    metavar="EXPERIMENT/TRIAL...",
    shell_complete=completion.trials,
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file. Default: report.html in the run directory of a single trial, report.html here "
    "for several.",
)
@click.option("--watch", is_flag=True, help="Write it again until no trial runs or waits.")
@common
def report(names: tuple[str, ...], output: Path | None, watch: bool, root: str | None) -> int:
    """Write one HTML file about trials: curves, story, time, checkpoints, samples, settings. It
    needs no network and no server."""
    from slurmrl.desk import trials

    folder = trials.root_folder(root)
    chosen = [trials.find(folder, name) for name in dict.fromkeys(names)]
    file = output or (chosen[0].report if len(chosen) == 1 else Path("report.html"))
    if watch:
        schedulers, rest = functools.cache(PolledScheduler), Rest()

        def look() -> Seen:
            statuses = _write(chosen, file.absolute(), schedulers)
            return Seen.END if rest.begins(statuses) else Seen.NOTHING_NEW

        follow(look, FIRST_S, LONGEST_S)
    else:
        _write(chosen, file.absolute())
    click.echo(file)
    return 0


def _write(
    chosen: Sequence[RunPaths], file: Path, schedulers: SchedulerFactory | None = None
) -> list[dict[str, Any]]:
    from slurmrl.desk.report import page
    from slurmrl.desk.report.collect import collect
    from slurmrl.scheduler import make
    from slurmrl.watch.overview import collect as collect_statuses

    statuses = collect_statuses(chosen, schedulers or make, detailed=True)
    pairs = zip(chosen, statuses, strict=True)
    page.write(file, [collect(paths, status) for paths, status in pairs])
    return statuses
