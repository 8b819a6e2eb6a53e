"""``slurmrl doctor``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmrl.cli.options import checking, common, examples, json_option
from slurmrl.display.columns import hanging, row_lines, width
from slurmrl.display.words import plain

if TYPE_CHECKING:
    from slurmrl.desk.doctor.check import Check

MARKS = {"ok": "ok", "warning": "WARNING", "failed": "FAILED"}
STYLES = {"ok": "green", "warning": "yellow", "failed": "red"}
ADVICE = "         -> "
MOST_HOSTS = 4


@click.command(epilog=examples("slurmrl doctor", "slurmrl doctor grpo.yaml --job"))
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.argument("overrides", nargs=-1, metavar="[dotted.key=value]...")
@click.option("--job", is_flag=True, help="Also run the checks of compute nodes in a short job.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Maximum wait for the job to start.",
)
@click.option(
    "--scheduler",
    type=click.Choice(["auto", "local", "slurm"]),
    help="Where to run the job. Default: cluster.scheduler; auto is slurm on a cluster.",
)
@checking
@json_option
@common
def doctor(
    config: Path | None,
    overrides: tuple[str, ...],
    job: bool,
    timeout: float,
    scheduler: str | None,
    no_check: bool,
    check_timeout: float,
    as_json: bool,
    root: str | None,
) -> int:
    """Check whether trials, or the trial of CONFIG, can run here, and print how to fix what fails.

    The exit code is 1 if a check failed.
    """
    from slurmrl.desk.doctor.examine import Examination, examine
    from slurmrl.desk.trials import chosen_root, root_folder

    what = Examination(
        config,
        overrides,
        chosen_root(root),
        root_folder(root),
        scheduler,
        job,
        timeout,
        None if no_check else check_timeout,
    )
    checks = examine(what, lambda text: click.echo(text, err=True))
    counts = {state: sum(one.state == state for one in checks) for state in MARKS}
    if as_json:
        shown = {"checks": [one.to_json() for one in checks], **counts}
        click.echo(json.dumps(shown))
    else:
        _show(checks)
        words = ", ".join(f"{count} {state}" for state, count in counts.items())
        hint = "" if job else "; compute nodes were not checked: add --job"
        click.echo(f"{words}{hint}")
    return 1 if counts["failed"] else 0


def _show(checks: Sequence[Check]) -> None:
    """Print passed checks first and failures last, where people look."""
    groups = sorted(_together(checks), key=lambda group: list(MARKS).index(group[0].state))
    columns = width()
    heading, *shown = row_lines([("", "CHECK", "WHERE", "MEASURED"), *map(_row, groups)], columns)
    click.echo("\n".join(heading))
    for group, (first, *more) in zip(groups, shown, strict=True):
        mark = MARKS[group[0].state]
        click.echo(click.style(mark, fg=STYLES[group[0].state]) + first.removeprefix(mark))
        for line in more + (hanging(ADVICE, group[0].advice, columns) if group[0].advice else []):
            click.echo(line)


def _row(group: Sequence[Check]) -> tuple[str, str, str, str]:
    first = max(group, key=_slowest)
    hosts = list(dict.fromkeys(one.where for one in group))
    where = ",".join(hosts) if len(hosts) <= MOST_HOSTS else f"{len(hosts)} hosts"
    return MARKS[first.state], first.name, where, plain(first.measured)


def _together(checks: Sequence[Check]) -> list[list[Check]]:
    """Hosts with equal results share a row. So do more than MOST_HOSTS that pass a check and differ
    only in numbers; their row shows the slowest."""
    groups: dict[tuple[str, ...], list[Check]] = {}
    names = [one.name for one in checks if one.state == "ok"]
    for one in checks:
        many = one.state == "ok" and names.count(one.name) > MOST_HOSTS
        key = (one.name, one.state, one.advice, "" if many else one.measured)
        groups.setdefault(key, []).append(one)
    order = list(dict.fromkeys(one.name for one in checks))
    return sorted(groups.values(), key=lambda group: order.index(group[0].name))


def _slowest(check: Check) -> float:
    return max((value for name, value in check.values.items() if name.endswith("_s")), default=0.0)
