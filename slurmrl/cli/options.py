"""Options that commands share."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slurmrl import env
from slurmrl.cli import completion
from slurmrl.desk.trials import root_folder

if TYPE_CHECKING:
    from slurmrl.run.paths import RunPaths

F = TypeVar("F", bound=Callable[..., Any])


class FiniteRange(click.FloatRange):
    """Numbers of a range, without NaN, which every comparison lets through."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not allowed; expected a finite number", param, ctx)
        return number


def _remember_debug(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    ctx.obj.debug = value


def _use_profile(ctx: click.Context, parameter: click.Parameter, name: str | None) -> None:
    if name is not None:
        ctx.obj.profile = name
        ctx.with_resource(env.PROFILE.given(name))


def examples(*lines: str) -> str:
    """The end of a command's help: command lines that work."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def trial_argument(command: F) -> F:
    """Add the argument ``trial``."""
    argument = click.argument("trial", metavar="EXPERIMENT/TRIAL", shell_complete=completion.trials)
    return argument(command)


def trials_argument(command: F) -> F:
    """Add the argument ``names``: one trial or more."""
    argument = click.argument(
        "names",
        nargs=-1,
        required=True,
        metavar="EXPERIMENT/TRIAL...",
        shell_complete=completion.trials,
    )
    return argument(command)


def newest_trial_argument(command: F) -> F:
    """Add the argument ``trial`` of a command that only reads; see `chosen_trial`."""
    argument = click.argument(
        "trial", metavar="[EXPERIMENT/TRIAL]", required=False, shell_complete=completion.trials
    )
    return argument(command)


def chosen_trial(root: str | None, trial: str | None) -> RunPaths:
    """Return the trial of a name; without one the newest, and say which one that is."""
    from slurmrl.desk import trials

    folder = root_folder(root)
    if trial is not None:
        return trials.find(folder, trial)
    paths = trials.newest(folder)
    click.echo(f"{paths.full_name}, the newest trial", err=True)
    return paths


def common(command: F) -> F:
    """Add ``--root``, ``--profile`` and ``--debug``."""
    root = click.option(
        "--root",
        metavar="DIR",
        shell_complete=completion.folders,
        help="Root folder of all runs. Default: SLURMRL_ROOT, then root of the configuration or "
        "of the site profile, then ./runs.",
    )
    debug = click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        callback=_remember_debug,
        help="Print the traceback of an error.",
    )
    profile = click.option(
        "--profile",
        metavar="NAME",
        expose_value=False,
        is_eager=True,
        callback=_use_profile,
        shell_complete=completion.profiles,
        help="Name of the site profile, or none for no profile. Default: SLURMRL_PROFILE, then the "
        "profile named default, then the only profile.",
    )
    return root(profile(debug(command)))


def overrides_argument(command: F) -> F:
    """Add the argument ``overrides``."""
    argument = click.argument(
        "overrides",
        nargs=-1,
        metavar="[dotted.key=value]...",
        shell_complete=completion.overrides,
    )
    return argument(command)


def submitting(command: F) -> F:
    """Add the arguments and options of ``submit`` and ``resume``."""
    scheduler = click.option(
        "--scheduler",
        type=click.Choice(["auto", "local", "slurm"]),
        help="Where to run. Default: cluster.scheduler; auto is slurm on a cluster.",
    )
    wait = click.option(
        "--wait/--detach",
        default=None,
        help="Watch the run until it ends, or return at once. --wait exits with 1 if the run "
        "fails. Default: --wait with the local scheduler, --detach with Slurm.",
    )
    dry_run = click.option(
        "--dry-run",
        is_flag=True,
        help="Print the jobs, files and batch scripts that would be made (with --json also the "
        "plan); write and submit nothing.",
    )
    return overrides_argument(scheduler(wait(json_option(dry_run(checking(command))))))


def short_job(timeout_s: float) -> Callable[[F], F]:
    """Add the options of a command that submits a short job and waits ``timeout_s`` by default."""
    timeout = click.option(
        "--timeout",
        type=click.FloatRange(min=1),
        default=timeout_s,
        show_default=True,
        metavar="SECONDS",
        help="Maximum wait for the job to start.",
    )
    scheduler = click.option(
        "--scheduler",
        type=click.Choice(["auto", "local", "slurm"]),
        help="Where to run the job. Default: cluster.scheduler; auto is slurm on a cluster.",
    )
    return lambda command: timeout(scheduler(command))


def checking(command: F) -> F:
    """Add the options of commands that check a trial's files."""
    no_check = click.option(
        "--no-check",
        is_flag=True,
        help="Skip the checks of data, weights, tokenizer, reward and disk, for a login node that "
        "cannot run them. Errors then appear only when the run starts.",
    )
    timeout = click.option(
        "--check-timeout",
        type=click.FloatRange(min=0.1),
        default=120.0,
        show_default=True,
        metavar="SECONDS",
        help="Time limit of the checks that --no-check skips. Unfinished checks are listed.",
    )
    return no_check(timeout(command))


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def again(root: Path) -> str:
    """Return the option that makes another command use ``root``; empty if that is the default."""
    if root_folder(None) != root:
        return f" --root {shlex.quote(str(root))}"
    profile = click.get_current_context().obj.profile
    return f" --profile {profile}" if profile and not env.ROOT.get() else ""
