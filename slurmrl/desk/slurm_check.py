"""Checks by Slurm's commands whether Slurm would accept the jobs of a trial."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from slurmrl.config.schema import Slurm
from slurmrl.config.schema.cluster import time_limit_s
from slurmrl.desk.trial_checks import Finding, Weight
from slurmrl.env import user_name
from slurmrl.errors import SchedulerError
from slurmrl.plan.placement import ROLLOUTS, slurm_of
from slurmrl.plan.settings import Settings
from slurmrl.registry import near
from slurmrl.scheduler.base import SubmissionRequest
from slurmrl.scheduler.batch_script import Rejection, rejections
from slurmrl.scheduler.client import SlurmClient, is_out_of_service
from slurmrl.scheduler.parse import Partition

SUBJECT: Final = "slurm"
TIMEOUT_S: Final = 20.0
OF_CLUSTER: Final = {
    "mem": "cluster.mem_per_worker",
    "cpus-per-task": "cluster.cpus_per_worker",
    "nodes": "cluster.hosts",
}
OF_SLURM: Final = {"gres": "gpu_type", "gpus-per-node": "gpu_type"}
"""Mapping from a directive to its setting in ``cluster.slurm`` if the names differ."""
NAME: Final = re.compile(r"[\w.@+/-]+")
COUNT: Final = re.compile(r"[:*=]\d+")
"""Pattern of the number of licenses, or of the number of hosts with a feature."""


def ask_slurm(
    settings: Settings, request: SubmissionRequest, client: SlurmClient | None = None
) -> list[Finding]:
    """Return findings about jobs that Slurm would reject or never start, without submitting them.

    Each finding has Slurm's message and the dotted key of the setting.
    """
    client = client or SlurmClient(timeout_s=TIMEOUT_S)
    try:
        rejected = list(rejections(client, request))
        partitions = {one.name: one for one in client.partitions()}
    except SchedulerError as error:
        text = f"cannot check if Slurm would accept the jobs: {error}"
        return [Finding(SUBJECT, Weight.WARNING, text)]
    findings = [_rejected(one, settings, client, partitions) for one in rejected]
    found = {finding.key for finding in findings}
    for group in request.groups:
        slurm = slurm_of(settings.config, group.name)
        used = _partitions_of(slurm, partitions)
        more = [*_too_long(slurm, used), *_gpu_type(slurm, used), *_by_accounting(slurm, client)]
        for name, weight, message in more:
            key = _key(settings, group.name, name)
            findings += [] if key in found else [Finding(SUBJECT, weight, message, key)]
            found.add(key)
    return findings


def _rejected(
    one: Rejection, settings: Settings, client: SlurmClient, partitions: dict[str, Partition]
) -> Finding:
    name = one.directive
    if name.startswith("#"):
        what, key = f" ({name})", _key(settings, one.group, "extra_lines")
    elif name in OF_CLUSTER:
        what, key = f" (--{name})", OF_CLUSTER[name]
    else:
        what, key = "", _key(settings, one.group, OF_SLURM.get(name, name))
    job = f"the job of the {one.group} group"
    if one.waits or (one.unclear and _out_of_service(one, settings, client, partitions)):
        message = f"Slurm would accept {job}{what}, but not start it now: {one.words}"
        return Finding(SUBJECT, Weight.WARNING, message, key)
    message = f"Slurm would reject {job}{what}: {one.words}"
    value = getattr(slurm_of(settings.config, one.group), name, None)
    if value is not None:
        message = f"'{value}': {message}{_known_names(name, str(value), client)}"
    return Finding(SUBJECT, Weight.FAILED, message, key)


def _known_names(name: str, value: str, client: SlurmClient) -> str:
    """Return a hint about an unknown name in a value that Slurm has rejected, or ""."""
    try:
        known = client.names(name, user_name())
    except SchedulerError:
        return ""
    if known is None or (name == "nodelist" and "[" in value):  # Slurm expands n[1-3] itself.
        return ""
    parts = NAME.findall(COUNT.sub("", value))  # Examples: matlab:2,ansys or [rack1|rack2]
    unknown = [part for part in parts if part not in known]
    if not unknown:
        return ""
    nothing = {"constraint": "features", "account": "account for you"}.get(name, name)
    return f"; {near(unknown[0], known) if known else f'this cluster has no {nothing}'}"


def _key(settings: Settings, group: str, name: str) -> str:
    """Return the dotted key of an option of a group's jobs, or of the section for an empty name."""
    path = ("rollout", "slurm", name) if name else ("rollout", "slurm")
    own = group == ROLLOUTS and settings.source.writes(*path)
    section = "rollout.slurm" if own else "cluster.slurm"
    return f"{section}.{name}" if name else section


