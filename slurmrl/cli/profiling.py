"""``slurmrl profile-cluster``: measure the hardware for predictions."""

from __future__ import annotations

import json
from pathlib import Path

import click

from slurmrl.cli.options import common, examples, json_option, overrides_argument, short_job


@click.command(
    "profile-cluster",
    epilog=examples(
        "slurmrl profile-cluster",
        "slurmrl profile-cluster grpo.yaml --hosts 2",
        "slurmrl profile-cluster --scheduler local --ranks 2 --output cpu.yaml",
    ),
)
@click.argument("config", type=click.Path(path_type=Path), required=False)
@overrides_argument
@click.option(
    "--hosts",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Hosts of the job. Default: 2 if the cluster has them, so that the network is measured.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Ranks of each host. Default: cluster.workers_per_host, else one for each GPU, else 2.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="Name of the hardware. Default: cpu, or the GPU's name, such as h100.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file to write. Default: NAME.yaml in ~/.config/slurmrl/hardware, where plan and "
    "search find it.",
)
@short_job(3600.0)
@json_option
@common
def profile_cluster(
    config: Path | None,
    overrides: tuple[str, ...],
    hosts: int | None,
    ranks: int | None,
    name: str | None,
    output: Path | None,
    timeout: float,
    scheduler: str | None,
    as_json: bool,
    root: str | None,
) -> int:
    """Measure the hardware in a short job and write a hardware profile.

    The job measures matrix products, memory, collectives, a small model and the shared directory.
    `slurmrl plan` and `slurmrl search` then predict seconds from these numbers. The job takes the
    partition and other options from CONFIG or from the site profile.
    """
    from slurmrl.desk.hardware_profiling import Profiling, profile
    from slurmrl.desk.trials import chosen_root, root_folder
    from slurmrl.display.terminal import table, width
    from slurmrl.plan.estimates.hardware import CPU, read_file

    what = Profiling(
        config,
        overrides,
        chosen_root(root),
        root_folder(root),
        scheduler,
        hosts,
        ranks,
        name,
        output,
        timeout,
    )
    path = profile(what, lambda text: click.echo(text, err=True))
    found = read_file(path)
    numbers = found.measured.model_dump(exclude_none=True)
    if as_json:
        click.echo(json.dumps({"file": str(path), "made": found.made, "measured": numbers}))
        return 0
    rows = [("NUMBER", "MEASURED"), *((key, f"{value:.3g}") for key, value in numbers.items())]
    click.echo("\n".join(table(rows, width())))
    click.echo(f"wrote {path}")
    if output is not None or not found.hardware.isalnum():  # a GPU's type is found by its words
        click.echo(f"  use it  slurmrl search CONFIG cluster.hardware={path}")
    elif found.hardware != CPU:
        click.echo(f"  use it  slurmrl search CONFIG cluster.slurm.gpu_type={found.hardware}")
    return 0
