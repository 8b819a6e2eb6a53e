"""``slurmrl stacks``."""

from __future__ import annotations

import click

from slurmrl.cli.options import again, common, examples, trial_argument

WAIT_S = 60.0


@click.command(epilog=examples("slurmrl stacks grpo/1", "slurmrl stacks grpo/1 3"))
@trial_argument
@click.argument("rank", type=click.IntRange(min=0), required=False)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=WAIT_S,
    show_default=True,
    metavar="SECONDS",
    help="Maximum wait for the answers.",
)
@common
def stacks(trial: str, rank: int | None, timeout_s: float, root: str | None) -> int:
    """Print what the ranks of a running trial are doing: the Python stacks of all threads and the
    newest collectives of each rank, or of RANK only. Without RANK, the stacks of the master and of
    the agents as well."""
    from slurmrl.desk import trials
    from slurmrl.errors import EnvironmentFailure, UsageError
    from slurmrl.scheduler import make
    from slurmrl.watch.overview import collect
    from slurmrl.watch.stack_requests import Request

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
