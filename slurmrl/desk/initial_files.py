"""Files for new users: first configurations, the shipped examples, and a site profile.

Each question of a site profile shows facts about the cluster and proposes an answer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import textwrap
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from slurmrl import package
from slurmrl.config.load import validate
from slurmrl.config.profiles import ROOT_RULE, is_root
from slurmrl.config.schema import Profile
from slurmrl.config.source import KeyPath, Source
from slurmrl.desk import copying
from slurmrl.env import user_name
from slurmrl.errors import EnvironmentFailure, SchedulerError, UsageError
from slurmrl.fsio import atomic
from slurmrl.plan.algorithms import POLICY_GRADIENTS
from slurmrl.registry import near
from slurmrl.run.channel.wakeups import default_address, interface_address, interface_of
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.parse import Accounts, HostKind, Partition, duration_s

REWARD: Final = "reward.txt"
PLAIN: Final = re.compile(r"[\w.][\w.+-]*(?: [\w.+-]+)*")
RULE: Final = "its name may have letters, digits, '.', '_', '-', '+' and single spaces"
"""The rule for names, because the configuration names the files next to it without quotes."""
EXAMPLES: Final = package.FOLDER / "examples"
FETCHED: Final = ("data",)
"""Folders of data that the user of a checkout has downloaded."""


@dataclass(frozen=True)
class Starter:
    """The templates of a first configuration."""

    template: str
    """File name of the configuration's template."""
    data: str
    """File name of the template with lines of data."""
    rewards: bool = False
    """Whether the algorithm needs a reward."""


STARTERS: Final[dict[str, Starter]] = {
    "sft": Starter("sft.yaml", "answers.jsonl"),
    "ppo": Starter("ppo.yaml", "answers.jsonl", rewards=True),
    **{
        name: Starter("grpo.yaml", "answers.jsonl", rewards=True)
        for name in POLICY_GRADIENTS
        if name != "ppo"
    },
    "dpo": Starter("dpo.yaml", "pairs.jsonl"),
    "kto": Starter("kto.yaml", "labels.jsonl"),
    "reward_model": Starter("reward_model.yaml", "pairs.jsonl"),
    "distill": Starter("distill.yaml", "answers.jsonl", rewards=True),
}
"""Templates by the name of the algorithm."""


def starter_files(kind: str, output: Path) -> dict[Path, str]:
    """Return the content of the files to write, the configuration ``output`` first.

    The other files are in the same folder, and their names contain the configuration's name. Raises
    UsageError for an unknown kind or an unusable name.
    """
    starter = STARTERS.get(kind)
    if starter is None:
        raise UsageError(f"'{kind}' is not a kind of configuration; {near(kind, list(STARTERS))}")
    if output.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--output {output}: the name of a configuration ends with .yaml")
    if not PLAIN.fullmatch(output.stem):
        raise UsageError(f"--output {output}: {RULE}")
    stem = re.sub(r"\W", "_", output.stem, flags=re.ASCII)
    module = f"{stem}_reward" if stem[:1].isalpha() else f"reward_{stem}"
    words = {
        "FILE": output.name,
        "NAME": re.sub(r"[^A-Za-z0-9._-]|^[._-]+|\.\.+", "-", output.stem).strip("-")[:64] or kind,
        "DATA": f"{output.stem}.jsonl",
        "REWARD": module,
        "ALGORITHM": kind,
    }
    made = {
        output: _filled(starter.template, words),
        output.with_name(words["DATA"]): _filled(starter.data, {}),
    }
    if starter.rewards:
        made[output.with_name(f"{module}.py")] = _filled(REWARD, words)
    return made


def _filled(template: str, words: dict[str, str]) -> str:
    text = package.read(f"desk/templates/{template}").decode()
    for name, value in words.items():
        text = text.replace(f"@{name}@", value)
    return text


