"""Construction of a rollout task's worker from the run directory: engine, weights, episodes.

The engine is a model in the task's process, or a server that the task keeps running. The engine in
``ENGINES`` names the kind of server (`ServerEngine.kind`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.distributed as dist

from slurmrl.algorithms.base import CallContext
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.schema.roles import Model
from slurmrl.data.chat import stop_ids
from slurmrl.data.tokenizer import decoding
from slurmrl.engines import ENGINES
from slurmrl.engines.fsdp.parameters import new_model
from slurmrl.engines.hf_batch import HFRollout
from slurmrl.engines.role_weights import model_config, served_config
from slurmrl.errors import RunFailedError
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.decoder import Decoder, build
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.parallel.split import WHOLE, Axis, Split
from slurmrl.plan.checks import fit
from slurmrl.plan.engine_rules import HF
from slurmrl.plan.estimates.shape import stop_tokens
from slurmrl.plan.estimates.worker_memory import own_share, share_in_task
from slurmrl.plan.model import GroupPlan, ModelPlan, Plan
from slurmrl.plan.settings import Settings, load_run_settings
from slurmrl.rollouts.generation.base import Decode, RolloutEngine
from slurmrl.rollouts.generation.native.batch_schedule import Limits
from slurmrl.rollouts.generation.native.native_rollout import NativeRollout, SplitRollout
from slurmrl.rollouts.generation.native.split_batch import SplitRanks
from slurmrl.rollouts.generation.process import HostFolder
from slurmrl.rollouts.generation.server_kinds import VISIBLE, ServerKind, weights_config
from slurmrl.run.channel.pipe import Connection
from slurmrl.run.channel.wakeups import WakeupSocket, fabric_wakeups
from slurmrl.run.events import EventWriter
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.parallel.device import Accelerator
from slurmrl.tensors.parallel.groups import Activity
from slurmrl.workers.distributed import collective_timeout, join
from slurmrl.workers.messages import TO_ROLLOUT_WORKER, Ready, Retire, Serve, StartRollout
from slurmrl.workers.polling import PollIntervals
from slurmrl.workers.rollout.task import TaskAtWork, TaskOptions
from slurmrl.workers.rollout.task_generation import Generation, TaskRows, scoring_of
from slurmrl.workers.rollout.task_weights import MergingHost, TaskWeights
from slurmrl.workers.serving import own_server
from slurmrl.workers.worker.setup import read_input, set_up_device, tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slurmrl.models.hf_model import HFModel


MakeEngine: TypeAlias = Callable[[Path], RolloutEngine]
"""Function that makes an engine without weights, in a running asyncio loop. The argument is a
private folder (mode 0700) in the host's memory."""


def build_rollout(
    paths: RunPaths, rank: int, start: StartRollout, activity: Activity
) -> TaskWorker | FollowingRank:
    """Build the worker of a task's rank. Its engine has no weights yet."""
    settings = read_input("the configuration", partial(load_run_settings, paths))
    plan = read_input("the plan", lambda: Plan.read(paths.plan))
    group = plan.group(start.agent.group)
    reject = partial(fit.rejection_in_task, settings)
    accelerator = set_up_device(
        *(settings, plan, group, rank, start, activity, reject), deterministic_on_cpus=False
    )
    tokenizer = tokenizer_of(settings)
    activity.phase("making the model")
    config: ModelConfig | HFConfig
    (model,) = plan.models_of(group.name).values()
    dtype = settings.config.actor.dtype
    make: MakeEngine
    decode = decoding(tokenizer)
    if BACKENDS[model.engine].serves:
        assert start.world_size == 1, "one worker keeps the server of a task"
        agent = start.agent
        log = paths.logs / group.name / f"{model.engine}.{agent.task}.{agent.attempt}.log"
        events = EventWriter(paths, f"{model.engine}.{group.name}.{agent.task}.{agent.attempt}")
        config = actor_config(settings.config.actor)
        make = served(settings, model, config, accelerator.device, log, events)
    else:
        peers = _peers(paths, start, rank, accelerator, settings.config.step_timeout_s)
        compute: Callable[[], SplitRollout]
        if settings.config.actor.implementation == HF:
            config = read_input("the model", partial(own_config, settings.config.actor))
            compute = transformers_rollout(settings, config, accelerator.device, decode, peers)
        else:
            config = decoder_config(settings.config.actor)
            decoder = undefined_decoder(config, dtype, accelerator.device, peers)
            compute = partial(native, settings, decoder, decode, peers)
        if rank:
            return FollowingRank(rank, compute)
        make = lambda _: compute()  # noqa: E731
    tasks = settings.config.rollout.tasks
    assert tasks is not None, "the plan has rollout tasks"
    intervals = PollIntervals.of(plan.hosts, settings.config.cluster.heartbeat_s)
    poll_s = intervals.task_s, max(intervals.task_s, intervals.poll_s)
    options = TaskOptions(
        interruptible=tasks.interruptible,
        poll_s=poll_s,
        record_s=intervals.record_s,
        spread_s=intervals.spread_s,
    )
    wakeups = fabric_wakeups(settings.config.cluster.interface, plan.hosts)
    return TaskWorker(
        *(paths, start, settings, tokenizer, make, config, accelerator.device, options),
        cores=_cores(plan.trainers),
        wakeups=wakeups,
    )


