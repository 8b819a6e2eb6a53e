"""A rank executes the master's messages. Engines and interfaces are stand-ins."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import pytest
import torch

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.data.dataset import SampleRows
from slurmrl.data.meta import SampleMeta
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import TrainEngine
from slurmrl.fsio.atomic import make_private_directory
from slurmrl.fsio.calls import explain
from slurmrl.plan.model import CallPlan, Plan
from slurmrl.plan.settings import Settings
from slurmrl.rollouts.sample_files import SampleWriter
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint.tensors import SavedFile
from slurmrl.tensors.parallel.groups import Activity, ParallelContext
from slurmrl.tensors.parallel.topology import ProcessTopology
from slurmrl.workers.messages import LoadBatch, RunCall, Save, Saved
from slurmrl.workers.worker import executor as executor_module
from slurmrl.workers.worker.executor import Executor
from slurmrl.workers.worker.reallocation import Reallocations, Residence
from slurmrl.workers.worker.step_batch import Mail
from tests.support.sample_groups import small_group

CPU = torch.device("cpu")


class FakeDataset:
    """A dataset whose items have one token."""

    fingerprint, left_out, directories = "", 0, ("rows",)

    def __init__(self, size: int) -> None:
        self.size = size

    def meta(self, items: Sequence[tuple[int, int]]) -> SampleMeta:
        ids = tuple(f"{index}@{epoch}" for epoch, index in items)
        return SampleMeta(ids, {"input_ids": [[1] for _ in items]})

    def sample(self, items: Sequence[tuple[int, int]]) -> SequenceSample:
        tokens = torch.tensor([index for _, index in items])
        return SequenceSample.from_default(
            [1] * len(items), self.meta(items).ids, {"input_ids": tokens}
        )


class FakeEngine:
    def __init__(self, role: str) -> None:
        self.role = role
        self.context = ParallelContext(role, CPU, 0, (0,), ProcessTopology(["dp"], [1]), {})

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
    """An interface that stores the settings of its calls."""

    def __init__(self) -> None:
        self.settings: list[Settings] = []

    def inference(self, engine: Any, sample: SequenceSample, context: CallContext) -> CallResult:
        self.settings.append(context.settings)
        return CallResult()


MakeExecutor: TypeAlias = Callable[..., Executor]


@pytest.fixture
def make_executor(
    paths: RunPaths, plans: Callable[..., Plan], calls: Callable[..., CallPlan]
) -> MakeExecutor:
    """``make_executor(settings, suites=…)``: the only rank, with rows for each suite."""

    def make(settings: Settings, suites: tuple[str, ...] = ("",)) -> Executor:
        call = calls("judge", ranks=(0,), interface="fake:Judge")
        plan = plans(per_host=1, calls=(call,), evaluation_calls=(call,))
        plan = plan.model_copy(update={"suite_calls": dict.fromkeys(suites, (call,))})
        rows = [FakeDataset(9 + number) for number in range(-1, len(suites))]
        return Executor(
            paths,
            settings,
            plan,
            0,
            {role: cast(TrainEngine, FakeEngine(role)) for role in ("actor", "ref")},
            [cast(SampleRows, each) for each in rows],
            tokenizer=SimpleNamespace(convert_ids_to_tokens=str),
            stop_token_ids=(),
            cores=1,
            mail=Mail(None, CPU),
            reallocations=Reallocations({}, "first", Activity()),
            residence=Residence({}, ()),
            activity=Activity(),
        )

    return make


def test_each_suite_uses_its_own_rows_settings_and_reward(
    make_settings: Any, make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each suite has a separate interface with its reward."""
    section = make_settings().config.evaluation.model_dump(mode="json")
    own = {"dataset": section.pop("dataset")}
    suites = {"a": {**own, "n": 2}, "b": {**own, "n": 3, "reward": {"name": "math"}}}
    settings = make_settings(evaluation={"every_steps": 2, "suites": suites})
    executor = make_executor(settings, ("a", "b"))
    interfaces: list[FakeInterface] = []

    def make() -> FakeInterface:
        interfaces.append(FakeInterface())
        return interfaces[-1]

    monkeypatch.setattr(executor_module, "resolve", lambda name: make)
    assert {own.suite: own.size for own in executor.ready().held_out} == {"a": 9, "b": 10}
    for suite in ("a", "b", "a"):
        executor.load(LoadBatch(step=3, items=((0, 1),), evaluation=True, suite=suite))
        order = {"step": 3, "name": "judge", "scalars": {}, "part": f"part.{suite}"}
        executor.call(RunCall(**order, evaluation=True, suite=suite))
    seen = [
        [(one.config.evaluation.n, one.config.reward.title) for one in interface.settings]
        for interface in interfaces
    ]
    assert seen == [[(2, "exact_match")] * 2, [(3, "math")]]


