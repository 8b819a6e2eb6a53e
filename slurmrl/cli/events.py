"""``slurmrl events``."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import click

from slurmrl.cli.options import common, json_option

if TYPE_CHECKING:
    from slurmrl.paths import RunPaths

FIRST_S, LONGEST_S = 0.3, 5.0
"""Pauses between two looks for new events."""
UNITS_S = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
OWN = ("time", "writer", "kind")
KIND_WIDTH = len("checkpoint_failed")


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
    from slurmrl.monitor.events import Reader

    reader = Reader(paths)
    backoff = Backoff(FIRST_S, LONGEST_S, sleep=time.sleep)
    origin: float | None = None
    width = 0
    while True:
        ended = not follow or recent(paths.history, exports=False).end is not None
        found = reader.read()  # after that look, so that nothing before the end is missed
        if origin is None and found:
            origin = found[0]["time"]
        chosen = [one for one in found if one["time"] >= earliest and _wanted(one, kinds)]
        width = max([width, *(len(event["writer"]) for event in chosen)])
        for event in chosen:
            click.echo(json.dumps(event) if as_json else line(event, origin or 0.0, width))
        if ended:
            if found and not chosen and not follow:
                kinds_found = ", ".join(sorted({event["kind"] for event in found}))
                click.echo(f"no such events; there are: {kinds_found}", err=True)
            return
        if found:
            backoff.reset()
        backoff.sleep()


def _wanted(event: dict[str, Any], kinds: Collection[str]) -> bool:
    return not kinds or event["kind"] in kinds


def line(event: dict[str, Any], origin: float, width: int) -> str:
    """``+12.3 s  master.1  commit  step=10  seconds=0.4``: the time since the first event, the
    writer in ``width`` columns, and what is not empty of the rest."""
    rest = {key: value for key, value in event.items() if key not in OWN}
    shown = {key: text for key, value in rest.items() if (text := _shown(value))}
    values = "  ".join(f"{key}={text}" for key, text in shown.items())
    after_s = event["time"] - origin
    head = f"{after_s:+12.1f} s  {event['writer']:{width}}  {event['kind']:{KIND_WIDTH}}"
    return f"{head}  {values}".rstrip()


def _shown(value: Any) -> str:
    """On one line, and harmless to a terminal."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        text = ",".join(str(one) for one in value)
    else:
        text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    return "".join(character if character.isprintable() else " " for character in text).strip()
