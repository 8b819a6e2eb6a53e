"""``slurmrl simulate``: the time of a whole trial with its queue, time limits and failures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slurmrl.cli.options import (
    FiniteRange,
    common,
    complete_files,
    examples,
    json_option,
    overrides_argument,
)
from slurmrl.cli.searching import ASSUMED_GPU, ProgressLine
from slurmrl.cli.sequence_lengths import limit_notes, limit_of_rows, mean_tokens

if TYPE_CHECKING:
    from slurmrl.plan.settings import Settings
    from slurmrl.simulate.outcomes import Runs, SimulationAnswers
    from slurmrl.simulate.queue_waits import Waits
    from slurmrl.simulate.trial_costs import Disturbances, TrialCosts

T = TypeVar("T")


RATE = FiniteRange(min=0, max=1e6)
SECONDS = FiniteRange(min=0, max=1e9)
MOST_RUNS = 1000
SLURM = "slurm"
"""Value of --first-wait with which the command asks Slurm for the wait."""
MEASURED = ("given on the command line",)


def _checked(parse: Callable[[str], T]) -> Callable[..., T | None]:
    """Return a callback that parses the value of an option by ``parse``."""

    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> T | None:
        from slurmrl.errors import UsageError

        if value is None:
            return None
        try:
            return parse(value)
        except (UsageError, ValueError) as error:
            raise click.BadParameter(str(error), ctx, param) from None

    return callback


def _first_wait(text: str) -> float | str:
    from slurmrl.errors import UsageError
    from slurmrl.simulate.queue_waits import duration_s

    try:
        return text if text == SLURM else duration_s(text)
    except UsageError as error:
        raise UsageError(f"{error}, or {SLURM}") from None


def _waits(text: str) -> Waits:
    from slurmrl.simulate.queue_waits import given_waits

    return given_waits(text)


def _limits(text: str) -> list[str]:
    from pydantic import TypeAdapter, ValidationError

    from slurmrl.config.schema.cluster import TimeLimit

    try:
        limits = [TypeAdapter(TimeLimit).validate_python(part) for part in text.split(",")]
    except ValidationError:
        limits = []
    if not limits or not all(limits):
        raise ValueError(
            f"'{text}' is not a list of time limits in Slurm's format, for example 04:00:00,1-00"
        )
    return limits


@click.command(
    epilog=examples(
        "slurmrl simulate ppo.yaml --queue-wait 2h --failures 0.01",
        "slurmrl simulate ppo.yaml --trace sacct.txt --time-limit 04:00:00,12:00:00,1-00",
        "slurmrl simulate ppo.yaml --hosts 1000 --steps 1000 --failures 0.01 --runs 1",
        "slurmrl simulate ppo.yaml --step-seconds 61 --groups-per-hour 900 --tasks 12",
    )
)
@click.argument("config", metavar="CONFIG", shell_complete=complete_files)
@overrides_argument
@click.option(
    "--steps", type=click.IntRange(1, 10**6), help="Steps to simulate. Default: total_steps."
)
@click.option(
    "--hosts",
    type=click.IntRange(1, 10**5),
    help="Number of trainer hosts. The work of each host stays the same, so the batch and the "
    "number of rollout tasks grow. Default: the plan's.",
)
@click.option("--tasks", type=click.IntRange(1, 10**5), help="Rollout tasks. Default: the plan's.")
@click.option(
    "--time-limit",
    callback=_checked(_limits),
    metavar="TIME,...",
    help="Job time limits to compare. Default: cluster.slurm.time.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Take queue waits from this file, which holds the output of "
    "'sacct -X -P --format=Submit,Eligible,Start,NNodes,Timelimit'.",
)
@click.option(
    "--queue-wait",
    callback=_checked(_waits),
    metavar="TIME|fixed:TIME",
    help="Queue wait of jobs: the mean of an exponential distribution (30m, 2h), or the same wait "
    "for all jobs (fixed:30m). Default: no wait.",
)
@click.option(
    "--task-wait",
    callback=_checked(_waits),
    metavar="TIME|fixed:TIME",
    help="Queue wait of rollout tasks' jobs, written like --queue-wait. Default: the wait of "
    "the trainers' jobs.",
)
@click.option(
    "--first-wait",
    callback=_checked(_first_wait),
    metavar="TIME|slurm",
    help="Queue wait of the first job, or slurm: the wait that 'sbatch --test-only' predicts.",
)
@click.option(
    "--failures", type=RATE, default=0.0, metavar="RATE", help="Host failures per host and day."
)
@click.option(
    "--crashes",
    type=RATE,
    default=0.0,
    metavar="RATE",
    help="Crashed processes per host and day. The host keeps running.",
)
@click.option(
    "--preemptions", type=RATE, default=0.0, metavar="RATE", help="Preemptions per job and day."
)
@click.option(
    "--grace-seconds",
    type=SECONDS,
    default=30.0,
    help="Seconds from the preemption signal to the kill. Default: 30.",
)
@click.option(
    "--slurmd-timeout",
    type=FiniteRange(min=1, max=1e9),
    default=300.0,
    metavar="SECONDS",
    help="SlurmdTimeout of the cluster, after which Slurm considers a silent host lost. If it is 0 "
    "(never), give the time after which your site removes such a host. Default: 300.",
)
@click.option(
    "--stragglers",
    type=FiniteRange(0, 2),
    default=0.0,
    metavar="SIGMA",
    help="Relative spread of the step time between hosts (0.05: about 5 %). A step waits for "
    "the slowest host.",
)
@click.option(
    "--slow-hosts",
    type=FiniteRange(0, 1),
    default=0.0,
    metavar="SHARE",
    help="Share of the cluster's hosts that are always slow (0.01: 1 %). Such a host slows down "
    "each step of its job.",
)
@click.option(
    "--slow-factor",
    type=FiniteRange(1, 1000),
    default=1.5,
    metavar="FACTOR",
    help="Step time of a slow host divided by the step time of other hosts. Default: 1.5.",
)
@click.option("--step-seconds", type=SECONDS, help="Measured seconds of a step of the trainers.")
@click.option(
    "--start-seconds",
    type=SECONDS,
    help="Seconds from the start of a job to its first step, or to the first prompt of a rollout "
    "task.",
)
@click.option(
    "--restart-seconds",
    type=SECONDS,
    help="Seconds from a failure to the next step, if the job keeps running.",
)
@click.option("--commit-seconds", type=SECONDS, help="Time for which a commit stops training.")
@click.option(
    "--evaluation-seconds", type=SECONDS, help="Seconds of an evaluation on the trainers' GPUs."
)
@click.option(
    "--reward-seconds",
    type=SECONDS,
    help="Measured time of the rewards of a step, to be added to the predicted seconds.",
)
@click.option(
    "--groups-per-hour",
    type=FiniteRange(min=0, min_open=True),
    metavar="GROUPS",
    help="Measured speed of a rollout task. A group is a prompt with all its completions.",
)
@click.option(
    "--write-rate",
    type=FiniteRange(min=0, min_open=True),
    default=10.0,
    metavar="GB/S",
    help="Rate at which the trial reads and writes the shared directory. Default: 10.",
)
@click.option(
    "--prompt-tokens",
    type=FiniteRange(min=1),
    help="Mean length of a prompt. Default: half of the maximum.",
)
@click.option(
    "--response-tokens",
    type=FiniteRange(min=1),
    help="Mean length of a completion. Default: half of the maximum.",
)
@click.option(
    "--runs",
    type=click.IntRange(1, MOST_RUNS),
    default=10,
    help="Number of runs with different seeds. The intervals cover these runs. Default: 10.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=1, help="Seed of the first run. Default: 1."
)
@json_option
@common
def simulate(config: str, overrides: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Simulate a whole trial: queue, jobs, failures, steps and commits.

    The output shows, for each time limit, when the trial would be done, how many GPU hours it would
    take and where time is lost. The same command always prints the same numbers.

    The exit code is 1 if no run finishes.
    """
    from slurmrl.display import terminal
    from slurmrl.simulate.outcomes import document, values

    answers, notes = _simulate(Path(config), overrides, options)
    if as_json:
        click.echo(json.dumps(values(answers)))
    else:
        click.echo(terminal.as_text(document(answers)))
    for line in notes:
        click.echo(line, err=True)
    return 0 if any(one.finished for one in answers.runs) else 1


