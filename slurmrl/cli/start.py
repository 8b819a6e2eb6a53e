"""The common part of ``submit`` and ``resume``: check, start, print, watch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from slurmrl.cli.follow import Interrupts
from slurmrl.cli.options import again

if TYPE_CHECKING:
    from slurmrl.desk.checks.finding import Finding
    from slurmrl.desk.live import Jobs
    from slurmrl.desk.proposal import Proposal
    from slurmrl.desk.submit import Submitted


def look_over(proposal: Proposal, timeout_s: float | None, compared: set[str]) -> Sequence[Finding]:
    """Check what the run will read and print the findings. None checks only what takes no time.
    ``compared``: see `slurmrl.desk.checks.run.check`.

    Raises ConfigError for findings that would make the run fail.
    """
    from slurmrl.desk.checks.run import refuse

    if timeout_s is None:
        click.echo("not checked: data, weights, tokenizer, reward, disk (--no-check)", err=True)
    elif sys.stderr.isatty():
        what = "data, weights, tokenizer, reward, disk"
        click.echo(f"checking {what} of {proposal.trial} (--no-check skips this) …", err=True)
    checked = proposal.check(timeout_s, compared)
    refuse(checked)
    for one in checked:
        click.echo(f"{one.weight}: {one.problem}", err=True)
    return checked


def carry_out(
    proposal: Proposal,
    *,
    check_s: float | None,
    dry_run: bool,
    wait: bool | None,
    as_json: bool,
) -> int:
    """Check (None: do not) and start a trial, or show what a ``dry_run`` would start."""
    return carry_out_all([proposal], check_s=check_s, dry_run=dry_run, wait=wait, as_json=as_json)


def carry_out_all(
    proposals: Sequence[Proposal],
    *,
    check_s: float | None,
    dry_run: bool,
    wait: bool | None,
    as_json: bool,
) -> int:
    """`carry_out` for several trials: all are checked before the first one starts, and none starts
    after one that was watched and did not finish."""
    from slurmrl.cli.dry_run import show
    from slurmrl.desk.submit import rehearse

    compared: set[str] = set()  # the trials of several suites have one checkpoint
    checked = [look_over(proposal, check_s, compared) for proposal in proposals]
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
    """Submit. ``wait=None`` watches a local run and returns after submitting a Slurm job."""
    from slurmrl.desk.submit import submit

    watch = proposal.kind == "local" if wait is None else wait
    with Interrupts() if watch else nullcontext() as interrupts:
        submitted = submit(proposal)
        said = {**describe(submitted), "checks": [one.to_json() for one in checked]}
        if submitted.jobs is not None and interrupts is not None:
            return _watch(submitted, submitted.jobs, said if as_json else None, interrupts)
    click.echo(json.dumps(said) if as_json else "\n".join(_lines(submitted)))
    return 0


def _watch(
    submitted: Submitted, jobs: Jobs, said: dict[str, Any] | None, interrupts: Interrupts
) -> int:
    """``said`` is printed as JSON together with the last status; None prints for people. Ctrl-C
    since the submission began counts: it would leave behind a run that nobody watches."""
    from slurmrl.cli import render
    from slurmrl.cli.live import TrialFollower, exit_code, make_view

    if said is None:
        click.echo(_headline(submitted))
    with make_view(silent=said is not None, earlier=submitted.earlier) as view:
        follower = TrialFollower(submitted.paths, submitted.kind, jobs, view, interrupts=interrupts)
        status = follower.run()
    if said is not None:
        click.echo(json.dumps({**said, "status": status}))
    else:
        click.echo(render.conclusion(status, again(submitted.root)))
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
    """Return job ids by group, joined by commas as Slurm's commands accept them."""
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
