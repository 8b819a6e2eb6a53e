"""Construction of a rollout task's worker from the run directory: engine, weights, episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from slurmrl.backoff import READ_S, retry
from slurmrl.channel.pipe import Connection
from slurmrl.config.schema.model import Model
from slurmrl.data.tokenizer import end_id, load_tokenizer
from slurmrl.engines.initial_weights import model_config
from slurmrl.engines.rollout.host_folder import HostFolder
from slurmrl.engines.rollout.native.rollout import NativeRollout
from slurmrl.engines.rollout.native.schedule import Limits
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.models.config import ModelConfig
from slurmrl.models.decoder import Decoder, build
from slurmrl.parallel import device
from slurmrl.parallel.activity import Activity
from slurmrl.paths import RunPaths
from slurmrl.plan.model import Plan
from slurmrl.plan.model_files import stop_tokens
from slurmrl.plan.settings import Settings, load_run_settings
from slurmrl.workers.messages import TO_ROLLOUT_WORKER, Ready, Retire, Serve, StartRollout
from slurmrl.workers.poll_intervals import PollIntervals
from slurmrl.workers.rollout.generation import Generation
from slurmrl.workers.rollout.rows import TaskRows
from slurmrl.workers.rollout.task import TaskAtWork, TaskOptions
from slurmrl.workers.rollout.weights import TaskWeights

T = TypeVar("T")


def build_rollout(
    paths: RunPaths, rank: int, start: StartRollout, listener: int | None, activity: Activity
) -> TaskWorker:
    """Build the worker of a task with one rank. Its engine has no weights yet."""
    assert start.world_size == 1, "the plan gives a rollout task one rank"
    settings = _read("the configuration", partial(load_run_settings, paths))
    plan = _read("the plan", lambda: Plan.read(paths.plan))
    group = plan.group(start.agent.group)
    accelerator = device.choose(group.gpus_per_worker)
    device.set_up(
        accelerator,
        threads=group.threads_per_worker,
        deterministic=bool(settings.config.deterministic),
    )
    activity.phase("making the model")
    decoder = undefined_decoder(settings.config.actor, accelerator.device)
    tasks = settings.config.rollout.tasks
    assert tasks is not None, "the plan has rollout tasks"
    intervals = PollIntervals.of(plan.hosts, settings.config.cluster.heartbeat_s)
    poll_s = intervals.task_s, max(intervals.task_s, intervals.poll_s)
    options = TaskOptions(interruptible=tasks.interruptible, poll_s=poll_s)
    return TaskWorker(paths, start, settings, decoder, options)


class TaskWorker:
    """The only rank of a rollout task."""

    def __init__(
        self,
        paths: RunPaths,
        start: StartRollout,
        settings: Settings,
        decoder: Decoder,
        options: TaskOptions,
    ) -> None:
        """``decoder``: with any weights, in ``actor.dtype``."""
        self._paths, self._agent, self._settings = paths, start.agent, settings
        self._decoder, self._options = decoder, options
        folder = settings.config.actor.tokenizer
        assert folder is not None, "checked at submission"
        self._tokenizer = _read("the tokenizer", lambda: load_tokenizer(Path(folder)))
        self._stops = _read(
            "the stop tokens", lambda: stop_tokens(settings.config, end_id(self._tokenizer))
        )

    def ready(self) -> Ready:
        return Ready(rank=0, size=0, fingerprint="")

    def serve(self, agent: Connection) -> None:
        """Serve the incarnations that the agent names, until it says `Retire` or the master says
        ``Leave``. Raises RunFailedError if the agent is gone."""
        host = HostFolder()
        try:
            with torch.no_grad():
                asyncio.run(self._serve(agent, host.path))
        finally:
            host.close()

    async def _serve(self, agent: Connection, host: Path) -> None:
        config = self._settings.config
        engine = self._engine()
        rows = TaskRows(self._paths.data, config.dataset, self._tokenizer)
        generation = Generation(self._settings, rows, self._tokenizer, self._stops, engine)
        decoder, dtype = self._decoder, config.actor.dtype
        model = {**decoder.config.to_hf(head="lm", dtype=dtype), "eos_token_id": None}
        weights = TaskWeights(self._paths.versions, host, model)
        task = TaskAtWork(self._paths, self._agent, engine, weights, generation, self._options)
        listening = asyncio.create_task(_listen(agent, task))
        running = asyncio.create_task(task.run())
        try:
            await asyncio.wait({listening, running}, return_when=asyncio.FIRST_COMPLETED)
            await (running if running.done() else listening)
        finally:
            for each in (listening, running):
                each.cancel()
            generation.close()
            await engine.close()

    def _engine(self) -> NativeRollout:
        config = self._settings.config
        rows, memory = config.rollout.episode.concurrency, config.rollout.episode.cache_bytes
        tokens = max(rows, config.actor.max_tokens_per_microbatch)
        limits = Limits(rows=rows, step_tokens=tokens, cache_bytes=memory)
        return NativeRollout(self._decoder, limits=limits)


async def _listen(agent: Connection, task: TaskAtWork) -> None:
    """Pass the agent's messages on."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(agent.fileno(), readable.set)
    try:
        while not agent.closed:
            readable.clear()
            for values in agent.receive_available():
                match TO_ROLLOUT_WORKER.from_json(values):
                    case Serve() as order:
                        await task.serve(order.incarnation)
                    case Retire() as order:
                        await task.retire(order.reason, order.within_s)
                    case other:
                        raise TypeError(f"a worker that has started cannot execute {other}")
            if not agent.closed:
                await readable.wait()
    finally:
        loop.remove_reader(agent.fileno())
    raise RunFailedError("the agent is gone")


def undefined_decoder(model: Model, target: torch.device) -> Decoder:
    """The actor's architecture, with undefined weights."""
    source = None if model.path is None else Path(model.path)
    config = _read("the model", lambda: model_config("actor", model, source))
    if not isinstance(config, ModelConfig):
        raise UsageError("rollout tasks need the built-in decoder, not 'implementation: hf'")
    with torch.device("meta"):
        decoder = build(config).to(getattr(torch, model.dtype))
    decoder.to_empty(device=target)
    decoder.requires_grad_(False)
    return decoder


def _read(what: str, action: Callable[[], T]) -> T:
    """Read a file that was there when the trial was submitted, so that a failure may pass."""
    return retry(f"read {what}", action, timeout_s=READ_S)
