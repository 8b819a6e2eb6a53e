"""Limits of the cluster on the length of an array."""

from __future__ import annotations

import re
from collections.abc import Mapping

from slurmrl.errors import EnvironmentFailure

TOO_MANY = re.compile(
    r"submit ?jobs?(per\w+)?limit|job submit limit|invalid job array|job array index|MaxArraySize"
    r"|too many (jobs|tasks)|job count limit|MaxJobCount",
    re.IGNORECASE,
)
"""sbatch's messages for an array that is too long."""

_RECORD = re.compile(r"ClusterName=\S+ Account=(\S*) UserName=([^\s(]*)")
_SUBMIT = re.compile(r"\b(?:Max|Grp)SubmitJobs=(\d+)\((\d+)\)")


def of_arrays(settings: Mapping[str, str]) -> int | None:
    """Return the maximum length of an array from ``scontrol show config``; None if it is not there.

    Raises EnvironmentFailure where job arrays are disabled.
    """
    text = settings.get("MaxArraySize", "")
    if not text.isdigit():
        return None
    if int(text) == 0:
        raise EnvironmentFailure(
            "job arrays are disabled on this cluster (MaxArraySize=0), and a chain of links is an "
            "array: ask the administrators to enable them"
        )
    return int(text)


def of_user(text: str, user: str, account: str | None) -> int | None:
    """Return how many more jobs a user may submit, from ``scontrol show assoc_mgr``; None: no
    limit.

    The account's own records, which limit all of its users together, count too.
    """
    records = [
        (found[1], found[2], part)
        for part in re.split(r"^(?=ClusterName=)", text, flags=re.MULTILINE)
        if (found := _RECORD.match(part))
    ]
    own = [name for name, owner, part in records if owner == user and "DefAssoc=No" not in part]
    wanted = account or (own[0] if own else None)
    room = [
        int(limit) - int(used)
        for name, owner, part in records
        if owner in (user, "") and name == wanted
        for limit, used in _SUBMIT.findall(part)
    ]
    return max(min(room), 0) if room else None
