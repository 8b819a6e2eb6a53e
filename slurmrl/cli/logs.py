"""``slurmrl logs``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from slurmrl.cli.follow import Seen, follow, has_ended
from slurmrl.cli.options import chosen_trial, common, examples, json_option, newest_trial_argument
from slurmrl.cli.times import clock, since_option
from slurmrl.display.columns import GAP

if TYPE_CHECKING:
    from slurmrl.watch.log_files import LogFile, LogLine, OutputReader

LONGEST_S = 1.0
"""Longest pause of ``-f``."""
LEVELS = ("debug", "info", "warning", "error", "critical")
COLOURS = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}


@click.command(
    epilog=examples(
        "slurmrl logs grpo/1 -f",
        "slurmrl logs grpo/1 -n 50 --level warning --process 'rank *'",
        "slurmrl logs --since 10min",
    )
)
@newest_trial_argument
@click.option(
    "-f", "--follow", "following", is_flag=True, help="Print new output until the trial ends."
)
@click.option(
    "-n", "--lines", "last", type=click.IntRange(min=0), metavar="N", help="Print the last N lines."
)
@since_option
@click.option(
    "--level",
    type=click.Choice(LEVELS, case_sensitive=False),
    default="debug",
    help="Print only entries of at least this level, and tracebacks.",
)
@click.option(
    "--process",
    metavar="GLOB",
    help="Print only processes of this name, as the lines have it: 'rank 3', 'agent *', master.",
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
@json_option
@common
def logs(
    trial: str | None,
    following: bool,
    last: int | None,
    since: float | None,
    level: str,
    process: str | None,
    group: str | None,
    task: int | None,
    incarnation: int | None,
    as_json: bool,
    root: str | None,
) -> int:
    """Print the output of a trial's processes (default: of the newest trial) in the order of their
    clocks: of the newest attempts and of the batch process."""
    from slurmrl.watch import log_files
    from slurmrl.watch.log_files import newest, serving

    if incarnation is not None and following:
        raise click.UsageError("--incarnation and --follow exclude each other")
    paths = chosen_trial(root, trial)
    least = 0 if level == "debug" else log_files.LEVELS[level.upper()]
    wanted = log_files.Wanted(process, least, since or 0.0)
    printer = Printer(log_files.OutputReader(wanted, last), as_json=as_json)

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
    elif not printer.print(files, torn=True) and not wanted.all:
        click.echo("no line matches", err=True)
    return 0


class Printer:
    """Prints the lines of log files that were added since the last time."""

    def __init__(self, reader: OutputReader, *, as_json: bool = False) -> None:
        self._reader = reader
        self._as_json = as_json
        self._width = 0
        """Columns of processes; they never shrink, so that followed lines stay aligned."""

    def print(self, files: Sequence[LogFile], *, torn: bool) -> int:
        """Return the number of printed lines. ``torn``: print an unfinished last line, too."""
        count = 0
        for line in self._reader.read(files, torn=torn):
            click.echo(json.dumps(_object(line)) if self._as_json else self._text(line, len(files)))
            count += 1
        return count

    def _text(self, line: LogLine, files: int) -> str:
        if line.first and line.time is not None:
            self._width = max(self._width, len(line.process))
            head = (clock(line.time), line.process.ljust(self._width))
            level = click.style(line.level.ljust(7), COLOURS.get(line.level))
            return GAP.join((*head, level, line.text))
        if line.time is not None:
            return GAP + line.text
        return f"{line.label} | {line.text}" if files > 1 else line.text


def _object(line: LogLine) -> dict[str, object]:
    return {
        "file": line.label,
        "time": line.time,
        "process": line.process,
        "level": line.level or None,
        "text": line.text,
    }
