"""Whether the packages of the chosen engines are installed, without importing them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from slurmrl.config.schema import role_key
from slurmrl.config.source import dotted
from slurmrl.desk.checks.finding import Finding, Weight
from slurmrl.plan.engine_rules import ENGINES
from slurmrl.plan.model import Plan
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.plan.resources import lacking_gpus
from slurmrl.plan.settings import Settings

SUBJECT: Final = "engine"
TIMEOUT_S: Final = 60.0
LOOK: Final = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
OF_CLIENT: Final = "aiohttp"
"""Module that talks to servers."""
TRANSFORMER_ENGINE: Final = "transformer_engine"


def check(settings: Settings, plan: Plan) -> list[Finding]:
    """Return the engines whose GPU or package is missing.

    A container has its own packages, and set-up lines may bring others.
    """
    slurm = settings.config.cluster.slurm
    without = [
        Finding(SUBJECT, Weight.FAILED, problem.message, problem.key)
        for problem in lacking_gpus(settings, plan)
    ]
    if slurm.container:
        return without
    weight = Weight.WARNING if slurm.setup else Weight.FAILED
    hint = " (the set-up lines of the job may bring it)" if slurm.setup else ""
    found = dict(_missing(settings, plan))
    return without + [Finding(SUBJECT, weight, f"{text}{hint}", key) for key, text in found.items()]


def _missing(settings: Settings, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the key of each setting whose package is missing, and the message."""
    rollout, reported = settings.config.rollout, set[str]()
    for model in plan.models.values():
        rules = ENGINES[model.engine]
        if model.role == ROLLOUTS:
            yield from _of_servers(model.engine, rules.module, rollout.python)
            continue
        section = settings.config.model(model.role)
        if rules.module and not _is_here(rules.module) and model.engine not in reported:
            reported.add(model.engine)
            key = dotted((*role_key(model.role), "backend"))
            yield key, f"{model.engine} needs a package that {sys.prefix} lacks: {rules.install}"
        if section.transformer_engine and not _is_here(TRANSFORMER_ENGINE):
            key = dotted((*role_key(model.role), "transformer_engine"))
            yield key, f"{sys.prefix} lacks TransformerEngine (docs/engines.md)"


def _of_servers(engine: str, module: str, python: str | None) -> Iterator[tuple[str, str]]:
    """Yield what servers lack; without ``module``, slurmrl itself generates."""
    if not module:
        return
    if not _is_here(OF_CLIENT):
        yield "rollout.backend", f"{engine} needs a package that {sys.prefix} lacks: aiohttp"
    if python is None:
        return
    try:
        done = subprocess.run(
            [python, "-c", LOOK, module],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield "rollout.python", f"{python} does not run: {error}"
        return
    if done.returncode != 0:
        yield (
            "rollout.python",
            f"{python} has no {engine}: install it there",
        )


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that contains it
        return False
