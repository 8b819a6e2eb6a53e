"""Pure parsers of Slurm's output: ids, elements, hosts, times, exit codes, partitions, accounts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from slurmrl.errors import SchedulerError

HOSTS_FORMAT = "%N|%T|%G|%c|%m"
"""Fields requested from sinfo, which prints a line for each host and partition: host, state,
generic resources, CPUs, megabytes of memory."""
PARTITIONS_FORMAT = "%P|%a|%l|%D|%c|%m|%G"
"""Fields requested from sinfo, which prints a line for each partition and kind of host: partition
(a star marks the default), availability, time limit, number of hosts, CPUs, megabytes of memory,
generic resources."""
ACCOUNTS_FORMAT = "User,DefaultAccount,Account"
NO_JOB_ID = "sbatch did not answer with a job id but with"
"""Beginning of the error if sbatch succeeded but printed no job id."""
MOST_DIGITS = 7
"""Maximum number of digits in ranges of elements and hosts; Slurm has at most 4,000,001 elements.
"""
_PLACES = re.compile(r"\([^)]*\)")
_COUNT = re.compile(r"(\d+)([KMGTP]?)", re.IGNORECASE)
NO_CONSUME = "no_consume"
NO_EXIT = (None, None)
NOTHING = ("None", "N/A", "(null)", "Unknown")


@dataclass(frozen=True)
class HostRow:
    """One host of the cluster."""

    name: str
    state: str
    gpus: int
    cpus: int = 0
    """Number of CPUs (cores or hardware threads); 0 if unknown."""
    memory_mib: int = 0
    """Memory of the host in MiB; 0 if unknown."""


def cluster_hosts(text: str) -> list[HostRow]:
    """Return each host in sinfo's output once, with the total number of its GPUs of all types."""
    found = {}
    for line in rows(text, "sinfo", lambda line: re.match(r"[^|\s]+\|[^|\s]+\|", line)):
        parts = line.split("|")
        gpus = gpu_count(parts[2])
        cpus, memory_mib = (whole(text) for text in [*parts[3:5], "", ""][:2])
        known_mib = memory_mib if memory_mib > 1 else 0  # sinfo prints 1 for unknown memory.
        found[parts[0]] = HostRow(parts[0], parts[1], gpus, cpus, known_mib)
    return list(found.values())


def gpu_count(resources: str) -> int:
    """Return the total number of GPUs of all types in a host's generic resources."""
    return sum(number for _, number in gpus(resources))


def gpus(resources: str) -> list[tuple[str, int]]:
    """Return type and number of each kind of GPU in generic resources.

    An example of resources is ``gpu:a100:4(S:0,2),gpu:1g.5gb:2,shard:8``. The type may be empty.
    A missing number means 1. Suffixes K to P multiply by powers of 1024, as in Slurm.
    """
    found = []
    for entry in _PLACES.sub("", resources).split(","):
        name, *rest = entry.strip().removeprefix("gres/").replace("=", ":").split(":")
        if name != "gpu":
            continue
        rest = [part for part in rest if part != NO_CONSUME]
        count = _COUNT.fullmatch(rest[-1]) if rest else None
        number = (
            1 if count is None else int(count[1]) << 10 * " KMGTP".index(count[2].upper() or " ")
        )
        found.append((":".join(rest if count is None else rest[:-1]), number))
    return found


def whole(text: str) -> int:
    """Return the integer in a string such as ``64`` or sinfo's ``64+``; 0 for other strings."""
    digits = text.strip().removesuffix("+")
    return int(digits) if digits.isdecimal() else 0


def job_id(text: str) -> str:
    """Return the job id in ``sbatch --parsable``'s output, which is ``41`` or ``41;cluster``.

    A wrapper of sbatch may print other lines. Raises SchedulerError unless exactly one line has
    this form.
    """
    found = [re.fullmatch(r"(\d+)(;\S*)?", line.strip()) for line in text.splitlines()]
    ids = [each[1] for each in found if each]
    if not ids:
        raise SchedulerError(f"{NO_JOB_ID} {text.strip()!r}")
    if len(ids) > 1:
        raise SchedulerError(f"sbatch did not answer with one job id but with {text.strip()!r}")
    return ids[0]


