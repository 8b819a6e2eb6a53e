"""``slurmrl profile-cluster``: a short job that measures the hardware, and the resulting profile.

The job's points come from `workers.hardware_measures`. The numbers of the profile are fitted so
that the formulas of the plan give the measured seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar, Final

from slurmrl.config import profiles
from slurmrl.config.allocation import parse
from slurmrl.config.load import load_profile
from slurmrl.config.schema import Cluster
from slurmrl.config.source import Source
from slurmrl.desk.doctor.examine import usable_hosts
from slurmrl.desk.doctor.job import Say, ShortJob, scratch
from slurmrl.desk.trial_jobs import clear_away
from slurmrl.errors import EnvironmentFailure, UsageError
from slurmrl.fsio import atomic, documents
from slurmrl.plan.estimates import hardware, pass_seconds
from slurmrl.plan.estimates.hardware import CPU, FITTED_GPU, GIB, HardwareFile, Machine, made
from slurmrl.plan.estimates.shape import ModelShape, layer_parameters, read
from slurmrl.plan.inherited_settings import gpus_per_worker
from slurmrl.plan.settings import load_settings
from slurmrl.scheduler import choose
from slurmrl.scheduler.base import GroupRequest
from slurmrl.workers import hardware_job
from slurmrl.workers.hardware_sizes import ON_CPUS, ON_GPUS, MeasureSizes

SENT: Final[Mapping[str, float]] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Number of times that a collective sends each rank the missing part of the tensor."""
LARGEST_SHARE: Final = 1.5
LEAST_S: Final = 1e-7


def profile_text(
    name: str, made_by: str, ranks: Sequence[Sequence[Mapping[str, Any]]], model: Mapping[str, Any]
) -> str:
    """Return the file of a profile.

    Args:
        name: Name of the hardware.
        made_by: Time, program and hosts, in one line.
        ranks: The points of each rank.
        model: The architecture whose layers were measured.

    Raises ConfigError for points that give no valid profile.
    """
    points = _together(ranks)
    like = name if name in hardware.shipped_names() else FITTED_GPU
    shape = read(model)
    assert shape is not None, "the built-in decoder runs the measured model"
    measured = _Measured(name, like, points, shape)
    numbers = {key: float(f"{value:.4g}") for key, value in measured.numbers().items()}
    values = {"hardware": name, "like": like, "made": made_by, "measured": numbers}
    hardware.checked(Source(Path(f"{name}.yaml"), values))
    lines = [f"hardware: {name}", f"like: {like}", f"made: {json.dumps(made_by)}", "measured:"]
    lines += [f"  {key}: {value:.4g}" for key, value in numbers.items()]
    lines += ["# Points, the mean of all ranks:", *(f"#   {_shown(point)}" for point in points)]
    return "\n".join(lines) + "\n"


def _shown(point: Mapping[str, Any]) -> str:
    parts = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in point.items()
        if name != "what"
    ]
    return f"{point['what']}: {', '.join(parts)}"


