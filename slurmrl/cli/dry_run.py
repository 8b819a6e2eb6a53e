"""What ``submit --dry-run`` and ``resume --dry-run`` print: what would be queued and written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from slurmrl.display.columns import table

if TYPE_CHECKING:
    from slurmrl.desk.checks.finding import Finding
    from slurmrl.desk.proposal import Proposal
    from slurmrl.desk.submit import Outlook
    from slurmrl.plan.model import GroupPlan


def show(
    proposal: Proposal,
    checked: Sequence[Finding],
    outlook: Outlook | None,
    *,
    as_json: bool,
) -> int:
    """Print what would be submitted, and the batch scripts. ``outlook``: where the trial is, if it
    exists."""
    from slurmrl.run.leave import shortened

    complete = outlook is not None and outlook.complete
    scripts = {} if complete else proposal.scripts()
    if as_json:
        shown: dict[str, Any] = {"trial": proposal.trial, "run": str(proposal.paths.run)}
        shown["checks"] = [one.to_json() for one in checked]
        if outlook is not None:
            shown |= {"resumed_step": outlook.step, "notes": list(outlook.notes)}
        plan = json.loads(proposal.plan.to_json())
        click.echo(json.dumps({**shown, "plan": plan, "scripts": scripts}))
        return 0
    if complete:
        click.echo(f"{proposal.trial} is already complete; nothing would be submitted")
        return 0
    click.echo(f"{proposal.trial} would be submitted to {proposal.kind}:")
    click.echo("\n".join(table([(f"  {name}", text) for name, text in _facts(proposal, outlook)])))
    for group, text in scripts.items():
        click.echo(f"\n# {proposal.paths.submission_script(1, group).name}\n{shortened(text)}")
    return 0


def _facts(proposal: Proposal, outlook: Outlook | None) -> Iterator[tuple[str, str]]:
    from slurmrl.desk.prepare import is_prepared

    config, prepared = proposal.settings.config, is_prepared(proposal.paths)
    steps = "" if config.total_steps is None else f", {_count(config.total_steps, 'step')}"
    yield "algorithm", f"{config.algorithm['name']}{steps}"
    for group in proposal.plan.jobs:
        yield f"job of {group.name}", ", ".join(_job(proposal, group))
    if used := proposal.settings.profile:
        keys = ", ".join(used.settings) or "nothing that the configuration leaves open"
        yield "site profile", f"{used.file}: {keys}"
    yield "directory", f"{proposal.paths.run}{'' if prepared else ' (new)'}"
    added = [] if prepared else ["configuration", "plan"]
    if proposal.update_code or not prepared:
        added.append("a copy of the code")
    yield "written there", ", ".join([*added, "the batch scripts"])
    if outlook is not None:
        yield from _continues(outlook)


def _job(proposal: Proposal, group: GroupPlan) -> Iterator[str]:
    """Yield what a group's array asks for."""
    from slurmrl.plan.placement import slurm_of

    gpus = group.gpus_per_worker * group.slots_per_host
    on_each = f"{_count(group.workers_per_host, 'worker')} and {_count(gpus, 'GPU')} on each"
    yield f"{_count(group.hosts, 'task' if group.elastic else 'host')}, {on_each}"
    if proposal.kind == "slurm":
        slurm = slurm_of(proposal.settings.config, group.name)
        yield f"partition {slurm.partition}" if slurm.partition else "the default partition"
        yield f"time limit {slurm.time}" if slurm.time else "the partition's time limit"
    yield f"{_count(group.links, 'start' if group.elastic else 'link')} in the queue"


def _continues(outlook: Outlook) -> Iterator[tuple[str, str]]:
    yield "continues from", "the beginning" if outlook.step is None else f"step {outlook.step}"
    left = [job for jobs in outlook.left.ids.values() for job in jobs] if outlook.left else []
    if left:
        yield "cancelled", f"its jobs that are still queued: {', '.join(left)}"
    yield from (("changes", note) for note in outlook.notes)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
