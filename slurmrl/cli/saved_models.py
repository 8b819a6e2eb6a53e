"""Commands about the saved models of a trial: checkpoints, weights, export."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmrl.cli.options import common, complete_commits, examples, json_option, trial_argument
from slurmrl.display.terminal import age, table

if TYPE_CHECKING:
    from slurmrl.config.schema.config import ExportDtype, ExportForm
    from slurmrl.tensors.weights.inventory import StoredVersion
    from slurmrl.watch.checkpoints import StoredCommit


COMMIT_HEADINGS = ("STEP", "INCARNATION", "AGE", "SIZE", "FILES", "KEPT BY", "STATE")
VERSION_HEADINGS = ("VERSION", "AGE", "CONTENT", "SIZE", "READS", "STATE")


@click.command(
    epilog=examples("slurmrl checkpoints grpo/1", "slurmrl checkpoints grpo/1 --no-verify")
)
@trial_argument
@click.option(
    "--verify/--no-verify",
    default=True,
    help="Compare the checksums of all files, or only their sizes.",
)
@json_option
@common
def checkpoints(trial: str, verify: bool, as_json: bool, root: str | None) -> int:
    """List and verify a trial's checkpoints.

    The exit code is 1 if a checkpoint from which the trial could resume is damaged or unreadable.
    """
    from dataclasses import asdict

    from slurmrl.desk import trials
    from slurmrl.watch.checkpoints import inventory

    paths = trials.find(trials.root_folder(root), trial)
    commits = inventory(paths, checksums=verify)
    if as_json:
        click.echo(json.dumps([asdict(commit) for commit in commits]))
    else:
        click.echo(_commits_text(commits, verified=verify) if commits else "no checkpoints yet")
    return int(any(commit.problem and not commit.set_aside for commit in commits))


def _commits_text(commits: list[StoredCommit], *, verified: bool) -> str:
    rows = [
        (
            str(one.step),
            str(one.incarnation),
            age(max(time.time() - one.time, 0.0)),
            size(one.bytes),
            str(one.files),
            ", ".join(one.kept_by) or "-",
            _state(one, verified),
        )
        for one in commits
    ]
    problems = [f"  step {one.step}: {one.problem}" for one in commits if one.problem]
    return "\n".join([*table([COMMIT_HEADINGS, *rows]), *problems])


def _state(one: StoredCommit, verified: bool) -> str:
    if one.set_aside:
        return "damaged, set aside"
    if one.problem:
        return "unreadable" if one.unreadable else "damaged"
    state = "verified" if verified else "sizes match"
    return f"{state}, exported" if one.exported else state


def size(count: int) -> str:
    """Return a number of bytes as ``1.4 GB``."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


@click.command(epilog=examples("slurmrl weights grpo/1", "slurmrl weights grpo/1 --verify"))
@trial_argument
@click.option("--verify", is_flag=True, help="Compare the checksums of all stored tensors.")
@json_option
@common
def weights(trial: str, verify: bool, as_json: bool, root: str | None) -> int:
    """List the weight versions that a trial has published for its rollout hosts.

    READS is the number of versions that a host without a copy reads. Versions of a LoRA actor hold
    only its adapters. The exit code is 1 if a version is broken.
    """
    from dataclasses import asdict

    from slurmrl.desk import trials
    from slurmrl.tensors.weights.inventory import BROKEN, inventory

    paths = trials.find(trials.root_folder(root), trial)
    versions = inventory(paths.versions, verify=verify)
    if as_json:
        click.echo(json.dumps([asdict(one) for one in versions]))
    else:
        click.echo(_versions_text(versions, verified=verify) if versions else "no weight versions")
    return int(any(one.state == BROKEN for one in versions))


def _versions_text(versions: list[StoredVersion], *, verified: bool) -> str:
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
    return "\n".join([*table([VERSION_HEADINGS, *rows]), *problems])


def _content(one: StoredVersion) -> str:
    if one.time is None:
        return "-"
    extent = "whole" if one.base is None else f"delta of {one.base}"
    return extent if one.frozen is None else f"adapters, {extent}"


@click.command(
    epilog=examples(
        "slurmrl export grpo/1", "slurmrl export grpo/1 --step 40 --dtype bfloat16 --output model"
    )
)
@trial_argument
@click.option(
    "--step",
    type=click.IntRange(min=0),
    shell_complete=complete_commits,
    help="The checkpoint to export. Default: the newest.",
)
@click.option(
    "--output",
    "--out",
    "out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The folder to create. Default: export/step-N in the run directory.",
)
@click.option(
    "--role",
    default="actor",
    show_default=True,
    help="The model to export: a role that is trained, or ref if ref.ema is set.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "source", "float32", "bfloat16", "float16"]),
    help="Type of the exported weights. source: the type of the model from which the role was "
    "loaded. auto: source if that type keeps the training's update, else float32. "
    "Default: the trial's checkpoint.export_dtype (auto unless set).",
)
@click.option(
    "--form",
    type=click.Choice(["merged", "adapter"]),
    help="Form of a LoRA role's export. merged: a whole model. adapter: a folder for PEFT. "
    "Default: the trial's checkpoint.export_form (merged unless set).",
)
@common
def export(
    trial: str,
    step: int | None,
    out: Path | None,
    role: str,
    dtype: ExportDtype | None,
    form: ExportForm | None,
    root: str | None,
) -> int:
    """Export a checkpoint's model to a folder for transformers or PEFT, and print the folder.

    The command works while the trial runs and after it has ended. The command first verifies the
    checkpoint by checksum; if the checkpoint is damaged, it writes nothing.
    """
    from slurmrl.desk import trials
    from slurmrl.workers.master.exporting import export_step

    paths = trials.find(trials.root_folder(root), trial)
    target = out.absolute() if out is not None else None
    exported = export_step(paths, role, step, target, dtype, form)
    if exported.warning:
        click.echo(f"Warning: {exported.warning}", err=True)
    elif exported.types is not None and exported.types.kept is not None:
        types = exported.types
        click.echo(f"{types.kept:.1%} of the update survives rounding to {types.name}", err=True)
    click.echo(str(exported.folder))
    return 0
