"""``slurmrl submit``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmrl.cli.options import common, submitting
from slurmrl.cli.start import start

if TYPE_CHECKING:
    from slurmrl.submission.submit import Proposal


@click.command(epilog="Example: slurmrl submit ppo.yaml trial=2 actor.optimizer.lr=3e-5")
@click.argument("config", type=click.Path(path_type=Path))
@submitting
@click.option("--dry-run", is_flag=True, help="Print plan and batch scripts; write nothing.")
@click.option("--new", is_flag=True, help="Take the next free trial name.")
@common
def submit(
    config: Path,
    overrides: tuple[str, ...],
    scheduler: str | None,
    wait: bool | None,
    as_json: bool,
    dry_run: bool,
    new: bool,
    root: str | None,
) -> int:
    """Check CONFIG, plan its trial, snapshot both and the code, and start it.

    A trial that ended or was interrupted goes on from its last commit if its configuration agrees.
    """
    from slurmrl.submission.submit import propose

    proposal = propose(config, overrides, root=root, scheduler=scheduler, new=new)
    if dry_run:
        _show(proposal, as_json)
        return 0
    return start(proposal, wait=wait, as_json=as_json)


def _show(proposal: Proposal, as_json: bool) -> None:
    """What would be done."""
    scripts = proposal.scripts()
    if as_json:
        plan = json.loads(proposal.plan.to_json())
        shown = {"trial": proposal.trial, "run": str(proposal.paths.run)}
        click.echo(json.dumps({**shown, "plan": plan, "scripts": scripts}))
        return
    click.echo(f"# plan of {proposal.trial} on {proposal.kind}; run directory {proposal.paths.run}")
    click.echo(proposal.plan.to_json())
    for group, text in scripts.items():
        click.echo(f"# {proposal.paths.submission_script(1, group).name}\n{text}")
