"""``slurmrl submit`` and ``slurmrl eval``: check, submit and watch trials, or only show them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmrl.cli.options import again, common, complete_checkpoints, examples, submitting
from slurmrl.display.terminal import table

if TYPE_CHECKING:
    from slurmrl.cli.following import Interrupts
    from slurmrl.desk.proposal import Proposal
    from slurmrl.desk.submitting import Outlook, Submitted
    from slurmrl.desk.trial_checks import Finding
    from slurmrl.desk.trial_jobs import Jobs
    from slurmrl.plan.model import GroupPlan


@click.command(
    epilog=examples(
        "slurmrl submit grpo.yaml",
        "slurmrl submit grpo.yaml trial=2 actor.optimizer.lr=3e-5",
        "slurmrl submit grpo.yaml --dry-run",
    )
)
@click.argument("config", type=click.Path(path_type=Path))
@submitting
@click.option("--new", is_flag=True, help="Start a new trial under the next free name.")
@common
def submit(
    config: Path,
    overrides: tuple[str, ...],
    scheduler: str | None,
    wait: bool | None,
    as_json: bool,
    dry_run: bool,
    no_check: bool,
    check_timeout: float,
    new: bool,
    root: str | None,
) -> int:
    """Check CONFIG, plan its trial, copy configuration, plan and code, and start the trial.

    CONFIG may also be an archive that `slurmrl bundle` made.

    An existing trial that was interrupted, failed or cancelled continues from its last commit if
    its configuration is the same.
    """
    from slurmrl.desk.proposal import propose

    proposal = propose(config, overrides, root=root, scheduler=scheduler, new=new)
    check_s = None if no_check else check_timeout
    return carry_out([proposal], check_s=check_s, dry_run=dry_run, wait=wait, as_json=as_json)


@click.command(
    "eval",
    epilog=examples(
        "slurmrl eval grpo.yaml --checkpoint grpo/1",
        "slurmrl eval grpo.yaml --checkpoint grpo/1@40 rollout.n=16 --detach",
    ),
)
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint",
    required=True,
    metavar="TRIAL[@STEP]|PATH",
    shell_complete=complete_checkpoints,
    help="The model: a checkpoint of a trial (default: its newest), the folder of a model, or "
    "hf://org/name.",
)
@click.option(
    "--suite",
    "suites",
    multiple=True,
    metavar="NAME",
    help="A suite of CONFIG's evaluation; may be repeated. Default: all suites.",
)
@submitting
@click.option("--new", is_flag=True, help="Start a new trial under the next free name.")
@common
def evaluate(
    config: Path,
    checkpoint: str,
    suites: tuple[str, ...],
    overrides: tuple[str, ...],
    scheduler: str | None,
    wait: bool | None,
    as_json: bool,
    dry_run: bool,
    no_check: bool,
    check_timeout: float,
    new: bool,
    root: str | None,
) -> int:
    """Evaluate a checkpoint of CONFIG's model in a separate trial; training may continue.

    CONFIG is the configuration that trains the model, or has `algorithm.name: evaluate`. In the
    first case, the command uses the `evaluation` section and all rows of its dataset. Overrides use
    the keys of an `evaluate` configuration: rollout.n=16, dataset.path=FILE, trial=NAME. Repeat
    experiment=NAME if the training was submitted with this override.

    The trial is EXPERIMENT-eval/CHECKPOINT. With suites, each suite has the trial
    EXPERIMENT-eval/CHECKPOINT-SUITE. The same command continues an interrupted evaluation.
    """
    from slurmrl.desk.evaluating import choose_suites, evaluation_of, of_evaluation
    from slurmrl.desk.proposal import propose
    from slurmrl.desk.trials import chosen_root
    from slurmrl.errors import UsageError

    chosen = choose_suites(config, suites)
    if len(chosen) > 1 and any(override.startswith("trial=") for override in overrides):
        raise UsageError("trial=NAME needs --suite: each suite has its own trial")
    proposals = [
        propose(
            *(config, of_evaluation(overrides)),
            root=root,
            scheduler=scheduler,
            new=new,
            derive=evaluation_of(checkpoint, chosen_root(root), suite),
        )
        for suite in chosen
    ]
    check_s = None if no_check else check_timeout
    return carry_out(proposals, check_s=check_s, dry_run=dry_run, wait=wait, as_json=as_json)


def report_checks(
    proposal: Proposal, timeout_s: float | None, compared: set[str]
) -> Sequence[Finding]:
    """Check the files that the run will read; print and return the findings.

    If ``timeout_s`` is None, do only instant checks. `slurmrl.desk.trial_checks.check_trial`
    explains ``compared``.

    Raises ConfigError for findings that would make the run fail.
    """
    from slurmrl.desk.trial_checks import reject

    if timeout_s is None:
        click.echo("not checked: data, weights, tokenizer, reward, disk (--no-check)", err=True)
    elif sys.stderr.isatty():
        what = "data, weights, tokenizer, reward, disk"
        click.echo(f"checking {what} of {proposal.trial} (--no-check skips this) …", err=True)
    checked = proposal.check(timeout_s, compared)
    reject(checked)
    for one in checked:
        click.echo(f"{one.weight}: {one.problem}", err=True)
    return checked


def carry_out(
    proposals: Sequence[Proposal],
    *,
    check_s: float | None,
    dry_run: bool,
    wait: bool | None,
    as_json: bool,
) -> int:
    """Check and start trials, or only print them (``dry_run``).

    ``check_s`` limits the seconds of the checks; if None, do only instant checks. All checks come
    before the first start. After a watched trial that did not finish, no other trial starts.
    """
    from slurmrl.desk.submitting import rehearse

    compared: set[str] = set()  # trials of several suites share one checkpoint
    checked = [report_checks(proposal, check_s, compared) for proposal in proposals]
    code = 0
    for proposal, findings in zip(proposals, checked, strict=True):
        if dry_run:
            code = show(proposal, findings, rehearse(proposal), as_json=as_json) or code
        elif code == 0:
            code = start(proposal, findings, wait=wait, as_json=as_json)
    return code


def start(
    proposal: Proposal, checked: Sequence[Finding], *, wait: bool | None, as_json: bool
) -> int:
    """Submit a trial and perhaps watch it; return the exit code.

    If ``wait`` is None, watch a local run, but not a Slurm job.
    """
    from slurmrl.desk import submitting as submission

    watch = proposal.kind == "local" if wait is None else wait
    with _interrupts(watch) as interrupts:
        submitted = submission.submit(proposal)
        said = {**describe(submitted), "checks": [one.to_json() for one in checked]}
        if submitted.jobs is not None and interrupts is not None:
            return _watch(submitted, submitted.jobs, said if as_json else None, interrupts)
    click.echo(json.dumps(said) if as_json else "\n".join(_lines(submitted)))
    return 0


def _interrupts(watch: bool) -> AbstractContextManager[Interrupts | None]:
    """Return a context that counts Ctrl-C if the trial is watched."""
    if not watch:
        return nullcontext()
    from slurmrl.cli.following import Interrupts  # The import loads all modules that read a trial.

    return Interrupts()


def _watch(
    submitted: Submitted, jobs: Jobs, said: dict[str, Any] | None, interrupts: Interrupts
) -> int:
    """Follow a run and return its exit code.

    Print ``said`` and the last status as JSON; if ``said`` is None, print text. A Ctrl-C during the
    submission counts too, so that the run does not continue unattended.
    """
    from slurmrl.cli import status_text
    from slurmrl.cli.following import TrialFollower, exit_code, make_view

    if said is None:
        click.echo(_headline(submitted))
    with make_view(silent=said is not None, earlier=submitted.earlier) as view:
        follower = TrialFollower(submitted.paths, submitted.kind, jobs, view, interrupts=interrupts)
        status = follower.run()
    if said is not None:
        click.echo(json.dumps({**said, "status": status}))
    else:
        click.echo(status_text.conclusion(status, again(submitted.root)))
    return exit_code(status)


def describe(submitted: Submitted) -> dict[str, Any]:
    """Return the object that ``--json`` prints; ``submission`` is null if the trial is complete."""
    jobs = submitted.jobs
    return {
        "trial": submitted.trial,
        "run": str(submitted.paths.run),
        "scheduler": submitted.kind,
        "submission": jobs.number if jobs else None,
        "jobs": _jobs(submitted),
        "resumed_step": submitted.resumed_step,
        "notes": list(submitted.notes),
    }


def _headline(submitted: Submitted) -> str:
    jobs = ", ".join(f"{group}: {job}" for group, job in _jobs(submitted).items())
    step = submitted.resumed_step
    continues = f", continues from step {step}" if step is not None else ""
    lines = [f"{submitted.trial} submitted to {submitted.kind} ({jobs}){continues}"]
    return "\n".join([*lines, *(f"  {note}" for note in submitted.notes)])


def _jobs(submitted: Submitted) -> dict[str, str]:
    """Return the job ids of each group, joined by commas as Slurm's commands expect."""
    ids = submitted.jobs.ids if submitted.jobs else {}
    return {group: ",".join(each) for group, each in ids.items()}


