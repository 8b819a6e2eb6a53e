"""Construction of a trainer from the run directory: process group, models, datasets, tokenizer.

Rank 0 prepares the datasets, and all ranks read them (`Datasets`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from slurmrl import log
from slurmrl.backoff import READ_S, Interval, retry
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.schema import Config, Optimizer
from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data import dataset, preparation
from slurmrl.data.chat import stop_ids
from slurmrl.data.dataset import SampleRows
from slurmrl.data.prepared import PreparedRows
from slurmrl.data.tokenizer import load_tokenizer
from slurmrl.engines import ENGINES
from slurmrl.engines.base import Engine, TrainEngine
from slurmrl.errors import DamagedCheckpointError, EnvironmentFailure, UsageError
from slurmrl.fsio import inputs
from slurmrl.plan import precision
from slurmrl.plan.algorithms import uses_of
from slurmrl.plan.checks import fit
from slurmrl.plan.estimates.shape import stop_tokens
from slurmrl.plan.estimates.worker_memory import share_of_server
from slurmrl.plan.model import GroupPlan, Plan
from slurmrl.plan.placement import model_of
from slurmrl.plan.settings import Settings, load_run_settings
from slurmrl.registry import resolve
from slurmrl.rollouts.generation.server_kinds import Running, Serving
from slurmrl.run.channel.pipe import Connection
from slurmrl.run.events import EventWriter
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import TRAINERS, RankId, group_of
from slurmrl.tensors.checkpoint.manifest import is_pinned, until_certain, verify_share
from slurmrl.tensors.parallel import device, groups
from slurmrl.tensors.parallel.device import Accelerator
from slurmrl.tensors.parallel.groups import Activity, ParallelContext
from slurmrl.workers.distributed import (
    Reject,
    RunStore,
    collective_timeout,
    host_group,
    join,
    take_gpus,
    wait_for_all,
)
from slurmrl.workers.messages import Answer, Preparing, Ready, Start, StartRollout
from slurmrl.workers.serving import own_server, running_servers
from slurmrl.workers.worker import reallocation
from slurmrl.workers.worker.executor import Executor, UpdateKept
from slurmrl.workers.worker.reallocation import Reallocations, Residence
from slurmrl.workers.worker.saver import prepare_versions
from slurmrl.workers.worker.step_batch import Mail

logger = log.get(__name__)

T = TypeVar("T")


class RolloutWorker(Protocol):
    """The worker of a rollout task's rank."""

    def ready(self) -> Ready: ...

    def serve(self, agent: Connection) -> None:
        """Serve the incarnations that ``agent`` names, until `Retire` or the master's ``Leave``.

        Raises RunFailedError if the agent has ended.
        """


def build(
    paths: RunPaths, who: RankId, start: Start, activity: Activity, say: Callable[[Answer], None]
) -> Executor:
    """Build the worker of a trainer from the plan. ``say`` sends a message to the master."""
    worker: Executor = _maker(paths, who)(paths, who.rank, start, activity, say)
    return worker


def build_rollout(
    paths: RunPaths, who: RankId, start: StartRollout, activity: Activity
) -> RolloutWorker:
    """Build the worker of a rollout task from the plan."""
    worker: RolloutWorker = _maker(paths, who)(paths, who.rank, start, activity)
    return worker


def _maker(paths: RunPaths, who: RankId) -> Callable[..., Any]:
    plan = read_input("the plan", lambda: Plan.read(paths.plan))
    make: Callable[..., Any] = resolve(plan.group(group_of(who.world)).worker)
    return make


