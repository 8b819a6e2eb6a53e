"""Commands that print the output of a trial's processes: logs, events, samples."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from slurmrl.cli.following import Seen, follow, has_ended
from slurmrl.cli.options import (
    chosen_trial,
    common,
    complete_sampled_steps,
    examples,
    json_option,
    newest_trial_argument,
)
from slurmrl.cli.status_text import number
from slurmrl.display.terminal import GAP, hanging, plain, width

if TYPE_CHECKING:
    from slurmrl.run.paths import RunPaths
    from slurmrl.watch.log_files import LogFile, LogLine, OutputReader


LONGEST_S = 1.0
"""Longest pause of ``-f`` in seconds."""
LEVELS = ("debug", "info", "warning", "error", "critical")
COLORS = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}


F = TypeVar("F", bound=Callable[..., Any])

UNITS_S = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_CLOCK = re.compile(r"\d{1,2}:\d\d(:\d\d)?")
COMMON_KEYS = ("time", "writer", "kind")
LINES = 12
"""Number of printed lines of a prompt or completion; ``--whole`` prints all."""


def since_option(command: F) -> F:
    """Add ``--since``, whose value is in seconds since the epoch, or None."""
    option = click.option(
        "--since",
        callback=_since,
        metavar="SPAN|TIME",
        help="Print only entries of the last 90s, 10min, 2h or 1d, or since 14:30 today, or "
        "since '2026-01-31 14:30'.",
    )
    return option(command)


def _since(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip())
    if match is not None and match[2] in UNITS_S:
        return time.time() - float(match[1]) * UNITS_S[match[2]]
    try:
        return _moment(text.strip()).timestamp()
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{text!r} is neither a time span (90s, 10min, 2h, 1d) nor a time (14:30, "
            "2026-01-31, '2026-01-31 14:30')"
        ) from None


def _moment(text: str) -> datetime:
    """Parse a time of today, a date or both; the default time zone is local. Raises ValueError."""
    if _CLOCK.fullmatch(text):
        text = f"{datetime.fromtimestamp(time.time()):%Y-%m-%d} {text}"
    return datetime.fromisoformat(re.sub(r"(?<!\d)(?=\d:)", "0", text))


def clock(seconds: float) -> str:
    """Return a time as ``11-21 16:02:29.3``, in the local time zone."""
    try:
        return f"{datetime.fromtimestamp(seconds):%m-%d %H:%M:%S.%f}"[:-5]
    except (ValueError, OverflowError, OSError):
        return "(invalid time)".ljust(len("11-21 16:02:29.3"))


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
    help="Print only processes with this name, which each line shows: 'rank 3', 'agent *', master.",
)
@click.option("--group", help="Print only this group. Default: all groups.")
@click.option(
    "--task", type=click.IntRange(min=0), help="Print only this task. Default: all tasks."
)
@click.option(
    "--incarnation",
    type=click.IntRange(min=1),
    help="Print the output of the job in which this incarnation ran; slurmrl status shows the "
    "numbers. "
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
    """Print the output of a trial's processes in the order of their clocks.

    The default is the newest trial. The output includes the newest attempt of each task, and the
    batch process.
    """
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
    """Prints the lines of log files that were added since the last `print`."""

    def __init__(self, reader: OutputReader, *, as_json: bool = False) -> None:
        self._reader = reader
        self._as_json = as_json
        self._width = 0
        """Width of the column of processes. The width only grows, so that lines stay aligned."""

    def print(self, files: Sequence[LogFile], *, torn: bool) -> int:
        """Print new lines; return their number. ``torn``: print an incomplete last line too."""
        count = 0
        for line in self._reader.read(files, torn=torn):
            click.echo(json.dumps(_object(line)) if self._as_json else self._text(line, len(files)))
            count += 1
        return count

    def _text(self, line: LogLine, files: int) -> str:
        if line.first and line.time is not None:
            self._width = max(self._width, len(line.process))
            head = (clock(line.time), line.process.ljust(self._width))
            level = click.style(line.level.ljust(7), COLORS.get(line.level))
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


@click.command(
    epilog=examples("slurmrl events grpo/1 -f", "slurmrl events grpo/1 --since 2h --kind commit")
)
@newest_trial_argument
@click.option(
    "-f", "--follow", "following", is_flag=True, help="Print new events until the trial ends."
)
@click.option(
    "-n",
    "--lines",
    "last",
    type=click.IntRange(min=0),
    metavar="N",
    help="Print the last N events.",
)
@since_option
@click.option("--kind", multiple=True, help="Print only events of this kind. Repeatable.")
@json_option
@common
def events(
    trial: str | None,
    following: bool,
    last: int | None,
    since: float | None,
    kind: tuple[str, ...],
    as_json: bool,
    root: str | None,
) -> int:
    """Print the events of a trial's processes in the order of their clocks.

    Events are starts, commits, warnings, failures and ends.
    """
    paths = chosen_trial(root, trial)
    _check_kinds(paths, kind)
    printer = _EventPrinter(paths, since or 0.0, kind, last, as_json=as_json)

    def look() -> Seen:
        ended = has_ended(paths)
        printer.print()
        return Seen.END if ended else Seen.NEWS if printer.read else Seen.NOTHING_NEW

    if following:
        follow(look)
    elif not printer.print() and last != 0:
        click.echo(_nothing(printer.read), err=True)
    return 0


def _check_kinds(paths: RunPaths, kinds: Collection[str]) -> None:
    """Raise UsageError for a kind that neither this slurmrl nor the trial writes."""
    from slurmrl.registry import near
    from slurmrl.run.events import EventKind, read_all

    known = get_args(EventKind)
    if unknown := [kind for kind in kinds if kind not in known]:
        written = {event["kind"] for event in read_all(paths)}
        for kind in unknown:
            if kind not in written:
                hint = near(kind, sorted({*known, *written}))
                raise click.UsageError(f"--kind: no event has kind '{kind}'; {hint}")


class _EventPrinter:
    """Prints the chosen events that were written since the last `print`."""

    def __init__(
        self,
        paths: RunPaths,
        earliest: float,
        kinds: Collection[str],
        last: int | None,
        *,
        as_json: bool,
    ) -> None:
        """Prepare printing; ``last`` limits the number of events of the first `print`."""
        from slurmrl.run.events import EventReader

        self._reader = EventReader(paths)
        self._earliest = earliest
        self._kinds = kinds
        self._last = last
        self._as_json = as_json
        self._width = 0
        """Width of the column of kinds. The width only grows, so that lines stay aligned."""
        self.read: list[dict[str, Any]] = []
        """New events that the last `print` has found, printed or not."""

    def print(self) -> int:
        """Print new events; return the number of printed events."""
        self.read = self._reader.read()
        chosen = [event for event in self.read if self._is_chosen(event)]
        if self._last is not None:
            chosen, self._last = chosen[max(0, len(chosen) - self._last) :], None
        self._width = max([self._width, *(len(event["kind"]) for event in chosen)])
        for event in chosen:
            text = [json.dumps(event)] if self._as_json else lines(event, self._width, width())
            click.echo("\n".join(text))
        return len(chosen)

    def _is_chosen(self, event: dict[str, Any]) -> bool:
        wanted = not self._kinds or event["kind"] in self._kinds
        return wanted and bool(event["time"] >= self._earliest)


def _nothing(events: Sequence[dict[str, Any]]) -> str:
    if not events:
        return "no events yet"
    kinds = ", ".join(sorted({event["kind"] for event in events}))
    return f"no event matches; the trial has events of kind {kinds}"


def lines(event: dict[str, Any], columns: int, terminal: int | None) -> list[str]:
    """Return an event as ``11-21 16:02:29.3 commit step=10 seconds=0.4 (master.1)``, wrapped.

    The lines have the local time, the kind in ``columns`` columns, all other nonempty values, and
    the writer. ``terminal`` is the width of the terminal; None turns wrapping off.
    """
    rest = {key: value for key, value in event.items() if key not in COMMON_KEYS}
    shown = {key: text for key, value in rest.items() if (text := _shown(value))}
    values = [*(f"{key}={text}" for key, text in shown.items()), f"({plain(event['writer'])})"]
    head = [clock(event["time"]), plain(event["kind"]).ljust(columns), ""]
    return hanging(GAP.join(head), GAP.join(values), terminal)


def _shown(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return plain(",".join(str(item) for item in value))
    return plain(value if isinstance(value, str) else "" if value is None else json.dumps(value))


Row = Mapping[str, Any]


@click.command(
    epilog=examples("slurmrl samples grpo/1", "slurmrl samples grpo/1 --step 40 --evaluation -n 2")
)
@newest_trial_argument
@click.option(
    "--step",
    type=click.IntRange(min=0),
    shell_complete=complete_sampled_steps,
    help="Step of the completions. Default: the newest step with samples.",
)
@click.option("--evaluation", is_flag=True, help="Print samples of evaluations, not of training.")
@click.option(
    "-n",
    "--prompts",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="N",
    help="Number of prompts, each with all of its kept completions.",
)
@click.option(
    "--whole", is_flag=True, help=f"Print completions with more than {LINES} lines in full."
)
@json_option
@common
def samples(
    trial: str | None,
    step: int | None,
    evaluation: bool,
    prompts: int,
    whole: bool,
    as_json: bool,
    root: str | None,
) -> int:
    """Print completions of a step with their prompts and rewards.

    The trial keeps the completions that logging.samples selects.
    """
    from slurmrl.desk.report.report_data import of_step

    paths = chosen_trial(root, trial)
    rows = of_step(paths.samples, step, evaluation=evaluation)
    groups = [list(group) for _, group in groupby(rows, lambda row: row.get("id"))]
    for group in islice(groups, prompts):
        if as_json:
            click.echo("\n".join(map(json.dumps, group)))
        else:
            click.echo("\n".join([*_lines(group, None if whole else LINES), ""]))
    left = len(groups) - prompts
    if left > 0 and not as_json:
        click.echo(f"{left} more {'prompt' if left == 1 else 'prompts'}; -n {len(groups)} for all")
    return 0


def _lines(group: list[Row], most: int | None) -> Iterator[str]:
    first = group[0]
    rewards = [reward for row in group if (reward := row.get("reward")) is not None]
    facts = [f"step {first['step']}", str(first.get("id", ""))]
    facts += [f"answer: {plain(str(first['answer']))}"] if first.get("answer") is not None else []
    facts += [f"mean reward {number(sum(rewards) / len(rewards))}"] if len(rewards) > 1 else []
    yield "  ".join(fact for fact in facts if fact)
    yield from _text(first.get("rendered", first["prompt"]), most)
    for row in group:
        said = [f"reward {_score(row['reward'])}"] if "reward" in row else []
        said += [f"{plain(name)} {number(value)}" for name, value in row.get("parts", {}).items()]
        said += ["cut off"] if row.get("finished") is False else []
        yield f"  {', '.join(said) or 'completion'}"
        yield from _text(row["completion"], most, "    ")


def _score(reward: float | None) -> str:
    return "none" if reward is None else number(reward)


def _text(text: str, most: int | None, indent: str = "  ") -> Iterable[str]:
    lines = [plain(line) for line in text.splitlines()] or [""]
    shown = lines if most is None else lines[:most]
    yield from (part for line in shown for part in hanging(f"{indent}| ", line, width()))
    if len(shown) < len(lines):
        yield f"{indent}… {len(lines) - len(shown)} more lines; --whole prints them"
