"""``slurmrl stop``."""

from __future__ import annotations

import click

from slurmrl.cli.options import again, common, examples, trials_argument


@click.command(epilog=examples("slurmrl stop grpo/1", "slurmrl stop grpo/1 --wait"))
@trials_argument
@click.option("--wait", is_flag=True, help="Return when their jobs have ended.")
@common
def stop(names: tuple[str, ...], wait: bool, root: str | None) -> int:
    """Stop trials at the next step: they commit, and their jobs end. `slurmrl resume` continues
    them. `slurmrl cancel` ends them at once, without a commit."""
    from slurmrl.desk import stopping, trials

    folder = trials.root_folder(root)
    chosen = {name: trials.find(folder, name) for name in names}  # all before the first is stopped
    jobs = {name: stopping.stop(paths) for name, paths in chosen.items()}
    for name, paths in chosen.items():
        if wait:
            how = stopping.wait(paths, jobs[name])
            click.echo(f"{name} {how}; to continue it: slurmrl resume {name}{again(folder)}")
        else:
            look = f"slurmrl status {name}{again(folder)}"
            click.echo(f"{name} stops at the next step and commits; to see how: {look}")
    return 0
