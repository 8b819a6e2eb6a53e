"""``slurmrl plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from slurmrl.cli import completion
from slurmrl.cli.options import common, examples


@click.command(
    epilog=examples(
        "slurmrl plan grpo.yaml",
        "slurmrl plan grpo.yaml actor.backend=fsdp:d8 --svg plan.svg",
        "slurmrl plan megatron:d2p2t4 --json",
    )
)
@click.argument("target", metavar="CONFIG|ALLOCATION", shell_complete=completion.files)
@click.argument("overrides", nargs=-1, metavar="[dotted.key=value]...")
@click.option(
    "--scheduler",
    type=click.Choice(["auto", "local", "slurm"]),
    help="Plan for this scheduler. Default: cluster.scheduler; auto is slurm on a cluster.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--table", "as_table", is_flag=True, help="Print tables (the default), in addition to --svg."
)
@click.option(
    "--moves",
    "with_moves",
    is_flag=True,
    help="Also show what each reallocation moves: bytes per link and per rank, memory, messages.",
)
@click.option("--svg", type=click.Path(path_type=Path), help="Write the plan to this SVG file.")
@common
def plan(
    target: str,
    overrides: tuple[str, ...],
    scheduler: str | None,
    as_json: bool,
    as_table: bool,
    with_moves: bool,
    svg: Path | None,
    root: str | None,
) -> int:
    """Show what would run where, without submitting.

    For a configuration: hosts, GPUs, ranks of each model, memory and FLOPs. For an allocation such
    as megatron:d2p2t4: its parallel dimensions and ranks.

    The exit code is 2 if something must be fixed before the configuration can be submitted.
    """
    from slurmrl.plan.resolve.hub_references import LATER

    if as_json and as_table:
        raise click.UsageError("--json and --table exclude each other")
    if _is_allocation(target):
        if overrides or scheduler or with_moves:
            raise click.UsageError(
                "overrides, --scheduler and --moves are not allowed with an allocation"
            )
        from slurmrl.plan.plan_document import allocation_document
        from slurmrl.plan.resolve.spellings import explain

        made = explain(target)
        shown = allocation_document(made)
    else:
        from slurmrl.plan.plan_document import document

        made = _report(Path(target), overrides, scheduler, root, with_moves=with_moves)
        shown = document(made)
    if svg is not None:
        from slurmrl.display import svg as picture

        svg.write_text(picture.render(shown), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(made))
    elif as_table or with_moves or svg is None:
        from slurmrl.display import text

        click.echo(text.render(shown))
    return 2 if any(not line.endswith(LATER) for line in made.get("missing", ())) else 0


def _is_allocation(target: str) -> bool:
    """Existing files and paths that look like files are configurations, so that a mistyped file is
    reported as missing."""
    names_file = target.endswith((".yaml", ".yml")) or "/" in target
    return not names_file and not Path(target).exists()


def _report(
    path: Path,
    overrides: tuple[str, ...],
    scheduler: str | None,
    root: str | None,
    *,
    with_moves: bool,
) -> dict[str, Any]:
    from slurmrl.desk import own_code
    from slurmrl.desk.proposal import kept
    from slurmrl.desk.submit import refusal
    from slurmrl.desk.trials import chosen_root
    from slurmrl.plan import precision, resources
    from slurmrl.plan.build import make_plan
    from slurmrl.plan.dataflow import unread
    from slurmrl.plan.plan_values import report
    from slurmrl.plan.settings import Settings, load_settings
    from slurmrl.scheduler import choose

    def load(*more: str) -> Settings:
        given, where = (*overrides, *more), chosen_root(root)
        return load_settings(path, given, root=where, scheduler=scheduler, planning=True)

    settings = load()
    if added := kept(settings):
        settings = load(*added)
    config = settings.config
    kind = choose(scheduler or config.cluster.scheduler, asks_slurm=config.asks_slurm)
    hosts = resources.ask(settings.config) if kind == "slurm" else None
    planned = make_plan(settings, scheduler=kind, hosts=hosts)
    unread_keys = unread(planned.calls, settings.config.dataset.kind)
    warnings = [f"key {line}" for line in unread_keys]
    if slow := precision.slow_bfloat16(precision.bfloat16_models(config, planned, planned.groups)):
        warnings.append(slow if kind == "local" else f"{slow}; {precision.ELSEWHERE}")
    made = report(settings, planned, [*warnings, *resources.scarce(planned, settings, hosts)])
    made["missing"] += resources.lacking(planned, settings.config, hosts)
    made["missing"] += map(str, resources.lacking_gpus(settings, planned))
    code = own_code.find(settings.config, settings.source, settings.folders, settings.algorithm)
    slurm = settings.config.cluster.slurm
    made["warnings" if slurm.container or slurm.setup else "missing"] += code.notes
    if reason := refusal(settings):
        made["missing"].append(reason)
    if settings.profile is not None:
        made["profile"] = settings.profile.to_json()
    if with_moves:
        from slurmrl.engines.planned import moves

        made["moves"] = list(moves(settings, planned))
    return made
