"""Explanations of Slurm's reasons for pending and ended jobs, with advice.

The names come from ``job_reason_string`` in Slurm 22.05 to 26.05 and from its page "Job Reason
Codes". Names of limits are composed (``QOSMaxGRESPerUser``), so this module parses their parts.
"""

from __future__ import annotations

import re
from typing import Final

_WAIT: Final = "nothing to do but wait"
_ADMIN: Final = "ask the administrators"
_HELD: Final = "scontrol release JOBID releases it"

REASONS: Final[dict[str, tuple[str, str]]] = {
    "Priority": (
        "jobs of higher priority are ahead of it",
        "wait, or request a shorter time or another partition",
    ),
    "Resources": ("it is next, but the hosts it needs are busy", _WAIT),
    "Dependency": ("it waits for the previous job to end", _WAIT),
    "DependencyNeverSatisfied": (
        "its dependency can no longer be met, so it never starts",
        "cancel it and resume the trial",
    ),
    "JobArrayTaskLimit": ("it waits for the previous link to end", _WAIT),
    "BeginTime": (
        "its earliest start time has not come; Slurm also delays requeued jobs",
        _WAIT,
    ),
    "ReqNodeNotAvail": (
        "hosts that it requests are down, drained or reserved",
        "see sinfo -R; loosen nodelist, exclude or constraint, or shorten time so that it ends "
        "before a maintenance window",
    ),
    "NodeDown": ("a host that it needs is down", "wait for the host, or exclude it"),
    "BadConstraints": (
        "no host meets its request",
        "compare constraint, gpu_type, memory and cores with sinfo -o '%N %f %G %m %c'",
    ),
    "Constraints": (
        "no host meets its request",
        "compare constraint, gpu_type, memory and cores with sinfo -o '%N %f %G %m %c'",
    ),
    "PartitionNodeLimit": (
        "it requests more hosts than the partition allows",
        "see scontrol show partition; request fewer hosts or choose another partition",
    ),
    "PartitionTimeLimit": (
        "its time limit exceeds the partition's limit",
        "lower cluster.slurm.time: the chain continues after each time limit",
    ),
    "PartitionDown": ("the partition accepts no jobs at the moment", _ADMIN),
    "PartitionInactive": ("the partition is inactive", _ADMIN),
    "PartitionConfig": ("the partition's limits do not allow it", "see scontrol show partition"),
    "Licenses": ("all licenses that it requests are in use", _WAIT),
    "Reservation": ("its reservation has not begun or is full", _WAIT),
    "ReservationInvalid": (
        "its reservation does not exist or is not yours",
        "cancel, and resume with another cluster.slurm.reservation",
    ),
    "ReservationDeleted": (
        "its reservation was deleted",
        "cancel, and resume with another cluster.slurm.reservation",
    ),
    "JobHeldUser": ("you hold it", _HELD),
    "JobHeldAdmin": ("an administrator holds it", _ADMIN),
    "JobHoldMaxRequeue": ("it was requeued too often and is held", _HELD),
    "InvalidAccount": (
        "its account does not exist or is not yours",
        "correct cluster.slurm.account",
    ),
    "InvalidQOS": ("its QOS does not exist or is not yours", "correct cluster.slurm.qos"),
    "AccountNotAllowed": (
        "the partition does not accept the job's account",
        "choose another account or partition",
    ),
    "QOSNotAllowed": (
        "the partition or the account does not accept the job's QOS",
        "choose another qos or partition",
    ),
    "QOSUsageThreshold": ("the QOS's usage threshold is exceeded", _WAIT),
    "AccountingPolicy": ("an accounting limit is reached", "see sacctmgr show assoc"),
    "MaxMemPerLimit": (
        "it requests more memory per core or host than is allowed",
        "lower cluster.mem_per_worker",
    ),
    "SchedDefer": ("the controller starts jobs in groups, a little later", _WAIT),
    "Cleaning": ("Slurm is cleaning up after the job's last start", _WAIT),
    "Prolog": ("the site's prolog prepares the job's hosts", _WAIT),
    "FrontEndDown": ("no front-end host is up", _ADMIN),
    "MaxPoweredUpNodes": ("the cluster may not power up more hosts at the moment", _WAIT),
    "NvidiaImexChannels": ("its GPUs need channels between hosts, which are all in use", _WAIT),
    "MpiPortsBusy": ("the ports that Slurm reserves for MPI are all in use", _WAIT),
    "FedJobLock": ("the federation decides which cluster runs it", _WAIT),
    "BurstBufferResources": ("the burst buffer is full", _WAIT),
    "BurstBufferStageIn": ("files are being staged in", _WAIT),
    "BurstBufferOperation": ("the burst buffer failed", _ADMIN),
    "PowerNotAvail": ("the cluster's power budget is used up", _WAIT),
    "PowerReserved": ("power is reserved for others", _WAIT),
    "DeadLine": ("its deadline passed", "resume the trial without a deadline"),
    "JobLaunchFailure": (
        "its hosts could not start it",
        "see the batch log; the user, the directory or the interpreter may be missing there",
    ),
    "SystemFailure": ("Slurm itself failed", _ADMIN),
    "NonZeroExitCode": ("it ended with an exit code other than 0", "see slurmrl logs"),
    "RaisedSignal": ("a signal ended it", "see slurmrl logs"),
    "TimeLimit": ("it reached its time limit", "the next link resumes from the last commit"),
    "InactiveLimit": ("it was inactive for too long", _ADMIN),
    "OutOfMemory": (
        "it used more memory than it requested",
        "raise cluster.mem_per_worker or lower max_tokens_per_mb",
    ),
}
"""Mapping from Slurm's name of a reason to its meaning and advice."""

