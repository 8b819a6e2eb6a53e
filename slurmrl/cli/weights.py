"""``slurmrl weights``."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from slurmrl.cli.checkpoints import size
from slurmrl.cli.options import common, examples, json_option, trial_argument
from slurmrl.display.columns import table
from slurmrl.display.words import age

if TYPE_CHECKING:
    from slurmrl.tensors.weights.inventory import StoredVersion

HEADINGS = ("VERSION", "AGE", "CONTENT", "SIZE", "READS", "STATE")


@click.command(epilog=examples("slurmrl weights grpo/1", "slurmrl weights grpo/1 --verify"))
@trial_argument
@click.option("--verify", is_flag=True, help="Compare the checksums of all stored tensors.")
@json_option
@common
def weights(trial: str, verify: bool, as_json: bool, root: str | None) -> int:
    """List the weight versions that a trial has published for its rollout hosts. READS is the
    number of versions that a host without a copy reads. Those of a LoRA actor hold its adapters
    alone. The exit code is 1 if one is broken."""
    from dataclasses import asdict

    from slurmrl.desk import trials
    from slurmrl.tensors.weights.inventory import BROKEN, inventory

    paths = trials.find(trials.root_folder(root), trial)
    versions = inventory(paths.versions, verify=verify)
    if as_json:
        click.echo(json.dumps([asdict(one) for one in versions]))
    else:
        click.echo(_text(versions, verified=verify) if versions else "no weight versions")
    return int(any(one.state == BROKEN for one in versions))


def _text(versions: list[StoredVersion], *, verified: bool) -> str:
    rows = [
        (
            one.version,
            "-" if one.time is None else age(max(time.time() - one.time, 0.0)),
            _content(one),
            size(one.bytes),
            "-" if one.chain is None else str(one.chain),
            "verified" if verified and one.state == "complete" else one.state,
        )
        for one in versions
    ]
    problems = [f"  {one.version}: {one.problem}" for one in versions if one.problem]
    return "\n".join([*table([HEADINGS, *rows]), *problems])


def _content(one: StoredVersion) -> str:
    if one.time is None:
        return "-"
    extent = "whole" if one.base is None else f"delta of {one.base}"
    return extent if one.frozen is None else f"adapters, {extent}"
