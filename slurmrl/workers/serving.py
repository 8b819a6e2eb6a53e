"""Settings with which workers start servers and keep them running, or use existing servers."""

from __future__ import annotations

import hashlib
from pathlib import Path

from slurmrl.backoff import READ_S, retry
from slurmrl.config.schema import Rollout
from slurmrl.config.schema.rollout import Address, read_keys
from slurmrl.plan.estimates.shape import least_context
from slurmrl.plan.settings import Settings
from slurmrl.rollouts.generation.server_instance import Patience
from slurmrl.rollouts.generation.server_kinds import Running, Serving
from slurmrl.run.events import EventWriter
from slurmrl.run.paths import RunPaths


def own_server(
    settings: Settings,
    log: Path,
    events: EventWriter | None = None,
    *,
    memory_bytes: int | None,
    sleeps: bool = False,
) -> Serving:
    """Return the settings of a server that the run starts; arguments are fields of `Serving`."""
    rollout, tokenizer = settings.config.rollout, settings.config.actor.tokenizer
    assert rollout.python is not None, "checked at submission"
    assert tokenizer is not None, "checked at submission"
    return Serving(
        python=rollout.python,
        arguments=tuple(rollout.server_args),
        tokenizer=Path(tokenizer) if rollout.needs_text else None,
        processor=Path(tokenizer),
        patience=_patience(rollout),
        log=log,
        events=events,
        context=least_context(settings.config, assumed=False),
        memory_bytes=memory_bytes,
        sleeps=sleeps,
        experts=rollout.replay_experts,
        stale_cache=rollout.tasks is not None and rollout.tasks.stale_cache,
        quantized=rollout.quantization is not None,
        cache_dtype=rollout.kv_cache_dtype,
    )


def running_servers(settings: Settings, paths: RunPaths) -> Running:
    """Return the settings of ``rollout.servers``.

    Raises UsageError for unusable keys, and EnvironmentFailure.
    """
    rollout = settings.config.rollout
    weights = paths.weights
    keys = Path(rollout.server_keys) if rollout.server_keys is not None else None
    if rollout.server_weights is not None:  # Trials may share the folder: add a unique name.
        weights = Path(rollout.server_weights) / f"{paths.trial}-{_digest(paths.run)}"
    return Running(
        addresses=tuple(map(Address, rollout.servers)),
        weights=weights,
        keys=retry("read the keys of rollout.servers", lambda: read_keys(keys), timeout_s=READ_S),
        context=least_context(settings.config),
        text=rollout.needs_text,
        patience=_patience(rollout),
        experts=rollout.replay_experts,
    )


def _patience(rollout: Rollout) -> Patience:
    return Patience(start_s=rollout.server_start_s, silence_s=rollout.server_silence_s)


def _digest(path: Path) -> str:
    return hashlib.sha256(str(path).encode()).hexdigest()[:16]
