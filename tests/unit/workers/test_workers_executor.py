"""One rank executes the master's messages; engines and interfaces are stand-ins."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Queue
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.data.dataset import SampleRows
from slurmrl.data.meta import SampleMeta
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import TrainEngine
from slurmrl.fsio.atomic import make_private_directory
from slurmrl.fsio.failures import explain
from slurmrl.plan.model import CallPlan, Plan
from slurmrl.rewards.scores import JudgedCompletions
from slurmrl.rollouts.sample_files import SampleWriter
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint.tensors import SavedFile
from slurmrl.tensors.parallel.groups import Activity, ParallelContext
from slurmrl.tensors.parallel.topology import ProcessTopology
from slurmrl.workers.messages import Done, LoadBatch, RunCall, Save, Saved
from slurmrl.workers.worker import executor as executor_module
from slurmrl.workers.worker.executor import Executor
from slurmrl.workers.worker.reallocation import Reallocations, Residence
from slurmrl.workers.worker.step_batch import Mail
from tests.support.sample_groups import small_group


class FakeDataset:
    """Item i has i % 7 + 1 tokens, all of value i."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fingerprint = f"of {size}"
        self.left_out = 3
        self.directories = (f"rows-{size}",)
        self.reads: list[list[tuple[int, int]]] = []

    def meta(self, items: Sequence[tuple[int, int]]) -> SampleMeta:
        ids = tuple(f"{index}@{epoch}" for epoch, index in items)
        return SampleMeta(ids, {"input_ids": [[index % 7 + 1] for _, index in items]})

    def sample(self, items: Sequence[tuple[int, int]]) -> SequenceSample:
        self.reads.append(list(items))
        lengths = [index % 7 + 1 for _, index in items]
        tokens = [index for (_, index), n in zip(items, lengths, strict=True) for _ in range(n)]
        return SequenceSample.from_default(
            lengths,
            self.meta(items).ids,
            {"input_ids": torch.tensor(tokens), "prompt_mask": torch.ones(len(tokens))},
            {"row": [{"index": index} for _, index in items]},
        )


class FakeTokenizer:
    def convert_ids_to_tokens(self, one: int) -> str:
        return f"<{one}>"


class FakeEngine:
    def __init__(self, role: str, rank: int, sizes: dict[str, int], ranks: tuple[int, ...]) -> None:
        """``rank`` of the ranks of a model with the layout ``sizes``."""
        self.role = role
        self.closed = False
        topology = ProcessTopology([*sizes], [*sizes.values()])
        index = ranks.index(rank) if rank in ranks else 0
        self.context = ParallelContext(role, torch.device("cpu"), index, ranks, topology, {})

    def close(self) -> None:
        self.closed = True

    def snapshot(self, *, copy: bool) -> FakeSnapshot:
        return FakeSnapshot(self.role, copy)


TrainEngine.register(FakeEngine)


@dataclass
class FakeSnapshot:
    role: str
    copied: bool

    def paths(self, directory: Path) -> list[Path]:
        return [directory / self.role]

    def write(self, directory: Path) -> list[SavedFile]:
        thread = threading.current_thread() is not threading.main_thread()
        assert thread is self.copied, "only a copy may be written while the rank goes on"
        if not directory.parent.exists():
            raise explain(FileNotFoundError(2, "gone"), "write", directory)
        if directory.name == "full":
            raise explain(OSError(28, "full"), "write", directory) from OSError(28, "full")
        if directory.name == "bug":
            raise KeyError("bug")
        return [SavedFile(f"{self.role}.safetensors", 7, "sha256:0")]


class FakeInterface(Interface):
    """Makes a reward per item, and remembers what it was given."""

    made = 0

    def __init__(self) -> None:
        self.given: list[tuple[Any, SequenceSample, CallContext]] = []
        self.closed = False

    def inference(self, engine: Any, sample: SequenceSample, context: CallContext) -> CallResult:
        self.given.append((engine, sample, context))
        rewards = torch.full((sample.bs,), 0.5)
        return CallResult(
            SequenceSample.from_default([1] * sample.bs, sample.ids, {"rewards": rewards}),
            {"reward": (0.5 * sample.bs, float(sample.bs))},
            [{"id": one} for one in sample.ids[:1]],
            records={name: {"score": 0.5} for name in sample.ids},
        )

    generate = inference

    def filter(self, engine: Any, sample: SequenceSample, context: CallContext) -> CallResult:
        self.given.append((engine, sample, context))
        reasons = {1: "odd", 2: "three"}
        indices = {name: int(name.partition("@")[0]) for name in sample.ids}
        return CallResult(
            dropped={
                name: reasons[index % 4] for name, index in indices.items() if index % 4 in reasons
            }
        )

    def train_step(self, engine: Any, sample: SequenceSample, context: CallContext) -> CallResult:
        self.given.append((engine, sample, context))
        return CallResult(None, {"loss": (0.1, 1.0)})

    def close(self) -> None:
        self.closed = True