def _lines(submitted: Submitted) -> list[str]:
    trial, where = submitted.trial, again(submitted.root)
    if submitted.jobs is None:
        longer = f"  train longer:  slurmrl resume {trial} total_steps=N{where}"
        return [
            f"{trial} is already complete; nothing was submitted",
            *([longer] if submitted.may_have_more else []),
            "  start again:   the same command with --new",
        ]
    return [
        _headline(submitted),
        f"  run directory  {submitted.paths.run}",
        f"  watch          slurmrl status {trial} --watch{where}",
        f"  output         slurmrl logs {trial} -f{where}",
        f"  end            slurmrl stop {trial}{where}",
    ]


def show(
    proposal: Proposal, checked: Sequence[Finding], outlook: Outlook | None, *, as_json: bool
) -> int:
    """Print the jobs of a submission and the batch scripts, without submitting.

    ``outlook`` is the state of an existing trial; None for a new trial.
    """
    from slurmrl.run.hosts import shorten_script

    complete = outlook is not None and outlook.complete
    scripts = {} if complete else proposal.scripts()
    if as_json:
        shown: dict[str, Any] = {"trial": proposal.trial, "run": str(proposal.paths.run)}
        shown["checks"] = [one.to_json() for one in checked]
        if outlook is not None:
            shown |= {"resumed_step": outlook.step, "notes": list(outlook.notes)}
        plan = json.loads(proposal.plan.to_json())
        click.echo(json.dumps({**shown, "plan": plan, "scripts": scripts}))
        return 0
    if complete:
        click.echo(f"{proposal.trial} is already complete; nothing would be submitted")
        return 0
    click.echo(f"{proposal.trial} would be submitted to {proposal.kind}:")
    click.echo("\n".join(table([(f"  {name}", text) for name, text in _facts(proposal, outlook)])))
    for group, text in scripts.items():
        click.echo(f"\n# {proposal.paths.submission_script(1, group).name}\n{shorten_script(text)}")
    return 0