def write_files(files: Mapping[Path, str], *, force: bool) -> list[Path]:
    """Write all files or none; return the files that are new or changed.

    Each file appears once it is complete. The first file is written last, so that its existence
    implies the other files.

    Raises UsageError for an existing file with different content unless ``force``, and
    EnvironmentFailure for files that cannot be written.
    """
    data = {path: text.encode() for path, text in files.items()}
    taken = [str(path) for path in data if path.exists() and not _has(path, data[path])]
    if taken and not force:
        verb = "exist" if len(taken) > 1 else "exists"
        raise UsageError(f"{', '.join(taken)} {verb}: --force replaces, --output changes the name")
    for path in data:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a file: choose another name with --output")
    needed = [path for path in data if not _has(path, data[path])]
    for path in reversed(needed):
        if force:
            atomic.replace(path, data[path])
        elif not atomic.exclusive_create(path, data[path]):
            raise UsageError(f"another process has just created {path}, which stays unchanged")
    return needed


def _has(path: Path, data: bytes) -> bool:
    """Return whether a file already has this content."""
    return path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data


def examples() -> Iterator[tuple[str, str]]:
    """Yield the name and the description of each example. Raises EnvironmentFailure."""
    if not EXAMPLES.is_dir():
        raise EnvironmentFailure(
            f"{EXAMPLES} is missing: this slurmrl was copied without its examples; install it"
        )
    for path in sorted(EXAMPLES.rglob("*.yaml")):
        if path.relative_to(EXAMPLES).parts[0] not in FETCHED:
            yield str(path.relative_to(EXAMPLES)), _summary(path)


