"""Commands that prepare a site: init, examples, doctor, profile-cluster, bundle."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmrl import env
from slurmrl.cli.options import (
    checking,
    common,
    complete_folders,
    examples,
    json_option,
    overrides_argument,
    short_job,
)
from slurmrl.config.profiles import expanded
from slurmrl.display.terminal import hanging, plain, row_lines, table, width

if TYPE_CHECKING:
    from slurmrl.config.source import KeyPath
    from slurmrl.desk.doctor import Check
    from slurmrl.desk.initial_files import Question, Survey

SITE = "site"
LEAVE_OUT = "-"
"""Answer with which the user leaves out a setting that has a proposed value."""
KINDS = {
    "sft": "supervised fine-tuning",
    "ppo": "PPO with a critic",
    "grpo": "GRPO; also dr_grpo, dapo, rloo and the other presets",
    "dpo": "preference optimization on pairs",
    "kto": "preference optimization on single labeled answers",
    "reward_model": "a reward model from pairs",
    "distill": "on-policy distillation",
    SITE: "the profile of this cluster, for all configurations",
}

MARKS = {"ok": "ok", "warning": "WARNING", "failed": "FAILED"}
STYLES = {"ok": "green", "warning": "yellow", "failed": "red"}
ADVICE = "         -> "
MOST_HOSTS = 4
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

HELP = """Write a first configuration of a KIND, or the profile of this site.

\b
KIND is
{kinds}

A configuration comes with a few rows of data and, if the algorithm needs one, a reward function.
Replace rows and function with yours. For a profile, the command queries the cluster (sinfo,
sacctmgr) and asks you for the root of all runs, partition, account, time limit, GPU type, network
interface and set-up lines.
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
    help="Configuration to write. Default: KIND.yaml in this directory. The data and reward files "
    "get the same base name.",
)
@click.option("--name", metavar="NAME", help="With site: name of the profile. Default: default.")
@click.option("--yes", is_flag=True, help="With site: accept all proposals without asking.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
def init(kind: str, output: Path | None, name: str | None, yes: bool, force: bool) -> int:
    if kind == SITE:
        if output is not None:
            raise click.UsageError("--output is not allowed with site: use --name NAME")
        return _site(name, yes=yes, force=force)
    if name is not None or yes:
        raise click.UsageError("--name and --yes belong to slurmrl init site")
    from slurmrl.desk import initial_files

    made = initial_files.starter_files(kind, output or Path(f"{kind}.yaml"))
    written = initial_files.write_files(made, force=force)
    config = next(iter(made))
    there = f"{', '.join(map(str, made))} exist already with this content"
    click.echo(f"wrote {', '.join(map(str, written))}" if written else there)
    click.echo(f"  look at it  slurmrl plan {config}")
    click.echo(f"  start it    slurmrl submit {config}")
    return 0


def _known(typed: str) -> list[Any]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(one, help=text) for one, text in KINDS.items() if one.startswith(typed)]


def _site(name: str | None, *, yes: bool, force: bool) -> int:
    from slurmrl.config import profiles
    from slurmrl.desk import initial_files
    from slurmrl.desk.initial_files import survey
    from slurmrl.fsio import atomic

    path = profiles.file_of(name or profiles.DEFAULT)
    if path.exists() and not force:
        raise click.UsageError(f"{path} exists: --force replaces it, --name writes another file")
    if not yes and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("there is no terminal for questions: --yes accepts all proposals")
    found = survey()
    _tell(found)
    if not yes:
        click.echo(f"\nEnter accepts the proposal in brackets; {LEAVE_OUT} leaves a setting out.")
    questions, values = _answers(found, yes=yes)
    text = initial_files.render_profile(questions, values, cluster=found.cluster)
    click.echo(f"\n{text}")
    if not yes and not click.confirm(f"Write this to {path}?", default=True):
        click.echo("nothing was written")
        return 0
    atomic.make_private_directory(path.parent)
    initial_files.write_files({path: text}, force=force)
    click.echo(f"wrote {path}; slurmrl doctor --job checks the compute nodes")
    return 0


def _tell(found: Survey) -> None:
    """Print found and missing values."""
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
    """Ask the questions, or take the proposals; return the questions and the values."""
    from slurmrl.desk import initial_files as asked

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
    from slurmrl.desk.initial_files import doubt, value_of

    if not yes:
        click.echo(f"\n{question.about}")
    while True:
        answer = question.proposal if yes else _ask(question)
        if answer in ("", LEAVE_OUT):
            return
        try:
            values[question.key] = value_of(question, answer)
            if words := doubt(question, answer, found):
                click.echo(f"  accepted, but {words}")
            return
        except ValueError as error:
            if yes:
                click.echo(f"left out: {'.'.join(map(str, question.key))} {answer!r}: {error}")
                return
            click.echo(f"  {error}")


