"""``slurmrl names``."""

from __future__ import annotations

import json
from typing import Any

import click

from slurmrl.cli.options import common, examples, json_option, trial_argument

VALUE_CHARACTERS = 60


@click.command(epilog=examples("slurmrl names grpo/1", "slurmrl names grpo/1 agents --json"))
@trial_argument
@click.argument("prefix", default="", metavar="[PREFIX]")
@json_option
@common
def names(trial: str, prefix: str, as_json: bool, root: str | None) -> int:
    """Show the name store of a trial, by which its processes find each other: keys, values, the
    leases that own them, and whether their owners are alive."""
    from slurmrl.desk import trials
    from slurmrl.watch.overview import name_entries

    rows = name_entries(trials.find(trials.root_folder(root), trial), prefix)
    click.echo(json.dumps(rows) if as_json else _text(rows, prefix))
    return 0


def _text(rows: list[dict[str, Any]], prefix: str) -> str:
    if not rows:
        return f"no names below '{prefix}'" if prefix else "no names"
    lines = [(row["key"], _shown(row["value"]), _owner(row)) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    return "\n".join(
        f"{key:{widths[0]}}  {value:{widths[1]}}  {owner}".rstrip() for key, value, owner in lines
    )


def _shown(value: str) -> str:
    """Return the value on one line, without control characters."""
    text = "".join(character if character.isprintable() else "?" for character in value)
    return text if len(text) <= VALUE_CHARACTERS else f"{text[: VALUE_CHARACTERS - 1]}…"


def _owner(row: dict[str, Any]) -> str:
    if row["owner"] is None:
        return ""
    state = "alive" if row["alive"] else f"silent for {row['lease_age_s']:.1f} s"
    return f"{row['owner']} ({state})"
