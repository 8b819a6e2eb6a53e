"""``slurmrl init``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmrl import env
from slurmrl.cli.options import examples
from slurmrl.config.profiles import expanded

if TYPE_CHECKING:
    from slurmrl.config.source import KeyPath
    from slurmrl.desk.init.questions import Question
    from slurmrl.desk.init.survey import Survey

SITE = "site"
LEAVE_OUT = "-"
"""The answer that leaves a setting out although there is a proposal."""
KINDS = {
    "sft": "supervised fine-tuning",
    "ppo": "PPO with a critic",
    "grpo": "GRPO; dr_grpo, dapo, rloo and the other presets likewise",
    "dpo": "preference optimisation on pairs",
    "kto": "the same on single labelled answers",
    "reward_model": "a reward model from pairs",
    "distill": "on-policy distillation",
    SITE: "the profile of this cluster, for all configurations",
}


HELP = """Write a first configuration of a KIND, or the profile of this site.

\b
KIND is
{kinds}

A configuration comes with some lines of data and, where one is needed, a reward function, all of
them to be replaced by yours. A profile is asked of the cluster (sinfo, sacctmgr) and of you: folder
of all runs, partition, account, time limit, GPU type, network interface, set-up lines.
"""


@click.command(
    help=HELP.format(kinds="\n".join(f"  {name:13} {text}" for name, text in KINDS.items())),
    epilog=examples(
        "slurmrl init grpo",
        "slurmrl init sft --output math.yaml",
        "slurmrl init site",
        "slurmrl init site --name a100 --yes",
    ),
)
@click.argument("kind", metavar="KIND", shell_complete=lambda ctx, parameter, typed: _known(typed))
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Configuration to write. Default: KIND.yaml here. Data and reward get its name.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="With site: name of the profile. Default: default.",
)
@click.option("--yes", is_flag=True, help="With site: take all proposals and ask nothing.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
def init(kind: str, output: Path | None, name: str | None, yes: bool, force: bool) -> int:
    if kind == SITE:
        if output is not None:
            raise click.UsageError("a profile has its place: --name NAME instead of --output")
        return _site(name, yes=yes, force=force)
    if name is not None or yes:
        raise click.UsageError("--name and --yes belong to slurmrl init site")
    from slurmrl.desk.init import files, starter

    made = starter.files(kind, output or Path(f"{kind}.yaml"))
    written = files.write(made, force=force)
    config = next(iter(made))
    there = f"{', '.join(map(str, made))} are there already, as they would be written"
    click.echo(f"wrote {', '.join(map(str, written))}" if written else there)
    click.echo(f"  look at it  slurmrl plan {config}")
    click.echo(f"  start it    slurmrl submit {config}")
    return 0


def _known(typed: str) -> list[Any]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(one, help=text) for one, text in KINDS.items() if one.startswith(typed)]


def _site(name: str | None, *, yes: bool, force: bool) -> int:
    from slurmrl.config import profiles
    from slurmrl.desk.init import files, profile
    from slurmrl.desk.init.survey import survey
    from slurmrl.fsio import atomic

    path = profiles.file_of(name or profiles.DEFAULT)
    if path.exists() and not force:
        raise click.UsageError(f"{path} exists: --force replaces it, --name writes another one")
    if not yes and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("there is no terminal to ask in: --yes takes all proposals")
    found = survey()
    _tell(found)
    if not yes:
        click.echo(f"\nEnter takes the proposal in brackets; {LEAVE_OUT} leaves a setting out.")
    questions, values = _answers(found, yes=yes)
    text = profile.render(questions, values, cluster=found.cluster)
    click.echo(f"\n{text}")
    if not yes and not click.confirm(f"Write this to {path}?", default=True):
        click.echo("nothing was written")
        return 0
    atomic.make_private_directory(path.parent)
    files.write({path: text}, force=force)
    click.echo(f"wrote {path}; slurmrl doctor --job checks the compute nodes")
    return 0


def _tell(found: Survey) -> None:
    """Print what was found, and what was not."""
    if found.cluster:
        count = len(found.partitions)
        click.echo(f"found: cluster {found.cluster}, {count} partition{'s' * (count != 1)}")
    if found.accounts.names:
        click.echo(f"found: accounts {', '.join(found.accounts.names)}")
    if found.interfaces:
        click.echo(f"found: interfaces {', '.join(one.name for one in found.interfaces)}")
    for line in found.missing:
        click.echo(f"not found: {line}")


def _answers(found: Survey, *, yes: bool) -> tuple[list[Question], dict[KeyPath, Any]]:
    """Ask everything, or take the proposals."""
    from slurmrl.desk.init import questions as asked

    values: dict[KeyPath, Any] = {}
    first = list(asked.first_questions(found, _root()))
    for question in first:
        _put(values, question, found, yes=yes)
    partition = values.get(asked.PARTITION, "")
    further = list(asked.further_questions(found, partition, env.LOADED_MODULES.get()))
    for question in further:
        _put(values, question, found, yes=yes)
    return [*first, *further], values


def _put(values: dict[KeyPath, Any], question: Question, found: Survey, *, yes: bool) -> None:
    from slurmrl.desk.init.questions import doubt, value_of

    if not yes:
        click.echo(f"\n{question.about}")
    while True:
        answer = question.proposal if yes else _ask(question)
        if answer in ("", LEAVE_OUT):
            return
        try:
            values[question.key] = value_of(question, answer)
            if words := doubt(question, answer, found):
                click.echo(f"  taken, but {words}")
            return
        except ValueError as error:
            if yes:
                click.echo(f"left out: {'.'.join(map(str, question.key))} {answer!r}: {error}")
                return
            click.echo(f"  {error}")


def _ask(question: Question) -> str:
    """The answer of the person at the terminal."""
    answer: str = click.prompt(
        str(question.key[-1]),
        default=question.proposal,
        show_default=bool(question.proposal),
    )
    return answer.strip()


def _root() -> str:
    """The proposed folder of all runs."""
    if chosen := env.ROOT.get():
        return str(Path(expanded(chosen)).absolute())
    scratch = env.SCRATCH.get()
    return f"{scratch.rstrip('/')}/slurmrl-runs" if scratch.startswith("/") else "~/slurmrl-runs"
