"""``slurmrl samples``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, islice
from typing import Any

import click

from slurmrl.cli.options import chosen_trial, common, examples, json_option, newest_trial_argument
from slurmrl.cli.render import number
from slurmrl.display.columns import hanging, width
from slurmrl.display.words import plain

Row = Mapping[str, Any]
LINES = 12
"""Lines of a text that are printed; ``--whole`` prints all."""


@click.command(
    epilog=examples("slurmrl samples grpo/1", "slurmrl samples grpo/1 --step 40 --evaluation -n 2")
)
@newest_trial_argument
@click.option("--step", type=click.IntRange(min=0), help="Default: the newest step with samples.")
@click.option("--evaluation", is_flag=True, help="Samples of evaluations instead of training.")
@click.option(
    "-n",
    "--prompts",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="N",
    help="Number of prompts, each with all of its kept completions.",
)
@click.option("--whole", is_flag=True, help=f"Print more than {LINES} lines of a text.")
@json_option
@common
def samples(
    trial: str | None,
    step: int | None,
    evaluation: bool,
    prompts: int,
    whole: bool,
    as_json: bool,
    root: str | None,
) -> int:
    """Print completions of a step with their prompts and rewards, of those that a trial keeps
    (logging.samples)."""
    from slurmrl.desk.report.samples import of_step

    paths = chosen_trial(root, trial)
    rows = of_step(paths.samples, step, evaluation=evaluation)
    groups = [list(group) for _, group in groupby(rows, lambda row: row.get("id"))]
    for group in islice(groups, prompts):
        if as_json:
            click.echo("\n".join(map(json.dumps, group)))
        else:
            click.echo("\n".join([*_lines(group, None if whole else LINES), ""]))
    left = len(groups) - prompts
    if left > 0 and not as_json:
        click.echo(f"{left} more {'prompt' if left == 1 else 'prompts'}; -n {len(groups)} for all")
    return 0


def _lines(group: list[Row], most: int | None) -> Iterator[str]:
    first = group[0]
    rewards = [reward for row in group if (reward := row.get("reward")) is not None]
    facts = [f"step {first['step']}", str(first.get("id", ""))]
    facts += [f"answer: {plain(str(first['answer']))}"] if first.get("answer") is not None else []
    facts += [f"mean reward {number(sum(rewards) / len(rewards))}"] if len(rewards) > 1 else []
    yield "  ".join(fact for fact in facts if fact)
    yield from _text(first.get("rendered", first["prompt"]), most)
    for row in group:
        said = [f"reward {_score(row['reward'])}"] if "reward" in row else []
        said += [f"{plain(name)} {number(value)}" for name, value in row.get("parts", {}).items()]
        said += ["cut off"] if row.get("finished") is False else []
        yield f"  {', '.join(said) or 'completion'}"
        yield from _text(row["completion"], most, "    ")


def _score(reward: float | None) -> str:
    return "none" if reward is None else number(reward)


def _text(text: str, most: int | None, indent: str = "  ") -> Iterable[str]:
    lines = [plain(line) for line in text.splitlines()] or [""]
    shown = lines if most is None else lines[:most]
    yield from (part for line in shown for part in hanging(f"{indent}| ", line, width()))
    if len(shown) < len(lines):
        yield f"{indent}… {len(lines) - len(shown)} more lines; --whole prints them"
