"""Placement of the run's processes, and the resources that the scheduler is asked to allocate."""

from __future__ import annotations

import re
import shlex
from math import inf
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from slurmrl.config.profiles import ROOT_RULE, is_root
from slurmrl.config.schema.base import (
    Line,
    NonNegativeInt,
    PathText,
    PlainPathText,
    PositiveFloat,
    PositiveInt,
    Section,
    Sequence,
    Word,
)

_TIME: Final = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_OWN_PREFIXES: Final = ("SLURM_", "SLURMD_")
_OWN: Final = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONPATH")
_MEMORY: Final = re.compile(r"[1-9]\d*[KMGT]?")


def _check_time(text: str) -> str:
    if text and not _TIME.fullmatch(text):
        raise ValueError("must be MINUTES, [HH:]MM:SS, D-HH[:MM[:SS]] or UNLIMITED")
    return text


def _check_memory(text: str) -> str:
    if not _MEMORY.fullmatch(text):
        raise ValueError("must be a whole number with K, M, G or T, for example 16G")
    return text


def _check_command(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"is not a command: {error}") from error
    if not words:
        raise ValueError("is not a command: it has no words")
    return text


def _check_env(variables: dict[str, str]) -> dict[str, str]:
    for name in variables:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"'{name}' is not a name of an environment variable")
        if name.startswith(_OWN_PREFIXES) or name in _OWN:
            raise ValueError(f"{name} is set by Slurm or slurmrl and cannot be chosen here")
    return variables


def time_limit_s(text: str) -> float:
    """Seconds of a time limit in one of Slurm's forms; infinite for a word such as UNLIMITED."""
    if not text[:1].isdigit():
        return inf
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if days:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 1:
        hours, minutes, seconds = 0, parts[0], 0
    else:
        hours, minutes, seconds = [0, *parts][-3:]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


TimeLimit = Annotated[Line, AfterValidator(_check_time)]
Memory = Annotated[Word, AfterValidator(_check_memory)]
Command = Annotated[Word, AfterValidator(_check_command)]


class JobOptions(Section):
    """Options of the jobs of tasks.

    An option that is left out takes its value from `cluster.slurm`. An empty string
    (`reservation: ""`) takes the cluster's default instead.
    """

    partition: Line | None = None
    """Partition, or several separated by commas. The partition of tasks may be preemptible: a
    preempted task returns its unfinished work, and Slurm queues its job again."""
    account: Line | None = None
    """Account to charge."""
    qos: Line | None = None
    """Quality of service."""
    time: TimeLimit | None = None
    """Time limit of one job as Slurm writes it: minutes, `HH:MM:SS` or `D-HH:MM:SS`."""
    constraint: Line | None = None
    """Features that hosts must have."""
    nodelist: Line | None = None
    """Hosts that must be part of the job."""
    exclude: Line | None = None
    """Hosts that must not be part of the job."""
    reservation: Line | None = None
    """Reservation to run in."""
    licenses: Line | None = None
    """Licenses that the job uses."""
    links: Annotated[int, Field(gt=0, le=1000)] | None = None
    """Number of successive jobs for each task."""
    signal_lead_s: PositiveInt | None = None
    """Seconds before the time limit at which Slurm signals a task to finish what it can."""
    extra_lines: Sequence[Line] | None = None
    """Additional `#SBATCH` lines, which replace the lines in `cluster.slurm`."""
    setup: Sequence[Line] | None = None
    """Shell lines at the top of the batch script, which replace the lines in `cluster.slurm`."""
    gpu_directive: Literal["gres", "gpus-per-node", "none"] | None = None
    """How GPUs are requested: `--gres=gpu:N`, `--gpus-per-node=N`, or not at all."""
    gpu_type: Line | None = None
    """GPU type in that request: `a100`."""

    def over(self, trainers: Slurm) -> Slurm:
        """All options of the array. Raises ValueError for options that exclude each other."""
        given = self.model_dump(exclude_none=True)
        return Slurm.model_validate({**trainers.model_dump(), **given})


class Slurm(JobOptions):
    """Options of the Slurm jobs.

    An option that is left out or is an empty string takes the cluster's default.
    """

    links: Annotated[int, Field(gt=0, le=1000)] = 8
    """Length of the chain: the number of elements in the job array, which run one after the other.
    When they run out, a trial that has committed submits as many again if sbatch works on compute
    nodes; otherwise run `slurmrl resume`. In an elastic group, the number of successive jobs for
    each task."""
    continue_: Annotated[Literal["chain", "requeue", "none"], Field(alias="continue")] = "chain"
    """How a trial continues when its job ends. `chain`: the next of `links` jobs. `requeue`: Slurm
    requeues the same job; `links` is ignored, and the chain ends if the batch process itself is
    killed. `none`: one job, which Slurm does not requeue."""
    spares: NonNegativeInt = 0
    """Additional hosts in a fixed group's job that replace lost hosts."""
    signal_lead_s: PositiveInt = 120
    """Seconds before the time limit at which Slurm signals the run to commit and stop."""
    extra_lines: Sequence[Line] = ()
    """Additional `#SBATCH` lines, with or without the `#SBATCH` prefix."""
    setup: Sequence[Line] = ()
    """Shell lines at the top of the batch script (`module load …`). They run on the first
    host; workers on all hosts inherit the resulting environment."""
    container: Command | None = None
    """Command prefix that runs the workers, and nothing else, in a container:
    `apptainer exec --nv --bind /shared image.sif`. The run directory must have the same path inside
    the container."""
    container_python: Word | None = None
    """Python inside the container, with slurmrl's dependencies installed: `python3`. Default: the
    path of the Python that submits."""
    gpu_directive: Literal["gres", "gpus-per-node", "none"] = "gres"
    """How GPUs are requested: `--gres=gpu:N`, `--gpus-per-node=N`, or not at all."""

    @field_validator("*")
    @classmethod
    def _default_of_cluster(cls, value: object) -> object:
        return None if isinstance(value, str) and not value.strip() else value

    @model_validator(mode="after")
    def _warned_in_time(self) -> Slurm:
        if self.time is not None and self.signal_lead_s >= time_limit_s(self.time):
            raise ValueError(
                f"signal_lead_s {self.signal_lead_s} (seconds) must be shorter than time "
                f"{self.time}: the run would be signaled to stop as soon as it starts"
            )
        return self