def _facts(proposal: Proposal, outlook: Outlook | None) -> Iterator[tuple[str, str]]:
    from slurmrl.desk.proposal import is_prepared

    config, prepared = proposal.settings.config, is_prepared(proposal.paths)
    steps = "" if config.total_steps is None else f", {_count(config.total_steps, 'step')}"
    yield "algorithm", f"{config.algorithm['name']}{steps}"
    for group in proposal.plan.jobs:
        yield f"job of {group.name}", ", ".join(_job(proposal, group))
    if used := proposal.settings.profile:
        keys = ", ".join(used.settings) or "no setting, because the configuration sets them all"
        yield "site profile", f"{used.file}: {keys}"
    yield "directory", f"{proposal.paths.run}{'' if prepared else ' (new)'}"
    added = [] if prepared else ["configuration", "plan"]
    if proposal.update_code or not prepared:
        added.append("a copy of the code")
    yield "written there", ", ".join([*added, "the batch scripts"])
    if outlook is not None:
        yield from _continues(outlook)


def _job(proposal: Proposal, group: GroupPlan) -> Iterator[str]:
    """Yield phrases about the resources of a group's job."""
    from slurmrl.plan.placement import slurm_of

    gpus = group.gpus_per_worker * group.slots_per_host
    on_each = f"{_count(group.workers_per_host, 'worker')} and {_count(gpus, 'GPU')} on each"
    yield f"{_count(group.hosts, 'task' if group.elastic else 'host')}, {on_each}"
    if proposal.kind == "slurm":
        slurm = slurm_of(proposal.settings.config, group.name)
        yield f"partition {slurm.partition}" if slurm.partition else "the default partition"
        yield f"time limit {slurm.time}" if slurm.time else "the partition's time limit"
    yield f"{_count(group.links, 'start' if group.elastic else 'link')} in the queue"


def _continues(outlook: Outlook) -> Iterator[tuple[str, str]]:
    yield "continues from", "the beginning" if outlook.step is None else f"step {outlook.step}"
    left = [job for jobs in outlook.left.ids.values() for job in jobs] if outlook.left else []
    if left:
        yield "cancelled", f"its jobs that are still queued: {', '.join(left)}"
    yield from (("changes", note) for note in outlook.notes)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