class OneProcessMail(Mail):
    """Adds up tensors of executors that run one after the other."""

    def __init__(self, sums: list[Tensor], ranks: int) -> None:
        super().__init__(None, torch.device("cpu"))
        self._sums, self._ranks = sums, ranks

    def total(self, own: Tensor) -> Callable[[], Tensor]:
        self._sums.append(own)
        return lambda: torch.stack(self._sums[-self._ranks :]).sum(0)


class Ranks:
    """Executors of all ranks of one plan, in one process."""

    def __init__(
        self,
        paths: RunPaths,
        settings: Any,
        plan: Plan,
        world: int,
        sizes: dict[str, int],
        suites: int = 1,
    ) -> None:
        self.interfaces: list[FakeInterface] = []
        self.dataset, self.held_out = FakeDataset(40), FakeDataset(9)
        on = plan.calls[0].ranks
        sums: list[Tensor] = []
        self.executors = [
            Executor(
                paths,
                settings,
                plan,
                rank,
                {
                    role: cast(TrainEngine, FakeEngine(role, rank, sizes, on))
                    for role in ("actor", "ref")
                },
                [
                    cast(SampleRows, each)
                    for each in (
                        self.dataset,
                        self.held_out,
                        *(FakeDataset(9 + suite) for suite in range(1, suites)),
                    )
                ],
                tokenizer=FakeTokenizer(),
                stop_token_ids=(7, 2),
                cores=3,
                mail=OneProcessMail(sums, world),
                reallocations=Reallocations({}, "first", Activity()),
                residence=Residence({}, ()),
                activity=Activity(),
            )
            for rank in range(world)
        ]

    def make_interface(self) -> FakeInterface:
        self.interfaces.append(FakeInterface())
        return self.interfaces[-1]

    def load(self, items: list[list[int]], **kind: bool) -> list[Done]:
        chosen = tuple((epoch, index) for epoch, index in items)
        order = LoadBatch(step=3, items=chosen, **kind)
        return [executor.load(order) for executor in self.executors]

    def call(self, name: str, *, evaluation: bool = False) -> list[Done]:
        scalars = {"kl_coef": 0.1}
        order = RunCall(step=3, name=name, scalars=scalars, evaluation=evaluation, part="part")
        return [executor.call(order) for executor in self.executors]

    def parts(self) -> list[tuple[str, ...]]:
        """This rank's items of the first call."""
        found = []
        for executor in self.executors:
            call = executor.plan.calls[0]
            assert executor.batch is not None
            place = executor.engines["actor"].context
            sample = executor.batch.inputs(call, place if executor.rank in call.ranks else None)
            found.append(() if sample is None else sample.ids)
        return found


@pytest.fixture
def make_ranks(
    paths: RunPaths,
    make_settings: Any,
    plans: Callable[..., Plan],
    calls: Callable[..., CallPlan],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Ranks]:
    def make(
        world: int = 2,
        ranks: tuple[int, ...] | None = None,
        sizes: dict[str, int] | None = None,
        first: str = "inference",
        reads: tuple[str, ...] = ("input_ids", "rewards"),
    ) -> Ranks:
        on = ranks or tuple(range(world))
        sizes = sizes or {"dp": len(on)}
        train = calls(
            "train",
            ranks=on,
            method="train_step",
            interface="fake:Trainer",
            inputs=reads,
        )
        judge = calls(
            "judge", ranks=on, role=None, outputs=("rewards",), interface="fake:Judge", method=first
        )
        held_out = calls("held_out", ranks=on, interface="fake:Judge")
        plan = plans(per_host=world, calls=(judge, train), evaluation_calls=(held_out,))
        placed = {"sizes": sizes, "ranks": on}
        models = {role: model.model_copy(update=placed) for role, model in plan.models.items()}
        plan = plan.model_copy(update={"models": models})
        found = Ranks(paths, make_settings(), plan, world, sizes)
        monkeypatch.setattr(executor_module, "resolve", lambda name: found.make_interface)
        return found

    return make