PHRASES: Final[tuple[tuple[str, str], ...]] = (
    ("nodes required for job are down", "ReqNodeNotAvail"),
    ("launch failed requeued held", "JobLaunchFailure"),
    ("job requeued in held state", "JobHeldUser"),
    ("reservation deleted", "ReservationDeleted"),
    ("node failure", "NodeDown"),
)
"""Pairs of a phrase that Slurm shows in place of a reason's name, and the name."""

_LIMIT: Final = re.compile(
    r"(?P<owner>Assoc|Association|QOS|(?=Max\w+Per(?:Account|User)))(?P<scope>Grp|Max|Min)?"
    r"(?P<what>[A-Z]\w*?)(?:Per(?P<per>Job|Node|User|Account))?(?:Limit|NotSatisfied)?"
)
_OWNERS: Final = {"Assoc": "account", "Association": "account", "QOS": "QOS", "": "QOS"}
_SUBJECTS: Final = (
    ("submit", "jobs that may wait at once"),
    ("job", "jobs that may run at once"),
    ("gres", "GPUs or other devices"),
    ("gpu", "GPUs"),
    ("cpu", "CPU cores"),
    ("mem", "memory"),
    ("node", "hosts"),
    ("bill", "billing units"),
    ("bb", "burst buffer"),
    ("license", "licenses"),
    ("energy", "energy"),
    ("wall", "time"),
    ("time", "time"),
    ("prio", "priority"),
    ("resource", "resources"),
)


def explain(reason: str) -> str:
    """Return an explanation of a reason, and advice after a semicolon.

    Quote an unknown reason. Return an empty string if Slurm gives no reason.
    """
    text = re.sub(r"^\((.*)\)$", r"\1", reason.strip())
    if text in ("", "None", "N/A", "null"):
        return ""
    name, details = _name(text)
    if name in REASONS:
        words, advice = REASONS[name]
        return f"{words}{f' ({details})' if details else ''}; {advice}"
    return _limit(name) or f"Slurm's reason is {text!r}"


def _name(text: str) -> tuple[str, str]:
    """Split a reason into its name and its details.

    Examples are ``ReqNodeNotAvail, UnavailableNodes:n1`` and ``RaisedSignal:9(Killed)``.
    """
    plain = text.replace("_", " ").lower()
    for phrase, name in PHRASES:
        if phrase in plain:
            return name, ""
    name, details = [*re.split("[,:]", text, maxsplit=1), ""][:2]
    return name.strip(), details.strip(" _")


def _limit(name: str) -> str:
    """Explain a limit's composed name, such as ``QOSMaxGRESPerUser``; empty for another name."""
    found = _LIMIT.fullmatch(name)
    if not found:
        return ""
    owner, scope = _OWNERS[found["owner"]], found["scope"]
    what, per = found["what"].lower(), found["per"] or ""
    subject = next((words for part, words in _SUBJECTS if part in what), "resources")
    if "minutes" in what or "runmins" in what:
        budget = "of running jobs" if "run" in what else "over time"
        return (
            f"the {owner}'s budget of {subject} x minutes {budget} is used up; wait until usage "
            "decays, request a shorter time, or use another account or qos"
        )
    if scope == "Min":
        return f"it requests less {subject} than the {owner} requires; request more"
    if per in ("Job", "Node") or (subject == "time" and scope != "Grp"):
        one = "host" if per == "Node" else "job"
        return f"it requests more {subject} than the {owner} allows one {one}; request less"
    whose = {"User": "your", "Account": "your account's"}.get(per, f"the {owner}'s")
    return (
        f"{whose} limit on {subject} is reached; wait until other jobs end, or use another account "
        "or qos"
    )