def test_call_begins_with_torch_defaults_after_a_reward_changed_them(
    make_executor: MakeExecutor, make_settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[bool, torch.dtype, str]] = []

    class Careless(FakeInterface):
        def inference(self, engine: Any, sample: Any, context: CallContext) -> CallResult:
            device = torch.get_default_device().type
            found.append((torch.is_grad_enabled(), torch.get_default_dtype(), device))
            torch.set_grad_enabled(False)
            torch.set_default_dtype(torch.bfloat16)
            torch.set_default_device("meta")
            return CallResult()

    monkeypatch.setattr(executor_module, "resolve", lambda name: Careless)
    executor = make_executor(make_settings())
    try:
        for step in (1, 2):
            executor.load(LoadBatch(step=step, items=((0, step),)))
            executor.call(RunCall(step=step, name="judge", scalars={}))
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert found == [(True, torch.float32, "cpu")] * 2


def save(executor: Executor, directory: str, *, asynchronous: bool) -> Saved:
    """Return the rank's answer about a checkpoint's files."""
    said: Queue[Saved] = Queue()
    order = Save(seq=7, step=3, directory=directory, asynchronous=asynchronous)
    assert executor.save(order, said.put).seq == 7
    found = said.get(timeout=60)
    assert (found.rank, found.seq) == (0, 7)
    return found


@pytest.mark.parametrize("asynchronous", [True, False])
def test_failed_checkpoint_write_does_not_end_the_rank(
    make_executor: MakeExecutor, make_settings: Any, asynchronous: bool
) -> None:
    executor = make_executor(make_settings())
    full = save(executor, "full", asynchronous=asynchronous)
    assert "No space left on device" in full.error
    assert not save(executor, "step-00000003.1", asynchronous=asynchronous).error
    shutil.rmtree(executor.paths.checkpoints)
    assert save(executor, "step-00000004.1", asynchronous=asynchronous).error


def test_error_of_the_writer_thread_is_raised_by_the_rank(
    make_executor: MakeExecutor, make_settings: Any
) -> None:
    executor = make_executor(make_settings())
    assert save(executor, "bug", asynchronous=True).error == "KeyError: 'bug'"
    with pytest.raises(KeyError, match="bug"):
        save(executor, "step-00000003.1", asynchronous=True)


def test_task_scores_of_another_submission_are_ignored(
    make_executor: MakeExecutor, make_settings: Any, paths: RunPaths
) -> None:
    """The earlier submission may have had another reward, so the trainers score again."""
    executor = make_executor(make_settings())
    make_private_directory(paths.rollouts)
    scores = (1.0, 0.5)
    group = replace(small_group(1), scores=scores, parts=({}, {}), submission=2)
    folder = paths.rollout_samples("rollout", 0, 0)
    (stored,) = SampleWriter(folder).write([group])
    executor.load(
        LoadBatch(step=3, items=((0, 1),), samples=(replace(stored, task="rollout.0.0"),))
    )
    for submission, expected in ((2, scores), (3, None)):
        executor._submission = submission
        assert executor._read_stored("1@0").scores == expected
