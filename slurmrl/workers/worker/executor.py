"""Execution of the master's messages on this rank's models and its part of the batch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.data.dataset import TokenizedDataset
from slurmrl.data.packing import balanced_partition, even_partition
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import Engine
from slurmrl.graph.call import Method
from slurmrl.parallel.groups import ParallelContext
from slurmrl.paths import RunPaths
from slurmrl.plan.model import CallPlan, Plan
from slurmrl.plan.settings import Settings
from slurmrl.registry import resolve
from slurmrl.workers.messages import Message
from slurmrl.workers.worker.saver import Saver
from slurmrl.workers.worker.sharing import share


class SampleStore:
    """This rank's part of the current batch. A call takes the keys that it reads and adds the keys
    that it makes; the next batch replaces everything."""

    def __init__(self) -> None:
        self._sample: SequenceSample | None = None

    def replace(self, sample: SequenceSample | None) -> None:
        self._sample = sample

    @property
    def sample(self) -> SequenceSample:
        if self._sample is None:
            raise RuntimeError("no batch was loaded before this call")
        return self._sample

    def add(self, produced: SequenceSample) -> None:
        self.sample.update_(produced)

    def tokens(self, key: str = "input_ids") -> int:
        """Return the number of tokens under ``key``; 0 if the batch has no such key yet."""
        if self._sample is None or key not in self._sample.keys:
            return 0
        return sum(sum(lengths) for lengths in self._sample.lengths[key])


class Executor:
    """One rank's models, data and interfaces."""

    def __init__(
        self,
        paths: RunPaths,
        settings: Settings,
        plan: Plan,
        rank: int,
        engines: Mapping[str, Engine],
        dataset: TokenizedDataset,
        evaluation_dataset: TokenizedDataset | None,
        tokenizer: Any,
        stop_token_ids: tuple[int, ...],
        cores: int,
    ) -> None:
        self.paths = paths
        self.settings = settings
        self.plan = plan
        self.rank = rank
        self.engines = engines
        self.dataset = dataset
        self.evaluation_dataset = evaluation_dataset
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self.store = SampleStore()
        self._cores = cores
        self._batch: tuple[str, ...] = ()
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
        """Take this rank's part of a batch. Every rank reads the whole batch, so all agree on the
        parts without communication. Ranks of one tp or cp group take the same part."""
        began = time.monotonic()
        first = self._calls(message)[0]
        part = None
        if self.rank in first.ranks:
            place = self._place(first)
            whole = self._read(message)
            self._batch = whole.ids
            part = whole.take(self._parts(whole, first, place.dp_size)[place.dp_rank])
        self.store.replace(part)
        return self._answer(began)

    def call(self, message: Message) -> Message:
        """Execute one call of the dataflow graph on this rank's part, if the rank takes part in the
        call. Of ranks with the same part, only the first one's results count."""
        began = time.monotonic()
        call = next(call for call in self._calls(message) if call.name == message["name"])
        if self.rank not in call.ranks:
            return self._answer(began)
        context = CallContext(
            step=message["step"],
            seed=self.settings.config.seed,
            scalars=message["scalars"],
            tokenizer=self.tokenizer,
            settings=self.settings,
            stop_token_ids=self.stop_token_ids,
            batch=self._batch,
            cores=self._cores,
            evaluation=message["evaluation"],
        )
        place = self._place(call)
        result = self._run(call, context) if call.role or place.is_leader else CallResult()
        if call.method != Method.TRAIN_STEP:
            made = share(result.sample, place)
            if made is not None:
                self.store.add(made)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if not place.is_leader:
            return {**self._answer(began), "tokens": 0}
        return self._answer(began, stats=result.stats, texts=result.texts)

    def save(self, message: Message, say: Callable[[Message], None]) -> Message:
        """Write this rank's part of a checkpoint of every trained model. An asynchronous save only
        copies it to host memory, and a thread writes it during the next messages. ``say`` receives
        SAVED once it is on disk, perhaps from that thread."""
        began = time.monotonic()
        self._saver.wait()
        taken = (
            engine.snapshot(copy=message["asynchronous"])
            for role, engine in self.engines.items()
            if self.plan.models[role].trained
        )
        snapshots = [snapshot for snapshot in taken if snapshot is not None]
        save = self._saver.start if message["asynchronous"] else self._saver.write
        directory = self.paths.checkpoints / message["directory"]
        save(snapshots, directory, message["seq"], say)
        return self._answer(began)

    # -- parts -------------------------------------------------------------------------------

    def _calls(self, message: Message) -> Sequence[CallPlan]:
        return self.plan.evaluation_calls if message["evaluation"] else self.plan.calls

    def _parts(self, whole: SequenceSample, first: CallPlan, ranks: int) -> list[list[int]]:
        """Return the items of each data-parallel rank. They have about equal numbers of tokens; if
        the first call generates, equal numbers of items of each minibatch, because completions,
        whose lengths are not known yet, cost more than prompts."""
        if first.method != Method.GENERATE:
            return balanced_partition(whole.item_lengths(), ranks)
        minibatches = self.settings.algorithm.minibatches
        return even_partition(whole.item_lengths(), ranks, minibatches)

    def _place(self, call: CallPlan) -> ParallelContext:
        """Return this rank's place in the layout of a call. A call without a model has the actor's
        layout."""
        return self.engines[call.layout or call.role or "actor"].context

    def _read(self, message: Message) -> SequenceSample:
        """Read the whole batch; items of one epoch are read together."""
        dataset = self.evaluation_dataset if message["evaluation"] else self.dataset
        assert dataset is not None
        return SequenceSample.gather(
            [
                dataset.sample([index for _, index in items], epoch)
                for epoch, items in itertools.groupby(message["items"], itemgetter(0))
            ]
        )

    def _run(self, call: CallPlan, context: CallContext) -> CallResult:
        if call.interface not in self._interfaces:
            self._interfaces[call.interface] = resolve(call.interface)()
        interface = self._interfaces[call.interface]
        engine = self.engines[call.role] if call.role is not None else None
        method = getattr(interface, call.method.value)
        result: CallResult = method(engine, self.store.sample.only(call.inputs), context)
        return result

    def close(self) -> None:
        self._saver.wait()
        for interface in self._interfaces.values():
            interface.close()

    def _answer(
        self,
        began: float,
        *,
        stats: Mapping[str, tuple[float, float]] | None = None,
        texts: Sequence[Mapping[str, Any]] = (),
    ) -> Message:
        return {
            "stats": dict(stats or {}),
            "seconds": time.monotonic() - began,
            "tokens": self.store.tokens(),
            "texts": list(texts),
        }
