"""Commands that act on existing trials: resume, scale, stacks, stop, cancel, rm."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from slurmrl.cli.options import (
    again,
    common,
    examples,
    json_option,
    submitting,
    trial_argument,
    trials_argument,
)
from slurmrl.cli.submit import carry_out, describe
from slurmrl.errors import SlurmrlError

if TYPE_CHECKING:
    from slurmrl.run.paths import RunPaths


STACKS_S = 60.0
"""Default of the longest wait for stacks in seconds."""
OTHER = """\
import runpy, sys, traceback, zipfile, zlib
sys.argv[0] = "slurmrl"
try:
    runpy.run_module("slurmrl", run_name="__main__")
except (SyntaxError, ImportError, NameError, AttributeError, TypeError, ValueError, EOFError,
        zipfile.BadZipFile, zlib.error) as error:
    if "--debug" in sys.argv:
        raise
    where = traceback.extract_tb(error.__traceback__)[-1]
    file = getattr(error, "filename", None) or f"{where.filename}, line {where.lineno}"
    print(f"Error: the trial's copy of slurmrl is damaged: {type(error).__name__}: {error} "
          f"({file}). --update-code uses the current code", file=sys.stderr)
    sys.exit(3)
"""
"""Program that runs a trial's copy of slurmrl, and reports damaged files of the copy."""


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
    help="Use a host again that was excluded after failures. slurmrl status lists these hosts. "
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
    and the optimizer state; the command prints the differences. The command also warns if a new
    total_steps changes the learning rate.

    If the trial is running and few Slurm jobs are left in its chain, the command adds jobs.
    """
    from slurmrl.desk import trials
    from slurmrl.desk.job_counts import add_links, include
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
    return carry_out([proposal], check_s=check_s, dry_run=dry_run, wait=wait, as_json=as_json)


def _exec_own_slurmrl(paths: RunPaths) -> None:
    """Replace this process by the trial's own slurmrl if its version differs.

    The jobs read the configuration, the plan and the batch scripts with the trial's version, so the
    same version must write them.
    """
    from slurmrl.desk import trial_code
    from slurmrl.scheduler.base import snapshot_environment

    code = trial_code.current_code(paths)
    if trial_code.is_this_code(code):
        return
    click.echo(f"using the trial's slurmrl, {code}; --update-code uses the installed one", err=True)
    sys.stdout.flush()
    arguments = [sys.executable, "-P", "-c", OTHER, *click.get_current_context().obj.arguments]
    given = snapshot_environment(code)
    path = os.pathsep.join([given["PYTHONPATH"], *filter(None, [os.environ.get("PYTHONPATH")])])
    os.execve(sys.executable, arguments, {**os.environ, **given, "PYTHONPATH": path})


@click.command(epilog=examples("slurmrl stop grpo/1", "slurmrl stop grpo/1 --wait"))
@trials_argument
@click.option("--wait", is_flag=True, help="Wait until the jobs of the trials have ended.")
@common
def stop(names: tuple[str, ...], wait: bool, root: str | None) -> int:
    """Stop trials at the next step: they commit, and their jobs end.

    `slurmrl resume` continues stopped trials. `slurmrl cancel` ends trials without a commit.
    """
    from slurmrl.desk import trial_jobs, trials

    folder = trials.root_folder(root)
    # Find all trials before stopping any: a wrong name must have no effect.
    chosen = {name: trials.find(folder, name) for name in names}
    jobs, errors = {}, list[SlurmrlError]()
    for name, paths in chosen.items():
        try:
            jobs[name] = trial_jobs.stop(paths)
        except SlurmrlError as error:
            errors.append(error)
    for name in jobs:
        try:
            if wait:
                how = trial_jobs.wait_until_stopped(chosen[name], jobs[name])
                click.echo(f"{name} {how}; to continue it: slurmrl resume {name}{again(folder)}")
            else:
                trains = jobs[name].trainers_run()
                how = "stops at the next step and commits"
                how = how if trains else "is stopped: its trainers were not running"
                click.echo(f"{name} {how}; to watch it: slurmrl status {name}{again(folder)}")
        except SlurmrlError as error:
            errors.append(error)
    if errors:
        *others, worst = sorted(errors, key=lambda each: each.exit_code)
        click.echo("".join(f"Error: {each}\n" for each in others), err=True, nl=False)
        raise worst
    return 0


@click.command(epilog=examples("slurmrl scale grpo/1 8", "slurmrl scale grpo/1 0"))
@trial_argument
@click.argument("tasks", metavar="N", type=click.IntRange(min=0))
@json_option
@common
def scale(trial: str, tasks: int, as_json: bool, root: str | None) -> int:
    """Set the number of rollout tasks of a trial that run at a time; 0 pauses generation.

    Surplus tasks finish the completions that they can, return the unfinished items, and exit. The
    number also holds for later jobs, until this command or a resume with another rollout.tasks.max
    changes it.
    """
    from slurmrl.desk import trials
    from slurmrl.desk.job_counts import set_tasks

    paths = trials.find(trials.root_folder(root), trial)
    scaled = set_tasks(paths, tasks)
    if as_json:
        click.echo(json.dumps({"trial": trial, **asdict(scaled)}))
        return 0
    words = "generation pauses" if tasks == 0 else f"{tasks} rollout task{'s' * (tasks > 1)}"
    note = f"; {scaled.note}" if scaled.note else ""
    click.echo(f"{trial}: {words}, before {scaled.before}{note}")
    return 0


@click.command(epilog=examples("slurmrl stacks grpo/1", "slurmrl stacks grpo/1 3"))
@trial_argument
@click.argument("rank", type=click.IntRange(min=0), required=False)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=STACKS_S,
    show_default=True,
    metavar="SECONDS",
    help="Maximum wait for the answers.",
)
@common
def stacks(trial: str, rank: int | None, timeout_s: float, root: str | None) -> int:
    """Print the Python stacks and collectives of a running trial's ranks.

    The output has the Python stacks of all threads and the newest collectives of each rank, or only
    of RANK. Without RANK, the output also has the stacks of the master and of the agents.
    """
    from slurmrl.desk import trials
    from slurmrl.errors import EnvironmentFailure, UsageError
    from slurmrl.scheduler import make
    from slurmrl.watch.log_files import Request
    from slurmrl.watch.overview import collect

    folder = trials.root_folder(root)
    paths = trials.find(folder, trial)
    (status,) = collect([paths], make)
    if status["state"] != "RUNNING" or status["phase"] is None:
        raise UsageError(
            f"no ranks of {trial} are running: it is {status['state']}, {status['diagnosis']}"
        )
    request = Request.make(paths, status["incarnation"], rank)
    for text in request.answers(timeout_s):
        click.echo(text)
    if request.missing:
        shown = ", ".join(request.missing[:8])
        raise EnvironmentFailure(
            f"no stacks of {shown} in {timeout_s:g} s; see slurmrl status {trial}{again(folder)}"
        )
    return 0


@click.command(epilog=examples("slurmrl cancel grpo/1", "slurmrl cancel grpo/1 grpo/2"))
@trials_argument
@common
def cancel(names: tuple[str, ...], root: str | None) -> int:
    """End trials and their jobs at once.

    Their checkpoints stay. Steps after the last checkpoint are lost. To commit first, use
    `slurmrl stop`.
    """
    from slurmrl.desk import trial_jobs, trials
    from slurmrl.run.history.slots import Kind

    folder = trials.root_folder(root)
    # Find all trials before ending any: a wrong name must have no effect.
    chosen = {name: trials.find(folder, name) for name in names}
    for name, paths in chosen.items():
        steps = trial_jobs.uncommitted(paths)
        kind = trial_jobs.cancel(paths)
        lost = f"; not committed and lost: {steps} (slurmrl stop commits first)" if steps else ""
        if kind is Kind.CANCELLED:
            go_on = f"to continue it: slurmrl resume {name}{again(folder)}"
            click.echo(f"{name} is cancelled{lost}; {go_on}")
        else:
            click.echo(f"{name} has already ended: {kind}")
    return 0


@click.command(epilog=examples("slurmrl rm grpo/1", "slurmrl rm grpo/1 grpo/2 --yes"))
@trials_argument
@click.option("--yes", is_flag=True, help="Remove without asking for confirmation.")
@common
def rm(names: tuple[str, ...], yes: bool, root: str | None) -> int:
    """Remove trials with all their files: checkpoints, exports, metrics, logs.

    Nothing is removed if a trial has a job or is being submitted, or if the configuration of
    another trial names files of these trials.
    """
    from slurmrl.desk import trial_jobs, trials
    from slurmrl.desk.submitting import newest_submitted

    folder = trials.root_folder(root)
    chosen = list(dict.fromkeys(trials.find(folder, name) for name in names))
    others = [paths for paths in trials.all_trials(folder) if paths not in chosen]
    for sure in (yes, True):  # Check again after the answer, which may take minutes.
        for paths in chosen:
            newest_submitted(paths)  # It raises during a submission.
        trial_jobs.check_removable(chosen, others)
        if sure:
            break
        listed = ", ".join(str(paths.run) for paths in chosen)
        try:
            agreed = click.confirm(f"Remove {listed} with all checkpoints and exports?")
        except click.Abort as error:
            if sys.stdin.isatty():
                raise
            raise click.UsageError(
                "there is no terminal to confirm: --yes removes without asking"
            ) from error
        if not agreed:
            raise click.Abort
    for paths in chosen:
        trial_jobs.remove(paths)
        click.echo(f"{paths.full_name} is removed")
    return 0
