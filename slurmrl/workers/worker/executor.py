"""Execution of the master's messages on this rank's models and its part of the batch.

`checked` checks the results of an algorithm's interfaces, which may be a user's code. `UpdateKept`
measures the share of each update of the actor that reaches generation. If generation has a narrower
dtype, rounding hides small updates until several add up, so generation uses older weights. The
share is computed from equally spaced weights of this rank (see `tensors.checkpoint.export`).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final, TypeVar

import torch

from slurmrl.algorithms.base import CallContext, CallResult, Interface, Stats
from slurmrl.algorithms.sequences import row_id
from slurmrl.backoff import READ_S, retry
from slurmrl.data.dataset import SampleRows
from slurmrl.data.ledger import StoredGroup
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import TOKENS, Engine, TrainEngine
from slurmrl.errors import UsageError
from slurmrl.plan.dataflow import Method
from slurmrl.plan.metric_names import UPDATE_KEPT
from slurmrl.plan.model import CallPlan, ModelPlan, Offloading, Plan
from slurmrl.plan.precision import rounds_to
from slurmrl.plan.settings import Settings
from slurmrl.registry import resolve
from slurmrl.rollouts.sample_files import SampleGroup, read_group
from slurmrl.run.paths import RunPaths
from slurmrl.run.samples import write_part
from slurmrl.tensors.checkpoint.export import survival
from slurmrl.tensors.layout import Array
from slurmrl.tensors.parallel.groups import Activity, ParallelContext
from slurmrl.workers.messages import (
    Done,
    HeldOut,
    LoadBatch,
    Order,
    Ready,
    RunCall,
    Save,
    Saved,
    WriteVersion,
)
from slurmrl.workers.worker.reallocation import Reallocations, Residence
from slurmrl.workers.worker.saver import ACTOR, Saver, VersionWriting
from slurmrl.workers.worker.step_batch import Batch, Mail, Shares

T = TypeVar("T")


class Executor:
    """One rank's models, data and interfaces."""

    def __init__(
        self,
        paths: RunPaths,
        settings: Settings,
        plan: Plan,
        rank: int,
        engines: Mapping[str, Engine],
        datasets: Sequence[SampleRows],
        tokenizer: Any,
        stop_token_ids: tuple[int, ...],
        cores: int,
        mail: Mail,
        reallocations: Reallocations,
        residence: Residence,
        activity: Activity,
        versions: VersionWriting | None = None,
        submission: int = 0,
        kept: UpdateKept | None = None,
    ) -> None:
        self.paths = paths
        self.settings = settings
        self.plan = plan
        self.rank = rank
        self.engines = engines
        self.dataset = datasets[0]
        evaluations = settings.config.evaluations
        self._held_out = dict(zip(evaluations, datasets[1:], strict=True))
        self._settings_of = {
            suite: replace(settings, config=own) for suite, own in evaluations.items()
        }
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self._cores = cores
        self.batch: Batch | None = None
        self._stored: dict[str, StoredGroup] = {}
        """Mapping from the ids of the batch's items to the file positions of tasks' samples."""
        self._candidates: list[Batch] = []
        """Batches of this step's candidates, from which the filter accepts the next batch."""
        self._mail = mail
        self._reallocations = reallocations
        self._residence = residence
        self._activity = activity
        self._interfaces: dict[tuple[str, str], Interface] = {}
        """Mapping from suite and name to interface: each suite has its own reward and episodes."""
        self._saver = Saver(rank)
        self._versions = versions
        self._submission = submission
        self._kept = kept or UpdateKept()

    def ready(self) -> Ready:
        """Return the message to the master with facts about data and tokens."""
        texts = map(self.tokenizer.convert_ids_to_tokens, self.stop_token_ids)
        return Ready(
            rank=self.rank,
            size=self.dataset.size,
            fingerprint=self.dataset.fingerprint,
            left_out=self.dataset.left_out,
            held_out=tuple(
                HeldOut(suite=suite, size=rows.size, left_out=rows.left_out)
                for suite, rows in self._held_out.items()
            ),
            directories=self.dataset.directories,
            stop_tokens=tuple(zip(self.stop_token_ids, map(str, texts), strict=True)),
        )

    # -- messages ----------------------------------------------------------------------------

    def execute(self, order: Order, say: Callable[[Saved], None]) -> Done:
        """Execute a message; return the answer. ``say`` sends later messages (see `save`)."""
        match order:
            case LoadBatch():
                return self.load(order)
            case RunCall():
                return self.call(order)
            case Save():
                return self.save(order, say)
            case WriteVersion():
                return self.publish(order, say)
        raise TypeError(f"a trainer cannot execute {order}")

    def load(self, order: LoadBatch) -> Done:
        """Begin a batch.

        Every rank reads the ids and lengths of all items and computes the same shares from them,
        without communication. Later, the rank reads only the items of its shares.
        """
        began = time.monotonic()
        self._mail.finish()
        calls = self._calls(order)
        dataset = self._held_out[order.suite] if order.evaluation else self.dataset
        items = order.items
        meta = _read(lambda: dataset.meta(items))

        def take(positions: Sequence[int]) -> SequenceSample:
            return _read(lambda: dataset.sample([items[position] for position in positions]))

        def layout_of(call: CallPlan) -> ModelPlan:
            return self.plan.models[self._layout(call)]

        self._stored = dict(zip(meta.ids, order.samples, strict=True)) if order.samples else {}
        minibatches = self.settings.algorithm.minibatches
        shares = Shares(calls, layout_of, meta.item_lengths(), minibatches)
        filtered = 0 if order.evaluation else self.plan.filtered
        first, stop = (0, filtered) if order.candidates else (filtered, None)
        self.batch = Batch(
            *(meta, take, calls, shares, self.rank, self._mail, self._activity),
            first=first,
            stop=stop,
        )
        if order.candidates:
            self._candidates.append(self.batch)
        elif filtered:
            self.batch.take_over(self._candidates)
            self._candidates.clear()
        return self._done(order, began)

    def call(self, order: RunCall) -> Done:
        """Execute one call of the dataflow graph on this rank's part of the batch, if it has one.

        If several ranks have the same part, only the results of the first rank count.
        """
        began = time.monotonic()
        call = next(call for call in self._calls(order) if call.name == order.name)
        models = () if call.role is None else (self._layout(call),)
        if call.role is not None:
            self._make_room(models)
        with self._residence.using(*models):
            for move in call.pre_hooks:
                with self._residence.using(move.source):
                    self._reallocations.run(move)
            result, tokens = self._execute(call, order)
        if call.method is Method.TRAIN_STEP and call.role is not None:
            self._reallocations.trained(call.role)
        for hook in call.post_hooks:
            if isinstance(hook, Offloading):
                continue  # `Residence` does the offloading.
            with self._residence.using(hook.source, hook.target):
                self._reallocations.run(hook)
        return self._done(order, began, result, tokens)

    def _execute(self, call: CallPlan, order: RunCall) -> tuple[CallResult, int]:
        """Execute a call. Return the result of this rank, and its number of tokens."""
        if self.batch is None:
            raise RuntimeError("no batch was loaded before this call")
        place = self._place(call) if self.rank in call.ranks else None
        sample = self.batch.inputs(call, place)
        if sample is None or place is None:
            self.batch.add(call, None)
            return CallResult(), 0
        context = CallContext(
            step=order.step,
            seed=self.settings.config.seed,
            scalars=order.scalars,
            tokenizer=self.tokenizer,
            settings=self._settings_of[order.suite] if order.evaluation else self.settings,
            stop_token_ids=self.stop_token_ids,
            batch=self.batch.ids,
            cores=self._cores,
            evaluation=order.evaluation,
            device=place.device,
            stored=self._read_stored if self._stored else None,
        )
        result = CallResult()
        if call.role or place.is_leader:
            result = self._run(call, order.suite, sample, context)
        if place.is_leader and call.method is Method.RECORD:
            path = self.paths.part(order.part, place.dp_rank)
            write_part(path, result.records, sample.ids, self.batch.ids)
        elif place.is_leader and _scored(order, result):
            scores = {name: {"id": row_id(name), **own} for name, own in result.records.items()}
            write_part(self.paths.part(order.part, self.rank), scores, sample.ids, self.batch.ids)
        self.batch.add(call, result.sample)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if not place.is_leader:
            return CallResult(), 0
        tokens = sum(sample.item_lengths(TOKENS)) if TOKENS in sample.keys else 0
        return result, tokens

    def save(self, order: Save, say: Callable[[Saved], None]) -> Done:
        """Write this rank's part of a checkpoint of every trained model.

        An asynchronous save only copies the part to host memory. A thread then writes it during the
        next messages. ``say`` receives `Saved` when the part is on disk, perhaps in that thread.
        """
        began = time.monotonic()
        self._make_room(())
        self._saver.wait()
        directory = self.paths.checkpoints / order.directory
        snapshots = []
        for role, engine in self.engines.items():
            if not self.plan.models[role].changes or not isinstance(engine, TrainEngine):
                continue
            copy = order.asynchronous or role in self.plan.offloaded
            with self._residence.using(role):
                if (snapshot := engine.snapshot(copy=copy)) is not None:
                    snapshots.append(snapshot)
        self._saver.write(snapshots, directory, order.seq, say, asynchronous=order.asynchronous)
        return self._done(order, began)

    def publish(self, order: WriteVersion, say: Callable[[Saved], None]) -> Done:
        """Copy this rank's tensors of a weight version to host memory.

        A thread writes the tensors during the next messages. ``say`` receives `Saved` when they are
        on disk.
        """
        began = time.monotonic()
        assert self._versions is not None, "this worker has no settings for weight versions"
        self._make_room(())
        with self._residence.using(ACTOR):
            self._activity.phase("copying a weight version")
            self._versions.write(order, self.engines.get(ACTOR), say)
        return self._done(order, began)

    # -- parts -------------------------------------------------------------------------------

    def _read_stored(self, name: str) -> SampleGroup:
        """Read a rollout task's samples of an item.

        Drop scores of another submission, because its reward may be different.
        """
        sample = self._stored[name]
        folder = self.paths.samples_of(sample.task)
        group = retry("read samples", lambda: read_group(folder, sample), timeout_s=READ_S)
        if group.scores is not None and group.submission != self._submission:
            return replace(group, scores=None)
        return group

    def _calls(self, order: LoadBatch | RunCall) -> Sequence[CallPlan]:
        return self.plan.evaluation(order.suite) if order.evaluation else self.plan.calls

    def _layout(self, call: CallPlan) -> str:
        """Return the model whose layout a call uses; a call without a model uses the actor's."""
        return call.layout or call.role or ACTOR

    def _place(self, call: CallPlan) -> ParallelContext:
        """Return this rank's place in the layout that a call uses."""
        return self.engines[self._layout(call)].context

    def _make_room(self, needed: Sequence[str]) -> None:
        """Offload models that are not ``needed``. Record which of them lose moved weights."""
        for model in self._residence.make_room(*needed):
            self._reallocations.discarded(model)

    def _run(
        self, call: CallPlan, suite: str, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        if (suite, call.interface) not in self._interfaces:
            self._interfaces[suite, call.interface] = resolve(call.interface)()
        interface = self._interfaces[suite, call.interface]
        engine = self.engines[self._layout(call)] if call.role is not None else None
        method = getattr(interface, call.method.value)
        torch.set_grad_enabled(True)  # A user's reward may have changed these settings.
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        before = self._kept.before(call, engine)
        with engine.base() if call.base and isinstance(engine, TrainEngine) else nullcontext():
            result = method(engine, sample, context)
        result = checked(result, call, leads=self._place(call).is_leader)
        if before is not None:
            more = self._kept.stats(before, engine)
            result = replace(result, stats={**result.stats, **more})
        return result

    def close(self) -> None:
        self._saver.wait()
        if self._versions is not None:
            self._versions.wait()
        self._mail.finish()
        for interface in self._interfaces.values():
            interface.close()
        for engine in self.engines.values():
            engine.close()

    def _done(
        self, order: Order, began: float, result: CallResult | None = None, tokens: int = 0
    ) -> Done:
        result = result or CallResult()
        seconds = time.monotonic() - began
        return Done(
            rank=self.rank,
            seq=order.seq,
            seconds=seconds,
            began=max(time.time() - seconds, 0.0),
            peak_bytes=_peak_bytes(),
            tokens=tokens,
            stats=result.stats,
            texts=tuple(result.texts),
            notes=tuple(result.notes),
            dropped=self._places_by_reason(result.dropped),
            scored=_scored(order, result),
        )

    def _places_by_reason(self, dropped: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
        """Map each reason to the batch positions of items that a filter dropped."""
        if self.batch is None or not dropped:
            return {}
        places: dict[str, list[int]] = {}
        for place, name in enumerate(self.batch.ids):
            if name in dropped:
                places.setdefault(dropped[name], []).append(place)
        return {reason: tuple(found) for reason, found in places.items()}


def _scored(order: Order, result: CallResult) -> bool:
    """Return whether a result contains scores of an evaluation's items."""
    return isinstance(order, RunCall) and order.evaluation and bool(result.records)


def _peak_bytes() -> int:
    """Return the maximum bytes of memory that this process has used, on its GPU if it has one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _read(action: Callable[[], T]) -> T:
    """Read the dataset. Retry for `READ_S` while its directory does not answer."""
    return retry("read the dataset", action, timeout_s=READ_S)


def checked(result: Any, call: CallPlan, *, leads: bool) -> CallResult:
    """Check and return the result of a call.

    Of the ranks that work on the same samples, only the rank that ``leads`` must return the call's
    outputs. Raises UsageError if the result is not a CallResult, lacks an output, or has a metric
    that is not a pair.
    """
    made = f"{call.interface}.{call.method.value}() of call '{call.name}'"
    if not isinstance(result, CallResult):
        raise UsageError(f"{made} returned {type(result).__name__}, but must return a CallResult")
    keys = () if result.sample is None else result.sample.keys
    if leads and (missing := [key for key in call.outputs if key not in keys]):
        raise UsageError(
            f"{made} returned a sample without {', '.join(missing)}, which calls() declares as "
            f"outputs; it has {', '.join(keys) or 'no keys'}"
        )
    if wrong := [name for name, value in _items(result.stats) if not _is_pair(value)]:
        raise UsageError(
            f"{made} returned metrics that are not a pair (sum, count) of numbers: "
            f"{', '.join(map(str, wrong))}"
        )
    return result


def _items(stats: Any) -> list[tuple[Any, Any]]:
    return [*stats.items()] if isinstance(stats, Mapping) else [("stats", stats)]


def _is_pair(value: Any) -> bool:
    both = isinstance(value, tuple | list) and len(value) == 2
    return both and all(isinstance(number, int | float) for number in value)


MOST: Final = 2**18
"""Maximum number of weights that a rank compares."""


class UpdateKept:
    """Measures the share of the actor's updates that survives rounding to generation's dtype."""

    def __init__(self, dtype: str | None = None) -> None:
        """``dtype`` is the dtype of generation; None measures nothing."""
        self._dtype = dtype

    @staticmethod
    def of(settings: Settings, plan: Plan, served: Collection[str] = ()) -> UpdateKept:
        """Return the measurement for a trial. ``served``: see `rounds_to`."""
        generates = any(call.method is Method.GENERATE for call in plan.calls)
        return UpdateKept(rounds_to(settings.config, served) if generates else None)

    def before(self, call: CallPlan, engine: Engine | None) -> Array | None:
        """Return the weights before a call that trains the actor; None to measure nothing."""
        trains = call.method is Method.TRAIN_STEP and call.role == ACTOR
        return _part_of(engine) if self._dtype and engine is not None and trains else None

    def stats(self, before: Array, engine: Engine | None) -> Stats:
        """Return the kept share of the update since ``before`` as training statistics.

        Return no statistics without an update.
        """
        assert self._dtype is not None, "there are weights to compare with"
        assert engine is not None, "there are weights to compare with"
        share = survival(before, _part_of(engine), self._dtype).share
        return {} if share is None else {UPDATE_KEPT: (share, 1.0)}


def _part_of(engine: Engine) -> Array:
    parts = engine.updated(MOST)
    joined = torch.cat(parts) if parts else torch.empty(0)
    array: Array = joined.clone().cpu().numpy()
    return array
