"""``slurmrl scale``."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from slurmrl.cli.options import common, examples, json_option, trial_argument


@click.command(epilog=examples("slurmrl scale grpo/1 8", "slurmrl scale grpo/1 0"))
@trial_argument
@click.argument("tasks", metavar="N", type=click.IntRange(min=0))
@json_option
@common
def scale(trial: str, tasks: int, as_json: bool, root: str | None) -> int:
    """Let N rollout tasks of a trial run at a time (0: none), also in its later links.

    Tasks that are too many finish what they can, give back the rest, and end. The number holds
    until it is changed, here or by another rollout.tasks.max when the trial is resumed.
    """
    from slurmrl.desk import trials
    from slurmrl.desk.scale import set_tasks

    paths = trials.find(trials.root_folder(root), trial)
    scaled = set_tasks(paths, tasks)
    if as_json:
        click.echo(json.dumps({"trial": trial, **asdict(scaled)}))
        return 0
    words = "generation pauses" if tasks == 0 else f"{tasks} rollout task{'s' * (tasks > 1)}"
    note = f"; {scaled.note}" if scaled.note else ""
    click.echo(f"{trial}: {words}, before {scaled.before}{note}")
    return 0
