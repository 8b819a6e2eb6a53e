"""``slurmrl try-reward``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmrl.cli.options import common, examples, json_option
from slurmrl.display.columns import table

if TYPE_CHECKING:
    from slurmrl.desk.inspection import Tried

ROWS = 8
SHOWN_CHARACTERS = 40


@click.command(
    epilog=examples(
        "slurmrl try-reward grpo.yaml",
        r"slurmrl try-reward grpo.yaml --completion 'so it is \boxed{72}'",
        "slurmrl try-reward grpo.yaml --completions samples.jsonl --rows 100",
    )
)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[dotted.key=value]...")
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of rows, from the first. Default: "
    f"{ROWS}; 1 with --completion; all of a --completions file.",
)
@click.option(
    "--completion",
    "completions",
    multiple=True,
    metavar="TEXT",
    help="Score this text. Repeatable. Default: score each row's own answer.",
)
@click.option(
    "--completions",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Score the completions of a JSONL file, such as 'slurmrl samples --json' prints. Each "
    "object has completion, and id unless the file is in the order of the rows.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit.",
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
    """Score some completions with the reward of CONFIG and print scores and times.

    The reward runs in a separate process on this machine, without Slurm, models or a GPU.
    """
    from slurmrl.desk import inspection as trying
    from slurmrl.desk import own_code
    from slurmrl.desk.inspection import Selection
    from slurmrl.desk.trials import chosen_root
    from slurmrl.plan.settings import load_settings

    if file is not None and completions:
        raise click.UsageError("--completion and --completions exclude each other")
    settings = load_settings(
        config, overrides, root=chosen_root(root), scheduler="local", planning=True, data=True
    )
    code = own_code.find(settings.config, settings.source, settings.folders, settings.algorithm)
    data = trying.RewardData(settings)
    default = None if file is not None else 1 if completions else ROWS
    path = None if file is None else str(file.absolute())
    tried = trying.try_reward(data, Selection(rows or default, completions, path), code, timeout)
    click.echo(json.dumps(_object(tried)) if as_json else _text(tried, data.reward.title))
    return 0


def _object(tried: Tried) -> dict[str, object]:
    """``{"items": [{"line", "id", "completion", "answer", "score"}, …], "mean": …, "stats": …,
    "made_s": …, "scored_s": …}``"""
    return {**asdict(tried), "mean": _mean(tried)}


def _mean(tried: Tried) -> float | None:
    """The mean over the completions that have a score; None if none has."""
    scores = [item.score for item in tried.items if item.score is not None]
    return sum(scores) / len(scores) if scores else None


def _number(score: float | None, form: str) -> str:
    return "none" if score is None else format(score, form)


def _text(tried: Tried, name: str) -> str:
    rows = [
        (str(item.line), _number(item.score, "g"), _short(item.completion), _short(item.answer))
        for item in tried.items
    ]
    stats = "".join(f", {key} {value:.4g}" for key, value in tried.stats.items())
    return "\n".join(
        [
            *table([("LINE", "SCORE", "COMPLETION", "ANSWER"), *rows]),
            f"{name}: mean {_number(_mean(tried), '.4g')} of {len(rows)} completions{stats}",
            f"{tried.scored_s:.2f} s to score them, {tried.made_s:.2f} s to import the reward",
        ]
    )


def _short(text: str) -> str:
    """Return the text on one line. A long one loses its beginning: the answer is at the end."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"…{line[-SHOWN_CHARACTERS:]}"