def _partitions_of(slurm: Slurm, partitions: dict[str, Partition]) -> list[Partition]:
    """Return the partitions in which a job may run and that the user can see."""
    if slurm.partition is None:
        return [one for one in partitions.values() if one.is_default]
    names = [name.strip() for name in slurm.partition.split(",")]
    return [partitions[name] for name in names if name in partitions]


def _out_of_service(
    one: Rejection, settings: Settings, client: SlurmClient, partitions: dict[str, Partition]
) -> bool:
    """Return whether a host or partition that the job may use is out of service."""
    slurm = slurm_of(settings.config, one.group)
    if not all(part.is_up for part in _partitions_of(slurm, partitions)):
        return True
    try:
        return any(is_out_of_service(row.state) for row in client.hosts(slurm.partition))
    except SchedulerError:
        return True


def _too_long(slurm: Slurm, partitions: list[Partition]) -> Iterator[tuple[str, Weight, str]]:
    """Yield a problem if the time limit exceeds the limits of all ``partitions``.

    On most clusters, sbatch accepts such a job.
    """
    if slurm.time is None or not partitions:
        return
    longest = max(partitions, key=lambda one: time_limit_s(one.time_limit))
    if time_limit_s(slurm.time) <= time_limit_s(longest.time_limit):
        return
    message = (
        f"{slurm.time} is above the limit of partition {longest.name}, {longest.time_limit}: Slurm "
        "would never start the job (PartitionTimeLimit)"
    )
    if slurm.qos is None:
        yield "time", Weight.FAILED, message
    else:
        yield "time", Weight.WARNING, f"{message}, unless QOS {slurm.qos} overrides the limit"


def _gpu_type(slurm: Slurm, partitions: list[Partition]) -> Iterator[tuple[str, Weight, str]]:
    known = list(dict.fromkeys(name for one in partitions for name in one.gpu_types))
    if slurm.gpu_type is None or slurm.gpu_directive == "none" or not known:
        return
    if slurm.gpu_type not in known:
        where = ", ".join(one.name for one in partitions)
        message = f"no host of partition {where} has GPUs of type '{slurm.gpu_type}'"
        yield "gpu_type", Weight.FAILED, f"{message}; {near(slurm.gpu_type, known)}"


def _by_accounting(slurm: Slurm, client: SlurmClient) -> Iterator[tuple[str, Weight, str]]:
    """Yield problems: names that the accounting lacks, and a time above the limit of the QOS.

    sbatch may accept such a job.
    """
    try:
        accounts = client.accounts(user_name()).names if slurm.account is not None else ()
        limits = client.qos_limits() if slurm.qos is not None else {}
    except SchedulerError:
        return  # There is no accounting, or ordinary users cannot read it.
    if slurm.account is not None and accounts and slurm.account not in accounts:
        message = f"Slurm's accounting has no account '{slurm.account}' of {user_name()}"
        yield "account", Weight.WARNING, f"{message}; {near(slurm.account, list(accounts))}"
    if slurm.qos is None or not limits:
        return
    if slurm.qos not in limits:
        message = f"Slurm's accounting has no QOS '{slurm.qos}'"
        yield "qos", Weight.WARNING, f"{message}; {near(slurm.qos, sorted(limits))}"
        return
    most = limits[slurm.qos]
    if slurm.time is not None and time_limit_s(slurm.time) > time_limit_s(most):
        message = f"{slurm.time} is above the limit of QOS {slurm.qos}, {most}"
        yield "time", Weight.WARNING, f"{message}: Slurm may never start the job"
