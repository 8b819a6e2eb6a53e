"""The kinds of servers: which versions work, what they offer, and which flags they must not get.

Checks of a configuration (`plan/checks/servers.py`), the doctor (`desk/doctor/servers.py`) and the
start of a server (`rollouts/generation/fitness.py`) read this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from slurmrl.plan.engines import EXPERTS_NEED

EXPERTS_FLAG: Final = "--enable-return-routed-experts"
"""Flag with which SGLang reports the experts of each token."""
VLLM_FLAGS: Final = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs")
"""Without these a server rejects requests, or reports log-probabilities before temperature."""
RETRACTING_SGLANG: Final = (0, 5, 22)
"""0.5.20 cannot empty its cache while requests wait; 0.5.21 may queue one twice (DP attention)."""
RETRACTING_NEEDS: Final[Mapping[str, object]] = {
    **EXPERTS_NEED,
    "enable_hisparse": False,
    "enable_pdmux": False,
    "max_queued_requests": None,
    "tokenizer_worker_num": 1,
}
"""Settings that retracting needs. With other values a server may still compute, move keys and
values, or get an update before the pause, so its cache could not be emptied; or it may reject its
own requests."""
KEY: Final = "all users of the host could read the key, and a Unix socket of your own needs none"
ADDRESS: Final = "slurmrl chooses where the server listens"
MODEL: Final = "the server has the actor, and gets its weights from slurmrl"
LAYOUT: Final = "rollout.backend says over how many GPUs a server is spread"
CONFLICTS: Final[Mapping[str, str]] = {
    "--config": (
        "its file could set what rollout.server_args must not; write its settings there as "
        "arguments"
    ),
    "--api-key": KEY,
    **dict.fromkeys(("--host", "--port"), ADDRESS),
    **dict.fromkeys(("--model", "--load-format"), MODEL),
    **dict.fromkeys(
        ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"), LAYOUT
    ),
}
"""Flags that conflict with slurmrl in every kind of server, and the reasons."""


@dataclass(frozen=True, kw_only=True)
class ServerRules:
    """What is known of one kind of server."""

    title: str
    """Its name in messages."""
    oldest: tuple[int, ...]
    """The first version that works."""
    newest: tuple[int, ...]
    """The last version that was tested."""
    words: tuple[str, ...]
    """Routes in quotes, and names of settings behind flags, that its source must contain."""
    to_sleep: tuple[str, ...] = ()
    """Modules that it needs to free the memory of GPUs, as ``import NAME``."""
    least_temperature: float
    """Below this it samples at another temperature than requests ask for, without an error."""
    conflicts: Mapping[str, str]
    """Flags that ``rollout.server_args`` must not have, and the reasons."""
    experts_conflicts: Mapping[str, str] = field(default_factory=dict)
    """Further flags that it must not have with ``rollout.replay_experts``."""
    stale_cache_conflicts: Mapping[str, str] = field(default_factory=dict)
    """Further flags that it must not have with ``rollout.tasks.stale_cache``."""

    @property
    def routes(self) -> tuple[str, ...]:
        """Routes that it must have."""
        return tuple(word.strip('"') for word in self.words if word.startswith('"/'))

    @property
    def tested(self) -> str:
        """The tested versions, for messages."""
        return " to ".join(".".join(map(str, each)) for each in (self.oldest, self.newest))

    def is_older(self, version: str) -> bool:
        """Return whether a version is too old."""
        return numbers_of(version) < self.oldest

    def is_newer(self, version: str) -> bool:
        """Return whether a version is newer than the tested ones."""
        return numbers_of(version)[: len(self.newest)] > self.newest


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (0, 5, 20) of ``0.5.20.post1``."""
    return tuple(map(int, takewhile(str.isdigit, version.split("."))))


SERVER_KINDS: Final[Mapping[str, ServerRules]] = {
    "sglang": ServerRules(
        title="SGLang",
        oldest=(0, 5, 20),
        newest=(0, 5, 23),
        words=(
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
        to_sleep=("import torch_memory_saver",),
        least_temperature=1e-6,
        conflicts={
            **CONFLICTS,
            "--admin-api-key": KEY,
            "--model-path": MODEL,
            **dict.fromkeys(("--tp-size", "--pp-size", "--dp-size"), LAYOUT),
            "--enable-custom-logit-processor": "the server would run code that requests carry",
        },
        experts_conflicts=dict.fromkeys(
            (f"--{name.replace('_', '-')}" for name in EXPERTS_NEED),
            "with rollout.replay_experts: the server would report the experts of other tokens",
        ),
        stale_cache_conflicts={
            "--enable-pdmux": (
                "with rollout.tasks.stale_cache: the server would draw while it reads weights"
            )
        },
    ),
    "vllm": ServerRules(
        title="vLLM",
        oldest=(0, 32),
        newest=(0, 33),
        words=(
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
        least_temperature=0.01,
        conflicts={
            **CONFLICTS,
            "--uds": ADDRESS,
            **dict.fromkeys(("-tp", "-pp", "-dp"), LAYOUT),
            "--logprobs-mode": "log-probabilities have to be those of the distribution drawn from",
        },
    ),
}
"""By the name of the backend."""
