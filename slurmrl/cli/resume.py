"""``slurmrl resume``."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import click

from slurmrl.cli.options import common, examples, submitting, trial_argument
from slurmrl.cli.start import carry_out, describe

if TYPE_CHECKING:
    from slurmrl.run.paths import RunPaths


OTHER = """\
import runpy, sys, traceback, zlib
sys.argv[0] = "slurmrl"
try:
    runpy.run_module("slurmrl", run_name="__main__")
except (SyntaxError, ImportError, NameError, AttributeError, TypeError, ValueError, EOFError,
        zlib.error) as error:
    if "--debug" in sys.argv:
        raise
    where = traceback.extract_tb(error.__traceback__)[-1]
    file = getattr(error, "filename", None) or f"{where.filename}, line {where.lineno}"
    print(f"Error: the trial's copy of slurmrl is damaged: {type(error).__name__}: {error} "
          f"({file}). --update-code takes the present one", file=sys.stderr)
    sys.exit(3)
"""
"""Runs the slurmrl of a trial. Its files may be damaged, and no code of theirs can say so."""


@click.command(
    epilog=examples(
        "slurmrl resume grpo/1",
        "slurmrl resume grpo/1 total_steps=400 cluster.slurm.partition=long",
        "slurmrl resume grpo/1 --update-code --dry-run",
    )
)
@trial_argument
@submitting
@click.option(
    "--update-code",
    is_flag=True,
    help="Use slurmrl and your own code as they are now. Default: the code that the trial was "
    "submitted with.",
)
@click.option(
    "--include",
    "included",
    multiple=True,
    metavar="HOST|all",
    help="Use a host again that jobs avoid after failures there; slurmrl status lists them. "
    "Repeatable.",
)
@common
def resume(
    trial: str,
    overrides: tuple[str, ...],
    scheduler: str | None,
    wait: bool | None,
    as_json: bool,
    dry_run: bool,
    no_check: bool,
    check_timeout: float,
    update_code: bool,
    included: tuple[str, ...],
    root: str | None,
) -> int:
    """Continue a trial from its last commit with the configuration in its run directory.

    Overrides may change settings that do not affect results (total_steps, stop_when, cluster,
    checkpoint, …) and the layout (actor.backend=fsdp:d4). A new layout keeps the order of the data
    and the optimizer state; the command prints what differs, and also when a new total_steps
    changes the learning rate.

    If the trial is running and few Slurm jobs are left in its chain, more are added.
    """
    from slurmrl.desk import trials
    from slurmrl.desk.links import add_links, include
    from slurmrl.desk.proposal import propose_resume

    paths = trials.find(trials.root_folder(root), trial)
    if not update_code:
        _exec_own_slurmrl(paths)
    if included:
        hosts, live = include(paths, included, dry_run=dry_run)
        verb = "would be used" if dry_run else "are used"
        click.echo(f"{trial}: {', '.join(hosts) or 'no hosts'} {verb} again", err=as_json)
        if live and not overrides and not update_code:
            return 0
    unchanged = not overrides and not update_code and scheduler in (None, "auto", "slurm")
    longer = add_links(paths, dry_run=dry_run) if unchanged else None
    if longer is not None:
        said = f"{trial}: {'; '.join(longer.notes)}"
        click.echo(json.dumps(describe(longer)) if as_json else said)
        return 0
    proposal = propose_resume(paths, overrides, scheduler=scheduler, update_code=update_code)
    check_s = None if no_check else check_timeout
    return carry_out(proposal, check_s=check_s, dry_run=dry_run, wait=wait, as_json=as_json)


def _exec_own_slurmrl(paths: RunPaths) -> None:
    """Replace this process by the trial's own slurmrl if that differs: the version that reads the
    configuration, plan and batch scripts later must write them."""
    from slurmrl.desk import snapshot
    from slurmrl.scheduler.job_environment import of_snapshot

    code = paths.snapshot(snapshot.current(paths))
    if snapshot.is_this_code(code):
        return
    click.echo(f"using the slurmrl of the trial, {code}; --update-code uses this one", err=True)
    sys.stdout.flush()
    arguments = [sys.executable, "-P", "-c", OTHER, *click.get_current_context().obj.arguments]
    given = of_snapshot(code)
    path = os.pathsep.join([given["PYTHONPATH"], *filter(None, [os.environ.get("PYTHONPATH")])])
    os.execve(sys.executable, arguments, {**os.environ, **given, "PYTHONPATH": path})
