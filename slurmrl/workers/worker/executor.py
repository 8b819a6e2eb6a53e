"""Execution of the master's messages on this rank's models and its part of the batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.backoff import READ_S, retry
from slurmrl.data.dataset import TokenizedDataset
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import TOKENS, Engine, TrainEngine
from slurmrl.graph.call import Method
from slurmrl.parallel.activity import Activity
from slurmrl.parallel.groups import ParallelContext
from slurmrl.paths import RunPaths
from slurmrl.plan.model import CallPlan, ModelPlan, Plan
from slurmrl.plan.settings import Settings
from slurmrl.registry import resolve
from slurmrl.workers.messages import Message
from slurmrl.workers.worker.batch import Batch
from slurmrl.workers.worker.reallocation import Reallocations
from slurmrl.workers.worker.residence import Residence
from slurmrl.workers.worker.saver import Saver
from slurmrl.workers.worker.shares import Shares
from slurmrl.workers.worker.sharing import Mail

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
        datasets: Sequence[TokenizedDataset],
        tokenizer: Any,
        stop_token_ids: tuple[int, ...],
        cores: int,
        mail: Mail,
        reallocations: Reallocations,
        residence: Residence,
        activity: Activity,
    ) -> None:
        self.paths = paths
        self.settings = settings
        self.plan = plan
        self.rank = rank
        self.engines = engines
        self.dataset = datasets[0]
        self.evaluation_dataset = datasets[1] if len(datasets) > 1 else None
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self._cores = cores
        self.batch: Batch | None = None
        self._mail = mail
        self._reallocations = reallocations
        self._residence = residence
        self._activity = activity
        self._interfaces: dict[str, Interface] = {}
        self._saver = Saver(rank)

    def describe_data(self) -> dict[str, Any]:
        """Return what the master needs to know about data and tokens, the same on every rank."""
        evaluation = self.evaluation_dataset
        return {
            "size": self.dataset.size,
            "fingerprint": self.dataset.fingerprint,
            "evaluation_size": evaluation.size if evaluation is not None else 0,
            "left_out": self.dataset.left_out,
            "evaluation_left_out": evaluation.left_out if evaluation is not None else 0,
            "stop_tokens": [
                [token, self.tokenizer.convert_ids_to_tokens(token)]
                for token in self.stop_token_ids
            ],
        }

    # -- messages ----------------------------------------------------------------------------

    def load(self, message: Message) -> Message:
        """Begin a batch. Every rank reads the ids and lengths of all items, so all agree on the
        shares without communication, and then only the items of its own shares."""
        began = time.monotonic()
        self._mail.finish()
        calls = self._calls(message)
        dataset = self.evaluation_dataset if message["evaluation"] else self.dataset
        assert dataset is not None
        items = [(epoch, index) for epoch, index in message["items"]]
        meta = _read(lambda: dataset.meta(items))

        def take(positions: Sequence[int]) -> SequenceSample:
            return _read(lambda: dataset.sample([items[position] for position in positions]))

        def layout_of(call: CallPlan) -> ModelPlan:
            return self.plan.models[self._layout(call)]

        minibatches = self.settings.algorithm.minibatches
        shares = Shares(calls, layout_of, meta.item_lengths(), minibatches)
        self.batch = Batch(meta, take, calls, shares, self.rank, self._mail, self._activity)
        return self._answer(began)

    def call(self, message: Message) -> Message:
        """Execute one call of the dataflow graph on this rank's part, if the rank takes part in the
        call. Of ranks with the same part, only the first one's results count."""
        began = time.monotonic()
        call = next(call for call in self._calls(message) if call.name == message["name"])
        models = () if call.role is None else (self._layout(call),)
        with self._residence.using(*models):
            for move in call.pre_hooks:
                with self._residence.using(move.source):
                    self._reallocations.run(move)
            results = self._results(call, message)
        if call.method is Method.TRAIN_STEP and call.role is not None:
            self._reallocations.trained(call.role)
        for offload in call.post_hooks:
            self._reallocations.discarded(offload.model)
        return self._answer(began, **results)

    def _results(self, call: CallPlan, message: Message) -> dict[str, Any]:
        """Execute a call. Return this rank's part of the answer."""
        if self.batch is None:
            raise RuntimeError("no batch was loaded before this call")
        place = self._place(call) if self.rank in call.ranks else None
        sample = self.batch.inputs(call, place)
        if sample is None or place is None:
            self.batch.add(call, None)
            return {}
        context = CallContext(
            step=message["step"],
            seed=self.settings.config.seed,
            scalars=message["scalars"],
            tokenizer=self.tokenizer,
            settings=self.settings,
            stop_token_ids=self.stop_token_ids,
            batch=self.batch.ids,
            cores=self._cores,
            evaluation=message["evaluation"],
        )
        result = self._run(call, sample, context) if call.role or place.is_leader else CallResult()
        self.batch.add(call, result.sample)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if not place.is_leader:
            return {}
        tokens = sum(sample.item_lengths(TOKENS)) if TOKENS in sample.keys else 0
        return {"tokens": tokens, "stats": result.stats, "texts": result.texts}

    def save(self, message: Message, say: Callable[[Message], None]) -> Message:
        """Write this rank's part of a checkpoint of every trained model. An asynchronous save only
        copies it to host memory, and a thread writes it during the next messages. ``say`` receives
        SAVED once it is on disk, perhaps from that thread."""
        began = time.monotonic()
        self._saver.wait()
        save = self._saver.start if message["asynchronous"] else self._saver.write
        directory = self.paths.checkpoints / message["directory"]
        snapshots = []
        for role, engine in self.engines.items():
            if not self.plan.models[role].trained or not isinstance(engine, TrainEngine):
                continue
            copy = message["asynchronous"] or role in self.plan.offloaded
            with self._residence.using(role):
                if (snapshot := engine.snapshot(copy=copy)) is not None:
                    snapshots.append(snapshot)
        save(snapshots, directory, message["seq"], say)
        return self._answer(began)

    # -- parts -------------------------------------------------------------------------------

    def _calls(self, message: Message) -> Sequence[CallPlan]:
        return self.plan.evaluation_calls if message["evaluation"] else self.plan.calls

    def _layout(self, call: CallPlan) -> str:
        """Return the model whose layout a call runs on. A call without a model has the actor's."""
        return call.layout or call.role or "actor"

    def _place(self, call: CallPlan) -> ParallelContext:
        """Return this rank's place in the layout of a call."""
        return self.engines[self._layout(call)].context

    def _run(self, call: CallPlan, sample: SequenceSample, context: CallContext) -> CallResult:
        if call.interface not in self._interfaces:
            self._interfaces[call.interface] = resolve(call.interface)()
        interface = self._interfaces[call.interface]
        engine = self.engines[self._layout(call)] if call.role is not None else None
        method = getattr(interface, call.method.value)
        result: CallResult = method(engine, sample, context)
        return result

    def close(self) -> None:
        self._saver.wait()
        self._mail.finish()
        for interface in self._interfaces.values():
            interface.close()

    def _answer(
        self,
        began: float,
        *,
        tokens: int = 0,
        stats: Mapping[str, tuple[float, float]] | None = None,
        texts: Sequence[Mapping[str, Any]] = (),
    ) -> Message:
        return {
            "stats": dict(stats or {}),
            "seconds": time.monotonic() - began,
            "tokens": tokens,
            "texts": list(texts),
        }


def _read(action: Callable[[], T]) -> T:
    """Read the dataset; its directory may fail to answer for a while."""
    return retry("read the dataset", action, timeout_s=READ_S)
