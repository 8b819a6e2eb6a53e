"""``slurmrl plot``."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmrl.cli import completion
from slurmrl.cli.options import common, examples
from slurmrl.cli.render import SHOWN
from slurmrl.display import columns

if TYPE_CHECKING:
    from slurmrl.desk.report.contents import Curve
    from slurmrl.run.paths import RunPaths

PIPE_WIDTH = 100
"""Columns where there is no terminal."""
HEIGHT = 16


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
    shell_complete=completion.trials,
)
@click.option(
    "--smooth",
    type=click.FloatRange(0.0, 1.0, max_open=True),
    default=0.0,
    metavar="WEIGHT",
    help="Draw moving averages; the weight of what came before, such as 0.9.",
)
@common
def plot(words: tuple[str, ...], smooth: float, root: str | None) -> int:
    """Draw metrics in the terminal, those of several trials in one chart. METRIC is a name or a
    pattern such as 'eval/*'; without one, the metrics of the progress line are drawn."""
    from slurmrl.desk import trials
    from slurmrl.desk.report.contents import Curve
    from slurmrl.desk.report.curves import curves, smoothed, thinned
    from slurmrl.desk.report.terminal import chart
    from slurmrl.run import evaluated

    chosen, patterns = _split(trials.root_folder(root), words)
    found = {
        f"{paths.experiment}/{paths.trial}": curves(evaluated.lines_of(paths)) for paths in chosen
    }
    for number, name in enumerate(_names(found, patterns)):
        drawn = {
            trial: thinned(Curve(x=own[name].x, y=smoothed(own[name].y, smooth)))
            for trial, own in found.items()
            if name in own
        }
        click.echo("\n" if number else "", nl=False)
        click.echo(
            chart(
                name,
                drawn,
                width=columns.width() or PIPE_WIDTH,
                height=HEIGHT,
                coloured=sys.stdout.isatty(),
            )
        )
    return 0


def _split(root: Path, words: Sequence[str]) -> tuple[list[RunPaths], Sequence[str]]:
    """Return the trials that the command line begins with, and the metrics behind them."""
    from slurmrl.desk import trials
    from slurmrl.errors import UnknownNameError, UsageError

    chosen = [trials.find(root, words[0])]
    for number, word in enumerate(words[1:], 1):
        try:
            chosen.append(trials.find(root, word))
        except (UsageError, UnknownNameError):  # a metric
            return chosen, words[number:]
    return chosen, ()


def _names(found: Mapping[str, Mapping[str, Curve]], patterns: Sequence[str]) -> Collection[str]:
    """Return the metrics to draw. Raises UnknownNameError for a pattern that none of the trials
    has a metric for."""
    from slurmrl.errors import UnknownNameError
    from slurmrl.registry import near

    known = list(dict.fromkeys(name for own in found.values() for name in own))
    if not known:
        raise UnknownNameError(f"{', '.join(found)}: there are no metrics yet")
    names: dict[str, None] = {}
    for pattern in patterns or [name for name in SHOWN if name in known]:
        matching = [name for name in known if fnmatchcase(name, pattern)]
        if not matching:
            raise UnknownNameError(f"no metric '{pattern}'; {near(pattern, known)}")
        names |= dict.fromkeys(matching)
    return names
