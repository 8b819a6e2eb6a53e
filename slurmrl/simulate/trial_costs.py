"""Seconds and sizes of a trial's parts. The numbers are predicted, measured or assumed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from slurmrl.config.schema import Config
from slurmrl.config.schema.cluster import Cluster, Slurm, time_limit_s
from slurmrl.config.schema.config import Checkpoint
from slurmrl.config.schema.evaluation import Evaluation
from slurmrl.config.schema.rollout import Publish, Tasks
from slurmrl.errors import UsageError
from slurmrl.plan.dataflow import Method
from slurmrl.plan.estimates.call_costs import Generating, MeanTokens, generating, memories
from slurmrl.plan.estimates.hardware import hardware_of
from slurmrl.plan.estimates.pass_seconds import LengthDistribution, generation, token_seconds
from slurmrl.plan.estimates.step_seconds import StepSeconds, predict_step
from slurmrl.plan.estimates.worker_memory import version_size
from slurmrl.plan.model import GroupPlan, Plan
from slurmrl.plan.placement import LARGEST_HOST, ROLLOUTS, slurm_of
from slurmrl.plan.settings import Settings
from slurmrl.simulate.queue_waits import ExponentialWait, Waits

DAY_S: Final = 86400.0
START_S: Final = 60.0
"""Seconds from the start of a job to the load of the models: imports, process groups, data."""
RESTART_S: Final = 15.0
"""Seconds from the start of an incarnation in a running job to the load of the models."""
WRITE_RATE: Final = 10e9
"""Bytes per second of the shared directory."""
DELTA: Final = 0.05
"""Size of a delta divided by the size of a full weight version, as measured with a learning rate
of 1e-5 (docs/benchmarks.md)."""
SIGNAL_EARLY_S: Final = 30.0
"""Maximum seconds by which Slurm signals a job too early: the interval at which Slurm checks time
limits. Slurm's documentation allows twice as much (`workers.agent.agent_host.LATE_S`)."""
POINTS: Final = 256
"""Number of lengths from which the mean of the longest completion is computed."""


@dataclass(frozen=True)
class LongestCompletion:
    """The longest of ``sequences`` completions whose lengths have a distribution."""

    lengths: LengthDistribution
    sequences: float

    @cached_property
    def mean(self) -> float:
        """Mean length in tokens."""
        width = self.lengths.most / POINTS
        shorter = (1 - self.lengths.longer((point + 0.5) * width) for point in range(POINTS))
        return sum(1 - math.pow(share, self.sequences) for share in shorter) * width

    def sample(self, rng: random.Random) -> float:
        """Return a random length in tokens."""
        return self.lengths.exceeded_by(1 - math.pow(rng.random(), 1 / self.sequences))


@dataclass(frozen=True)
class TaskCosts:
    """The rollout tasks, and the speed of a single task."""

    count: int
    gpus: int
    """GPUs per task."""
    settings: Tasks
    publish: Publish
    slurm: Slurm
    inside: bool
    """Whether the tasks run in the trainers' job."""
    longest: LongestCompletion
    """The longest completion of a group."""
    token_s: Callable[[float], float]
    """Function from a number of groups to the seconds in which each group gets one more token."""
    start_s: float
    publish_s: float
    """Seconds from the end of a step until tasks can read its weights."""
    load_s: float
    """Seconds that a task takes to read a weight version."""
    per_host: int = 1
    """Number of tasks in separate jobs that share a host and fail with it."""

    def groups_per_s(self, groups: float) -> float:
        """Return the groups per second of a task that works on a number of groups."""
        return groups / (self.token_s(groups) * self.longest.mean)


