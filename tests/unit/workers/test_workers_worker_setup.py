"""Inputs, models and checkpoints of a rank before it takes part in training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from slurmrl.backoff import retry
from slurmrl.engines.base import TrainEngine
from slurmrl.errors import UnreadableInputError, UsageError
from slurmrl.plan import build
from slurmrl.plan.model import Plan
from slurmrl.plan.settings import Settings
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint.manifest import read_state, write_manifest
from slurmrl.tensors.parallel.groups import Activity
from slurmrl.workers import distributed
from slurmrl.workers.messages import Start
from slurmrl.workers.worker import setup
from slurmrl.workers.worker.setup import require_inputs


@pytest.mark.parametrize("missing", ["model", "tokenizer", "rows.jsonl", "heldout.jsonl"])
def test_missing_file_on_a_host_is_a_host_failure(tmp_path: Path, missing: str) -> None:
    places = [tmp_path / name for name in ("model", "tokenizer", "rows.jsonl", "heldout.jsonl")]
    for place in places:
        place.touch()
    model, tokenizer, rows, heldout = map(str, places)
    actor = SimpleNamespace(path=model, tokenizer=tokenizer)
    config = SimpleNamespace(
        actor=actor,
        model=lambda role: actor,
        evaluations={},
        trainers_evaluate=True,
        data_paths=lambda: [rows, heldout],
    )
    algorithm = SimpleNamespace(
        roles=lambda: [SimpleNamespace(role="actor")],
        calls=lambda _: [],
        evaluation_calls=lambda _: [],
    )
    settings = cast(Settings, SimpleNamespace(config=config, algorithm=algorithm))
    require_inputs(settings)
    (tmp_path / missing).unlink()
    for certain in (True, False):
        with pytest.raises(UnreadableInputError, match=r"is not on .*mounted there") as caught:
            require_inputs(settings)
        assert bool(caught.value.absent) == certain
        for place in tmp_path.iterdir():  # an empty folder, as without a mount
            place.unlink()


@pytest.fixture
def on_gpu(
    make_settings: Callable[..., Settings],
    plans: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
) -> SimpleNamespace:
    """Build a trainer on a GPU up to the first use of the GPU. Return the GPU."""
    settings, plan = make_settings(), plans()
    group = plan.trainers.model_copy(update={"gpus_per_worker": 1, "cpus_per_worker": 6})
    plan = plan.model_copy(update={"groups": (group,)})
    gpu = SimpleNamespace(name="tiny GPU", total_memory=2**10)
    monkeypatch.setattr(setup, "load_run_settings", lambda _: settings)
    monkeypatch.setattr(setup, "require_inputs", lambda _: None)
    monkeypatch.setattr(setup.Plan, "read", lambda _: plan)
    monkeypatch.setattr(setup.device, "choose", lambda gpus: setup.device.GPU)
    monkeypatch.setattr(distributed.device, "wait_until_free", lambda *_, **__: None)
    monkeypatch.setattr(setup.device, "set_up", _reached)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    return gpu


@pytest.mark.parametrize("exclusive", [True, False])
def test_trainer_binds_cpus_and_waits_for_gpu_memory_before_use(
    on_gpu: SimpleNamespace, paths: RunPaths, monkeypatch: pytest.MonkeyPatch, exclusive: bool
) -> None:
    """CPUs are bound first, because host memory comes from the NUMA node of the thread that first
    writes it.
    """
    done: list[object] = []
    monkeypatch.setattr(
        distributed.gpu, "bind_cpus_near", lambda gpu, least: done.append((gpu, least))
    )
    monkeypatch.setattr(
        distributed.device,
        "wait_until_free",
        lambda gpu, *, exclusive: done.append((gpu, exclusive)),
    )
    start = Start(world_size=1, base="step-00000004.1", exclusive=exclusive)
    with pytest.raises(KeyError, match="built"):
        setup.build_trainer(paths, 0, start, Activity(), [].append)
    assert done == [(on_gpu, 6), (setup.device.GPU.device, exclusive)]


@pytest.mark.parametrize("base", [None, "step-00000004.1"])
def test_too_large_models_end_the_first_start_before_construction(
    on_gpu: SimpleNamespace, paths: RunPaths, base: str | None
) -> None:
    """A user error names host and GPU; a start from a checkpoint is not checked again."""
    expected = KeyError if base else UsageError
    start = Start(world_size=1, base=base, exclusive=True)
    with pytest.raises(expected, match="built" if base else f"the {on_gpu.name} has 0.0 GiB"):
        setup.build_trainer(paths, 0, start, Activity(), [].append)


def _reached(*_: object, **__: object) -> None:
    raise KeyError("models would be built now")


def test_rank_loads_its_checkpoint_once_the_mount_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount that is hidden while shares are verified, or while engines load, costs only time."""
    checkpoint = tmp_path / "checkpoints" / "step"
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, step=1, files=[], state={})
    loaded: list[str] = []

    def hide(*_: object) -> None:
        checkpoint.parent.rename(tmp_path / "away")

    def show(_: float) -> None:
        (tmp_path / "away").rename(checkpoint.parent)

    def read(directory: Path) -> None:
        loaded.append(str(read_state(directory)))

    monkeypatch.setattr(setup, "retry", partial(retry, pause=show))
    hide()
    engine = cast(TrainEngine, SimpleNamespace(load=read))
    setup.load(checkpoint, 0, 1, [engine], hide)
    assert loaded == ["{}"]


def test_learning_rate_schedule_covers_the_trained_steps(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Six steps of eight updates; the actor of a critic that warms up is left out of two steps."""
    made: dict[str, int] = {}

    def engine(role: str, model: object, *, total_steps: int, **_: object) -> str:
        made[role] = total_steps
        return role

    monkeypatch.setattr(setup.ENGINES, "load", lambda name: engine)
    algorithm = {"name": "ppo", "batch_size": 4, "n_epochs": 2, "critic_warmup_steps": 2}
    settings = make_settings(algorithm=algorithm)
    plan = build.make_plan(settings, scheduler="local")
    contexts = {role: cast(Any, SimpleNamespace(dp_rank=0, role=role)) for role in plan.models}
    setup._engines(settings, plan, contexts, RunPaths(tmp_path))
    assert (made["actor"], made["critic"]) == (32, 48)
