"""``slurmrl plan``: the processes and their GPUs, or the graph of a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from slurmrl.cli.options import common, complete_files, examples, json_option, overrides_argument

if TYPE_CHECKING:
    from slurmrl.display.terminal import Document


class Shown(NamedTuple):
    """The plan in the forms that the command prints."""

    values: dict[str, Any]
    """The plan as JSON values."""
    document: Document
    """The plan as a document, for text or SVG."""
    warnings: Sequence[str] = ()
    """Warnings, which are printed below the plan."""


@click.command(
    epilog=examples(
        "slurmrl plan grpo.yaml",
        "slurmrl plan grpo.yaml actor.backend=fsdp:d8 --svg plan.svg",
        "slurmrl plan grpo.yaml --graph",
        "slurmrl plan megatron:d2p2t4 --json",
    )
)
@click.argument("target", metavar="CONFIG|ALLOCATION", shell_complete=complete_files)
@overrides_argument
@click.option(
    "--scheduler",
    type=click.Choice(["auto", "local", "slurm"]),
    help="Plan for this scheduler. Default: cluster.scheduler; auto selects Slurm on a cluster.",
)
@json_option
@click.option(
    "--table", "as_table", is_flag=True, help="Print tables (the default), even with --svg."
)
@click.option(
    "--moves",
    "with_moves",
    is_flag=True,
    help="Also show each resharding of weights: bytes per link and per rank, memory, messages.",
)
@click.option(
    "--graph",
    "with_graph",
    is_flag=True,
    help="Show the calls of a step, the keys that pass between them, their models and hooks.",
)
@click.option(
    "--evaluation",
    is_flag=True,
    help="Show the graph of an evaluation, not of a training step. With suites: the first suite.",
)
@click.option(
    "--svg",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the plan to this SVG file.",
)
@common
def plan(
    target: str,
    overrides: tuple[str, ...],
    scheduler: str | None,
    as_json: bool,
    as_table: bool,
    with_moves: bool,
    with_graph: bool,
    evaluation: bool,
    svg: Path | None,
    root: str | None,
) -> int:
    """Show which ranks would run where, without submitting.

    For a configuration, the command shows hosts, GPUs, ranks of each model, memory and FLOPs. For
    an allocation such as megatron:d2p2t4, the command shows the parallel dimensions and ranks.

    The exit code is 2 if something must be fixed before the configuration can be submitted.
    """
    from slurmrl.plan.hub_references import LATER

    if as_json and as_table:
        raise click.UsageError("--json and --table exclude each other")
    graph = with_graph or evaluation
    if graph and (with_moves or scheduler):
        raise click.UsageError("--graph excludes --moves and --scheduler")
    if _is_allocation(target):
        if overrides or scheduler or with_moves or graph:
            raise click.UsageError(
                "overrides, --scheduler, --moves and --graph are not allowed with an allocation"
            )
        shown = _allocation(target)
    elif graph:
        shown = _graph(target, overrides, root, evaluation=evaluation)
    else:
        shown = _plan(Path(target), overrides, scheduler, root, with_moves=with_moves)
    if svg is not None:
        from slurmrl.display import svg as picture

        svg.write_text(picture.render(shown.document), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(shown.values))
    elif as_table or with_moves or svg is None:
        from slurmrl.display import terminal

        click.echo(terminal.as_text(shown.document))
    for line in [] if as_json else shown.warnings:
        click.echo(f"warning: {line}", err=True)
    return 2 if any(not line.endswith(LATER) for line in shown.values.get("missing", ())) else 0


def _is_allocation(target: str) -> bool:
    """Return whether the target is an allocation, not a configuration.

    Existing files and paths that look like files are configurations, so that a mistyped file is
    reported as missing.
    """
    names_file = target.endswith((".yaml", ".yml")) or "/" in target
    return not names_file and not Path(target).exists()


def _allocation(target: str) -> Shown:
    from slurmrl.display.terminal import Lines
    from slurmrl.plan.inherited_settings import explain
    from slurmrl.plan.plan_document import allocation_document

    made = explain(target)
    shown = allocation_document(made)
    if "write_instead" not in made and (problems := _not_run(target)):
        made = {**made, "missing": problems}
        shown = replace(shown, blocks=[*shown.blocks, Lines("to fix before submission:", problems)])
    return Shown(made, shown)


def _not_run(text: str) -> list[str]:
    """Return the reasons why engines cannot run the layouts of an allocation string."""
    from slurmrl.config.allocation import parse_components
    from slurmrl.errors import AllocationError
    from slurmrl.plan.engine_rules import rules_of

    problems = []
    for allocation in (one for place in parse_components(text).places for one in place):
        try:
            rules_of(allocation)
        except AllocationError as error:
            problems.append(str(error))
    return problems


def _plan(
    path: Path,
    overrides: tuple[str, ...],
    scheduler: str | None,
    root: str | None,
    *,
    with_moves: bool,
) -> Shown:
    from slurmrl.cli.searching import faster_layout
    from slurmrl.desk import trial_code
    from slurmrl.desk.proposal import kept_defaults, long_sequences
    from slurmrl.desk.submitting import rejection
    from slurmrl.desk.trials import chosen_root
    from slurmrl.display.terminal import Lines
    from slurmrl.plan import build, precision
    from slurmrl.plan.build import make_plan
    from slurmrl.plan.dataflow import unread
    from slurmrl.plan.plan_document import document
    from slurmrl.plan.plan_values import report
    from slurmrl.plan.settings import Settings, load_settings
    from slurmrl.scheduler import choose

    def load(*more: str) -> Settings:
        given, where = (*overrides, *more), chosen_root(root)
        return load_settings(path, given, root=where, scheduler=scheduler, planning=True)

    settings = load()
    if added := kept_defaults(settings):
        settings = load(*added)
    config = settings.config
    kind = choose(scheduler or config.cluster.scheduler, asks_slurm=config.asks_slurm)
    hosts = build.ask_hosts(settings.config) if kind == "slurm" else None
    planned = make_plan(settings, scheduler=kind, hosts=hosts)
    unread_keys = unread(planned.calls, settings.config.dataset.kind)
    warnings = [f"key {line}" for line in unread_keys]
    if slow := precision.slow_bfloat16(precision.bfloat16_models(config, planned, planned.groups)):
        warnings.append(slow if kind == "local" else f"{slow}; {precision.ELSEWHERE}")
    made = report(settings, planned, [*warnings, *build.scarce(planned, settings, hosts)])
    made["missing"] += build.lacking(planned, settings.config, hosts)
    made["missing"] += map(str, build.lacking_gpus(settings, planned))
    code = trial_code.find_own_code(settings)
    slurm = settings.config.cluster.slurm
    made["warnings" if slurm.container or slurm.setup else "missing"] += code.notes
    made["missing"] += trial_code.undefined(settings)
    made["notes"] += long_sequences(settings, code.paths)
    if reason := rejection(settings):
        made["missing"].append(reason)
    if settings.profile is not None:
        made["profile"] = settings.profile.to_json()
    if with_moves:
        from slurmrl.engines.planned import moves

        made["moves"] = list(moves(settings, planned))
    shown = document(made)
    if kind == "slurm" and (faster := faster_layout(settings, load)):
        made["faster_layout"] = faster
        shown = replace(shown, blocks=[*shown.blocks, Lines("a faster layout:", faster)])
    return Shown(made, shown)


def _graph(config: str, overrides: tuple[str, ...], root: str | None, *, evaluation: bool) -> Shown:
    """Return the calls of a step and the keys that pass between them."""
    from slurmrl.desk.trials import chosen_root
    from slurmrl.errors import UsageError
    from slurmrl.plan.build import make_plan
    from slurmrl.plan.dataflow import DATASET_KEYS, document, unread, values
    from slurmrl.plan.settings import load_settings

    settings = load_settings(
        Path(config), overrides, root=chosen_root(root), scheduler="local", planning=True
    )
    planned = make_plan(settings, scheduler="local")
    dataset = settings.config.dataset
    calls = planned.calls
    if evaluation:
        if settings.config.evaluation is None:
            raise UsageError(f"{config} has no evaluation section")
        if not settings.config.trainers_evaluate:
            raise UsageError(
                f"{config}: separate trials evaluate (evaluation.tasks), so there is "
                f"no graph to show"
            )
        suite, own = next(iter(settings.config.evaluations.items()))
        calls, dataset = planned.evaluation(suite), own.held_out
    warnings = unread(calls, dataset.kind, evaluation=evaluation)
    models = {name: model.backend for name, model in planned.models.items()}
    graph = values(calls, DATASET_KEYS[dataset.kind], models, warnings)
    title = f"{planned.experiment}/{planned.trial}{' evaluation' if evaluation else ''}"
    return Shown(graph, document(title, graph), [f"key {line}" for line in warnings])
