"""Commands that show metrics of trials: plot, compare, report."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmrl.cli.following import PolledScheduler, Seen, follow
from slurmrl.cli.options import (
    common,
    complete_trials,
    complete_trials_or_metrics,
    examples,
    json_option,
)
from slurmrl.cli.status_text import SHOWN, number, shown
from slurmrl.cli.trial_status import Rest
from slurmrl.display import terminal
from slurmrl.display.terminal import plain

if TYPE_CHECKING:
    from slurmrl.desk.report.report_data import Comparison, Curve, Point
    from slurmrl.run.paths import RunPaths
    from slurmrl.watch.overview import SchedulerFactory


PIPE_WIDTH = 100
"""Width of a chart in columns without a terminal."""
HEIGHT = 16
FIRST_S, LONGEST_S = 5.0, 60.0
"""First and longest pause of ``report --watch`` in seconds."""


@click.command(
    epilog=examples(
        "slurmrl plot grpo/1 reward", "slurmrl plot grpo/1 grpo/2 reward 'eval/*' --smooth 0.9"
    )
)
@click.argument(
    "words",
    nargs=-1,
    required=True,
    metavar="EXPERIMENT/TRIAL... [METRIC...]",
    shell_complete=complete_trials_or_metrics,
)
@click.option(
    "--smooth",
    type=click.FloatRange(0.0, 1.0, max_open=True),
    default=0.0,
    metavar="WEIGHT",
    help="Plot moving averages. WEIGHT is the weight of earlier values, for example 0.9.",
)
@common
def plot(words: tuple[str, ...], smooth: float, root: str | None) -> int:
    """Plot metrics of one or more trials in the terminal.

    METRIC is a name or a pattern such as 'eval/*'; the default is the metrics of the progress
    line.
    """
    from slurmrl.desk import trials
    from slurmrl.desk.report.page import chart
    from slurmrl.desk.report.report_data import Curve, curves, smoothed, thinned
    from slurmrl.run import metrics

    chosen, patterns = _split(trials.root_folder(root), words)
    found = {paths.full_name: curves(metrics.all_lines(paths)) for paths in chosen}
    for place, name in enumerate(_names(found, patterns)):
        drawn = {
            trial: thinned(Curve(x=own[name].x, y=smoothed(own[name].y, smooth)))
            for trial, own in found.items()
            if name in own
        }
        click.echo("\n" if place else "", nl=False)
        width, colored = terminal.width() or PIPE_WIDTH, sys.stdout.isatty()
        click.echo(chart(name, drawn, width=width, height=HEIGHT, colored=colored))
    return 0


def _split(root: Path, words: Sequence[str]) -> tuple[list[RunPaths], Sequence[str]]:
    """Return the trials at the beginning of the command line, and the metrics after the trials."""
    from slurmrl.desk import trials
    from slurmrl.errors import UnknownNameError, UsageError

    chosen = [trials.find(root, words[0])]
    for place, word in enumerate(words[1:], 1):
        try:
            chosen.append(trials.find(root, word))
        except (UsageError, UnknownNameError):  # The word names no trial: metrics begin here.
            return chosen, words[place:]
    return chosen, ()


def _names(found: Mapping[str, Mapping[str, Curve]], patterns: Sequence[str]) -> Collection[str]:
    """Return the metrics to plot.

    Raises UnknownNameError for a pattern that matches no metric of the trials.
    """
    from slurmrl.errors import UnknownNameError
    from slurmrl.registry import near

    known = list(dict.fromkeys(name for own in found.values() for name in own))
    if not known:
        raise UnknownNameError(f"{', '.join(found)}: there are no metrics yet")
    names: dict[str, None] = {}
    default = [*shown(known), *(name for name in known if f"{name}/low" in known)]
    for pattern in patterns or default:
        matching = [name for name in known if fnmatchcase(name, pattern)]
        if not matching:
            raise UnknownNameError(f"no metric '{pattern}'; {near(pattern, known)}")
        names |= dict.fromkeys(matching)
    return names


@click.command(
    epilog=examples("slurmrl compare grpo/1 grpo/2", "slurmrl compare grpo/1 grpo/2 --json")
)
@click.argument("one", metavar="EXPERIMENT/TRIAL", shell_complete=complete_trials)
@click.argument("two", metavar="EXPERIMENT/TRIAL", shell_complete=complete_trials)
@json_option
@common
def compare(one: str, two: str, as_json: bool, root: str | None) -> int:
    """Show the settings in which two trials differ, and the metrics that both have.

    The table has each metric's values at the last step of both trials, and its minimum and maximum
    with their steps. For a section that one trial lacks, the table has the other trial's settings.
    """
    from dataclasses import asdict

    from slurmrl.desk import trials
    from slurmrl.desk.report.collecting import differences, settings
    from slurmrl.desk.report.report_data import Comparison, curves, shared
    from slurmrl.run import metrics

    folder = trials.root_folder(root)
    pair = [trials.find(folder, name) for name in (one, two)]
    first, second = (curves(metrics.all_lines(paths)) for paths in pair)
    found = Comparison(differences([settings(paths) for paths in pair]), shared(first, second))
    click.echo(json.dumps(asdict(found)) if as_json else _text(found, one, two))
    return 0


def _text(found: Comparison, one: str, two: str) -> str:
    width = terminal.width()
    settings = [("SETTING", one, two)]
    settings += [(key, *_values(a, b)) for key, (a, b) in found.settings.items()]
    parts = [
        terminal.table(settings, width) if found.settings else ["all settings are the same"],
        _metrics(found, one, two, width) if found.metrics else ["no metric is in both trials"],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _metrics(found: Comparison, one: str, two: str, width: int | None) -> list[str]:
    """Return a line for each metric, at the last step that both trials have.

    The metrics of a progress line come first, then the other metrics, sorted by name. The last line
    names the metrics that have the same constant value in both trials.
    """
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
    lines = terminal.table(rows, width) if len(rows) > 1 else []
    return [*lines, *([f"constant and equal in both trials: {', '.join(same)}"] if same else [])]


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
    """Return the settings of a section that the other trial lacks."""
    return ", ".join(f"{plain(key)}: {_shown(value)}" for key, value in settings.items()) or "{}"


def _shown(value: Any) -> str:
    return "-" if value is None else plain(value if isinstance(value, str) else json.dumps(value))


@click.command(
    epilog=examples("slurmrl report grpo/1", "slurmrl report grpo/1 grpo/2 --output both.html")
)
@click.argument(
    "names", nargs=-1, required=True, metavar="EXPERIMENT/TRIAL...", shell_complete=complete_trials
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write. Default: report.html, in the run directory of a single trial, or in "
    "the current directory for several trials.",
)
@click.option("--watch", is_flag=True, help="Rewrite the file until no trial is running or queued.")
@common
def report(names: tuple[str, ...], output: Path | None, watch: bool, root: str | None) -> int:
    """Write one HTML file about trials: curves, timeline, checkpoints, samples, settings.

    The file needs no network and no server.
    """
    from slurmrl.desk import trials

    folder = trials.root_folder(root)
    chosen = [trials.find(folder, name) for name in dict.fromkeys(names)]
    file = output or (chosen[0].report if len(chosen) == 1 else Path("report.html"))
    if watch:
        schedulers, rest = functools.cache(PolledScheduler), Rest()

        def look() -> Seen:
            statuses = _write(chosen, file.absolute(), schedulers)
            return Seen.END if rest.begins(statuses) else Seen.NOTHING_NEW

        follow(look, FIRST_S, LONGEST_S)
    else:
        _write(chosen, file.absolute())
    click.echo(file)
    return 0


def _write(
    chosen: Sequence[RunPaths], file: Path, schedulers: SchedulerFactory | None = None
) -> list[dict[str, Any]]:
    from slurmrl.desk.report import page
    from slurmrl.desk.report.collecting import collect
    from slurmrl.scheduler import make
    from slurmrl.watch.overview import collect as collect_statuses

    statuses = collect_statuses(chosen, schedulers or make, detailed=True)
    pairs = zip(chosen, statuses, strict=True)
    page.write(file, [collect(paths, status) for paths, status in pairs])
    return statuses