def test_each_suite_has_its_rows_its_settings_and_its_reward(
    make_settings: Any,
    plans: Callable[..., Plan],
    calls: Callable[..., CallPlan],
    paths: RunPaths,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interface of a suite, which holds the suite's reward, is no other suite's."""
    section = make_settings().config.evaluation.model_dump(mode="json")
    own = {"dataset": section.pop("dataset")}
    suites = {"a": {**own, "n": 2}, "b": {**own, "n": 3, "reward": {"name": "math"}}}
    settings = make_settings(evaluation={"every_steps": 2, "suites": suites})
    held_out = calls("held_out", ranks=(0,), interface="fake:Judge")
    plan = plans(per_host=1, calls=(calls("judge", ranks=(0,), interface="fake:Judge"),))
    plan = plan.model_copy(update={"suite_calls": {"a": (held_out,), "b": (held_out,)}})
    ranks = Ranks(paths, settings, plan, 1, {"dp": 1}, suites=2)
    monkeypatch.setattr(executor_module, "resolve", lambda name: ranks.make_interface)
    executor = ranks.executors[0]
    sizes = {own.suite: own.size for own in executor.ready().held_out}
    assert sizes == {"a": 9, "b": 10}
    for suite in ("a", "b", "a"):
        executor.load(LoadBatch(step=3, items=((0, 1),), evaluation=True, suite=suite))
        order = {"step": 3, "name": "held_out", "scalars": {}, "part": f"part.{suite}"}
        executor.call(RunCall(**order, evaluation=True, suite=suite))
    seen = [
        (context.settings.config.evaluation.n, context.settings.config.reward.title)
        for interface in ranks.interfaces
        for _, _, context in interface.given
    ]
    assert seen == [(2, "exact_match"), (2, "exact_match"), (3, "math")]


def save(executor: Executor, directory: str, *, asynchronous: bool) -> Saved:
    """What the rank says about a checkpoint's files."""
    said: Queue[Saved] = Queue()
    order = Save(seq=7, step=3, directory=directory, asynchronous=asynchronous)
    assert executor.save(order, said.put).seq == 7
    found = said.get(timeout=60)
    assert (found.rank, found.seq) == (0, 7)
    return found


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_takes_no_checkpoint_does_not_end_the_rank(
    make_ranks: Callable[..., Ranks], asynchronous: bool
) -> None:
    executor = make_ranks(1).executors[0]
    full = save(executor, "full", asynchronous=asynchronous)
    assert "No space left on device" in full.error
    assert not save(executor, "step-00000003.1", asynchronous=asynchronous).error
    shutil.rmtree(executor.paths.checkpoints)
    assert save(executor, "step-00000004.1", asynchronous=asynchronous).error


def test_a_bug_in_the_thread_is_raised_by_the_rank(make_ranks: Callable[..., Ranks]) -> None:
    executor = make_ranks(1).executors[0]
    assert save(executor, "bug", asynchronous=True).error == "KeyError: 'bug'"
    with pytest.raises(KeyError, match="bug"):
        save(executor, "step-00000003.1", asynchronous=True)


def test_scores_that_a_task_gave_for_another_submission_do_not_count(
    make_ranks: Callable[..., Ranks], paths: RunPaths
) -> None:
    """Its reward may be another one, which the trainers then ask."""
    ranks = make_ranks(world=1)
    (executor,) = ranks.executors
    make_private_directory(paths.rollouts)
    scores = JudgedCompletions(scores=(1.0, 0.5), parts=({}, {}), submission=2)
    folder = paths.rollout_samples("rollout", 0, 0)
    (stored,) = SampleWriter(folder).write([replace(small_group(1), judged=scores)])
    executor.load(
        LoadBatch(step=3, items=((0, 1),), samples=(replace(stored, task="rollout.0.0"),))
    )
    for submission, expected in ((2, scores), (3, None)):
        executor._submission = submission
        assert executor._read_stored("1@0").judged == expected