def _peers(
    paths: RunPaths, start: StartRollout, rank: int, accelerator: Accelerator, step_timeout_s: float
) -> SplitRanks | None:
    """Return the ranks of the task's model; None if there is only one rank."""
    if start.world_size == 1:
        return None
    agent = start.agent
    meeting = paths.rollout_meeting(agent.group, agent.task, agent.attempt)
    join(start, rank, meeting, accelerator, collective_timeout(step_timeout_s))
    group = dist.group.WORLD
    assert group is not None, "it was formed"
    return SplitRanks(group, accelerator.device)


class FollowingRank:
    """The worker of any rank but the first of a task with a split model.

    Only the first rank gets requests. It sends its model calls to the other ranks.
    """

    def __init__(self, rank: int, make_engine: Callable[[], SplitRollout]) -> None:
        self._rank, self._make_engine = rank, make_engine

    def ready(self) -> Ready:
        return Ready(rank=self._rank, size=0, fingerprint="")

    def serve(self, agent: Connection) -> None:
        """Repeat the model calls of the first rank until it retires.

        Raises RuntimeError if the first rank has failed.
        """
        with torch.no_grad():
            self._make_engine().follow()


class TaskWorker:
    """The worker of a rollout task's first rank."""

    def __init__(
        self,
        paths: RunPaths,
        start: StartRollout,
        settings: Settings,
        tokenizer: PreTrainedTokenizerBase,
        make_engine: MakeEngine,
        config: ModelConfig | HFConfig,
        device: torch.device,
        options: TaskOptions,
        *,
        cores: int,
        wakeups: WakeupSocket | None,
    ) -> None:
        """``config`` is the architecture of the model; ``cores`` are CPU cores for rewards."""
        self._cores, self._wakeups = cores, wakeups
        self._paths, self._agent, self._settings = paths, start.agent, settings
        self._submission = start.submission
        self._make_engine, self._config, self._options = make_engine, config, options
        self._device = device
        self._tokenizer = tokenizer
        ends = partial(stop_ids, settings.config, tokenizer)
        self._stops = read_input("the stop tokens", lambda: stop_tokens(settings.config, ends()))

    def ready(self) -> Ready:
        return Ready(rank=0, size=0, fingerprint="")

    def serve(self, agent: Connection) -> None:
        """Serve the incarnations that the agent names, until `Retire` or the master's ``Leave``.

        Raises RunFailedError if the agent has ended.
        """
        host = HostFolder()
        try:
            with torch.no_grad():
                asyncio.run(self._serve(agent, host.path))
        finally:
            host.close()

    async def _serve(self, agent: Connection, host: Path) -> None:
        config = self._settings.config
        engine = self._make_engine(host)
        rows = TaskRows(self._paths.data, config.dataset, self._tokenizer)
        call = self._call()
        generation = Generation(rows, call, engine)
        scoring = scoring_of(call, rows, self._submission)
        model = weights_config(self._config, config.actor.dtype)
        weights = TaskWeights(self._paths.versions, host, model, self._merging(host / "frozen"))
        task = TaskAtWork(
            *(self._paths, self._agent, engine, weights, generation, self._options),
            scoring=scoring,
            wakeups=self._wakeups,
        )
        listening = asyncio.create_task(_listen(agent, task))
        running = asyncio.create_task(task.run())
        try:
            await asyncio.wait({listening, running}, return_when=asyncio.FIRST_COMPLETED)
            await (running if running.done() else listening)
        finally:
            for each in (listening, running):
                each.cancel()
            if scoring is not None:
                scoring.close()
            generation.close()
            await engine.close()

    def _merging(self, folder: Path) -> MergingHost | None:
        actor = self._settings.config.actor
        if actor.lora is None:
            return None
        assert actor.path is not None, "submission rejects adapters without a path"
        source, device = Path(actor.path), self._device
        return MergingHost(source, folder, self._config, actor.dtype, actor.lora, device)

    def _call(self) -> CallContext:
        return CallContext(
            step=0,
            seed=self._settings.config.seed,
            scalars={},
            tokenizer=self._tokenizer,
            settings=self._settings,
            stop_token_ids=tuple(self._stops),
            batch=(),
            cores=self._cores,
        )