@dataclass(frozen=True)
class TrialCosts:
    """Sizes of a trial, and the seconds of its parts."""

    steps: int
    batch_size: int
    hosts: int
    """Hosts that the trainers need."""
    spares: int
    gpus: int
    """GPUs of the trainers' job, including the GPUs of its rollout tasks."""
    step_s: float
    """Mean seconds of a step of the trainers."""
    decoding_s: float
    """The part of `step_s` that grows with the longest completion."""
    longest: LongestCompletion | None
    """The longest completion of a step; None if the trainers do not generate."""
    start_s: float
    restart_s: float
    stall_s: float
    """Seconds for which training waits while the ranks copy a checkpoint."""
    write_s: float
    """Seconds in which a checkpoint is written."""
    evaluation_s: float
    checkpoint: Checkpoint
    evaluation: Evaluation | None
    slurm: Slurm
    config: Config
    tasks: TaskCosts | None = None
    predicted: StepSeconds | None = None
    """The prediction of the cost model; None if the user gives the seconds of a step."""
    assumed: tuple[str, ...] = ()
    """Descriptions of assumed numbers."""

    @property
    def time_limit_s(self) -> float:
        """Time limit of a job in seconds; infinite without a limit."""
        text = self.slurm.time
        return math.inf if text is None else time_limit_s(text)


@dataclass(frozen=True)
class GivenSeconds:
    """Numbers that the user has measured. None marks numbers to predict or assume."""

    step: float | None = None
    start: float | None = None
    restart: float | None = None
    commit: float | None = None
    evaluation: float | None = None
    rewards: float | None = None
    """Seconds in which a step's rewards are computed; not predicted by the cost model."""
    groups_per_hour: float | None = None
    """Groups that a rollout task makes in an hour."""
    write_rate: float = WRITE_RATE
    """Bytes per second of the shared directory."""


@dataclass(frozen=True)
class Scale:
    """Size of the simulated trial; None for the configured size."""

    steps: int | None = None
    hosts: int | None = None
    """Hosts of the trainers. The batch and the number of tasks grow with the hosts, so that each
    host does as much work as configured."""
    tasks: int | None = None


def trial_costs(
    settings: Settings,
    plan: Plan,
    checkpoint_bytes: int,
    given: GivenSeconds,
    scale: Scale,
    mean: MeanTokens | None,
) -> TrialCosts:
    """Return the costs of a trial. Raises UsageError that names a missing option."""
    config, trainers = settings.config, plan.trainers
    steps = config.total_steps if scale.steps is None else scale.steps
    if steps is None:
        raise UsageError("the number of steps is unknown: set total_steps, or give --steps")
    if plan.filtered and config.rollout.tasks is not None:
        raise UsageError(
            "a trial with a filter and rollout tasks cannot be simulated: the share of dropped "
            "groups is unknown"
        )
    predicted = predict_step(settings, mean) if given.step is None else None
    if given.step is None and predicted is None:
        raise UsageError(
            "the seconds of a step cannot be predicted, because the GPU, the architecture, the "
            "servers or the lengths are unknown: give --step-seconds"
        )
    notes: list[str] = []
    factor = 1.0 if scale.hosts is None else scale.hosts / trainers.hosts
    loading_s = checkpoint_bytes / given.write_rate
    rate = f"{given.write_rate / 1e9:g} GB/s of the shared directory"
    tasks = _tasks(settings, plan, given, scale, mean, factor, notes)
    step_s = given.rewards or 0.0
    if predicted is None:
        step_s += given.step or 0.0
    else:
        step_s += predicted.total if tasks is None else predicted.of_trainers
    scores = any(call.role is None for call in settings.algorithm.calls(config))
    if scores and given.step is None and given.rewards is None and tasks is None:
        notes.append("rewards: 0 s of a step (--reward-seconds)")
    decoding_s, longest = (0.0, None) if predicted is None else _decoding(settings, mean, predicted)
    stall_s = write_s = given.commit
    if write_s is None:
        write_s = loading_s
        stall_s = _copy_s(settings) if config.checkpoint.asynchronous else write_s
        notes.append(f"commit: {write_s:.3g} s, with {rate} (--write-rate)")
    assert stall_s is not None
    start_s = START_S + loading_s if given.start is None else given.start
    restart_s = RESTART_S + loading_s if given.restart is None else given.restart
    if given.start is None:
        notes.append(f"start of a job: {start_s:.3g} s (--start-seconds)")
    if given.restart is None:
        notes.append(f"restart within a job: {restart_s:.3g} s (--restart-seconds)")
    return TrialCosts(
        steps=steps,
        batch_size=round(settings.algorithm.batch_size * factor),
        hosts=round(trainers.hosts * factor),
        spares=trainers.spares,
        gpus=_gpus(trainers, tasks, factor),
        step_s=step_s,
        decoding_s=decoding_s,
        longest=longest,
        start_s=start_s,
        restart_s=restart_s,
        stall_s=stall_s if config.checkpoint.asynchronous and given.commit is None else write_s,
        write_s=write_s,
        evaluation_s=_evaluation_s(settings, given, mean, notes),
        checkpoint=config.checkpoint,
        evaluation=config.evaluation if config.trainers_evaluate else None,
        slurm=config.cluster.slurm,
        config=config,
        tasks=tasks,
        predicted=predicted,
        assumed=tuple(notes),
    )


