"""Placement of the run's processes, and the resources that slurmrl requests from the scheduler."""

from __future__ import annotations

import re
import shlex
from math import inf
from typing import Annotated, ClassVar, Final, Literal

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
from slurmrl.fsio.inputs import OWN_VARIABLES

_TIME: Final = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.ASCII)
_MOST_TIME_S: Final = 10_000 * 86400
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_OWN_PREFIXES: Final = ("SLURM_", "SLURMD_")
_MEMORY: Final = re.compile(r"[1-9]\d*[KMGT]?", re.ASCII)


def _check_time(text: str) -> str:
    if text and not _TIME.fullmatch(text):
        raise ValueError("must be MINUTES, [HH:]MM:SS, D-HH[:MM[:SS]] or UNLIMITED")
    if _MOST_TIME_S < time_limit_s(text) < inf:  # Slurm may read a larger number as a short limit.
        raise ValueError("must be at most 10,000 days, or UNLIMITED")
    return text


def _check_memory(text: str) -> str:
    if not _MEMORY.fullmatch(text):
        raise ValueError("must be an integer with K, M, G or T, for example 16G")
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
            raise ValueError(f"'{name}' is not a valid name of an environment variable")
        if name.startswith(_OWN_PREFIXES) or name in OWN_VARIABLES:
            raise ValueError(f"{name} is not allowed, because Slurm or slurmrl sets it")
    return variables


def time_limit_s(text: str) -> float:
    """Return the seconds of a time limit in one of Slurm's forms; infinity for UNLIMITED and 0."""
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
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds or inf


TimeLimit = Annotated[Line, AfterValidator(_check_time)]
Memory = Annotated[Word, AfterValidator(_check_memory)]
Command = Annotated[Word, AfterValidator(_check_command)]


class JobOptions(Section):
    """Options of the Slurm jobs of tasks.

    An option that is left out takes its value from `cluster.slurm`. An empty string (`reservation:
    ""`) selects the cluster's default instead.
    """

    null_means: ClassVar[str] = "the value in `cluster.slurm`"

    partition: Line | None = None
    """Partition, or several with commas between them. The partition of tasks may be preemptible: a
    preempted task returns its unfinished work, and Slurm queues its job again. Example: `gpu`"""
    account: Line | None = None
    """Account to charge. Example: `ml-research`"""
    qos: Line | None = None
    """Quality of service. Example: `normal`"""
    time: TimeLimit | None = None
    """Time limit of one job, as Slurm writes it: `MINUTES`, `HH:MM:SS`, `D-HH:MM:SS` or
    `UNLIMITED`. Example: `04:00:00`"""
    constraint: Line | None = None
    """Features that hosts must have. Example: `a100&nvlink`"""
    nodelist: Line | None = None
    """Hosts that must be part of the job. Example: `node[01-02]`"""
    exclude: Line | None = None
    """Hosts that must not be part of the job. Example: `node[07,12]`"""
    reservation: Line | None = None
    """Reservation to run in. Example: `workshop`"""
    licenses: Line | None = None
    """Licenses that the job uses. Example: `matlab:1`"""
    links: Annotated[int, Field(gt=0, le=1000)] | None = None
    """Number of successive jobs for each task. Example: `4`"""
    signal_lead_s: PositiveInt | None = None
    """Time before the time limit at which Slurm signals a task to finish its running requests.
    Example: `60`"""
    extra_lines: Sequence[Line] | None = None
    """Additional `#SBATCH` lines, which replace the lines in `cluster.slurm`. Example:
    `["--mail-type=FAIL"]`"""
    setup: Sequence[Line] | None = None
    """Shell lines at the top of the batch script, which replace the lines in `cluster.slurm`.
    Example: `["module load cuda"]`"""
    gpu_directive: Literal["gres", "gpus-per-node", "none"] | None = None
    """How the batch script requests GPUs: `--gres=gpu:N`, `--gpus-per-node=N`, or not at all."""
    gpu_type: Line | None = None
    """GPU type that the job requests. Example: `a100`"""

    def over(self, trainers: Slurm) -> Slurm:
        """Return the trainers' options, overridden by these options. Raises ValueError."""
        given = self.model_dump(exclude_none=True)
        return Slurm.model_validate({**trainers.model_dump(), **given})