def copy_examples(target: Path) -> None:
    """Copy all examples with their data into a new folder, which appears once it is complete.

    Raises UsageError for an existing folder that is not empty, EnvironmentFailure.
    """
    list(examples())
    if target.exists() and not (target.is_dir() and not os.listdir(target)):
        raise UsageError(f"{target} exists: choose another folder with --output")
    made = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    try:
        copying.copy(EXAMPLES.resolve(), made, FETCHED)
        os.rename(made, target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    atomic.sync_directory(target.parent)


def _summary(path: Path) -> str:
    """Return the beginning of the first comment of a file, up to a colon or a period."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        lines.append(line.removeprefix("# "))
    return re.split(r"[.:] ", " ".join(lines))[0].rstrip(".:")


DAY_S: Final = 24 * 3600
DAY: Final = "24:00:00"
MOST_SHOWN: Final = 12
PARTITION: Final = ("cluster", "slurm", "partition")
GPUS: Final = ("cluster", "gpus_per_worker")
SETUP: Final = ("cluster", "slurm", "setup")
WIDTH: Final = 100
_PLAIN: Final = re.compile(r"(?:[A-Za-z]|~?/)[A-Za-z0-9_./-]*")
_WORDS: Final = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
"""Values that some version of YAML does not read as a string."""
HEAD: Final = """\
# Site profile of slurmrl, by `slurmrl init site`{of}.
# Each setting holds for all of your configurations that do not set it themselves; `slurmrl plan`
# shows which ones. `root` and all settings of `cluster` are allowed here.
"""
UNSET: Final = "..."
"""Words in place of a value that the user has left out."""
TIMEOUT_S = 20.0
"""Limit in seconds for each of Slurm's commands."""
NETWORK = Path("/sys/class/net")
INFINIBAND = "32"
"""Kernel's type of InfiniBand interfaces (ARPHRD_INFINIBAND of linux/if_arp.h)."""


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface of this host that has an IPv4 address."""

    name: str
    is_infiniband: bool
    is_default: bool
    """Whether the default route uses the interface."""


@dataclass
class Survey:
    """Facts about the cluster; unknown values are empty, and ``missing`` has the reasons."""

    cluster: str = ""
    """Name of the cluster and version of Slurm."""
    partitions: list[Partition] = field(default_factory=list)
    accounts: Accounts = field(default_factory=lambda: Accounts((), ""))
    interfaces: list[NetworkInterface] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def survey() -> Survey:
    """Return facts about the cluster from Slurm's commands and this host."""
    found, client = Survey(), SlurmClient(timeout_s=TIMEOUT_S)
    try:
        name = client.settings().get("ClusterName", "")
        found.cluster = f"{name} (Slurm {client.version()})".strip()
        found.partitions = client.partitions()
    except SchedulerError as error:
        found.missing.append(f"the partitions: {_brief(error)}")
    try:
        found.accounts = client.accounts(user_name())
        if not found.accounts.names:
            found.missing.append("accounts: sacctmgr lists no account for this user")
    except SchedulerError as error:
        found.missing.append(f"your accounts: {_brief(error)}")
    found.interfaces = interfaces()
    if not found.interfaces:
        found.missing.append("network interfaces: no interface of this host has an IPv4 address")
    return found


def _brief(error: SchedulerError) -> str:
    """Return the last line of a command's message, which has the reason."""
    return str(error).splitlines()[-1]


def interfaces(folder: Path = NETWORK) -> list[NetworkInterface]:
    """Return the network interfaces of this host, without loopback."""
    address = default_address()
    default = interface_of(address) if address else None
    names = [name for _, name in socket.if_nameindex() if name != "lo" and interface_address(name)]
    return [NetworkInterface(name, is_infiniband(folder / name), name == default) for name in names]


def is_infiniband(interface: Path) -> bool:
    """Return whether an interface, given by its folder in ``/sys``, is InfiniBand."""
    try:
        return (interface / "type").read_text().strip() == INFINIBAND
    except OSError:
        return False


@dataclass(frozen=True)
class Question:
    """One setting of the profile."""

    key: KeyPath
    about: str
    """Description of the setting, with facts about this cluster."""
    proposal: str = ""
    """Proposed answer; empty to leave the setting out."""


def first_questions(found: Survey, root: str) -> Iterator[Question]:
    """Yield the questions that depend on no answer."""
    about = "Folder of all runs, on a file system that login and compute nodes share."
    yield Question(("root",), about, root)
    shown = [_partition(one) for one in found.partitions[:MOST_SHOWN]]
    more = len(found.partitions) - len(shown)
    about = "Partition. " + ("; ".join(shown) if shown else "None was found.")
    yield Question(PARTITION, about + (f"; and {more} more." if more > 0 else ""), _best(found))


def further_questions(found: Survey, partition: str, modules: str) -> Iterator[Question]:
    """Yield the questions that depend on the partition, and then the remaining questions.

    An empty ``partition`` is the default partition. ``modules`` are the loaded modules in the form
    of LOADEDMODULES.
    """
    chosen = [one for one in found.partitions if one.name in partition.split(",")]
    chosen = chosen or [one for one in found.partitions if one.is_default]
    accounts, default = found.accounts.names, found.accounts.default
    about = f"Account to charge. Yours: {', '.join(accounts) or 'not known'}."
    yield Question(("cluster", "slurm", "account"), about, default or (accounts or ("",))[0])
    limits = [one.time_limit for one in chosen]
    about = "Time limit of one job of the chain; a run may take many jobs."
    about += f" Limit of the partition: {', '.join(limits)}." if limits else ""
    yield Question(("cluster", "slurm", "time"), about, _time(limits))
    types = list(dict.fromkeys(name for one in chosen for name in one.gpu_types))
    if types:
        about = f"GPU type to request. Available: {', '.join(types)}."
        yield Question(("cluster", "slurm", "gpu_type"), about, types[0] if len(types) == 1 else "")
    elif chosen and not any(one.most_gpus for one in chosen):
        yield Question(GPUS, "GPUs of a worker, 0 or 1. The partition's hosts have none.", "0")
    shown = ", ".join(map(_interface, found.interfaces)) or "not known"
    about = (
        "Network interface between workers. If left out: the interface of the default route. On "
        "this host: "
        f"{shown}. Compute nodes may have others: slurmrl doctor --job looks there."
    )
    fast = [one.name for one in found.interfaces if one.is_infiniband]
    yield Question(("cluster", "interface"), about, fast[0] if fast else "")
    about = "Shell lines at the top of each job, separated by ';'."
    about += " Proposed: the modules that are loaded in this shell." if modules else ""
    yield Question(
        SETUP, about, "; ".join(f"module load {one}" for one in modules.split(":") if one)
    )


def value_of(question: Question, answer: str) -> Any:
    """Return the value of a profile for an answer. Raises ValueError for a wrong answer."""
    value: Any = answer
    if question.key == SETUP:
        value = [line.strip() for line in answer.split(";") if line.strip()]
    elif question.key == GPUS:
        value = int(answer) if answer.isdecimal() else answer
    elif question.key == ("root",) and not is_root(answer):
        raise ValueError(ROOT_RULE)
    _, problems = validate(Profile, _source(nested({question.key: value})))
    if problems:
        raise ValueError(problems[0].message)
    return value


def doubt(question: Question, answer: str, found: Survey) -> str:
    """Return a warning about an allowed answer; empty without a warning.

    A partition that sinfo does not show may be right, because it may be hidden from the user.
    """
    known = [one.name for one in found.partitions]
    unknown = [name for name in answer.split(",") if name not in known]
    if question.key != PARTITION or not known or not unknown:
        return ""
    return f"sinfo shows no partition '{unknown[0]}'; {near(unknown[0], known)}"


def nested(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Return a mapping from keys to settings as nested sections."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        section = made
        for part in key[:-1]:
            section = section.setdefault(str(part), {})
        section[str(key[-1])] = value
    return made


def _source(values: dict[str, Any]) -> Source:
    return Source(Path("answers"), values)


def _best(found: Survey) -> str:
    """Return the first usable partition, preferring partitions with GPUs."""
    up = [one for one in found.partitions if one.is_up and one.hosts]
    with_gpus = [one for one in up if one.most_gpus]
    return next((one.name for one in [*with_gpus, *up]), "")


def _time(limits: list[str]) -> str:
    """Return the shortest of the time limits, but at most a day."""
    if not limits:
        return ""
    known = {limit: duration_s(limit) for limit in limits}
    shortest = min(limits, key=lambda limit: known[limit] or float("inf"))
    seconds = known[shortest]
    return DAY if seconds is None or seconds > DAY_S else shortest


def _partition(one: Partition) -> str:
    facts = ["default"] if one.is_default else []
    facts += [] if one.is_up else ["not up"]
    facts += [_hosts(kind) for kind in one.kinds]
    return f"{one.name} ({', '.join(facts)}, time limit {one.time_limit})"


def _hosts(kind: HostKind) -> str:
    gpus = f"{kind.gpus} GPUs {'/'.join(kind.gpu_types)}".strip() if kind.gpus else "no GPU"
    return f"{kind.hosts} hosts of {kind.cpus} CPUs, {kind.memory_mib >> 10} GiB, {gpus}"


def _interface(one: NetworkInterface) -> str:
    facts = [*(["InfiniBand"] if one.is_infiniband else [])]
    facts += ["default route"] if one.is_default else []
    return f"{one.name} ({', '.join(facts)})" if facts else one.name


def render_profile(
    questions: Sequence[Question], values: Mapping[KeyPath, Any], *, cluster: str = ""
) -> str:
    """Return the profile with a comment at each setting; comment out settings without a value."""
    lines = [HEAD.format(of=f" for {cluster}" if cluster else "")]
    opened: list[KeyPath] = []
    order = sorted(questions, key=lambda one: (one.key[0] != "root", len(one.key)))
    for question in order:
        for depth in range(1, len(question.key)):
            section = question.key[:depth]
            if section not in opened:
                opened.append(section)
                used = any(key[:depth] == section for key in values)
                lines.append(_line(section, "", is_set=used))
        lines += _comment(question)
        is_set = question.key in values
        shown = _value(values[question.key]) if is_set else UNSET
        lines.append(_line(question.key, f" {shown}", is_set=is_set))
        if question.key == ("root",):
            lines.append("")
    return "\n".join(lines) + "\n"


def _line(key: KeyPath, value: str, *, is_set: bool) -> str:
    indent = "  " * (len(key) - 1)
    return f"{indent}{'' if is_set else '# '}{key[-1]}:{value}"


def _comment(question: Question) -> Iterator[str]:
    prefix = "  " * (len(question.key) - 1) + "# "
    yield from textwrap.wrap(
        question.about,
        WIDTH,
        initial_indent=prefix,
        subsequent_indent=prefix,
        break_on_hyphens=False,
    )


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value)