def _together(ranks: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Merge equal points of all ranks; return each once, with the mean of its seconds."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for points in ranks:
        for point in points:
            key = tuple(
                (name, value) for name, value in point.items() if not isinstance(value, float)
            )
            found.setdefault(key, []).append(point)
    return [
        {
            name: mean(one[name] for one in same) if isinstance(value, float) else value
            for name, value in same[0].items()
        }
        for same in found.values()
    ]


def _of(points: Iterable[Mapping[str, Any]], what: str, **like: Any) -> Iterator[Mapping[str, Any]]:
    for point in points:
        if point["what"] == what and all(point[key] == value for key, value in like.items()):
            yield point


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (a, b) of the line a + b x through ``points`` (x, y); neither is negative.

    The line minimizes the sum of the squares of the relative errors.
    """
    weights = [(1 / y, x / y) for x, y in points]
    aa = sum(one * one for one, _ in weights)
    ab = sum(one * other for one, other in weights)
    bb = sum(other * other for _, other in weights)
    a1, b1 = sum(one for one, _ in weights), sum(other for _, other in weights)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        a, b = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if a > 0 and b > 0:
            return a, b
        if a <= 0:
            return 0.0, b1 / bb
    return a1 / aa, 0.0


def _memory(points: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    rates = {what: _rate(next(_of(points, what))) for what in ("copy", "add", "row")}
    found = {
        "bytes_per_s": rates["copy"],
        "stream": min(rates["add"] / rates["copy"], LARGEST_SHARE),
        "decoding": min(rates["row"] / rates["copy"], LARGEST_SHARE),
    }
    for point in _of(points, "host_copy"):
        found["host_link"] = _rate(point)
    for point in _of(points, "device"):
        found["memory_gib"] = point["bytes"] / GIB
    return found


def _rate(point: Mapping[str, Any]) -> float:
    return float(point["bytes"] / point["seconds"])


def _collectives(points: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return rates of links in bytes per second, latencies in seconds, and the overlap.

    The overlap is the share of a transfer that computation hides, from 0 to 1.
    """
    found: dict[str, float] = {}
    names = {"host": ("link", "latency"), "hosts": ("network", "network_latency")}
    for place, (rate, latency) in names.items():
        sent = [
            (times * one["bytes"] * (one["ranks"] - 1) / one["ranks"], one["seconds"])
            for what, times in SENT.items()
            for one in _of(points, what, place=place)
        ]
        if sent:
            first, each = _line(sent)
            found |= {rate: 1 / max(each, 1e-15), latency: max(first, LEAST_S), "links": 1.0}
    for point in _of(points, "overlap"):
        both, shorter = point["seconds"], min(point["gather"], point["product"])
        hidden = (point["gather"] + point["product"] - both) / shorter
        found["overlap"] = min(max(hidden, 0.0), 1.0)
    return found


def _files(points: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {
        "file_create_s": next(_of(points, "file_create"))["seconds"],
        "file_read_s": next(_of(points, "file_read"))["seconds"],
        "file_bytes_per_s": _rate(next(_of(points, "file_write"))),
    }


@dataclass(frozen=True)
class _Measured:
    """The points of a measurement, and the hardware and model that they describe."""

    name: str
    like: str
    """Name of the shipped profile that supplies unmeasured numbers."""
    points: Sequence[Mapping[str, Any]]
    shape: ModelShape

    @property
    def width(self) -> int:
        """Number of bytes of a value of the model."""
        return 4 if self.name == CPU else 2

    def numbers(self) -> dict[str, float]:
        """Return all numbers of the profile."""
        numbers = {
            **self._products(),
            **_memory(self.points),
            **_collectives(self.points),
            **_files(self.points),
        }
        numbers |= self._layers(numbers)
        numbers |= self._tokens(numbers)
        numbers |= self._gathers(numbers)
        return numbers

    def _products(self) -> dict[str, float]:
        """Return rates of matrix products, and the side of a square product with half of the rate.

        Seconds per operation of a square product are 1 / rate + half_side / (rate * side).
        """
        lines = {}
        for one in (2, 4):
            found = list(_of(self.points, "product", width=one))
            seconds = [
                (1 / each["side"], each["seconds"] / (2 * each["side"] ** 3)) for each in found
            ]
            lines[one] = _line(seconds)
        rates = {one: 1 / max(line[0], 1e-18) for one, line in lines.items()}
        peak = (
            hardware.shipped_file(self.name).vendor.flops_per_s if self.name == self.like else None
        )
        products = 1.0 if peak is None else min(rates[2] / peak, LARGEST_SHARE)
        at_once, per_side = lines[self.width]
        return {
            "flops_per_s": rates[2] / products,
            "float32_flops_per_s": rates[4] / products,
            "products": products,
            "half_side": max(per_side / max(at_once, 1e-18), 1.0),
        }

    def _machine(self, numbers: Mapping[str, float], **others: float) -> Machine:
        values = {"hardware": self.name, "like": self.like, "measured": {**numbers, **others}}
        hardware = made(HardwareFile.model_validate(values), "measured")
        return Machine(hardware.gpu, 1, hardware.efficiency)

    def _layers(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return the efficiency of attention, the traffic of a layer, and its launch seconds.

        Only attention makes long sequences slower than short sequences. For short sequences, all
        time except matrix products and attention counts as traffic. A pass over one token only
        starts the operations and reads the weights. A CPU starts operations before it computes; a
        GPU does both at the same time.
        """
        forward = sorted(
            _of(self.points, "forward"), key=lambda one: (one["tokens"], one["length"])
        )
        one, short, long = forward
        tiny = {"launches": LEAST_S, "traffic": 1.0}
        machine = self._machine(numbers, attention=1.0, **tiny)
        jobs = [self._pass(point) for point in (short, long)]
        least = [pass_seconds.inference(job, machine) for job in jobs]
        more = max(long["seconds"] - short["seconds"], 1e-9)
        share = (least[1]["attention"] - least[0]["attention"]) / more
        attention = min(max(share, 1e-3), LARGEST_SHARE)
        started = one["seconds"]
        known = least[0]["products"] + least[0]["attention"] / attention
        if not machine.gpu.asynchronous:
            weights = layer_parameters(self.shape, jobs[0].allocation, moe=False).total
            started -= self.shape.layers * weights * self.width / machine.streamed
            known += started
        moved = max(short["seconds"] - known, 0.0) * machine.streamed
        elements = moved / (short["tokens"] * self.width * self.shape.layers)
        return {
            "attention": attention,
            "traffic": max((elements - 4 * self.shape.inner) / self.shape.hidden, 1.0),
            "launches": max(started / self.shape.layers, LEAST_S),
        }

    def _gathers(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return the overhead of gathering a layer's weights in seconds, without its transfer."""
        point = next(_of(self.points, "sharded"), None)
        if point is None:
            return {}
        machine = self._machine({**numbers, "gathers": LEAST_S})
        if point["place"] == "host":
            machine = replace(machine, gpus_per_host=point["ranks"])
        (one,) = _of(self.points, "forward", tokens=1)
        job = self._pass(one, f"fsdp:d{point['ranks']}")
        known = pass_seconds.inference(job, machine)["weights"]
        left = (point["seconds"] - one["seconds"] - known) / (self.shape.layers + 1)
        return {"gathers": max(left, LEAST_S)}

    def _pass(self, point: Mapping[str, Any], layout: str = "fsdp:d1") -> pass_seconds.PassJob:
        """Return the forward pass that a point measured. Its value head costs almost nothing."""
        tokens = point["tokens"]
        return pass_seconds.PassJob(
            shape=self.shape,
            allocation=parse(layout),
            head="value",
            tokens=tokens,
            length=point["length"],
            microbatch=tokens,
            width=self.width,
            sharded=layout != "fsdp:d1",
            small=True,
        )

    def _tokens(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds per token and per sequence that no other number explains."""
        machine = self._machine(numbers, token=LEAST_S, row=LEAST_S)
        left = []
        for point in sorted(_of(self.points, "generate"), key=lambda one: one["rows"]):
            rows, count = point["rows"], point["tokens"]
            job = pass_seconds.DecodeJob(
                shape=self.shape,
                allocation=parse("native:d1"),
                sequences=rows,
                prompt=1,
                group=rows,
                lengths=pass_seconds.LengthDistribution(count, count),
                cache_tokens=1e12,
                width=self.width,
            )
            left.append(
                (rows, point["seconds"] - pass_seconds.generation(job, machine)["decode"] / count)
            )
        (few, first), (many, last) = left
        row = max((last - first) / max(many - few, 1), LEAST_S)
        return {"token": max(first - few * row, LEAST_S), "row": row}


GROUP: Final = "profile"
RANKS: Final = 2
"""Number of ranks on a host if neither its GPUs nor the workers per host are known."""


@dataclass(frozen=True)
class Profiling:
    """Scope of a measurement."""

    config: Path | None
    overrides: tuple[str, ...]
    root: Path | None
    fallback: Path
    """The root if no option, variable or profile sets a root."""
    scheduler: str | None
    hosts: int | None
    ranks: int | None
    """Number of ranks on each host."""
    name: str | None
    """Name of the hardware."""
    output: Path | None
    timeout_s: float
    sizes: MeasureSizes | None = None
    """Sizes of the measurements; None means the default for CPUs or GPUs."""


@dataclass
class ProfileJob(ShortJob):
    """The job that measures the hardware. Its results are the points of all ranks."""

    program: ClassVar = "slurmrl.workers.hardware_job"
    minutes: ClassVar = "20"
    runs_s: ClassVar = hardware_job.LIMIT_S + 60
    srun_options: ClassVar = ("--kill-on-bad-exit=1",)

    sizes: MeasureSizes = ON_CPUS

    def write(self) -> None:
        """Write the package and the request."""
        super().write()
        request = {
            "ranks_per_host": self.group.workers_per_host,
            "hosts": self.group.hosts,
            "gpus": self.group.gpus_per_worker,
            "threads": self.cluster.threads_per_worker,
            "interface": self.cluster.interface,
            "slurm": self.cluster.slurm.model_dump(include={"container", "container_python"}),
            "sizes": asdict(self.sizes),
        }
        atomic.replace(self.folder / hardware_job.ASK, json.dumps(request).encode())

    def points(self) -> tuple[list[str], list[list[dict[str, Any]]]]:
        """Run the job; return its hosts and the points of each rank.

        Raises SchedulerError, and EnvironmentFailure if a host has no result.
        """
        jobs, ended = self.ended()
        try:
            answers = self.answers()
        finally:
            clear_away(jobs)
        failures = [found for _, found in sorted(answers.items()) if "error" in found]
        if failures:
            first = min(failures, key=lambda found: bool(found.get("echo")))
            raise EnvironmentFailure(f"host {first['host']}: {first['error']}\n{first['log']}")
        if missing := self.missing(answers, ended):
            raise EnvironmentFailure(missing)
        hosts, ranks = [], []
        for task, found in sorted(answers.items()):
            with documents.expecting(self.folder / hardware_job.result_name(task)):
                hosts.append(str(found["host"]))
                ranks += [list(one["points"]) for one in found["ranks"]]
        return hosts, ranks


def profile(what: Profiling, say: Say) -> Path:
    """Measure the hardware, write its profile and return the path of the profile.

    Raises UsageError, EnvironmentFailure, SchedulerError; nothing is written then.
    """
    cluster, root = _cluster(what)
    kind = choose(what.scheduler or cluster.scheduler, asks_slurm=cluster.asks_slurm)
    group = _group(what, cluster, kind)
    gpus = group.gpus_per_worker
    name = what.name or _name(cluster, gpus)
    if name is not None:
        _output(what, name)  # Reject an invalid name or folder before the job.
    if name is not None and (name == CPU) == bool(gpus):
        seen = "GPUs" if gpus else "no GPUs"
        raise UsageError(f"--name {name}: the ranks have {seen}; '{CPU}' means no GPUs")
    sizes = what.sizes or (ON_GPUS if gpus else ON_CPUS)
    count = f"{group.hosts} host{'s' * (group.hosts > 1)}"
    each = f"{group.workers_per_host} rank{'s' * (group.workers_per_host > 1)} each"
    say(f"a job of {count} with {each} on {kind} measures the hardware, which takes minutes")
    with scratch(root) as paths:
        job = ProfileJob(paths, kind, cluster, group, what.timeout_s, say, sizes)
        hosts, ranks = job.points()
    name = name or _seen(ranks)
    made = (
        f"measured by slurmrl profile-cluster on {datetime.now(UTC):%Y-%m-%d} on "
        f"{', '.join(hosts)} with {each}"
    )
    text = profile_text(name, made, ranks, sizes.model)
    path = _output(what, name)
    atomic.make_private_directory(path.parent)
    atomic.replace(path, text.encode())
    return path


def _cluster(what: Profiling) -> tuple[Cluster, Path]:
    """Return the settings of the cluster, and the folder of all runs."""
    if what.config is not None:
        settings = load_settings(
            what.config, what.overrides, root=what.root, scheduler=what.scheduler, planning=True
        )
        return settings.config.cluster, Path(settings.config.root)
    path = profiles.in_force()
    cluster = Cluster() if path is None else load_profile(path).cluster
    return cluster, what.root or what.fallback


def _group(what: Profiling, cluster: Cluster, kind: str) -> GroupRequest:
    """Return the hosts and ranks of the job: two hosts if possible, one rank for each GPU."""
    rows = usable_hosts(cluster) if kind != "local" else []
    on_gpus = gpus_per_worker(cluster, kind)
    most = max((row.gpus for row in rows), default=0) if on_gpus else 0
    ranks = what.ranks or cluster.workers_per_host or most or RANKS
    fit = [row for row in rows if row.gpus >= ranks * on_gpus]
    hosts = what.hosts or min(2, max(len(fit), 1))
    if kind == "local" and hosts > 1:
        raise UsageError("--hosts: the local scheduler has one host")
    if ranks * hosts == 1:
        raise UsageError("--ranks: collectives need at least two ranks")
    cores = cluster.cpus_per_worker or cluster.threads_per_worker
    group = GroupRequest(name=GROUP, hosts=hosts, workers_per_host=ranks, gpus_per_worker=on_gpus)
    return replace(group, cpus_per_worker=cores, mem_per_worker=cluster.mem_per_worker)


def _name(cluster: Cluster, gpus: int) -> str | None:
    """Return the name by which `plan` finds the hardware; None if only the job can detect it."""
    if not gpus:
        return CPU
    known = hardware.name_of(cluster.model_copy(update={"gpus_per_worker": 1}))
    return known or hardware.new_name(cluster.slurm.gpu_type or "")


def _seen(ranks: list[list[dict[str, Any]]]) -> str:
    """Return the name of the GPU that the ranks have reported."""
    full = next(point["name"] for points in ranks for point in points if point["what"] == "device")
    found = hardware.new_name(str(full))
    assert found is not None, "a GPU has a name"
    return found


def _output(what: Profiling, name: str) -> Path:
    path = what.output or hardware.own_folder() / f"{name}.yaml"
    if path.is_dir():
        raise UsageError(f"--output {path}: is a directory, not a file")
    if what.output is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"--output {path}: there is no folder {path.parent}")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,63}", name):
        raise UsageError(
            f"--name {name}: a name has 1 to 64 lower-case letters, digits, '.' or '-'"
        )
    return path