def _check_options(options: dict[str, Any]) -> None:
    """Raise UsageError for options that exclude each other."""
    if options["trace"] is not None and options["queue_wait"] is not None:
        raise click.UsageError("--trace and --queue-wait exclude each other")
    if options["reward_seconds"] is not None and options["step_seconds"] is not None:
        raise click.UsageError("--step-seconds includes the rewards: leave out --reward-seconds")
    if options["first_wait"] == SLURM and options["hosts"] is not None:
        raise click.UsageError(
            "--first-wait slurm uses the hosts of CONFIG: leave out --hosts; to simulate other "
            "hosts, change the layouts in CONFIG"
        )


def _check_costs(costs: TrialCosts, options: dict[str, Any]) -> None:
    """Raise UsageError for options that do not apply to the trial."""
    if costs.step_s <= 0:
        raise click.UsageError("--step-seconds must be above 0, because a step takes time")
    if costs.tasks is not None and options["reward_seconds"]:
        raise click.UsageError(
            "--reward-seconds does not apply to rollout tasks; give --groups-per-hour"
        )
    of_tasks = ("tasks", "groups_per_hour", "task_wait")
    if costs.tasks is None and any(options[name] for name in of_tasks):
        raise click.UsageError(
            "--tasks, --groups-per-hour and --task-wait need rollout tasks: set rollout.tasks in "
            "CONFIG"
        )


