"""``slurmrl try-reward``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmrl.cli.layout import table
from slurmrl.cli.options import common, json_option

if TYPE_CHECKING:
    from slurmrl.submission.try_reward import Item, RewardData, Tried

ROWS = 8
SHOWN_CHARACTERS = 40


@click.command(
    epilog="Examples: slurmrl try-reward ppo.yaml; slurmrl try-reward ppo.yaml --completion "
    "'so it is \\boxed{72}'; slurmrl try-reward ppo.yaml --completions samples.jsonl"
)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[dotted.key=value]...")
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Rows of the data, from the top. Default: {ROWS}; 1 with --completion; all of a file.",
)
@click.option(
    "--completion",
    "completions",
    multiple=True,
    metavar="TEXT",
    help="Judge this text; may be given several times. Default: the rows' own answers.",
)
@click.option(
    "--completions",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Judge the completions of a JSONL file, such as one in samples/ of a run: objects with "
    "completion and, unless they follow the rows, id.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Give up after this time.",
)
@json_option
@common
def try_reward(
    config: Path,
    overrides: tuple[str, ...],
    rows: int | None,
    completions: tuple[str, ...],
    file: Path | None,
    timeout: float,
    as_json: bool,
    root: str | None,
) -> int:
    """Judge some completions with the reward of CONFIG, and print scores and time.

    The reward runs in a process of its own on this machine, without Slurm, models or a GPU.
    """
    from slurmrl.plan.settings import load_settings
    from slurmrl.submission import own_code
    from slurmrl.submission import try_reward as trying
    from slurmrl.submission.trials import chosen_root

    if file is not None and completions:
        raise click.UsageError("--completion and --completions exclude each other")
    settings = load_settings(config, overrides, root=chosen_root(root), planning=True)
    code = own_code.find(settings.config, settings.source, [config.parent.absolute(), Path.cwd()])
    data = trying.RewardData(settings)
    items = _items(data, rows, completions, file)
    tried = trying.try_reward(data, items, code, timeout)
    click.echo(json.dumps(_object(tried)) if as_json else _text(tried, data.reward.name))
    return 0


def _items(
    data: RewardData, rows: int | None, completions: tuple[str, ...], file: Path | None
) -> list[Item]:
    if file is not None:
        return data.file(file, rows)
    return data.texts(rows or 1, completions) if completions else data.references(rows or ROWS)


def _object(tried: Tried) -> dict[str, object]:
    """``{"items": [{"line", "id", "completion", "answer", "score"}, …], "mean": …, "stats": …,
    "made_s": …, "scored_s": …}``"""
    return {**asdict(tried), "mean": _mean(tried)}


def _mean(tried: Tried) -> float:
    return sum(item.score for item in tried.items) / len(tried.items)


def _text(tried: Tried, name: str) -> str:
    rows = [
        (str(item.line), f"{item.score:g}", _short(item.completion), _short(item.answer))
        for item in tried.items
    ]
    stats = "".join(f", {key} {value:.4g}" for key, value in tried.stats.items())
    return "\n".join(
        [
            *table([("LINE", "SCORE", "COMPLETION", "ANSWER"), *rows]),
            f"{name}: mean {_mean(tried):.4g} of {len(rows)} completions{stats}",
            f"{tried.scored_s:.2f} s to judge them, {tried.made_s:.2f} s to import it before",
        ]
    )


def _short(text: str) -> str:
    """On one line, the end of what is too long: there the answer stands."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"…{line[-SHOWN_CHARACTERS:]}"
