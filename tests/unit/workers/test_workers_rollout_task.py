"""A rollout task with a real engine. Its master is only a request log."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.policy.actor import RecomputeInterface
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.algorithms.rollout_calls import RolloutInterface
from slurmrl.config.schema import Config, Dataset, Model, Optimizer, Rollout
from slurmrl.data import dataset, preparation
from slurmrl.data.ledger import LeasedItems
from slurmrl.data.prepared import PreparedRows
from slurmrl.data.sample import SequenceSample
from slurmrl.data.tokenizer import load_tokenizer
from slurmrl.engines.fsdp.engine import FSDPEngine
from slurmrl.errors import EnvironmentFailure, UsageError
from slurmrl.plan.settings import Settings
from slurmrl.rollouts.generation.native.batch import ContinuousBatch
from slurmrl.rollouts.generation.native.native_rollout import NativeRollout
from slurmrl.rollouts.sample_files import SampleGroup, read_group
from slurmrl.run.channel.message_log import LogReader, LogWriter
from slurmrl.run.channel.wakeups import WakeupSocket
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Identity
from slurmrl.tensors.checkpoint.tensors import TensorFile
from slurmrl.tensors.weights.format import VersionId, part_file
from slurmrl.tensors.weights.inventory import remove
from slurmrl.tensors.weights.writer import PartWriter, publish
from slurmrl.workers.rollout.task import TaskAtWork, TaskOptions
from slurmrl.workers.rollout.task_generation import Generation, TaskRows
from slurmrl.workers.rollout.task_setup import decoder_config, undefined_decoder
from slurmrl.workers.rollout.task_weights import TaskWeights
from slurmrl.workers.rollout_messages import (
    REQUEST_LOG,
    RESULT_LOG,
    Confirm,
    GroupsFinished,
    Holds,
    Joined,
    Leave,
    Leaving,
    RolloutCounts,
    RolloutResult,
    WakeTask,
)
from tests.support.decoder_folders import to_hf
from tests.unit.algorithms.conftest import ARCHITECTURE, alone

TOKENIZER = Path(__file__).parents[3] / "examples" / "addition" / "tokenizer"
AGENT = Identity("rollout", 0, 0, "r0", "50.0.0", "50_0", 1)
BATCH, STOP = 4, 1
OLD, NEW = VersionId(0, 1), VersionId(1, 1)


class Trial:
    """Prepared prompts, trainers with weights of two steps, and their published versions."""

    def __init__(self, tmp_path: Path) -> None:
        self.paths, self.folder = RunPaths(tmp_path / "run"), tmp_path
        rows = [json.dumps({"id": str(n), "prompt": f"{n}+{n}="}) for n in range(8)]
        (tmp_path / "data.jsonl").write_text("\n".join(rows))
        self.config = Config(
            experiment="test",
            total_steps=4,
            algorithm={"name": "ppo"},
            actor=Model(architecture={**ARCHITECTURE, "vocab_size": 64}),
            rollout=Rollout(n=2, max_new_tokens=12),
            dataset=Dataset(type="prompt", path=str(tmp_path / "data.jsonl")),
        )
        self.settings = Settings(self.config, PolicyGradient(batch_size=BATCH), cast(Any, None))
        self.tokenizer: Any = load_tokenizer(TOKENIZER)
        self.rows = preparation.prepare(
            self.paths.data, 1, self.config.dataset, self.tokenizer, lambda _: None
        )
        self.trainers = {version: self._trainer(version.step) for version in (OLD, NEW)}
        place = AGENT.group, AGENT.task, AGENT.attempt
        self.samples = self.paths.rollout_samples(*place)
        self._results = LogReader(self.paths.rollout_results(*place))
        self.results: list[RolloutResult] = []
        self.requests: Callable[[int], Path] = lambda number: self.paths.rollout_requests(
            *place, number
        )

    def _trainer(self, seed: int) -> FSDPEngine:
        model = self.config.actor.model_copy(update={"optimizer": Optimizer(lr=0.1)})
        return FSDPEngine(
            *("actor", model), head="lm", trained=True, context=alone("actor"), seed=seed,
            total_steps=4, source=None,
        )  # fmt: skip

    def publish(self, version: VersionId) -> None:
        model = self.folder / version.name
        model.mkdir(exist_ok=True)
        with self.trainers[version]._shards.gathered() as decoder:
            to_hf(cast(Any, decoder), model)
        folder = self.paths.versions / version.name
        with (
            closing(TensorFile(model / "model.safetensors")) as file,
            PartWriter(folder, 0, None) as writer,
        ):
            for name, spec in file.specs.items():
                writer.add(name, spec.dtype, spec.shape, file.flat(name).view(np.uint8))
            publish(folder, [writer.finish()], version, None, clock=lambda: 1e9)

    def engine(self) -> NativeRollout:
        actor = self.config.actor
        decoder = undefined_decoder(decoder_config(actor), actor.dtype, torch.device("cpu"))
        return NativeRollout(decoder)

    def task(
        self, engine: NativeRollout, *, wakeups: WakeupSocket | None = None, **options: Any
    ) -> TaskAtWork:
        options = {"poll_s": (0.01, 0.01), "gather_s": 0.01, **options}
        rows = TaskRows(self.paths.data, self.config.dataset, self.tokenizer)
        return TaskAtWork(
            self.paths,
            AGENT,
            engine,
            TaskWeights(self.paths.versions, self.folder / "host", ARCHITECTURE),
            Generation(rows, self.context(0), engine),
            TaskOptions(**options),
            wakeups=wakeups,
        )

    @asynccontextmanager
    async def live(
        self, engine: NativeRollout, *, wake: Callable[[], None] = lambda: None, **options: Any
    ) -> AsyncIterator[tuple[TaskAtWork, LogWriter]]:
        """Run a task. Yield it and the log of its requests, and let it leave in the end."""
        task = self.task(engine, **options)
        running = asyncio.create_task(task.run())
        log = LogWriter(self.requests(3))
        yield task, log
        log.append(REQUEST_LOG.to_json(Leave(within_s=60.0)))
        wake()
        await asyncio.wait_for(running, 60)
        await self.until(Leaving, 1)
        await engine.close()

    async def until(self, kind: type[RolloutResult], count: int) -> None:
        """Wait until the log has this many messages of a kind, or this many groups."""
        async with asyncio.timeout(60):
            while True:
                found = [RESULT_LOG.from_json(values) for values in self._results.read()]
                self.results += found
                of_kind = [one for one in self.results if isinstance(one, kind)]
                groups = sum(len(getattr(one, "groups", (0,))) for one in of_kind)
                if groups >= count:
                    return
                await asyncio.sleep(0.01)

    def groups(self) -> dict[int, SampleGroup]:
        finished = [one for one in self.results if isinstance(one, GroupsFinished)]
        stored = [each for one in finished for each in one.groups]
        assert len({one.item for one in stored}) == len(stored)
        return {one.item: read_group(self.samples, one) for one in stored}

    def context(self, step: int, ids: tuple[str, ...] = ()) -> CallContext:
        return CallContext(
            *(step, self.config.seed, {}, self.tokenizer, self.settings, (STOP,), ids)
        )

    def generated(self, version: VersionId, items: tuple[int, ...]) -> SequenceSample:
        """Return the samples of the trainers with these weights for items of one step."""
        made = dataset.make(self.config.dataset, [PreparedRows(self.rows)])
        sample = made.sample([(0, item) for item in items])
        context = self.context(items[0] // BATCH + 1, sample.ids)
        result = RolloutInterface().generate(self.trainers[version], sample, context)
        assert result.sample is not None
        return result.sample


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    found = Trial(tmp_path)
    with torch.no_grad():
        yield found


def asked(lease: str, *items: int, oldest: VersionId = OLD) -> dict[str, Any]:
    rows = tuple((0, item) for item in items)
    request = LeasedItems(lease=lease, holder="", items=items, rows=rows, oldest=oldest.name)
    return REQUEST_LOG.to_json(request)


def test_task_fails_if_the_trainers_stop_at_other_tokens(trial: Trial) -> None:
    """Someone may have edited the model's folder between the two starts."""

    async def ask() -> None:
        engine = trial.engine()
        async with trial.live(engine) as (task, log):
            await task.serve(3)
            log.append(REQUEST_LOG.to_json(Confirm(stop_token_ids=(STOP, STOP + 1))))

    with pytest.raises(
        UsageError, match=r"at the token ids \[1, 2\], and this task would .* \[1\]"
    ):
        asyncio.run(ask())


