"""``slurmrl logs``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmrl.cli.follow import Seen, follow, has_ended
from slurmrl.cli.options import common, trial_argument

if TYPE_CHECKING:
    from slurmrl.monitor.log_files import LogFile

LONGEST_S = 1.0
"""Longest pause of ``-f``."""


@click.command()
@trial_argument
@click.option(
    "-f", "--follow", "following", is_flag=True, help="Print new output until the trial ends."
)
@click.option("--group", help="Print only this group. Default: all groups.")
@click.option(
    "--task", type=click.IntRange(min=0), help="Print only this task. Default: all tasks."
)
@click.option(
    "--incarnation",
    type=click.IntRange(min=1),
    help="Print the output of the job that this incarnation ran in; slurmrl status numbers them. "
    "Default: the newest attempt of each task.",
)
@common
def logs(
    trial: str,
    following: bool,
    group: str | None,
    task: int | None,
    incarnation: int | None,
    root: str | None,
) -> int:
    """Print the output of a trial's newest attempts, or of its batch process while no agent has
    started."""
    from slurmrl.monitor.log_files import newest, serving
    from slurmrl.submission import trials

    paths = trials.find(trials.root_folder(root), trial)
    if incarnation is not None and following:
        raise click.UsageError("--incarnation and --follow exclude each other")
    printer = Printer()

    def look() -> Seen:
        ended = has_ended(paths)
        printed = printer.print(newest(paths, group, task), torn=ended)
        return Seen.END if ended else Seen.NEWS if printed else Seen.NOTHING_NEW

    if following:
        follow(look, longest_s=LONGEST_S)
        return 0
    attempts = serving(paths, incarnation) if incarnation is not None else None
    files = newest(paths, group, task, attempts=attempts)
    if not files:
        click.echo(f"no logs in {paths.logs} yet", err=True)
    printer.print(files, torn=True)
    return 0


class Printer:
    """Prints what was added to log files since the last time, across their rotation."""

    def __init__(self) -> None:
        self._printed: dict[Path, tuple[int, int]] = {}
        """Part and offset in it."""

    def print(self, files: Sequence[LogFile], *, torn: bool) -> int:
        """Return the number of printed lines. ``torn``: print an unfinished last line, too;
        otherwise it is printed once it is complete."""
        count = 0
        for file in files:
            prefix = f"{file.label} | " if len(files) > 1 else ""
            for raw in self._new_lines(file.path, torn):
                for line in raw.decode(errors="replace").splitlines():
                    click.echo(prefix + line)
                    count += 1
        return count

    def _new_lines(self, path: Path, torn: bool) -> Iterator[bytes]:
        from slurmrl.fsio import lines
        from slurmrl.monitor.log_files import HEAD_BYTES, part

        printed, offset = self._printed.get(path, (0, 0))
        with lines.opened(path) as file:
            now = part(file.first(HEAD_BYTES))
            if now.number != printed:
                yield from self._rotated_lines(path, now.number, printed, offset)
                offset = 0
            yield from file.forward(offset, torn=torn)
            self._printed[path] = now.number, file.offset

    def _rotated_lines(self, path: Path, now: int, printed: int, offset: int) -> Iterator[bytes]:
        """Yield the lines of the previous part that were not printed yet."""
        from slurmrl.fsio import lines
        from slurmrl.monitor.log_files import HEAD_BYTES, part
        from slurmrl.paths import rotated

        try:
            with lines.opened(rotated(path)) as file:
                before = part(file.first(HEAD_BYTES))
                if before.number >= now:
                    return  # rotation is under way: the file itself still has all lines
                start = 0  # the head of a part not seen before says how much is missing
                if before.number == printed:
                    start = (
                        before.head_bytes + offset - before.skipped if before.skipped else offset
                    )
                yield from file.forward(max(start, 0), torn=True)
        except FileNotFoundError:
            return
