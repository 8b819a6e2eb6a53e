"""``slurmrl compare``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from slurmrl.cli import completion
from slurmrl.cli.options import common, examples, json_option
from slurmrl.cli.render import SHOWN, number
from slurmrl.display import columns
from slurmrl.display.words import plain

if TYPE_CHECKING:
    from slurmrl.desk.report.comparison import Comparison, Point


@click.command(
    epilog=examples("slurmrl compare grpo/1 grpo/2", "slurmrl compare grpo/1 grpo/2 --json")
)
@click.argument("one", metavar="EXPERIMENT/TRIAL", shell_complete=completion.trials)
@click.argument("two", metavar="EXPERIMENT/TRIAL", shell_complete=completion.trials)
@json_option
@common
def compare(one: str, two: str, as_json: bool, root: str | None) -> int:
    """Show the settings in which two trials differ, and the metrics that both have: their values at
    the last step of both, and the least and the greatest value with its step. For a section that
    one trial lacks it shows what the other sets."""
    from dataclasses import asdict

    from slurmrl.desk import trials
    from slurmrl.desk.report.collect import settings
    from slurmrl.desk.report.comparison import Comparison, shared
    from slurmrl.desk.report.curves import curves
    from slurmrl.desk.report.settings import differences
    from slurmrl.run import evaluated

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
    parts = [
        columns.table(settings, width) if found.settings else ["all settings are the same"],
        _metrics(found, one, two, width) if found.metrics else ["no metric is in both trials"],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _metrics(found: Comparison, one: str, two: str, width: int | None) -> list[str]:
    """Return a line for each metric, at the last step that both trials have; first those of a
    progress line, then the others by name. A last line names the metrics that are constant and
    the same in both."""
    rows: list[tuple[str, ...]] = [
        ("METRIC", "STEP", one, two, f"{one} FROM, TO", f"{two} FROM, TO")
    ]
    same = []
    for name in sorted(found.metrics, key=lambda name: (_place(name), name)):
        first, second = found.metrics[name]
        if first.is_constant and second.is_constant and first.least.value == second.least.value:
            same.append(plain(name))
            continue
        step = "-" if first.common is None else str(first.common.step)
        values = [number(each.common and each.common.value) for each in (first, second)]
        ranges = [f"{_at(each.least)}, {_at(each.greatest)}" for each in (first, second)]
        rows.append((plain(name), step, *values, *ranges))
    lines = columns.table(rows, width) if len(rows) > 1 else []
    return [*lines, *([f"the same at every step of both: {', '.join(same)}"] if same else [])]


def _place(name: str) -> int:
    return SHOWN.index(name) if name in SHOWN else len(SHOWN) + name.startswith("time/")


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