def build_trainer(
    paths: RunPaths, rank: int, start: Start, activity: Activity, say: Callable[[Preparing], None]
) -> Executor:
    """Build the executor of a trainer; load the weights of the commit that ``start`` names."""
    settings = read_input("the configuration", lambda: load_run_settings(paths))
    read_input("the models and data", lambda: require_inputs(settings))
    plan = read_input("the plan", lambda: Plan.read(paths.plan))
    group = plan.trainers
    cores = max(1, len(os.sched_getaffinity(0)) // group.workers_per_host)
    # Check the size only of initial models: the models of a checkpoint have already fitted.
    reject = partial(fit.rejection, settings) if start.base is None else _accept
    accelerator = set_up_device(
        *(settings, plan, group, rank, start, activity, reject), deterministic_on_cpus=True
    )
    torch.manual_seed(settings.config.seed * group.world_size + rank)
    timeout = collective_timeout(settings.config.step_timeout_s)
    activity.phase("joining the other ranks")
    store = join(start, rank, paths.meeting(start.incarnation), accelerator, timeout)
    tokenizer = tokenizer_of(settings)
    datasets = Datasets(paths.data, start.incarnation, settings.config, store, activity)
    # Preparation may take hours, so do it before any rank waits in a collective.
    opened = datasets.provide(tokenizer, rank, say)
    activity.phase("connecting to the other ranks")
    contexts = groups.build(
        plan.models_of(TRAINERS).values(),
        rank=rank,
        device=accelerator.device,
        timeout=timeout,
        activity=activity,
    )
    activity.phase("making the models")
    wait = partial(wait_for_all, store, rank, ranks := group.world_size)
    verify_pinned(settings, rank, ranks, wait)
    engines = _engines(settings, plan, contexts, paths)
    if start.base is not None:
        activity.phase("loading the checkpoint")
        trained = [engine for engine in engines.values() if isinstance(engine, TrainEngine)]
        load(paths.checkpoints / start.base, rank, ranks, trained, wait)
    residence = Residence(engines, plan.offloaded, plan.generating)
    report = partial(say, Preparing(rank=rank))
    served = wait_until_up(settings, plan, engines.values(), store, report)
    activity.phase("planning moves of weights")
    transfer = settings.config.transfer
    moves = reallocation.prepare(
        plan,
        engines,
        rank,
        accelerator.device,
        staging_bytes=transfer.staging_mib * 2**20,
        timeout=timeout,
    )
    reallocations = Reallocations(moves, transfer.verify, activity)
    versions = prepare_versions(settings, plan, engines, paths, rank, accelerator, timeout)
    mail = Mail(host_group(accelerator, timeout), accelerator.device)
    ends = partial(stop_ids, settings.config, tokenizer)
    return Executor(
        paths,
        settings,
        plan,
        rank,
        engines,
        opened,
        tokenizer,
        read_input("the stop tokens", lambda: stop_tokens(settings.config, ends())),
        cores,
        mail,
        reallocations,
        residence,
        *(activity, versions, start.submission, UpdateKept.of(settings, plan, served)),
    )


def set_up_device(
    settings: Settings,
    plan: Plan,
    group: GroupPlan,
    rank: int,
    start: Start,
    activity: Activity,
    reject: Reject,
    *,
    deterministic_on_cpus: bool,
) -> Accelerator:
    """Take this rank's GPUs, or its CPU threads.

    ``deterministic_on_cpus`` is the default of the setting ``deterministic`` on CPUs; on GPUs, the
    default is false. Raises as `distributed.take_gpus`.
    """
    accelerator = device.choose(group.gpus_per_worker)
    on_cpus = accelerator.device.type == "cpu"
    if not on_cpus:
        take_gpus(group, reject, activity, exclusive=start.exclusive)
    elif rank % group.workers_per_host == 0:
        precision.log_slow_bfloat16(settings.config, plan, group)
    deterministic = settings.config.deterministic
    if deterministic is None:
        deterministic = on_cpus and deterministic_on_cpus
    device.set_up(accelerator, threads=group.threads_per_worker, deterministic=deterministic)
    return accelerator


def _accept(gpu: str, total_bytes: int) -> None:
    """Accept any GPU."""


def load(
    checkpoint: Path,
    rank: int,
    ranks: int,
    engines: Iterable[TrainEngine],
    wait_for_others: Callable[[str], None],
) -> None:
    """Load a checkpoint after the ranks have verified it; each rank verifies a share.

    Raises DamagedCheckpointError, and EnvironmentFailure if a file cannot be read for `READ_S`.
    """
    _verify(checkpoint, rank, ranks)
    # Wait, so that a rank that finds damage reports it before any rank loads.
    wait_for_others("checkpoint verified")
    for engine in engines:
        read_input("the checkpoint", partial(engine.load, checkpoint))


def verify_pinned(
    settings: Settings, rank: int, ranks: int, wait_for_others: Callable[[str], None]
) -> None:
    """Verify checkpoints of other trials from which models start; each rank verifies a share.

    Raises UsageError for damage, and EnvironmentFailure if a file cannot be read for `READ_S`.
    """
    config = settings.config
    paths = {config.model(use.role).path for use in uses_of(config, settings.algorithm)}
    for path in sorted(path for path in paths if path is not None and is_pinned(Path(path))):
        try:
            _verify(Path(path), rank, ranks)
        except DamagedCheckpointError as error:
            raise UsageError(f"{error}; choose another step of that trial") from error
        wait_for_others(f"{path} verified")


def _verify(checkpoint: Path, rank: int, ranks: int) -> None:
    share = partial(verify_share, checkpoint, rank, ranks)
    read_input("the checkpoint", lambda: until_certain(share))


def require_inputs(settings: Settings) -> None:
    """Raise UnreadableInputError if this host cannot read a path of the configuration."""
    config = settings.config
    uses = uses_of(config, settings.algorithm)
    models = [config.model(use.role) for use in uses]
    paths = [config.actor.tokenizer, *(model.path for model in models), *config.data_paths()]
    inputs.require(Path(path) for path in paths if path is not None)


def _engines(
    settings: Settings, plan: Plan, contexts: Mapping[str, ParallelContext], paths: RunPaths
) -> dict[str, Engine]:
    """Build the models of which this rank has a shard, with their initial weights."""
    config = settings.config
    algorithm = settings.algorithm
    engines: dict[str, Engine] = {}
    for role, context in contexts.items():
        model = model_of(config, role)
        source = Path(model.path) if model.path is not None else None
        if source is not None:  # Check this first, before other ranks wait in a collective.
            read_input(f"the model of {role}", partial(inputs.check_folder, source))
        steps = (config.total_steps or 0) - algorithm.untrained_steps(role)
        placed = plan.models[role]
        if placed.averaged:  # A moving average needs trained weights, but no optimizer moments.
            model = model.model_copy(update={"optimizer": Optimizer(name="sgd")})
        engines[role] = ENGINES.load(placed.engine)(
            role,
            model,
            head=placed.head,
            trained=placed.changes,
            context=context,
            seed=config.seed,
            total_steps=steps * algorithm.optimizer_steps,
            source=source,
            **_serving(settings, plan, context, paths),
        )
    return engines


def _serving(
    settings: Settings, plan: Plan, context: ParallelContext, paths: RunPaths
) -> dict[str, Serving | Running]:
    """Return the additional argument of an engine that uses servers."""
    engine = plan.models[context.role].engine
    if not BACKENDS[engine].serves:
        return {}
    if settings.config.rollout.servers:
        return {"serving": running_servers(settings, paths)}
    return {
        "serving": own_server(
            settings,
            paths.logs / TRAINERS / f"{engine}.{context.dp_rank}.log",
            EventWriter(paths, f"{engine}.{TRAINERS}.{context.dp_rank}"),
            memory_bytes=_share_of_gpu(settings, context.device),
            sleeps=context.role in plan.offloaded,
        )
    }


SERVED_TYPES = "types of running servers"
"""Key of the store with the dtypes in which running servers compute."""


def wait_until_up(
    settings: Settings,
    plan: Plan,
    engines: Collection[Engine],
    store: RunStore,
    report: Callable[[], None],
) -> Collection[str]:
    """Start servers in the memory that the models leave free. Collective over all ranks.

    Return the dtypes in which `rollout.servers` compute. The rank that uses the servers gets these
    dtypes and shares them with the other ranks. Call ``report`` now and then during the start.
    """
    for engine in engines:
        engine.wait_until_up(report)
    models = plan.models_of(TRAINERS).values()
    serves = any(BACKENDS[model.engine].serves for model in models)
    if not (serves and settings.config.rollout.servers):
        return ()
    for engine in engines:
        if (types := engine.served_types) is not None:
            store.set(SERVED_TYPES, json.dumps(sorted(types)))
    store.wait([SERVED_TYPES], timedelta.max)
    return tuple(json.loads(store.get(SERVED_TYPES)))


def _share_of_gpu(settings: Settings, device: torch.device) -> int | None:
    """Return the bytes of this rank's GPU for a server; None if the server's settings decide."""
    if device.type != "cuda":
        return None
    total: int = torch.cuda.get_device_properties(device).total_memory
    return share_of_server(settings, total)


def tokenizer_of(settings: Settings) -> PreTrainedTokenizerBase:
    folder = settings.config.actor.tokenizer
    assert folder is not None, "checked at submission"
    return read_input("the tokenizer", lambda: load_tokenizer(Path(folder)))


def read_input(what: str, action: Callable[[], T]) -> T:
    """Read a file of the run. Retry for `READ_S`, because the file existed at submission."""
    return retry(f"read {what}", action, timeout_s=READ_S)


KEY = "prepared data"
REPORT_S = 10.0
REPORTS_PER_TIMEOUT = 4


class Datasets:
    """Prepares and opens the datasets of a configuration.

    Only rank 0 of an incarnation looks for prepared data. Therefore, processes cannot disagree
    about its state, and no lock is needed. The other ranks read the names of the directories from
    the store of their world.
    """

    def __init__(
        self, folder: Path, incarnation: int, config: Config, store: RunStore, activity: Activity
    ) -> None:
        self._folder = folder
        self._incarnation = incarnation
        self._config = config
        self._sections = list(config.datasets().values())
        self._store = store
        self._activity = activity

    def provide(
        self, tokenizer: PreTrainedTokenizerBase, rank: int, say: Callable[[Preparing], None]
    ) -> tuple[SampleRows, ...]:
        """Return the training dataset and the datasets of `Config.evaluations`.

        While rank 0 tokenizes, it sends `Preparing` with ``say`` now and then.
        """
        if rank == 0:
            self._prepare(tokenizer, lambda: say(Preparing(rank=rank)))
        return self._open()

    def _prepare(self, tokenizer: PreTrainedTokenizerBase, report: Callable[[], None]) -> None:
        """Find or make the prepared data; store the names of its directories for other ranks."""
        timeout_s = self._config.cluster.start_timeout_s
        every_s = min(REPORT_S, timeout_s / REPORTS_PER_TIMEOUT)
        due = Interval(every_s, after_s=every_s)

        def progress(what: str) -> None:
            self._activity.phase(what)
            if due.due():
                logger.info("%s", what)
                report()

        directories = []
        for part in (part for section in self._sections for part in section.parts.values()):
            make = partial(
                preparation.prepare, self._folder, self._incarnation, part, tokenizer, progress
            )
            directories.append(retry("prepare the dataset", make, timeout_s=READ_S))
        try:
            preparation.sweep(self._folder, self._incarnation, directories)
        except EnvironmentFailure as error:
            logger.warning("cannot remove old prepared data: %s", error)
        self._store.set(KEY, json.dumps([directory.name for directory in directories]))

    def _open(self) -> tuple[SampleRows, ...]:
        """Open the prepared data. Wait for rank 0 without a limit: its failure ends this rank."""
        self._activity.phase("waiting for rank 0 to tokenize the dataset")
        self._store.wait([KEY], timedelta.max)
        names = iter(json.loads(self._store.get(KEY)))
        opened = []
        for section in self._sections:
            make = partial(self._open_one, section, [next(names) for _ in section.parts])
            opened.append(retry("open the dataset", make, timeout_s=READ_S))
        return tuple(opened)

    def _open_one(self, section: DatasetConfig, names: Sequence[str]) -> SampleRows:
        return dataset.make(section, [PreparedRows(self._folder / name) for name in names])
