"""``slurmrl logs``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmrl.cli.options import common

if TYPE_CHECKING:
    from slurmrl.monitor.log_files import LogFile
    from slurmrl.paths import RunPaths

POLL_S = 0.3


@click.command()
@click.argument("trial", metavar="EXPERIMENT/TRIAL")
@click.option("-f", "--follow", is_flag=True, help="Print what is added until the trial ends.")
@click.option("--group", help="Only this group. Default: all.")
@click.option("--task", type=click.IntRange(min=0), help="Only this task. Default: all.")
@click.option(
    "--incarnation",
    type=click.IntRange(min=1),
    help="What those wrote who served this incarnation (see slurmrl status). Default: the newest.",
)
@common
def logs(
    trial: str,
    follow: bool,
    group: str | None,
    task: int | None,
    incarnation: int | None,
    root: str | None,
) -> int:
    """Print what a trial's newest attempts wrote; batch output where no agent has started yet."""
    from slurmrl.monitor.log_files import newest, serving
    from slurmrl.submission import trials

    paths = trials.find(trials.root_folder(root), trial)
    if incarnation is not None and follow:
        raise click.UsageError("--incarnation is over or the newest: it cannot be followed")
    if follow:
        _follow(paths, group, task)
        return 0
    attempts = serving(paths, incarnation) if incarnation is not None else None
    files = newest(paths, group, task, attempts=attempts)
    if not files:
        click.echo(f"no logs in {paths.logs} yet", err=True)
    Printer().print(files, torn=True)
    return 0


def _follow(paths: RunPaths, group: str | None, task: int | None) -> None:
    """Print until the trial has ended and everything that it wrote before was printed."""
    from slurmrl.history.log import History
    from slurmrl.history.state import fold
    from slurmrl.monitor.log_files import newest

    history = History(paths.history)
    printer = Printer()
    while True:
        ended = fold(history.read()).end is not None
        printer.print(newest(paths, group, task), torn=ended)
        if ended:
            return
        time.sleep(POLL_S)


class Printer:
    """Prints what files hold beyond what it printed before."""

    def __init__(self) -> None:
        self._offsets: dict[Path, int] = {}

    def print(self, files: Sequence[LogFile], *, torn: bool) -> None:
        """``torn``: print a last line without an end too; else it waits until it is whole."""
        for file in files:
            prefix = f"{file.label} | " if len(files) > 1 else ""
            for raw in self._new_lines(file.path, torn):
                for line in raw.decode(errors="replace").splitlines():
                    click.echo(prefix + line)

    def _new_lines(self, path: Path, torn: bool) -> Iterator[bytes]:
        from slurmrl.fsio import lines

        with lines.opened(path) as file:
            yield from file.forward(self._offsets.get(path, 0), torn=torn)
            self._offsets[path] = file.offset