def _ask(question: Question) -> str:
    """Return the answer that the user types at the terminal."""
    answer: str = click.prompt(
        str(question.key[-1]), default=question.proposal, show_default=bool(question.proposal)
    )
    return answer.strip()


def _root() -> str:
    """Return the proposed folder of all runs."""
    if chosen := env.ROOT.get():
        return str(Path(expanded(chosen)).absolute())
    scratch = env.SCRATCH.get()
    return f"{scratch.rstrip('/')}/slurmrl-runs" if scratch.startswith("/") else "~/slurmrl-runs"


@click.command(
    "examples",
    epilog=examples(
        "slurmrl examples",
        "slurmrl examples --output examples",
        "slurmrl submit examples/sft.yaml --scheduler local",
    ),
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    shell_complete=complete_folders,
    help="Copy all examples with their data into this new folder.",
)
@json_option
def list_examples(output: Path | None, as_json: bool) -> int:
    """List the examples that come with slurmrl, or copy them.

    The addition examples train a small model on CPUs within minutes, without a network.
    """
    from slurmrl.desk import initial_files

    found = dict(initial_files.examples())
    if output is not None:
        initial_files.copy_examples(output)
    if as_json:
        click.echo(json.dumps({"examples": found, "folder": str(output) if output else None}))
        return 0
    if output is not None:
        click.echo(f"copied {len(found)} configurations with their data into {output}")
        click.echo(f"  begin with  slurmrl submit {shlex.quote(str(output / 'sft.yaml'))}")
        return 0
    click.echo("\n".join(table(list(found.items()), width())))
    click.echo("\nslurmrl examples --output FOLDER copies all of them")
    return 0


@click.command(epilog=examples("slurmrl doctor", "slurmrl doctor grpo.yaml --job"))
@click.argument("config", type=click.Path(path_type=Path), required=False)
@overrides_argument
@click.option("--job", is_flag=True, help="Also run the checks of compute nodes in a short job.")
@short_job(600.0)
@checking
@json_option
@common
def doctor(
    config: Path | None,
    overrides: tuple[str, ...],
    job: bool,
    timeout: float,
    scheduler: str | None,
    no_check: bool,
    check_timeout: float,
    as_json: bool,
    root: str | None,
) -> int:
    """Check whether trials, or the trial of CONFIG, can run here, and print remedies.

    The exit code is 1 if a check failed.
    """
    from slurmrl.desk.doctor.examine import Examination, examine
    from slurmrl.desk.trials import chosen_root, root_folder

    what = Examination(
        config,
        overrides,
        chosen_root(root),
        root_folder(root),
        scheduler,
        job,
        timeout,
        None if no_check else check_timeout,
    )
    checks = examine(what, lambda text: click.echo(text, err=True))
    counts = {state: sum(one.state == state for one in checks) for state in MARKS}
    if as_json:
        shown = {"checks": [one.to_json() for one in checks], **counts}
        click.echo(json.dumps(shown))
    else:
        _show(checks)
        words = ", ".join(f"{count} {state}" for state, count in counts.items())
        hint = "" if job else "; compute nodes were not checked: add --job"
        click.echo(f"{words}{hint}")
    return 1 if counts["failed"] else 0


def _show(checks: Sequence[Check]) -> None:
    """Print passed checks first and failures last, because people look at the end."""
    groups = sorted(_together(checks), key=lambda group: list(MARKS).index(group[0].state))
    columns = width()
    heading, *shown = row_lines([("", "CHECK", "WHERE", "MEASURED"), *map(_row, groups)], columns)
    click.echo("\n".join(heading))
    for group, (first, *more) in zip(groups, shown, strict=True):
        mark = MARKS[group[0].state]
        click.echo(click.style(mark, fg=STYLES[group[0].state]) + first.removeprefix(mark))
        for line in more + (hanging(ADVICE, group[0].advice, columns) if group[0].advice else []):
            click.echo(line)


def _row(group: Sequence[Check]) -> tuple[str, str, str, str]:
    first = max(group, key=_slowest)
    hosts = list(dict.fromkeys(one.where for one in group))
    where = ",".join(hosts) if len(hosts) <= MOST_HOSTS else f"{len(hosts)} hosts"
    return MARKS[first.state], first.name, where, plain(first.measured)


def _together(checks: Sequence[Check]) -> list[list[Check]]:
    """Group the checks into rows.

    Hosts with equal results share a row. More than MOST_HOSTS hosts that pass a check also share a
    row if only their numbers differ; the row shows the numbers of the slowest host.
    """
    groups: dict[tuple[str, ...], list[Check]] = {}
    names = [one.name for one in checks if one.state == "ok"]
    for one in checks:
        many = one.state == "ok" and names.count(one.name) > MOST_HOSTS
        key = (one.name, one.state, one.advice, "" if many else one.measured)
        groups.setdefault(key, []).append(one)
    order = list(dict.fromkeys(one.name for one in checks))
    return sorted(groups.values(), key=lambda group: order.index(group[0].name))