def messages(text: str) -> list[str]:
    """Return the lines that sbatch, its plugins or a wrapper printed, without sbatch's prefixes."""
    lines = (re.sub(r"^\s*sbatch: (error: )?", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line]


def expected_start(text: str) -> datetime:
    """Return the start time (UTC) in the output of ``sbatch --test-only``.

    Raises SchedulerError if the output names no time.
    """
    found = re.search(r" to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", text)
    if found is None:
        said = " ".join(messages(text)) or "nothing"
        raise SchedulerError(f"sbatch --test-only did not name a start time; it printed: {said}")
    return datetime.fromisoformat(found[1]).replace(tzinfo=UTC)


def rows(text: str, command: str, is_row: Callable[[str], object]) -> list[str]:
    """Return the lines of a command's output that are rows.

    Skip lines of a wrapper. Raises SchedulerError if the output has only other lines: the command
    may have failed.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = [line for line in lines if is_row(line)]
    if lines and not found:
        raise SchedulerError(f"unexpected line from {command}: {lines[0]!r}")
    return found


def _ranges(text: str) -> Iterable[str]:
    """Yield the numbers in ranges joined by commas.

    Examples are ``4-6`` (4 5 6), ``001-003`` (001 002 003) and ``0-4:2`` (0 2 4).
    """
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part.strip())
        if not found:
            raise SchedulerError(f"Slurm printed {text!r}, in which {part!r} is not a range")
        first, last, step = found[1], found[2] or found[1], int(found[3] or 1)
        if max(len(first), len(last)) > MOST_DIGITS or step < 1:
            raise SchedulerError(f"Slurm printed {text!r}, in which {part!r} is not a range")
        for value in range(int(first), int(last) + 1, step):
            yield str(value).zfill(len(first))


def elements(text: str) -> tuple[int, ...]:
    """Parse array elements as squeue prints them, such as ``3``, ``[4-9%4]`` or ``0,2-6:2``.

    ``N/A`` gives no elements: the job is not an array, or its pending elements were cancelled.
    """
    ranges = text.strip().strip("[]").partition("%")[0].strip("[]")
    if ranges in ("", "N/A"):
        return ()
    return tuple(int(value) for value in _ranges(ranges))


def element_list(values: Iterable[int]) -> str:
    """Format elements as Slurm's commands accept them, such as ``0,4-7``."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and runs[-1][1] == value - 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def hosts(text: str) -> tuple[str, ...]:
    """Expand a host list such as ``n[0-1,07],gpu-3[1-2]x``."""
    names: list[str] = []
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text.strip()):
        expanded = [""]
        for plain, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", entry):
            tails = [plain] if plain else list(_ranges(ranges))
            expanded = [head + tail for head in expanded for tail in tails]
        names += expanded
    return tuple(names)


def exit_status(text: str) -> tuple[int | None, int | None]:
    """Return exit code and signal from ``3:0`` (sacct, scontrol) or ``768`` (squeue)."""
    code, colon, number = text.strip().partition(":")
    if not code.isdigit() or (colon and not number.isdigit()):
        return NO_EXIT
    if colon:
        return int(code), int(number) or None
    return int(code) >> 8 & 255, int(code) & 127 or None


def duration_s(text: str) -> float | None:
    """Return the seconds in ``1-02:03:04``, ``02:03:04`` or ``03:04``; None for other strings."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def time_left_s(text: str) -> float | None:
    """Return the last duration, in seconds, among the lines of a command's output, or None."""
    found = [duration_s(line) for line in text.splitlines()]
    return next((seconds for seconds in reversed(found) if seconds is not None), None)


def partition_names(text: str) -> list[str]:
    """Return the names in sinfo's list of partitions and their availability."""
    found = rows(text, "sinfo", re.compile(r"[^|\s]+\|(up|down|drain|inact)\S*").fullmatch)
    return sorted({line.partition("|")[0] for line in found})


