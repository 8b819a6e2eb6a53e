"""``slurmrl graph``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from slurmrl.cli.options import common, examples, json_option


@click.command(
    epilog=examples(
        "slurmrl graph grpo.yaml", "slurmrl graph grpo.yaml --evaluation --svg graph.svg"
    )
)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[dotted.key=value]...")
@click.option(
    "--evaluation",
    is_flag=True,
    help="Show the graph of an evaluation (of its first suite), not of a training step.",
)
@click.option("--svg", type=click.Path(path_type=Path), help="Write the graph to this SVG file.")
@json_option
@common
def graph(
    config: Path,
    overrides: tuple[str, ...],
    evaluation: bool,
    svg: Path | None,
    as_json: bool,
    root: str | None,
) -> int:
    """Show the calls of a step, the keys that pass between them, their models and hooks."""
    from slurmrl.desk.trials import chosen_root
    from slurmrl.display import svg as picture
    from slurmrl.display import text
    from slurmrl.errors import UsageError
    from slurmrl.plan.build import make_plan
    from slurmrl.plan.dataflow import DATASET_KEYS, document, unread, values
    from slurmrl.plan.settings import load_settings

    settings = load_settings(
        config, overrides, root=chosen_root(root), scheduler="local", planning=True
    )
    plan = make_plan(settings, scheduler="local")
    dataset = settings.config.dataset
    calls = plan.calls
    if evaluation:
        if settings.config.evaluation is None:
            raise UsageError(f"{config} has no evaluation section")
        if not settings.config.trainers_evaluate:
            raise UsageError(f"{config}: trials of their own evaluate, see evaluation.tasks")
        suite, own = next(iter(settings.config.evaluations.items()))
        calls, dataset = plan.evaluation(suite), own.held_out
    warnings = unread(calls, dataset.kind, evaluation=evaluation)
    models = {name: model.backend for name, model in plan.models.items()}
    shown = values(calls, DATASET_KEYS[dataset.kind], models, warnings)
    title = f"{plan.experiment}/{plan.trial}{' evaluation' if evaluation else ''}"
    if svg is not None:
        svg.write_text(picture.render(document(title, shown)), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(shown))
    elif svg is None:
        click.echo(text.render(document(title, shown)))
    if not as_json:
        for line in warnings:
            click.echo(f"warning: key {line}", err=True)
    return 0