class Cluster(Section):
    """The scheduler, the shape of the groups of workers, and their timeouts."""

    scheduler: Literal["auto", "local", "slurm"] = "auto"
    """`auto` selects Slurm if `cluster.slurm` has other settings than `links` and `continue`, or if
    sbatch is on the PATH and this machine belongs to a cluster. Otherwise it selects this machine.
    A controller that does not answer ends the submission."""
    hosts: PositiveInt | None = None
    """Maximum number of hosts for the trainers. Default: as many as the layouts need."""
    workers_per_host: PositiveInt | None = None
    """Worker processes per host; fewer workers in all are on one host. Default: the largest number
    up to 8 that divides the number of workers and keeps tensor-parallel groups within a host. The
    GPUs of rollout tasks in the trainers' job (`rollout.gpus`) count as workers. The local
    scheduler always runs all workers on this machine."""
    gpus_per_worker: Annotated[int, Field(ge=0, le=1)] | None = None
    """GPUs per worker, 0 or 1. Default: 1 under Slurm or on a machine with an NVIDIA GPU."""
    gpu_memory: Memory | None = None
    """Memory of one GPU: `80G`. A layout that is estimated to need more, with a margin of 3 GiB and
    10 %, is refused. Default: the memory of a known `slurm.gpu_type`; if that is unknown, workers
    compare the estimate with their GPU's memory when they start."""
    threads_per_worker: PositiveInt = 1
    """CPU threads that one worker computes with. Results on CPUs depend on it."""
    cpus_per_worker: PositiveInt | None = None
    """CPU cores requested for each worker. Default with GPUs under Slurm: 8, or fewer where the
    hosts have fewer for each of their GPUs; otherwise `threads_per_worker`."""
    mem_per_worker: Memory | None = None
    """Host memory requested for each worker in Slurm's notation: `16G`, or whole megabytes. Default
    with GPUs under Slurm: the estimate that `slurmrl plan` shows, or what the hosts have if that is
    less; otherwise the cluster's default."""
    interface: Word | None = None
    """Network interface for communication between workers. Default: loopback for a job on one host,
    otherwise the interface of the default route."""
    env: Annotated[dict[str, Line], AfterValidator(_check_env)] = Field(default_factory=dict)
    """Environment variables of the run's processes: `{NCCL_DEBUG: INFO, NCCL_IB_HCA: mlx5}`. They
    override those of the submitting shell. Not for secrets (see `variables_file`)."""
    variables_file: PathText | None = None
    """File of `NAME=VALUE` lines that are added to the environment of the run's processes, for
    example access tokens. You must own it and its mode must be 0600. It is read when a job starts
    and never copied."""
    heartbeat_s: PositiveFloat = 2.0
    """Seconds between heartbeats of an agent."""
    lease_ttl_s: PositiveFloat = 60.0
    """Seconds without a heartbeat after which an agent counts as dead."""
    silence_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 60.0
    """Seconds without a pulse after which a worker or the master counts as hung and is killed.
    (Ranks that wait for each other still send pulses; `step_timeout_s` limits their wait.)"""
    start_timeout_s: PositiveFloat = 600.0
    """Seconds within which all workers of a new incarnation must have started. While a dataset is
    tokenized, they start again with each report of rank 0, every 10 s."""
    slurm: Slurm = Slurm()

    @property
    def asks_slurm(self) -> bool:
        """Whether a setting has a meaning only on a cluster. Local chains have links, too."""
        local = {"links", "continue_"}
        return self.slurm.model_dump(exclude=local) != Slurm().model_dump(exclude=local)


def _check_root(text: str) -> str:
    if not is_root(text):
        raise ValueError(ROOT_RULE)
    return text


class Profile(Section):
    """Settings of a cluster that configurations need not repeat.

    They are merged under a configuration, key by key: what that sets itself, null included, takes
    precedence.
    """

    root: Annotated[PlainPathText, AfterValidator(_check_root)] | None = None
    """Folder of all runs: an absolute path, or one that begins with `~` or a variable
    (`$SCRATCH/runs`)."""
    cluster: Cluster = Cluster()
    """As in a configuration."""
