"""``slurmrl checkpoints``."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from slurmrl.cli.options import common, examples, json_option, trial_argument
from slurmrl.display.columns import table
from slurmrl.display.words import age

if TYPE_CHECKING:
    from slurmrl.watch.checkpoints import StoredCommit

HEADINGS = ("STEP", "INCARNATION", "AGE", "SIZE", "FILES", "KEPT BY", "STATE")


@click.command(
    epilog=examples("slurmrl checkpoints grpo/1", "slurmrl checkpoints grpo/1 --no-verify")
)
@trial_argument
@click.option(
    "--verify/--no-verify",
    default=True,
    help="Compare the checksums of all files, or only their sizes.",
)
@json_option
@common
def checkpoints(trial: str, verify: bool, as_json: bool, root: str | None) -> int:
    """List and verify a trial's checkpoints. The exit code is 1 if one that the trial could resume
    from is damaged or cannot be read."""
    from dataclasses import asdict

    from slurmrl.desk import trials
    from slurmrl.watch.checkpoints import inventory

    paths = trials.find(trials.root_folder(root), trial)
    commits = inventory(paths, checksums=verify)
    if as_json:
        click.echo(json.dumps([asdict(commit) for commit in commits]))
    else:
        click.echo(_text(commits, verified=verify) if commits else "no checkpoints yet")
    return int(any(commit.problem and not commit.set_aside for commit in commits))


def _text(commits: list[StoredCommit], *, verified: bool) -> str:
    rows = [
        (
            str(one.step),
            str(one.incarnation),
            age(max(time.time() - one.time, 0.0)),
            size(one.bytes),
            str(one.files),
            ", ".join(one.kept_by) or "-",
            _state(one, verified),
        )
        for one in commits
    ]
    problems = [f"  step {one.step}: {one.problem}" for one in commits if one.problem]
    return "\n".join([*table([HEADINGS, *rows]), *problems])


def _state(one: StoredCommit, verified: bool) -> str:
    if one.set_aside:
        return "damaged, set aside"
    if one.problem:
        return "unreadable" if one.unreadable else "damaged"
    state = "verified" if verified else "sizes match"
    return f"{state}, exported" if one.exported else state


def size(count: int) -> str:
    """Return ``1.4 GB``."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