def _load(
    path: Path, overrides: tuple[str, ...], options: dict[str, Any]
) -> tuple[Settings, list[str]]:
    """Return the settings, and notes about assumed settings and about memory."""
    from slurmrl.desk.trials import chosen_root
    from slurmrl.plan.estimates.hardware import hardware_of
    from slurmrl.plan.settings import load_settings
    from slurmrl.search.best_layouts import fits_into_memory

    where, assumed = chosen_root(options["root"]), list[str]()
    limit: dict[str, int] = {}

    def load() -> Settings:
        given = (*overrides, *assumed, *(f"{key}={value}" for key, value in limit.items()))
        return load_settings(path, given, root=where, scheduler="slurm", planning=True)

    settings = load()
    cluster = settings.config.cluster
    measured = options["step_seconds"] is not None
    if not (measured or hardware_of(cluster) or cluster.slurm.gpu_type):
        assumed.append(f"cluster.slurm.gpu_type={ASSUMED_GPU}")
        settings = load()
    if limit := limit_of_rows(settings):
        settings = load()
    if not measured:
        assumed += limit_notes(settings, limit)
    notes = [f"assumed: {line}, because the configuration does not set it" for line in assumed]
    if not fits_into_memory(settings):
        notes.append("the configuration does not fit into GPU memory: slurmrl plan names a remedy")
    return settings, notes


def _simulate(
    path: Path, overrides: tuple[str, ...], options: dict[str, Any]
) -> tuple[SimulationAnswers, list[str]]:
    """Return the answers, and notes for standard error."""
    from slurmrl.desk.trial_checks import checkpoint_bytes
    from slurmrl.plan.build import make_plan
    from slurmrl.simulate.outcomes import SimulationAnswers, commit_advice, tasks_needed
    from slurmrl.simulate.trial_costs import GivenSeconds, Scale, trial_costs

    _check_options(options)
    settings, notes = _load(path, overrides, options)
    given = GivenSeconds(
        step=options["step_seconds"],
        start=options["start_seconds"],
        restart=options["restart_seconds"],
        commit=options["commit_seconds"],
        evaluation=options["evaluation_seconds"],
        rewards=options["reward_seconds"],
        groups_per_hour=options["groups_per_hour"],
        write_rate=options["write_rate"] * 1e9,
    )
    scale = Scale(options["steps"], options["hosts"], options["tasks"])
    mean = mean_tokens(settings, options["prompt_tokens"], options["response_tokens"])
    plan = make_plan(settings, scheduler="slurm")
    costs = trial_costs(settings, plan, checkpoint_bytes(settings), given, scale, mean)
    _check_costs(costs, options)

    def ask(limit: str | None) -> float:
        time = () if limit is None else (f"cluster.slurm.time={json.dumps(limit)}",)
        return _expected_wait_s(path, (*overrides, *time), options["root"])

    results, disturbances = _run(costs, options, ask)
    answers = SimulationAnswers(
        f"{settings.config.experiment}/{settings.config.trial}",
        costs,
        results,
        options["seed"],
        commit_advice(costs, disturbances),
        tasks_needed(costs),
        _source(settings) if given.step is None else MEASURED,
    )
    return answers, notes


