"""Blame for hosts that repeatedly cause incarnations to fail; jobs avoid them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable

from slurmrl import log
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.name_resolve.file import FileNameStore
from slurmrl.run import hosts
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Cause
from slurmrl.scheduler.slurm import SlurmScheduler
from slurmrl.watch import published

logger = log.get(__name__)

CAUSES = (Cause.LOST_HOST, Cause.GPU_FAULT, Cause.ENVIRONMENT)
"""Causes of failures for which the host is to blame."""


def _avoid(paths: RunPaths, options: Namespace, host: str, why: str) -> None:
    """Exclude a host from jobs, unless it already is or no job could start then."""
    if host not in {avoided.host for avoided in hosts.avoided(paths)}:
        SlurmScheduler().avoid(paths, options.submission, options.group, host, why)


def avoid_failed(paths: RunPaths, options: Namespace, starts: Iterable[hosts.BadHost]) -> None:
    """Exclude the hosts on which an agent could not start."""
    try:
        for bad in starts:
            if bad.host:
                _avoid(paths, options, bad.host, bad.why)
    except (CorruptFileError, EnvironmentFailure) as error:
        logger.warning("cannot exclude failing hosts: %s", error)


def blame_hosts(paths: RunPaths, options: Namespace, incarnations: Iterable[int]) -> None:
    """Record the hosts that made these incarnations fail. Exclude those that did so before, and
    those whose GPU has certainly failed."""
    try:
        with FileNameStore(paths.names) as names:
            failures = [(number, published.failure(names, number)) for number in incarnations]
        for number, failure in failures:
            if failure is None or failure.cause not in CAUSES or not failure.host:
                continue
            if failure.echo:  # of a connection between hosts: either may be to blame, or a third
                continue
            again = hosts.blame(paths, failure.host, number, failure.reason)
            if again or failure.certain:
                _avoid(paths, options, failure.host, failure.reason)
    except (CorruptFileError, EnvironmentFailure) as error:
        logger.warning("cannot record host failures: %s", error)
