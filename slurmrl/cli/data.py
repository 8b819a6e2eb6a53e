"""``slurmrl data show`` and ``slurmrl data check``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmrl.cli.options import common, examples, json_option
from slurmrl.display.columns import table

if TYPE_CHECKING:
    from slurmrl.desk.inspection import DataCounts, DataReport, DataSample

ROWS = 3
TITLES = ("source", "rows", "too long", "tokens", "trained on", "longest", "path")
MARKS = ("⟦", "⟧")
"""Around targets where there are no colours."""


@click.group()
def data() -> None:
    """Show and check the data of a configuration as the model sees it."""


@data.command(
    epilog=examples(
        "slurmrl data show sft.yaml",
        "slurmrl data show grpo.yaml --rows 1 dataset.chat_template=true",
    )
)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[dotted.key=value]...")
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=ROWS,
    show_default=True,
    metavar="N",
    help="Number of rows of each source, from the first.",
)
@json_option
@common
def show(
    config: Path, overrides: tuple[str, ...], rows: int, as_json: bool, root: str | None
) -> int:
    """Print some samples of CONFIG as the model sees them, with all special tokens. Tokens that are
    trained on are green, or between ⟦ and ⟧ where there are no colours."""
    report = _report(config, overrides, root)
    for sample in report.samples(rows):
        if as_json:
            click.echo(json.dumps(asdict(sample)))
        else:
            _print(sample)
    report.finish()
    return 0


@data.command(epilog=examples("slurmrl data check sft.yaml", "slurmrl data check sft.yaml --json"))
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[dotted.key=value]...")
@json_option
@common
def check(config: Path, overrides: tuple[str, ...], as_json: bool, root: str | None) -> int:
    """Read and tokenise all data of CONFIG, as its run would, and name the lines that cannot be
    used. The exit code is 2 if there are any."""
    report = _report(config, overrides, root)
    counts = list(report.counts())
    if as_json:
        for each in counts:
            click.echo(json.dumps(asdict(each)))
    elif counts:
        click.echo("\n".join(table([TITLES, *map(_row, counts)])))
        _warn(counts)
    report.finish()
    return 0


def _report(config: Path, overrides: tuple[str, ...], root: str | None) -> DataReport:
    from slurmrl.desk import own_code, trials
    from slurmrl.desk.checks.run import Code
    from slurmrl.desk.inspection import DataReport, described
    from slurmrl.plan.settings import load_settings

    settings = load_settings(
        config, overrides, root=trials.chosen_root(root), planning=True, data=True
    )
    found = own_code.find(settings.config, settings.source, settings.folders, settings.algorithm)
    code = Code(paths=found.paths)
    return DataReport(described(settings, code), code)


def _row(counts: DataCounts) -> tuple[str, ...]:
    numbers = (counts.rows, counts.left_out, counts.tokens, counts.targets, counts.longest)
    return (counts.source, *map(str, numbers), counts.path)


def _warn(counts: list[DataCounts]) -> None:
    for each in counts:
        if each.equal_pairs:
            what = "pairs whose chosen and rejected answers are the same: they teach nothing"
            click.echo(f"warning: {each.source}: {each.equal_pairs} {what}", err=True)
        for remark in each.remarks:
            click.echo(f"warning: {each.source}: {remark}", err=True)


def _print(sample: DataSample) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(f"{sample.where}  id {sample.id}", style="bold"))
    for runs in sample.sequences:
        text = Text()
        for run in runs:
            opening, closing = MARKS if run.target and console.color_system is None else ("", "")
            text.append(f"{opening}{run.text}{closing}", style="green" if run.target else "")
        targets = sum(run.tokens for run in runs if run.target)
        total = sum(run.tokens for run in runs)
        console.print(text)
        console.print(Text(f"{total} tokens, {targets} of them trained on", style="dim"))
    console.print()
