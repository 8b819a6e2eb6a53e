"""Preparation of a run directory.

A directory is prepared once ``config.yaml``, which is written last, exists. A submitter that finds
a trial without it (the previous submitter was killed) repeats the same steps.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import asdict

import slurmrl
from slurmrl import log
from slurmrl.config.load import dump
from slurmrl.desk import trial_code
from slurmrl.desk.provenance import ProvenanceWriter
from slurmrl.fsio import atomic, documents, ownership
from slurmrl.fsio.shapes import TEXT
from slurmrl.plan.model import Plan
from slurmrl.plan.plan_values import figures
from slurmrl.plan.settings import Settings
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.processes import Claimant

logger = log.get(__name__)


def prepare(paths: RunPaths, settings: Settings, plan: Plan, recorder: ProvenanceWriter) -> bool:
    """Make the run directory; return False if the trial exists, which is then left unchanged.

    ``recorder`` names the code to copy, and records its origin.

    Raises EnvironmentFailure where the directory cannot be made or does not support links, or
    where other users could change it.
    """
    if is_prepared(paths):
        check_owner(paths)
        return False
    atomic.make_private_directory(paths.run)
    check_owner(paths)
    for directory in paths.directories():
        atomic.make_private_directory(directory)
    atomic.probe_link(paths.run)
    who = {"time": time.time(), **asdict(Claimant.of_this_process())}
    claim = {"uuid": uuid.uuid4().hex, "version": slurmrl.__version__, **who}
    atomic.exclusive_create(paths.identity, json.dumps(claim).encode())
    trial_code.take_snapshot(paths, recorder.code, recorder)
    write_plan(paths, settings, plan)
    # Two submitters of the same configuration may both get True: their files are equal.
    return atomic.exclusive_create(paths.config, dump(settings.config).encode())


def check_owner(paths: RunPaths) -> None:
    """Raise OwnershipError for a run directory that other users could change."""
    for warning in ownership.check(paths.run):
        logger.warning("%s", warning)


def is_prepared(paths: RunPaths) -> bool:
    return paths.config.exists()


def trial_uuid(paths: RunPaths) -> str:
    uuid_text: str = documents.parse(
        atomic.read_needed(paths.identity), paths.identity, {"uuid": TEXT}, ("uuid",)
    )["uuid"]
    return uuid_text


def write_plan(paths: RunPaths, settings: Settings, plan: Plan) -> None:
    """Replace the plan, and the estimates that reports compare with what was measured."""
    atomic.replace(paths.estimates, json.dumps(figures(settings, plan)).encode())
    atomic.replace(paths.plan, plan.to_json().encode())


def rewrite(paths: RunPaths, settings: Settings, plan: Plan) -> None:
    """Replace the configuration of a trial by a changed one."""
    write_plan(paths, settings, plan)
    atomic.replace(paths.config, dump(settings.config).encode())
