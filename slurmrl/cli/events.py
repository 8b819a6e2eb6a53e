"""``slurmrl events``."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import click

from slurmrl.cli.follow import Seen, follow, has_ended
from slurmrl.cli.options import chosen_trial, common, examples, json_option, newest_trial_argument
from slurmrl.cli.times import clock, since_option
from slurmrl.display.columns import GAP, hanging, width
from slurmrl.display.words import plain

if TYPE_CHECKING:
    from slurmrl.run.paths import RunPaths

COMMON_KEYS = ("time", "writer", "kind")


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
    """Print the events of a trial's processes in the order of their clocks: starts, commits,
    warnings, failures and ends."""
    paths = chosen_trial(root, trial)
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


class _EventPrinter:
    """Prints the chosen events that were written since the last time."""

    def __init__(
        self,
        paths: RunPaths,
        earliest: float,
        kinds: Collection[str],
        last: int | None,
        *,
        as_json: bool,
    ) -> None:
        """``last``: the most events of the first look; None for all."""
        from slurmrl.run.events import EventReader

        self._reader = EventReader(paths)
        self._earliest = earliest
        self._kinds = kinds
        self._last = last
        self._as_json = as_json
        self._width = 0
        """Columns of kinds; they never shrink, so that followed lines stay aligned."""
        self.read: list[dict[str, Any]] = []
        """What the last look read."""

    def print(self) -> int:
        """Return the number of printed events."""
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
    """Return ``11-21 16:02:29.3  commit  step=10  seconds=0.4  (master.1)``: the reader's local
    time, the kind in so many columns, all other values that are not empty, and the writer."""
    rest = {key: value for key, value in event.items() if key not in COMMON_KEYS}
    shown = {key: text for key, value in rest.items() if (text := _shown(value))}
    values = [*(f"{key}={text}" for key, text in shown.items()), f"({plain(event['writer'])})"]
    head = [clock(event["time"]), plain(event["kind"]).ljust(columns), ""]
    return hanging(GAP.join(head), GAP.join(values), terminal)


def _shown(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return plain(",".join(str(item) for item in value))
    return plain(value if isinstance(value, str) else "" if value is None else json.dumps(value))