def _run(
    costs: TrialCosts, options: dict[str, Any], ask: Callable[[str | None], float]
) -> tuple[list[Runs], Disturbances]:
    """Return the simulated runs for each time limit, and the disturbances of all runs.

    ``ask`` returns the seconds for which Slurm expects the first job with a time limit to wait.
    """
    from slurmrl.config.schema.cluster import time_limit_s
    from slurmrl.simulate.outcomes import run_all
    from slurmrl.simulate.queue_waits import FixedWait, QueueTrace
    from slurmrl.simulate.trial_costs import Conditions, Disturbances

    disturbances = Disturbances(
        options["failures"],
        options["crashes"],
        options["preemptions"],
        options["grace_seconds"],
        options["slurmd_timeout"],
        options["stragglers"],
        options["slow_hosts"],
        options["slow_factor"],
    )
    trace = None if options["trace"] is None else QueueTrace.read(options["trace"])
    limits: list[str | None] = options["time_limit"] or [None]
    limits_s = [costs.time_limit_s if text is None else time_limit_s(text) for text in limits]
    lead_s = costs.slurm.signal_lead_s
    if short := [limit_s for limit_s in limits_s if limit_s <= lead_s]:
        raise click.UsageError(
            f"a time limit of {short[0]:g} s is not allowed: must be longer than "
            f"cluster.slurm.signal_lead_s, {lead_s} s"
        )
    progress, results = ProgressLine(), []
    try:
        for limit, limit_s in zip(limits, limits_s, strict=True):
            waits = options["queue_wait"] or FixedWait(0.0)
            task_waits = options["task_wait"] or waits
            if trace is not None:
                waits = trace.waits(costs.hosts + costs.spares, limit_s)
                of_tasks = costs.slurm if costs.tasks is None else costs.tasks.slurm
                task_limit_s = math.inf if of_tasks.time is None else time_limit_s(of_tasks.time)
                task_waits = options["task_wait"] or trace.waits(1, task_limit_s)
            first_s = options["first_wait"]
            if first_s == SLURM:
                first_s = ask(limit)
            conditions = Conditions(disturbances, waits, task_waits, limit_s, first_s)
            seeds = range(options["seed"], options["seed"] + options["runs"])
            results.append(run_all(costs, conditions, seeds, progress.show))
    finally:
        progress.clear()
    return results, disturbances


def _source(settings: Settings) -> tuple[str, ...]:
    """Return a line about the source of the predicted seconds and a line about their error."""
    from slurmrl.plan.estimates.hardware import hardware_of

    hardware = hardware_of(settings.config.cluster)
    assert hardware is not None, "the seconds are predicted"
    return f"predicted by formulas and {hardware.source}", f"its error: {hardware.error}"


def _expected_wait_s(config: Path, overrides: tuple[str, ...], root: str | None) -> float:
    """Return the seconds until Slurm expects to start the trainers' job, without submitting it.

    Raises ConfigError for a configuration that cannot be submitted, SchedulerError if Slurm does
    not answer.
    """
    from datetime import UTC, datetime

    from slurmrl.desk.proposal import UNNAMED, propose
    from slurmrl.desk.slurm_check import TIMEOUT_S
    from slurmrl.run.reports import TRAINERS
    from slurmrl.scheduler.batch_script import expected_start
    from slurmrl.scheduler.client import SlurmClient

    request = propose(config, overrides, root=root, scheduler="slurm").request(1, UNNAMED, 1)
    start = expected_start(SlurmClient(timeout_s=TIMEOUT_S), request, TRAINERS)
    return max((start - datetime.now(UTC)).total_seconds(), 0.0)
