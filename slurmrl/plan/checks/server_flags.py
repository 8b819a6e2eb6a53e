"""Arguments that the run's own servers must not get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from slurmrl.errors import Problem
from slurmrl.plan.checks.draft import Draft
from slurmrl.plan.engines import EXPERTS_NEED
from slurmrl.plan.placement import ROLLOUTS

KEY: Final = "all users of the host could read the key, and a Unix socket of your own needs none"
ADDRESS: Final = "slurmrl chooses where the server listens"
MODEL: Final = "the server has the actor, and gets its weights from slurmrl"
LAYOUT: Final = "rollout.backend says over how many GPUs a server is spread"
FILE: Final = (
    "its file could set what rollout.server_args must not; write its settings there as arguments"
)
OF_ALL: Final = {
    "--config": FILE,
    **dict.fromkeys(("--api-key",), KEY),
    **dict.fromkeys(("--host", "--port"), ADDRESS),
    **dict.fromkeys(("--model", "--load-format"), MODEL),
    **dict.fromkeys(
        ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"), LAYOUT
    ),
}
REFUSED: Final[Mapping[str, Mapping[str, str]]] = {
    "sglang": {
        **OF_ALL,
        "--admin-api-key": KEY,
        "--model-path": MODEL,
        **dict.fromkeys(("--tp-size", "--pp-size", "--dp-size"), LAYOUT),
        "--enable-custom-logit-processor": "the server would run code that requests carry",
    },
    "vllm": {
        **OF_ALL,
        "--uds": ADDRESS,
        **dict.fromkeys(("-tp", "-pp", "-dp"), LAYOUT),
        "--logprobs-mode": "log-probabilities have to be those of the distribution drawn from",
    },
}
"""By kind of server, the flags and the reasons. argparse also knows a flag by its beginning."""
WITHOUT_EXPERTS: Final = dict.fromkeys(
    (f"--{name.replace('_', '-')}" for name in EXPERTS_NEED),
    "with rollout.replay_experts: the server would report the experts of other tokens",
)
"""Flags of SGLang that are refused with ``rollout.replay_experts`` besides."""
NOT_PAUSED: Final = {
    "--enable-pdmux": "with rollout.tasks.stale_cache: the server would draw while it reads weights"
}
"""Flags of SGLang that are refused with ``rollout.tasks.stale_cache`` besides."""
LEAST: Final = len("--tp")


def server_flags(draft: Draft, backend: str) -> Iterator[Problem]:
    """Arguments with which a server cannot be reached, or is another one than the plan's."""
    rollout = draft.config.rollout
    flags = REFUSED[backend]
    if rollout.replay_experts and backend == "sglang":
        flags = WITHOUT_EXPERTS | dict(flags)
    if rollout.tasks is not None and rollout.tasks.stale_cache and backend == "sglang":
        flags = NOT_PAUSED | dict(flags)
    for argument in rollout.server_args:
        flag = argument.partition("=")[0].replace("_", "-")
        for refused, reason in flags.items():
            if flag == refused or (
                len(flag) >= LEAST and flag.startswith("--") and refused.startswith(flag)
            ):
                message = f"'{argument}' is not allowed: {reason}"
                yield draft.problem((ROLLOUTS, "server_args"), message)
                break
