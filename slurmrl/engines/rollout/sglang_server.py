"""SGLang servers: how they are started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmrl import package
from slurmrl.engines.rollout.dialect import Dialect
from slurmrl.engines.rollout.http import HttpClient
from slurmrl.engines.rollout.routed_experts import FLAG, RoutedLayers
from slurmrl.engines.rollout.server import Serving
from slurmrl.engines.rollout.server_engine import ServerEngine
from slurmrl.engines.rollout.server_kind import ServerKind
from slurmrl.engines.rollout.sglang import SglangDialect
from slurmrl.plan.estimates.servers import computing

LAUNCHER = package.program("engines/rollout/launch_sglang.py")
FLAGS = (
    "--enable-priority-scheduling",
    "--schedule-low-priority-values-first",
    "--disable-priority-preemption",
    "--skip-server-warmup",
    *("--log-level-http", "warning"),  # no line for each completion
)
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-cuda-graph", "--disable-overlap-schedule"),
    *("--max-total-tokens", "65536"),
)
"""Flags of a server without a GPU."""
LEAST_SHARE, MOST_SHARE = 0.01, 0.98
ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_PICKLE_IPC": "0",  # it would unpickle what arrives on its internal sockets
    "SGLANG_ZMQ_ALLOWED_PEERS": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
}
"""Variables of a server, over those of the job."""


def command(
    python: str,
    model: Path,
    socket: Path,
    *,
    vocabulary: int,
    tokenizer: Path | None = None,
    tensor_ranks: int = 1,
    options: Sequence[str] = (),
) -> tuple[str, ...]:
    """Start a server on a Unix socket, whose folder must have mode 0700.

    ``model`` has a ``config.json`` without ``eos_token_id``, so that only the stop tokens of a
    request end it; its weights are undefined until the first version. Stop strings and a minimum
    of new tokens need a ``tokenizer``; its end of a sequence then always ends a completion.
    ``tensor_ranks``: GPUs that share the model. ``options``: further flags, which win over these.
    """
    text = ("--skip-tokenizer-init",) if tokenizer is None else ("--tokenizer-path", str(tokenizer))
    return (
        *(python, "-P", str(LAUNCHER), str(socket), "--model-path", str(model), *text),
        *("--load-format", "dummy", "--sampling-mask-max-tokens", str(vocabulary)),
        *FLAGS,
        *("--tp-size", str(tensor_ranks)),
        *options,
    )


def memory_flags(share: int, free: int, total: int) -> tuple[str, ...]:
    """Arguments with which a server uses ``share`` bytes of a GPU, what it computes with included.
    SGLang takes a fraction of what is ``free`` when it starts for weights and caches; it needs the
    rest of its share besides."""
    fraction = (share - computing(total)) / max(free, 1)
    return ("--mem-fraction-static", f"{min(max(fraction, LEAST_SHARE), MOST_SHARE):.4f}")


class SglangServer(ServerKind):
    """SGLang servers."""

    name = "sglang"

    def command(self, serving: Serving, model: Path, socket: Path) -> Sequence[str]:
        on_cpu = self.device.type == "cpu"
        flags = CPU_FLAGS if on_cpu else ("--enable-memory-saver",) if serving.sleeps else ()
        records = (FLAG,) if serving.experts else ()
        watched = self._watched(serving) if serving.stale_cache else ()
        return command(
            serving.python,
            model,
            socket,
            vocabulary=self.model.vocabulary,
            tokenizer=serving.tokenizer,
            tensor_ranks=self.tensor_ranks,
            options=(*flags, *records, *watched, "--dtype", self.dtype, *serving.arguments),
        )

    @staticmethod
    def _watched(serving: Serving) -> Sequence[str]:
        """With requests that it keeps in place, SGLang takes an update for a batch that hangs, and
        ends after 300 s."""
        return ("--watchdog-timeout", f"{300 + 2 * serving.patience.start_s:g}")

    def memory_flags(self, share: int, free: int, total: int) -> Sequence[str]:
        return memory_flags(share, free, total)

    def environment(self) -> Mapping[str, str]:
        return ENVIRONMENT

    def dialect(self, client: HttpClient, control: HttpClient | None = None) -> Dialect:
        return SglangDialect(
            client,
            control,
            model=self.model,
            routed=RoutedLayers.of(self.config),
            full_logprobs=True,
            checks=self.checks,
            health_s=self.serving.patience.silence_s,
            stale_cache=self.stale_cache,
        )


class SglangEngine(ServerEngine):
    """Generation by SGLang servers."""

    kind = SglangServer