def _gpus(trainers: GroupPlan, tasks: TaskCosts | None, factor: float) -> int:
    """Return the GPUs of the trainers' job. Each spare has as many GPUs as any other host."""
    of_trainers = trainers.hosts * trainers.workers_per_host * trainers.gpus_per_worker
    total = round(of_trainers * factor)
    if tasks is not None and tasks.inside:
        total += tasks.count * tasks.gpus
    hosts = max(round(trainers.hosts * factor), 1)
    return total + math.ceil(total / hosts) * trainers.spares


def _decoding(
    settings: Settings, mean: MeanTokens | None, predicted: StepSeconds
) -> tuple[float, LongestCompletion | None]:
    """Return the seconds of the trainers that grow with the longest completion, and its length."""
    seconds = sum(
        parts.get("decode", 0.0)
        for name, parts in predicted.calls.items()
        if name not in predicted.asynchronous
    )
    found = _generating(settings, mean)
    if not seconds or found is None:
        return 0.0, None
    copies = found.job.allocation.sizes["dp"]
    longest = LongestCompletion(found.job.lengths, max(found.job.sequences * copies, 1.0))
    return seconds * (1 + predicted.rest), longest


def _generating(settings: Settings, mean: MeanTokens | None) -> Generating | None:
    calls = settings.algorithm.calls(settings.config)
    if all(call.method is not Method.GENERATE for call in calls):
        return None
    return generating(settings, ROLLOUTS, mean) or generating(settings, "actor", mean)


def _copy_s(settings: Settings) -> float:
    """Return the seconds in which ranks copy the states of trained models to host memory."""
    hardware = hardware_of(settings.config.cluster)
    most = max((memory.standing for memory in memories(settings).values()), default=0)
    return 0.0 if hardware is None else most / hardware.efficiency.host_link


def _evaluation_s(
    settings: Settings, given: GivenSeconds, mean: MeanTokens | None, notes: list[str]
) -> float:
    """Return the seconds of one evaluation by the trainers. Raises UsageError."""
    config = settings.config
    if given.evaluation is not None or not config.trainers_evaluate:
        return given.evaluation or 0.0
    name = ROLLOUTS if config.rollout_evaluates and config.rollout.backend else "actor"
    found = generating(settings, name, mean)
    parts = [one.evaluation for one in config.evaluations.values()]
    if found is None or any(one is None or one.samples is None for one in parts):
        raise UsageError("the seconds of an evaluation are unknown: give --evaluation-seconds")
    total = 0.0
    for one in parts:
        assert one is not None
        assert one.samples is not None
        sequences = one.samples * one.n / found.job.allocation.sizes["dp"]
        job = replace(found.job, sequences=sequences, group=one.n)
        total += sum(generation(job, found.machine).values())
    notes.append(f"evaluation: {total:.3g} s, generation only (--evaluation-seconds)")
    return total


