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
    """Prints what files hold beyond what it printed before, also where they were cut meanwhile."""

    def __init__(self) -> None:
        self._printed: dict[Path, tuple[int, int]] = {}
        """Part and offset in it."""

    def print(self, files: Sequence[LogFile], *, torn: bool) -> None:
        """``torn``: print a last line without an end too; else it waits until it is whole."""
        for file in files:
            prefix = f"{file.label} | " if len(files) > 1 else ""
            for raw in self._new_lines(file.path, torn):
                for line in raw.decode(errors="replace").splitlines():
                    click.echo(prefix + line)

    def _new_lines(self, path: Path, torn: bool) -> Iterator[bytes]:
        from slurmrl.fsio import lines
        from slurmrl.monitor.log_files import HEAD_BYTES, part

        printed, offset = self._printed.get(path, (0, 0))
        with lines.opened(path) as file:
            now = part(file.first(HEAD_BYTES))
            if now.number != printed:
                yield from self._rest(path, now.number, printed, offset)
                offset = 0
            yield from file.forward(offset, torn=torn)
            self._printed[path] = now.number, file.offset

    def _rest(self, path: Path, now: int, printed: int, offset: int) -> Iterator[bytes]:
        """What the part before holds beyond what was printed of it."""
        from slurmrl.fsio import lines
        from slurmrl.monitor.log_files import HEAD_BYTES, part
        from slurmrl.paths import rotated

        try:
            with lines.opened(rotated(path)) as file:
                before = part(file.first(HEAD_BYTES))
                if before.number >= now:
                    return  # it is being cut at this moment: the file itself still has all
                start = 0  # where it is new, its head says what is missing
                if before.number == printed:
                    start = (
                        before.head_bytes + offset - before.skipped if before.skipped else offset
                    )
                yield from file.forward(max(start, 0), torn=True)
        except FileNotFoundError:
            return