async def _listen(agent: Connection, task: TaskAtWork) -> None:
    """Handle the agent's messages. Raises RunFailedError when the agent has ended."""
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
    raise RunFailedError("this worker cannot continue, because its agent has ended")


def actor_config(model: Model) -> ModelConfig | HFConfig:
    """Return the actor's architecture in the form that servers need."""
    source = None if model.path is None else Path(model.path)
    return read_input("the model", lambda: served_config("actor", model, source))


def decoder_config(model: Model) -> ModelConfig:
    """Return the architecture of an actor that the built-in decoder runs."""
    config = actor_config(model)
    assert isinstance(config, ModelConfig), "checked at submission"
    return config


def _cores(trainers: GroupPlan) -> int:
    """Return the number of CPU cores for the rewards of a task.

    In the trainers' job, the task gets a share of the cores, otherwise all cores.
    """
    cores = len(os.sched_getaffinity(0))
    if not trainers.tasks_per_host:
        return cores
    return max(1, cores * trainers.slots_per_task // trainers.slots_per_host)


def native(
    settings: Settings, decoder: Decoder, decode: Decode, peers: SplitRanks | None = None
) -> NativeRollout:
    """Build the native rollout engine.

    ``decoder`` has arbitrary weights in ``actor.dtype``. ``decode`` turns tokens into text, for
    stop strings. ``peers`` are the ranks of a split model.
    """
    config = settings.config
    rows, fit = config.rollout.episode.concurrency, config.rollout.episode.cache_bytes
    tokens = max(rows, config.actor.max_tokens_per_microbatch)
    limits = Limits(rows=rows, step_tokens=tokens, cache_bytes=fit)
    tasks = config.rollout.tasks
    assert tasks is not None, "an engine of rollout tasks"
    return NativeRollout(
        decoder, limits=limits, decode=decode, peers=peers, stale_cache=tasks.stale_cache
    )


def own_config(model: Model) -> HFConfig:
    """Return the architecture of an actor that transformers runs in this process."""
    config = model_config("actor", model, None if model.path is None else Path(model.path))
    assert isinstance(config, HFConfig), "the caller has checked the implementation"
    return config


def transformers_rollout(
    settings: Settings,
    config: HFConfig,
    target: torch.device,
    decode: Decode,
    peers: SplitRanks | None,
) -> Callable[[], HFRollout]:
    """Make a model of transformers with random weights, or this rank's part of it.

    Return a function that builds the model's engine. ``decode``, ``peers``: see `native`.
    """
    actor, rollout = settings.config.actor, settings.config.rollout
    assert rollout.tasks is not None, "an engine of rollout tasks"
    options: dict[str, Any] = {"source": None, "seed": settings.config.seed, "dtype": actor.dtype}
    model = new_model(config, "lm", split_over(peers), **options).to(target)
    model.requires_grad_(False)
    return partial(
        HFRollout,
        cast("HFModel", model),
        None,
        actor.max_tokens_per_microbatch,
        rows=rollout.episode.concurrency,
        decode=decode,
        joins=True,
        stale_cache=rollout.tasks.stale_cache,
        peers=peers,
    )


def served(
    settings: Settings,
    model: ModelPlan,
    config: ModelConfig | HFConfig,
    device: torch.device,
    log: Path,
    events: EventWriter,
) -> MakeEngine:
    """Return a function that starts a server on all GPUs of this worker, including ``device``.

    The server's output goes to ``log``. Each end of a server becomes an event in ``events``.
    """
    serving = own_server(settings, log, events, memory_bytes=_share(settings, device))
    make: type[ServerKind] = ENGINES.load(model.engine).kind
    size = model.sizes["tp"]
    kind = make(config, settings.config.actor.dtype, serving, tensor_ranks=size, device=device)
    visible = os.environ.get(VISIBLE, "")
    return lambda folder: kind.keep(serving, folder, name=f"{kind.name} server", visible=visible)


def undefined_decoder(
    config: ModelConfig, dtype: str, target: torch.device, peers: SplitRanks | None = None
) -> Decoder:
    """Return a decoder with undefined weights, or this rank's part of it."""
    with torch.device("meta"):
        decoder = build(config, split=split_over(peers)).to(getattr(torch, dtype))
    decoder.to_empty(device=target)
    decoder.requires_grad_(False)
    return decoder


def split_over(peers: SplitRanks | None) -> Split:
    """Return this rank's part of a model that ``peers`` share; the whole model without peers."""
    if peers is None:
        return WHOLE
    return Split(Axis(peers.group.rank(), peers.group.size(), peers.group))


def _share(settings: Settings, device: torch.device) -> int | None:
    """Return the bytes of each GPU for the server; None if the server's own settings decide."""
    arguments = settings.config.rollout.server_args
    if device.type != "cuda" or own_share(arguments) is not None:
        return None
    total: int = torch.cuda.get_device_properties(device).total_memory
    return share_in_task(arguments, total)
