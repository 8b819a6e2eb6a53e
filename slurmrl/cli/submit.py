"""``slurmrl submit`` and ``slurmrl cancel``."""

from __future__ import annotations

from pathlib import Path

import click

from slurmrl.cli.options import again, common, examples, submitting, trials_argument
from slurmrl.cli.start import carry_out
from slurmrl.desk.trials import root_folder


@click.command(
    epilog=examples(
        "slurmrl submit grpo.yaml",
        "slurmrl submit grpo.yaml trial=2 actor.optimizer.lr=3e-5",
        "slurmrl submit grpo.yaml --dry-run",
    )
)
@click.argument("config", type=click.Path(path_type=Path))
@submitting
@click.option("--new", is_flag=True, help="Start a new trial under the next free name.")
@common
def submit(
    config: Path,
    overrides: tuple[str, ...],
    scheduler: str | None,
    wait: bool | None,
    as_json: bool,
    dry_run: bool,
    no_check: bool,
    check_timeout: float,
    new: bool,
    root: str | None,
) -> int:
    """Check CONFIG, plan its trial, snapshot configuration, plan and code, and start it. CONFIG may
    also be an archive that `slurmrl bundle` made.

    An existing trial that was interrupted, failed or cancelled continues from its last commit if
    its configuration is the same.
    """
    from slurmrl.desk.bundle.unpack import is_bundle, unpack
    from slurmrl.desk.proposal import propose

    if is_bundle(config):
        config = unpack(config, root_folder(root))
    proposal = propose(config, overrides, root=root, scheduler=scheduler, new=new)
    check_s = None if no_check else check_timeout
    return carry_out(proposal, check_s=check_s, dry_run=dry_run, wait=wait, as_json=as_json)


@click.command(epilog=examples("slurmrl cancel grpo/1", "slurmrl cancel grpo/1 grpo/2"))
@trials_argument
@common
def cancel(names: tuple[str, ...], root: str | None) -> int:
    """End trials and their jobs at once. Their checkpoints stay, steps after the last one are lost.
    `slurmrl stop` commits them first."""
    from slurmrl.desk import trials
    from slurmrl.desk.live import cancel as cancel_trial
    from slurmrl.desk.live import uncommitted
    from slurmrl.run.history.record import Kind

    folder = trials.root_folder(root)
    chosen = {name: trials.find(folder, name) for name in names}  # all before the first is ended
    for name, paths in chosen.items():
        steps = uncommitted(paths)
        kind = cancel_trial(paths)
        lost = f"; not committed and lost: {steps} (slurmrl stop commits first)" if steps else ""
        if kind is Kind.CANCELLED:
            go_on = f"to continue it: slurmrl resume {name}{again(folder)}"
            click.echo(f"{name} is cancelled{lost}; {go_on}")
        else:
            click.echo(f"{name} has already ended: {kind}")
    return 0