class Slurm(JobOptions):
    """Options of the Slurm jobs.

    An option that is left out or is an empty string takes the cluster's default. Example:
    `{partition: gpu, time: "04:00:00", gpu_type: a100}`
    """

    null_means: ClassVar[str] = "the cluster's default"

    links: Annotated[int, Field(gt=0, le=1000)] = 8
    """Length of the chain: the number of elements in the job array, which run one after the other.
    When few elements are left, a job that has committed submits another array of this length if
    sbatch works on compute nodes. Otherwise run `slurmrl resume`. For tasks, the number of
    successive jobs.
    """
    continue_: Annotated[Literal["chain", "requeue", "none"], Field(alias="continue")] = "chain"
    """How a trial continues when its job ends.

    - `chain`: the next of `links` jobs continues.
    - `requeue`: Slurm requeues the same job. `links` is ignored, and the chain ends if the batch
      process itself is killed.
    - `none`: the trial stops. Slurm does not requeue the job."""
    spares: NonNegativeInt = 0
    """Additional hosts of the trainers' job, which replace lost hosts. Example: `1`"""
    signal_lead_s: PositiveInt = 120
    """Time before the time limit at which Slurm signals the run to commit and stop. The lead must
    be shorter than `time`."""
    extra_lines: Sequence[Line] = ()
    """Additional `#SBATCH` lines, with or without the `#SBATCH` prefix. Example:
    `["--mail-type=FAIL"]`"""
    setup: Sequence[Line] = ()
    """Shell lines at the top of the batch script. The lines run on the first host, and the workers
    on all hosts inherit the resulting environment. Example: `["module load cuda"]`"""
    container: Command | None = None
    """Command prefix that runs the workers, and nothing else, in a container. The run directory
    must have the same path inside the container. Example: `apptainer exec --nv --bind /shared
    image.sif`"""
    container_python: Word | None = None
    """Python inside the container, with slurmrl's dependencies installed. Default: the path of the
    Python that submits. Example: `python3`"""
    gpu_directive: Literal["gres", "gpus-per-node", "none"] = "gres"
    """How the batch script requests GPUs: `--gres=gpu:N`, `--gpus-per-node=N`, or not at all."""

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
    """Where the jobs run. `auto` selects Slurm in two cases: if `cluster.slurm` has other keys than
    `links` and `continue`, or if sbatch is on the PATH and this machine belongs to a cluster.
    Otherwise `auto` selects this machine. If Slurm's controller does not answer, the submission
    fails."""
    hosts: PositiveInt | None = None
    """Maximum number of hosts for the trainers. Default: as many as the layouts need. Example: `2`
    """
    workers_per_host: PositiveInt | None = None
    """Worker processes per host; if the trial has fewer workers, all run on one host. The GPUs of
    rollout tasks in the trainers' job (`rollout.gpus`) count as workers. The local scheduler always
    runs all workers on this machine. Default: the largest number up to 8 that divides the number of
    workers and keeps tensor-parallel groups within a host. Example: `8`"""
    gpus_per_worker: Annotated[int, Field(ge=0, le=1)] | None = None
    """GPUs per worker. Default: 1 under Slurm or on a machine with an NVIDIA GPU, else 0. Example:
    `1`"""
    gpu_memory: Memory | None = None
    """Memory of one GPU. slurmrl rejects a layout whose estimate exceeds it, with a margin of 3 GiB
    and 10 %. Default: the memory of a known `slurm.gpu_type`; for an unknown type, workers compare
    the estimate with the memory of their GPU when they start. Example: `80G`"""
    hardware: PathText | None = None
    """Hardware profile: a file with the rates from which `slurmrl plan` and `slurmrl search`
    predict seconds. `slurmrl profile-cluster` measures such a profile. Default:
    `~/.config/slurmrl/hardware/NAME.yaml` if that exists, else the profile of a known
    `slurm.gpu_type` that comes with slurmrl. NAME is the type (`h100`), or `cpu` without GPUs.
    Example: `hardware/h100.yaml`"""
    threads_per_worker: PositiveInt = 1
    """CPU threads with which one worker computes. Results on CPUs depend on this number."""
    cpus_per_worker: PositiveInt | None = None
    """CPU cores requested for each worker. Default: under Slurm with GPUs, the smaller of 8 and the
    hosts' cores per GPU; otherwise `threads_per_worker`. Example: `8`"""
    mem_per_worker: Memory | None = None
    """Host memory requested for each worker, as Slurm writes it; a plain number is in megabytes.
    Default: with GPUs under Slurm, the smaller of the hosts' memory and the estimate that `slurmrl
    plan` shows; otherwise the cluster's default. Example: `16G`"""
    interface: Word | None = None
    """Network interface for communication between workers. Default: loopback for a job on one host,
    otherwise the interface of the default route. Example: `ib0`"""
    env: Annotated[dict[str, Line], AfterValidator(_check_env)] = Field(default_factory=dict)
    """Environment variables of the run's processes. These variables override the variables of the
    submitting shell. Do not put secrets here: use `variables_file`. Example: `{NCCL_DEBUG: INFO,
    NCCL_IB_HCA: mlx5}`"""
    variables_file: PathText | None = None
    """File of `NAME=VALUE` lines that are added to the environment of the run's processes, for
    example access tokens. You must own the file, and its mode must be 0600. Each job reads the file
    at its start; slurmrl never copies the file. Default: none. Example:
    `~/.config/slurmrl/variables`"""
    heartbeat_s: PositiveFloat = 2.0
    """Time between heartbeats of an agent."""
    lease_ttl_s: PositiveFloat = 60.0
    """Time without a heartbeat after which an agent counts as dead."""
    silence_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 60.0
    """Time without a heartbeat from a worker or the master after which its agent kills it as hung.
    Ranks that wait for each other still send heartbeats; `step_timeout_s` limits their wait."""
    start_timeout_s: PositiveFloat = 600.0
    """Time within which all workers of a new incarnation must start. While rank 0 tokenizes a
    dataset, its reports (every 10 s) restart this time."""
    slurm: Slurm = Slurm()

    @property
    def asks_slurm(self) -> bool:
        """Whether the section `slurm` has settings that apply only to a cluster."""
        local = {"links", "continue_"}
        return self.slurm.model_dump(exclude=local) != Slurm().model_dump(exclude=local)


def _check_root(text: str) -> str:
    if not is_root(text):
        raise ValueError(ROOT_RULE)
    return text


class Profile(Section):
    """Settings of a cluster that configurations need not repeat.

    Each value applies if a configuration does not set the key. Null in a configuration counts as
    set.
    """

    root: Annotated[PlainPathText, AfterValidator(_check_root)] | None = None
    """Folder of all runs: an absolute path, or one that begins with `~` or a variable. Default:
    none. Example: `$SCRATCH/runs`"""
    cluster: Cluster = Cluster()
    """Keys of `cluster`, as in a configuration."""
