"""``slurmrl compare``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from slurmrl.cli import completion
from slurmrl.cli.options import common, examples, json_option
from slurmrl.cli.render import number
from slurmrl.display import columns
from slurmrl.monitor.words import plain

if TYPE_CHECKING:
    from slurmrl.report.comparison import Comparison, Extent, Point


@click.command(
    epilog=examples("slurmrl compare grpo/1 grpo/2", "slurmrl compare grpo/1 grpo/2 --json")
)
@click.argument("one", metavar="EXPERIMENT/TRIAL", shell_complete=completion.trials)
@click.argument("two", metavar="EXPERIMENT/TRIAL", shell_complete=completion.trials)
@json_option
@common
def compare(one: str, two: str, as_json: bool, root: str | None) -> int:
    """Show the settings in which two trials differ, and the last, least and greatest values of the
    metrics that both have. Of a section that one of them lacks it shows what the other sets."""
    from dataclasses import asdict

    from slurmrl.monitor import evaluated
    from slurmrl.report.collect import settings
    from slurmrl.report.comparison import Comparison, shared
    from slurmrl.report.curves import curves
    from slurmrl.report.settings import differences
    from slurmrl.submission import trials

    folder = trials.root_folder(root)
    pair = [trials.find(folder, name) for name in (one, two)]
    first, second = (curves(evaluated.lines_of(paths)) for paths in pair)
    found = Comparison(differences([settings(paths) for paths in pair]), shared(first, second))
    click.echo(json.dumps(asdict(found)) if as_json else _text(found, one, two))
    return 0


def _text(found: Comparison, one: str, two: str) -> str:
    width = columns.width()
    settings = [("SETTING", one, two)]
    settings += [(key, *_values(a, b)) for key, (a, b) in found.settings.items()]
    metrics = [("METRIC", "", "LAST", "LEAST", "GREATEST")]
    for name, extents in found.metrics.items():
        for trial, extent in zip((one, two), extents, strict=True):
            metrics.append((plain(name) if trial == one else "", trial, *_cells(extent)))
    parts = [
        columns.table(settings, width) if found.settings else ["all settings are the same"],
        columns.table(metrics, width) if found.metrics else ["no metric is in both trials"],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _cells(extent: Extent) -> tuple[str, str, str]:
    return number(extent.last.value), _at(extent.least), _at(extent.greatest)


def _at(point: Point) -> str:
    return f"{number(point.value)} at {point.step}"


def _values(one: Any, two: Any) -> tuple[str, str]:
    if not isinstance(one, dict) and not isinstance(two, dict):
        return _shown(one), _shown(two)
    first, second = ("absent" if each is None else _section(each) for each in (one, two))
    return first, second


def _section(settings: dict[str, Any]) -> str:
    """What is set in a section that the other trial lacks."""
    return ", ".join(f"{plain(key)}: {_shown(value)}" for key, value in settings.items()) or "{}"


def _shown(value: Any) -> str:
    return "-" if value is None else plain(value if isinstance(value, str) else json.dumps(value))
