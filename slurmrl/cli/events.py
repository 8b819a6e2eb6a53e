"""``slurmrl events``."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from slurmrl.cli.layout import GAP, hanging, width
from slurmrl.cli.options import common, json_option
from slurmrl.monitor.words import plain

if TYPE_CHECKING:
    from slurmrl.paths import RunPaths

FIRST_S, LONGEST_S = 0.3, 5.0
"""Pauses between two looks for new events."""
UNITS_S = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
OWN = ("time", "writer", "kind")


def _seconds(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip())
    if found is None or found[2] not in UNITS_S:
        raise click.BadParameter(f"{text!r} is no span of time such as 90s, 10min, 2h or 1d")
    return float(found[1]) * UNITS_S[found[2]]


@click.command()
@click.argument("trial", metavar="EXPERIMENT/TRIAL")
@click.option("-f", "--follow", is_flag=True, help="Print new ones until the trial ends.")
@click.option("--since", callback=_seconds, metavar="SPAN", help="Only the last 90s, 10min, 2h …")
@click.option("--kind", multiple=True, help="Only events of this kind; can be repeated.")
@json_option
@common
def events(
    trial: str,
    follow: bool,
    since: float | None,
    kind: tuple[str, ...],
    as_json: bool,
    root: str | None,
) -> int:
    """Print what a trial's processes say has happened, in the order of their clocks: starts,
    commits, warnings, failures, ends."""
    from slurmrl.submission import trials

    paths = trials.find(trials.root_folder(root), trial)
    earliest = 0.0 if since is None else time.time() - since
    _print(paths, earliest, kind, as_json=as_json, follow=follow)
    return 0


def _print(
    paths: RunPaths, earliest: float, kinds: Collection[str], *, as_json: bool, follow: bool
) -> None:
    from slurmrl.backoff import Backoff
    from slurmrl.history.recent import recent
    from slurmrl.monitor.events import EventReader

    reader = EventReader(paths)
    backoff = Backoff(FIRST_S, LONGEST_S, sleep=time.sleep)
    widths = (0, 0)
    while True:
        ended = not follow or recent(paths.history, exports=False).end is not None
        found = reader.read()  # after that look, so that nothing before the end is missed
        chosen = [one for one in found if one["time"] >= earliest and _wanted(one, kinds)]
        widths = _widths(chosen, widths)
        for event in chosen:
            text = json.dumps(event) if as_json else "\n".join(lines(event, widths, width()))
            click.echo(text)
        if ended:
            if not chosen and not follow:
                click.echo(_nothing(found), err=True)
            return
        if found:
            backoff.reset()
        backoff.sleep()


def _nothing(found: Sequence[dict[str, Any]]) -> str:
    if not found:
        return "no events yet"
    kinds = ", ".join(sorted({event["kind"] for event in found}))
    return f"no such events; there are: {kinds}"


def _wanted(event: dict[str, Any], kinds: Collection[str]) -> bool:
    return not kinds or event["kind"] in kinds


def _widths(events: Sequence[dict[str, Any]], before: tuple[int, int]) -> tuple[int, int]:
    """Of the columns of writers and kinds; they do not shrink while events are followed."""
    writers = [len(event["writer"]) for event in events]
    return max([before[0], *writers]), max([before[1], *(len(event["kind"]) for event in events)])


def lines(event: dict[str, Any], widths: tuple[int, int], terminal: int | None) -> list[str]:
    """``11-21 16:02:29.3  master.1  commit  step=10  seconds=0.4``: local time of the reader, the
    writer, and what is not empty of the rest."""
    rest = {key: value for key, value in event.items() if key not in OWN}
    shown = {key: text for key, value in rest.items() if (text := _shown(value))}
    values = GAP.join(f"{key}={text}" for key, text in shown.items())
    writer, kind = plain(event["writer"]).ljust(widths[0]), plain(event["kind"]).ljust(widths[1])
    return hanging(GAP.join([_clock(event["time"]), writer, kind, ""]), values, terminal)


def _clock(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds):%m-%d %H:%M:%S.%f}"[:-5]
    except (ValueError, OverflowError, OSError):
        return "(no such time)".ljust(len("11-21 16:02:29.3"))


def _shown(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return plain(",".join(str(one) for one in value))
    return plain(value if isinstance(value, str) else "" if value is None else json.dumps(value))