def _tasks(
    settings: Settings,
    plan: Plan,
    given: GivenSeconds,
    scale: Scale,
    mean: MeanTokens | None,
    factor: float,
    notes: list[str],
) -> TaskCosts | None:
    config = settings.config
    if config.rollout.tasks is None:
        return None
    group = plan.group(ROLLOUTS)
    found = generating(settings, ROLLOUTS, mean)
    n = settings.algorithm.sequences_per_item(config)
    if given.groups_per_hour is None and found is None:
        raise UsageError(
            "the speed of a rollout task cannot be predicted, because the GPU, the architecture or "
            "the lengths are unknown: give --groups-per-hour"
        )
    lengths = LengthDistribution(1.0, 2) if found is None else found.job.lengths
    longest = LongestCompletion(lengths, max(n, 1))
    publish = config.rollout.publish
    assert publish is not None, "every trial with tasks publishes"
    whole_s, deltas = version_size(config) / given.write_rate, 1 - 1 / publish.whole_every
    loading_s = whole_s * (1 - deltas * (1 - DELTA))
    inside = plan.trainers.tasks_per_host > 0
    count = round(group.hosts * factor) if scale.tasks is None else scale.tasks
    start_s = START_S + whole_s if given.start is None else given.start
    if given.start is None:
        notes.append(f"start of a rollout task: {start_s:.3g} s (--start-seconds)")
    words = f"weights of rollout tasks: {loading_s:.3g} s to write, and the same time to read"
    words += f"; {deltas:.0%} of the versions are deltas, with {DELTA:.0%} of the bytes"
    notes.append(words)
    return TaskCosts(
        count=count,
        gpus=group.workers_per_host * group.gpus_per_worker,
        settings=config.rollout.tasks,
        publish=publish,
        slurm=slurm_of(config, ROLLOUTS),
        inside=inside,
        longest=longest,
        token_s=_speed(given, found, longest, n),
        start_s=start_s,
        publish_s=loading_s,
        load_s=loading_s,
        per_host=_tasks_of_host(config.cluster, group.workers_per_host * group.gpus_per_worker),
    )


def _tasks_of_host(cluster: Cluster, gpus: int) -> int:
    """Return the number of tasks that fit on a host; 1 for tasks without GPUs."""
    of_host = cluster.workers_per_host or LARGEST_HOST
    return max(of_host // gpus, 1) if gpus else 1


def _speed(
    given: GivenSeconds, found: Generating | None, longest: LongestCompletion, n: int
) -> Callable[[float], float]:
    """Return a function that maps a number of groups to the seconds per token of each group."""
    if given.groups_per_hour is not None:
        of_group = 3600 / given.groups_per_hour / longest.mean
        return lambda groups: groups * of_group
    assert found is not None, "the caller has checked"
    job, machine = found.job, found.machine
    active = n * job.lengths.mean / longest.mean
    """Mean number of unfinished sequences in a group."""
    most = max(job.cache_tokens / (job.prompt + job.lengths.mean), 1.0)
    known: dict[int, float] = {}

    def seconds(groups: float) -> float:
        key = max(round(groups), 1)
        if key not in known:
            rows = max(key * active, 1.0)
            held = min(rows, most)
            context = job.prompt + job.lengths.mean / 2
            known[key] = token_seconds(job, machine, held, context) * rows / held
        return known[key]

    return seconds


@dataclass(frozen=True)
class Disturbances:
    """Rates of events that disturb a trial, each per day."""

    failures: float = 0.0
    """Losses of hosts, per host."""
    crashes: float = 0.0
    """Crashed processes on hosts that keep running, per host."""
    preemptions: float = 0.0
    """Preemptions, per job."""
    grace_s: float = 30.0
    """Seconds from the signal of a preemption to the kill."""
    slurmd_timeout_s: float = 300.0
    """Seconds after which Slurm considers a silent host lost (``SlurmdTimeout``)."""
    stragglers: float = 0.0
    """Standard deviation of the logarithm of the seconds in which a host does its part of a step.
    A step waits for the slowest host."""
    slow_hosts: float = 0.0
    """Share of slow hosts. A slow host stays slow for the whole job."""
    slow_factor: float = 1.0
    """Seconds of a step on a slow host divided by its seconds on a host of normal speed."""


def seconds_to_event(per_day: float, rng: random.Random) -> float:
    """Return random seconds until the next event; infinite for a rate of 0."""
    share = ExponentialWait(1.0).sample(rng)
    return share / per_day * DAY_S if per_day else math.inf


@dataclass(frozen=True)
class Conditions:
    """Assumptions of a simulation in addition to the costs."""

    disturbances: Disturbances
    waits: Waits
    task_waits: Waits
    time_limit_s: float
    first_wait_s: float | None = None
    """Known queue wait of the first job; None to sample it as for other jobs."""
