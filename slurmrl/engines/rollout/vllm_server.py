"""vLLM servers: how they are started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmrl.engines.rollout.dialect import Dialect
from slurmrl.engines.rollout.fitness import VLLM_FLAGS
from slurmrl.engines.rollout.http import HttpClient
from slurmrl.engines.rollout.server import Serving
from slurmrl.engines.rollout.server_engine import ServerEngine
from slurmrl.engines.rollout.server_kind import ServerKind
from slurmrl.engines.rollout.vllm import VllmDialect

MOST_SHARE = 0.98
CPU_FLAGS = ("--enforce-eager", "--no-enable-chunked-prefill")
"""Flags of a server without a GPU. A part of a prompt rewinds the random stream of its request,
which torch's generators on CPUs cannot: vLLM 0.32 ends with "CPU Generator does not use offset"."""


def command(
    python: str,
    model: Path,
    socket: Path,
    *,
    tokenizer: Path | None = None,
    tensor_ranks: int = 1,
    options: Sequence[str] = (),
) -> tuple[str, ...]:
    """Start a server on a Unix socket, whose folder must have mode 0700.

    ``model`` has a ``config.json``; its weights are undefined until the first version. Stop strings
    need a ``tokenizer``. Sequences may be as long as the model and the memory allow.
    ``tensor_ranks``: GPUs that share the model. ``options``: further flags, which win over these.
    """
    text = ("--skip-tokenizer-init",) if tokenizer is None else ("--tokenizer", str(tokenizer))
    return (
        *("/bin/sh", "-c", 'rm -f -- "$0" && exec "$@"', str(socket)),  # vLLM binds a new one only
        *(python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--uds", str(socket), "--load-format", "dummy", *text),
        *VLLM_FLAGS,
        *("--generation-config", "vllm"),  # that of the model would change sampling silently
        *("--tensor-parallel-size", str(tensor_ranks)),
        "--disable-uvicorn-access-log",  # a line for each completion
        *("--max-model-len", "-1", "--scheduling-policy", "priority", "--enable-prefix-caching"),
        *options,
    )


ENVIRONMENT: Mapping[str, str] = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # it would unpickle requests
    "VLLM_API_KEY": "",  # the user's, of other servers: this one would ask for it
    "HF_HUB_OFFLINE": "1",
}
"""Variables of a server, over those of the job."""
CPU_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several servers would bind to the same cores
}
"""Further variables of a server without a GPU."""


def memory_flags(share: int, total: int) -> tuple[str, ...]:
    """Arguments with which a server uses ``share`` of the ``total`` bytes of a GPU, what it
    computes with included."""
    return ("--gpu-memory-utilization", f"{min(share / total, MOST_SHARE):.4f}")


class VllmServer(ServerKind):
    """vLLM servers."""

    name = "vllm"

    def command(self, serving: Serving, model: Path, socket: Path) -> Sequence[str]:
        on_cpu = self.device.type == "cpu"
        flags = CPU_FLAGS if on_cpu else ("--enable-sleep-mode",) if serving.sleeps else ()
        return command(
            serving.python,
            model,
            socket,
            tokenizer=serving.tokenizer,
            tensor_ranks=self.tensor_ranks,
            options=(*flags, "--dtype", self.dtype, *serving.arguments),
        )

    def memory_flags(self, share: int, free: int, total: int) -> Sequence[str]:
        return memory_flags(share, total)

    def environment(self) -> Mapping[str, str]:
        further = CPU_ENVIRONMENT if self.device.type == "cpu" else {}
        return {**ENVIRONMENT, **further}

    def dialect(self, client: HttpClient, control: HttpClient | None = None) -> Dialect:
        return VllmDialect(
            client,
            control,
            model=self.model,
            checks=self.checks,
            health_s=self.serving.patience.silence_s,
            stale_cache=self.stale_cache,
        )


class VllmEngine(ServerEngine):
    """Generation by vLLM servers."""

    kind = VllmServer