def assignments(text: str) -> dict[str, str]:
    """Parse ``Name = value`` lines, as ``scontrol show config`` prints them."""
    found = re.findall(r"^(\S+)\s*=\s*(.*?)\s*$", text, re.MULTILINE)
    return dict(found)


def said(text: str) -> str:
    """Return a field without Slurm's placeholders, such as ``None``.

    A row of several elements joins their reasons, as in ``JobArrayTaskLimit,None``.
    """
    return ",".join(part for part in text.split(",") if part.strip() not in NOTHING)


@dataclass(frozen=True)
class HostKind:
    """The hosts of a partition with equal hardware."""

    hosts: int
    cpus: int
    memory_mib: int
    gpus: int
    gpu_types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Partition:
    """A partition, with its kinds of hosts in sinfo's order."""

    name: str
    is_default: bool
    is_up: bool
    time_limit: str
    """Time limit as sinfo prints it, such as ``1-00:00:00`` or ``infinite``."""
    kinds: tuple[HostKind, ...]

    @property
    def hosts(self) -> int:
        return sum(kind.hosts for kind in self.kinds)

    @property
    def most_gpus(self) -> int:
        """Maximum number of GPUs in one host."""
        return max((kind.gpus for kind in self.kinds), default=0)

    @property
    def gpu_types(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for kind in self.kinds for name in kind.gpu_types))


@dataclass(frozen=True)
class Accounts:
    """The accounts that a user may charge."""

    names: tuple[str, ...]
    default: str
    """Name of the default account; empty if there is none."""


def partitions(text: str) -> list[Partition]:
    """Return the partitions in sinfo's output, the default partition first."""
    found: dict[str, Partition] = {}
    bars = PARTITIONS_FORMAT.count("|")
    for line in rows(text, "sinfo", lambda line: line.count("|") == bars):
        parts = line.split("|")
        label, state, limit, hosts, cpus, memory, resources = parts
        name = label.removesuffix("*")
        kind = HostKind(
            whole(hosts),
            whole(cpus),
            whole(memory),
            gpu_count(resources),
            tuple(dict.fromkeys(name for name, _ in gpus(resources) if name)),
        )
        before = found[name].kinds if name in found else ()
        found[name] = Partition(name, label != name, state == "up", limit, (*before, kind))
    return sorted(found.values(), key=lambda one: not one.is_default)


def accounts(text: str) -> Accounts:
    """Return each account in sacctmgr's output once, the default account first."""
    names, default = [], ""
    for line in rows(text, "sacctmgr", re.compile(r"[^|\s]+\|[^|\s]*\|[^|\s]*\|?").fullmatch):
        parts = line.split("|")
        default = said(parts[1]) or default
        names.append(said(parts[2]))
    return Accounts(tuple(dict.fromkeys(name for name in [default, *names] if name)), default)


def version(text: str) -> str:
    """Return ``22.05.8`` from sbatch's ``slurm 22.05.8`` or ``slurm-wlm 22.05.8``."""
    found = rows(text, "sbatch", re.compile(r"slurm\S* \S+").fullmatch)
    return found[-1].rpartition(" ")[2] if found else ""


def qos_limits(text: str) -> dict[str, str]:
    """Return the time limit of each QOS in sacctmgr's output. Empty means no limit."""
    found = rows(text, "sacctmgr", re.compile(r"[^|\s]+\|[\d:-]*").fullmatch)
    return {name: limit for name, _, limit in (line.partition("|") for line in found)}


def names(text: str, field: str) -> list[str]:
    """Return the sorted names in ``field=NAME,NAME`` at the beginning of lines."""
    found = re.findall(rf"^{field}=(\S+)", text, re.MULTILINE)
    # A comma in brackets, as in n[0-3,7], does not separate names.
    parts = (part for line in found for part in re.split(r",(?![^\[]*\])", line))
    return sorted({part for part in parts if said(part)})
