"""Where the run's processes are placed, and what the scheduler is asked for."""

from __future__ import annotations

import re
import shlex
from math import inf
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from slurmrl.config.schema.base import (
    Line,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Section,
    Sequence,
    Word,
)

_TIME: Final = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE")
_MEMORY: Final = re.compile(r"[1-9]\d*[KMGT]?")


def _check_time(text: str) -> str:
    if not _TIME.fullmatch(text):
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


def _time_s(text: str) -> float:
    """Seconds of a time limit in one of Slurm's forms."""
    if not text[0].isdigit():
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


TimeLimit = Annotated[Word, AfterValidator(_check_time)]
Memory = Annotated[Word, AfterValidator(_check_memory)]
Command = Annotated[Word, AfterValidator(_check_command)]


class Slurm(Section):
    """Options of the Slurm jobs. Those that are left out are left to the cluster's defaults."""

    partition: Word | None = None
    """Partition, or several separated by commas."""
    account: Word | None = None
    """Account to charge."""
    qos: Word | None = None
    """Quality of service."""
    time: TimeLimit | None = None
    """Time limit of one link as Slurm writes it: minutes, `HH:MM:SS` or `D-HH:MM:SS`."""
    constraint: Word | None = None
    """Features that hosts must have."""
    nodelist: Word | None = None
    """Hosts that must be part of the job."""
    exclude: Word | None = None
    """Hosts that must not be part of the job."""
    reservation: Word | None = None
    """Reservation to run in."""
    licenses: Word | None = None
    """Licences that the job takes."""
    links: Annotated[int, Field(gt=0, le=1000)] = 8
    """Length of the chain: how many jobs may succeed each other, the elements of one array that run
    one after the other. Where sbatch works on compute nodes, a trial that commits adds as many when
    they run out, else `slurmrl resume` does. In an elastic group, how many may succeed each other
    in each place."""
    continue_: Annotated[Literal["chain", "requeue", "none"], Field(alias="continue")] = "chain"
    """What goes on with a trial when its job ends: the next of `links` jobs, the same job put back
    into the queue (`requeue`; `links` does not count then, and what kills the batch process itself
    ends the chain), or `none`: one job, which Slurm does not requeue either."""
    spares: NonNegativeInt = 0
    """Further hosts in a fixed group's job that take the place of hosts that are lost."""
    signal_lead_s: PositiveInt = 120
    """Seconds before the time limit at which the run is told to commit and stop."""
    extra_lines: Sequence[Line] = ()
    """Further `#SBATCH` lines, with or without that word in front."""
    setup: Sequence[Line] = ()
    """Shell lines at the top of the batch script (`module load …`). They run on its first host;
    the environment that they leave reaches the workers of all hosts."""
    container: Command | None = None
    """Command in front of each worker's own, which runs the workers (and nothing else) in a
    container: `apptainer exec --nv --bind /shared image.sif`. The run directory must be visible
    inside under the same name."""
    container_python: Word | None = None
    """Python inside the container, with what slurmrl requires installed: `python3`. Default: the
    path of the one that submits."""
    gpu_directive: Literal["gres", "gpus-per-node", "none"] = "gres"
    """How GPUs are asked for: `--gres=gpu:N`, `--gpus-per-node=N`, or not at all."""
    gpu_type: Word | None = None
    """Kind of GPU in that request: `a100`."""

    @model_validator(mode="after")
    def _warned_in_time(self) -> Slurm:
        if self.time is not None and self.signal_lead_s >= _time_s(self.time):
            raise ValueError(
                f"signal_lead_s {self.signal_lead_s} (seconds) leaves nothing of time {self.time}: "
                "the run would be told to stop when it starts"
            )
        return self


class Cluster(Section):
    """The scheduler, the shape of the groups of workers, and their timeouts."""

    scheduler: Literal["auto", "local", "slurm"] = "auto"
    """`auto` takes Slurm where sbatch is on the PATH and answers, else this machine."""
    hosts: PositiveInt | None = None
    """Most hosts that the trainers may take. Default: as many as the layouts need."""
    workers_per_host: PositiveInt | None = None
    """Worker processes on one host. Default: all of them up to 8, and 8 where there are more; with
    the local scheduler always all."""
    gpus_per_worker: Annotated[int, Field(ge=0, le=1)] | None = None
    """GPUs of one worker, 0 or 1. Default: 1 under Slurm and on a machine with an NVIDIA GPU."""
    gpu_memory: Memory | None = None
    """Memory of one GPU: `80G`. A layout that is estimated to need more is refused. Default: that
    of a known `slurm.gpu_type`, else unknown, and nothing is refused."""
    threads_per_worker: PositiveInt = 1
    """CPU threads that one worker computes with. Part of what makes a run repeatable."""
    cpus_per_worker: PositiveInt | None = None
    """CPU cores asked for each worker. Default: `threads_per_worker`."""
    mem_per_worker: Memory | None = None
    """Memory asked for each worker as Slurm writes it: `16G`, or whole megabytes."""
    interface: Word | None = None
    """Network interface that the workers talk over. Default: loopback for a job of one host, else
    that of the default route."""
    variables_file: PathText | None = None
    """File of `NAME=VALUE` lines that the processes of the run find in their environment: tokens.
    It must belong to you and have mode 0600; it is read when a job starts and copied nowhere."""
    heartbeat_s: PositiveFloat = 2.0
    """Seconds between two heartbeats of an agent."""
    lease_ttl_s: PositiveFloat = 60.0
    """Seconds without a heartbeat after which an agent counts as dead."""
    silence_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 60.0
    """Seconds without a sign of life after which a worker or the master counts as hung and is
    killed. (Ranks that wait for each other are alive; `step_timeout_s` is for those.)"""
    start_timeout_s: PositiveFloat = 600.0
    """Seconds in which all workers of a new incarnation must have come up."""
    slurm: Slurm = Slurm()