def test_tasks_sample_the_same_tokens_as_trainers(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also covers an update of the weights during completions."""
    step, calls = ContinuousBatch.step, []

    def counted(self: ContinuousBatch) -> Any:
        calls.append(self.version)
        if self.version == NEW.name or calls.count(OLD.name) != first + 5:
            return step(self)
        engine._paused = True
        return step(self)

    monkeypatch.setattr(ContinuousBatch, "step", counted)
    engine: NativeRollout
    first = 1_000_000  # calls before those that are interrupted; not known yet

    async def run() -> None:
        nonlocal engine, first
        engine = trial.engine()
        async with trial.live(engine) as (task, log):
            log.append(REQUEST_LOG.to_json(Confirm()), asked("3.0", 0, 1, 2, 3))
            await task.serve(3)
            await asyncio.sleep(0.1)
            assert not calls, "there are no weights yet"
            trial.publish(OLD)
            await trial.until(GroupsFinished, 4)
            first = len(calls)
            log.append(asked("3.1", 4, 5), asked("3.2", 6, 7, oldest=NEW))
            async with asyncio.timeout(60):
                while not engine._paused:
                    await asyncio.sleep(0.01)
            trial.publish(NEW)
            await trial.until(Holds, 2)
            await engine.resume()
            await trial.until(GroupsFinished, 8)

    asyncio.run(run())
    assert trial.results[:1] == [Joined(agent=AGENT)]
    assert [one.version for one in trial.results if isinstance(one, Holds)] == ["0.1", "1.1"]
    groups = trial.groups()
    same(trial.generated(OLD, (0, 1, 2, 3)), [groups[item] for item in range(4)], OLD)
    same(trial.generated(NEW, (6, 7)), [groups[item] for item in (6, 7)], NEW)
    interrupted(trial, [groups[item] for item in (4, 5)])


def test_uninterrupted_completions_use_one_weight_version(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New weights that arrive during completions wait until these end, and items that have not
    begun wait for the weights.
    """
    step, calls = ContinuousBatch.step, []

    def counted(self: ContinuousBatch) -> Any:
        calls.append(self.version)
        engine._paused = len(calls) == 5
        return step(self)

    monkeypatch.setattr(ContinuousBatch, "step", counted)
    engine: NativeRollout

    async def run() -> None:
        nonlocal engine
        engine = trial.engine()
        async with trial.live(engine, interruptible=False) as (task, log):
            log.append(REQUEST_LOG.to_json(Confirm()), asked("3.0", 4, 5))
            trial.publish(OLD)
            await task.serve(3)
            async with asyncio.timeout(60):
                while len(calls) < 5:
                    await asyncio.sleep(0.01)
                trial.publish(NEW)
                while not (trial.folder / "host" / "models" / NEW.name / "config.json").exists():
                    await asyncio.sleep(0.01)
            log.append(asked("3.1", 6, 7))
            await engine.resume()
            await trial.until(GroupsFinished, 4)

    asyncio.run(run())
    versions = {item: group.versions for item, group in trial.groups().items()}
    assert versions == {4: (OLD.name,), 5: (OLD.name,), 6: (NEW.name,), 7: (NEW.name,)}


def test_task_reacts_to_notifications_without_polling(trial: Trial) -> None:
    """The task neither polls nor waits for more results than will come."""
    masters, own = (WakeupSocket("127.0.0.1") for _ in range(2))

    async def heard() -> None:
        async with asyncio.timeout(60):
            while own.address.source not in masters.receive().sources:
                await asyncio.sleep(0.01)

    async def run() -> None:
        wake = partial(masters.wake, [own.address])
        slow: dict[str, Any] = {"poll_s": (600.0, 600.0), "gather_s": 600.0, "spread_s": 0.01}
        async with trial.live(trial.engine(), wake=wake, wakeups=own, **slow) as (task, log):
            log.append(REQUEST_LOG.to_json(Confirm(wakeups=masters.address)))
            await task.serve(3)
            await trial.until(WakeTask, 1)
            await heard()
            assert trial.results[-1] == WakeTask(wakeups=own.address)
            trial.publish(OLD)
            wake()
            await trial.until(Holds, 1)
            await heard()
            log.append(asked("3.0", 0, 1, 2, 3))
            wake()
            await trial.until(GroupsFinished, 4)
            await heard()

    asyncio.run(run())
    assert own.fileno() < 0, "it is closed"
    masters.close()


def test_task_reports_why_it_cannot_load_weights(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer, full = TaskWeights.newer, [EnvironmentFailure("cannot write x: No space left on device")]

    def limited(self: TaskWeights) -> Any:
        if full:
            raise full[0]
        return newer(self)

    monkeypatch.setattr(TaskWeights, "newer", limited)

    def problems() -> list[str]:
        return [one.problem for one in trial.results if isinstance(one, RolloutCounts)]

    async def run() -> None:
        async with trial.live(trial.engine(), counts_s=0.01) as (task, _):
            trial.publish(OLD)
            await task.serve(3)
            while not any(problems()):  # the first counts may come before the first look
                await trial.until(RolloutCounts, len(problems()) + 1)
            assert problems()[-1] == "cannot write x: No space left on device"
            full.clear()
            await trial.until(Holds, 1)
            await trial.until(RolloutCounts, len(problems()) + 2)
            assert problems()[-1] == ""

    asyncio.run(run())


def test_rejected_version_is_loaded_after_it_is_published_again(trial: Trial) -> None:
    weights = TaskWeights(trial.paths.versions, trial.folder / "host", ARCHITECTURE)
    trial.publish(OLD)
    part = trial.paths.versions / OLD.name / part_file(0)
    os.truncate(part, part.stat().st_size // 2)
    assert weights.newer() is None
    assert [version for version, _ in weights.unreadable] == [OLD]
    assert weights.newer() is None
    assert len(weights.unreadable) == 1, "it is not read again"
    remove(trial.paths.versions, OLD)
    trial.publish(OLD)
    taken = weights.newer()
    assert taken is not None
    assert taken.name == OLD.name


def _drawn_by(group: SampleGroup) -> torch.Tensor:
    """Return int64 [T]: 0 for tokens of the old weights, 1 for the new weights, -1 for prompts."""
    place = [(OLD.name, NEW.name).index(name) for name in group.versions]
    return torch.tensor([*place, -1])[torch.from_numpy(group.drawn_by).long()]


def interrupted(trial: Trial, groups: list[SampleGroup]) -> None:
    """Return completions whose tokens come from the old weights up to a token, and then from the
    new weights.
    """
    assert any(group.versions == (OLD.name, NEW.name) for group in groups)
    lengths = [group.lengths.tolist() for group in groups]
    ids, logprobs = (
        torch.from_numpy(np.concatenate([getattr(group, name) for group in groups]))
        for name in ("input_ids", "logprobs")
    )
    # A group that began after the update has the new weights alone.
    drawn_by = torch.cat([_drawn_by(group) for group in groups])
    old = trial.generated(OLD, (4, 5))
    flat = [length for row in lengths for length in row]
    before = [length for row in old.lengths["input_ids"] for length in row]
    for tokens, by, expected in zip(
        ids.split(flat), drawn_by.split(flat), old.tensor("input_ids").split(before), strict=True
    ):
        assert by.tolist() == sorted(by.tolist())
        kept = int((by < 1).sum())
        assert tokens[:kept].tolist() == expected[:kept].tolist()
    data: dict[str, torch.Tensor | None] = {
        "input_ids": ids.long(),
        "prompt_mask": drawn_by < 0,
        "logprobs": logprobs,
    }
    sample = SequenceSample.grouped(lengths, ("4@0", "5@0"), data)
    context = trial.context(2, sample.ids)
    found = RecomputeInterface().inference(trial.trainers[NEW], sample, context)
    assert found.sample is not None
    new = drawn_by == 1
    own = found.sample.tensor("old_logprobs")[new]
    torch.testing.assert_close(own, logprobs[new], atol=1e-5, rtol=1e-4)


def same(sample: SequenceSample, groups: list[SampleGroup], version: VersionId) -> None:
    """Check that tokens and ends are equal, and log-probabilities equal except for rounding."""
    assert all(group.versions == (version.name,) for group in groups)
    joined = {
        name: np.concatenate([getattr(group, name) for group in groups])
        for name in ("input_ids", "drawn_by", "logprobs", "finished")
    }
    assert sample.tensor("input_ids").tolist() == joined["input_ids"].tolist()
    assert sample.tensor("prompt_mask").tolist() == (joined["drawn_by"] < 0).tolist()
    assert sample.tensor("finished").tolist() == joined["finished"].tolist()
    np.testing.assert_allclose(
        sample.tensor("logprobs").numpy(), joined["logprobs"], rtol=0, atol=1e-6
    )
