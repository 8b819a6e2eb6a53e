from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmrl.config.schema import Logging, Wandb
from slurmrl.errors import MissingDependencyError
from slurmrl.monitor import sinks
from slurmrl.paths import RunPaths


@pytest.mark.parametrize(
    ("package", "logging"),
    [("tensorboard", Logging(tensorboard=True)), ("wandb", Logging(wandb=Wandb(project="p")))],
)
def test_a_missing_package_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, logging: Logging
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=rf"pip install 'slurmrl\[{package}\]'"):
        sinks.make_sinks(RunPaths(tmp_path), logging, first_step=0)


def test_nothing_is_needed_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert sinks.make_sinks(RunPaths(tmp_path), Logging(), first_step=0) == []


def test_only_numbers_are_plotted() -> None:
    values = {"step": 3, "reward": 0.5, "tokens": 7, "loss": None, "note": "x", "done": True}
    assert sinks.numbers(values) == {"reward": 0.5, "tokens": 7.0}


def test_one_wandb_run_for_all_incarnations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    run = SimpleNamespace(
        log=lambda values, step: seen.append((values, step)), finish=lambda: seen.append("finish")
    )

    def init(**options: Any) -> SimpleNamespace:
        seen.append(options)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    paths = RunPaths(tmp_path / "add" / "1")
    paths.run.mkdir(parents=True)
    paths.identity.write_text(json.dumps({"uuid": "abc"}))
    sink = sinks.WeightsAndBiases(paths, Wandb(project="p"))
    sink.log(4, {"step": 4, "reward": 0.5})
    sink.close()
    assert (seen[0]["id"], seen[0]["resume"], seen[0]["mode"]) == ("abc", "allow", "offline")
    assert seen[0]["name"] == "add/1"
    assert seen[1:] == [({"reward": 0.5}, 4), "finish"]


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is optional"
    )
    paths = RunPaths(tmp_path)
    first = sinks.TensorBoard(paths, 0)
    for step in range(5):
        first.log(step, {"step": step, "reward": step / 8})
    first.close()
    second = sinks.TensorBoard(paths, 3)
    second.log(3, {"reward": 1.0})
    second.close()
    events = accumulator.EventAccumulator(str(paths.tensorboard)).Reload()
    scalars = [(scalar.step, scalar.value) for scalar in events.Scalars("reward")]
    assert scalars == [(0, 0.0), (1, 0.125), (2, 0.25), (3, 1.0)]