def _slowest(check: Check) -> float:
    return max((value for name, value in check.values.items() if name.endswith("_s")), default=0.0)


def _torch(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    if re.fullmatch(r"cpu|cuda|cu\d{3}|none", value):
        return value
    raise click.BadParameter("cpu, cuda, none, or a version of CUDA such as cu126")


@click.command(
    epilog=examples(
        "slurmrl bundle ppo.yaml --python 3.12 --output ppo.tar",
        "slurmrl bundle grpo.yaml --no-wheels trial=2",
    )
)
@click.argument("config", type=click.Path(path_type=Path))
@overrides_argument
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The file to write. Default: EXPERIMENT-TRIAL.tar.",
)
@click.option("--no-wheels", is_flag=True, help="Leave out the Python packages.")
@click.option(
    "--python",
    default=PYTHON,
    show_default=True,
    metavar="VERSION",
    help="Python version of the cluster, which determines the packages in the bundle.",
)
@click.option(
    "--torch",
    default="cuda",
    show_default=True,
    callback=_torch,
    metavar="BUILD",
    help="Build of torch: cuda, cpu, a CUDA version such as cu126, or none.",
)
@common
def bundle(
    config: Path,
    overrides: tuple[str, ...],
    output: Path | None,
    no_wheels: bool,
    python: str,
    torch: str,
    root: str | None,
) -> None:
    """Write CONFIG and all files that it names into one archive, a bundle.

    `slurmrl submit` takes the bundle on a cluster without a network. The bundle contains models,
    datasets, your code, and wheels of slurmrl and its requirements. The command downloads
    repositories from the Hugging Face Hub.
    """
    from slurmrl.desk.bundling import make_bundle

    made = make_bundle(
        config, overrides, root=root, output=output, packages=None if no_wheels else (python, torch)
    )
    for note in made.notes:
        click.echo(note, err=True)
    size = made.file.stat().st_size
    click.echo(f"{made.file}: {made.files} files, {size / 1e6:,.1f} MB")
    click.echo(f"on the cluster: slurmrl submit {made.file.name}")


@click.command(
    "profile-cluster",
    epilog=examples(
        "slurmrl profile-cluster",
        "slurmrl profile-cluster grpo.yaml --hosts 2",
        "slurmrl profile-cluster --scheduler local --ranks 2 --output cpu.yaml",
    ),
)
@click.argument("config", type=click.Path(path_type=Path), required=False)
@overrides_argument
@click.option(
    "--hosts",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Number of hosts. Default: 2 if the cluster has them, so that the network is measured.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Ranks per host. Default: cluster.workers_per_host, else one for each GPU, else 2.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="Name of the hardware. Default: cpu, or the GPU's name, such as h100.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file to write. Default: NAME.yaml in ~/.config/slurmrl/hardware, where plan and "
    "search find it.",
)
@short_job(3600.0)
@json_option
@common
def profile_cluster(
    config: Path | None,
    overrides: tuple[str, ...],
    hosts: int | None,
    ranks: int | None,
    name: str | None,
    output: Path | None,
    timeout: float,
    scheduler: str | None,
    as_json: bool,
    root: str | None,
) -> int:
    """Measure the hardware in a short job and write a hardware profile.

    The job measures matrix products, memory, collectives, a small model and the shared directory.
    `slurmrl plan` and `slurmrl search` then predict seconds from these numbers. The job takes the
    partition and other options from CONFIG or from the site profile.
    """
    from slurmrl.desk.measured_profile import Profiling, profile
    from slurmrl.desk.trials import chosen_root, root_folder
    from slurmrl.display.terminal import table, width
    from slurmrl.plan.estimates.hardware import CPU, read_file

    what = Profiling(
        config,
        overrides,
        chosen_root(root),
        root_folder(root),
        scheduler,
        hosts,
        ranks,
        name,
        output,
        timeout,
    )
    path = profile(what, lambda text: click.echo(text, err=True))
    found = read_file(path)
    numbers = found.measured.model_dump(exclude_none=True)
    if as_json:
        click.echo(json.dumps({"file": str(path), "made": found.made, "measured": numbers}))
        return 0
    rows = [("NUMBER", "MEASURED"), *((key, f"{value:.3g}") for key, value in numbers.items())]
    click.echo("\n".join(table(rows, width())))
    click.echo(f"wrote {path}")
    if output is not None or not found.hardware.isalnum():  # No GPU type can select this file.
        click.echo(f"  use it  slurmrl search CONFIG cluster.hardware={path}")
    elif found.hardware != CPU:
        click.echo(f"  use it  slurmrl search CONFIG cluster.slurm.gpu_type={found.hardware}")
    return 0
