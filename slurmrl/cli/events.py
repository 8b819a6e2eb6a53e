"""``slurmrl events``."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from slurmrl.cli.follow import Seen, follow, has_ended
from slurmrl.cli.options import common, json_option, trial_argument
from slurmrl.display.columns import GAP, hanging, width
from slurmrl.monitor.words import plain

if TYPE_CHECKING:
    from slurmrl.paths import RunPaths

UNITS_S = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
COMMON_KEYS = ("time", "writer", "kind")


def _seconds(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip())
    if match is None or match[2] not in UNITS_S:
        raise click.BadParameter(f"{text!r} is not a time span; write 90s, 10min, 2h or 1d")
    return float(match[1]) * UNITS_S[match[2]]


@click.command()
@trial_argument
@click.option(
    "-f", "--follow", "following", is_flag=True, help="Print new events until the trial ends."
)
@click.option(
    "--since", callback=_seconds, metavar="SPAN", help="Print only the last 90s, 10min, 2h or 1d."
)
@click.option("--kind", multiple=True, help="Print only events of this kind. Repeatable.")
@json_option
@common
def events(
    trial: str,
    following: bool,
    since: float | None,
    kind: tuple[str, ...],
    as_json: bool,
    root: str | None,
) -> int:
    """Print the events of a trial's processes in the order of their clocks: starts, commits,
    warnings, failures and ends."""
    from slurmrl.submission import trials

    paths = trials.find(trials.root_folder(root), trial)
    earliest = 0.0 if since is None else time.time() - since
    printer = _EventPrinter(paths, earliest, kind, as_json=as_json)

    def look() -> Seen:
        ended = has_ended(paths)
        printer.print()
        return Seen.END if ended else Seen.NEWS if printer.read else Seen.NOTHING_NEW

    if following:
        follow(look)
    elif not printer.print():
        click.echo(_nothing(printer.read), err=True)
    return 0


class _EventPrinter:
    """Prints the chosen events that were written since the last time."""

    def __init__(
        self, paths: RunPaths, earliest: float, kinds: Collection[str], *, as_json: bool
    ) -> None:
        from slurmrl.monitor.events import EventReader

        self._reader = EventReader(paths)
        self._earliest = earliest
        self._kinds = kinds
        self._as_json = as_json
        self._widths = (0, 0)
        """Columns of writers and kinds; they never shrink, so that followed lines stay aligned."""
        self.read: list[dict[str, Any]] = []
        """What the last look read."""

    def print(self) -> int:
        """Return the number of printed events."""
        self.read = self._reader.read()
        chosen = [event for event in self.read if self._is_chosen(event)]
        self._widths = _widths(chosen, self._widths)
        for event in chosen:
            text = [json.dumps(event)] if self._as_json else lines(event, self._widths, width())
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


def _widths(events: Sequence[dict[str, Any]], before: tuple[int, int]) -> tuple[int, int]:
    writers = [len(event["writer"]) for event in events]
    return max([before[0], *writers]), max([before[1], *(len(event["kind"]) for event in events)])


def lines(event: dict[str, Any], widths: tuple[int, int], terminal: int | None) -> list[str]:
    """Return ``11-21 16:02:29.3  master.1  commit  step=10  seconds=0.4``: the reader's local time,
    the writer, the kind, and all other values that are not empty."""
    rest = {key: value for key, value in event.items() if key not in COMMON_KEYS}
    shown = {key: text for key, value in rest.items() if (text := _shown(value))}
    values = GAP.join(f"{key}={text}" for key, text in shown.items())
    writer, kind = plain(event["writer"]).ljust(widths[0]), plain(event["kind"]).ljust(widths[1])
    return hanging(GAP.join([_clock(event["time"]), writer, kind, ""]), values, terminal)


def _clock(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds):%m-%d %H:%M:%S.%f}"[:-5]
    except (ValueError, OverflowError, OSError):
        return "(invalid time)".ljust(len("11-21 16:02:29.3"))


def _shown(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return plain(",".join(str(item) for item in value))
    return plain(value if isinstance(value, str) else "" if value is None else json.dumps(value))
