from __future__ import annotations

import importlib.util
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.load import dump
from slurmrl.config.schema import Logging, Wandb
from slurmrl.errors import MissingDependencyError
from slurmrl.monitor import sinks
from slurmrl.paths import RunPaths
from slurmrl.plan.settings import load_settings
from tests.fake_runs import FakeRun, write_config


@pytest.mark.parametrize(
    ("package", "logging"),
    [("tensorboard", Logging(tensorboard=True)), ("wandb", Logging(wandb=Wandb(project="p")))],
)
def test_a_missing_package_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, logging: Logging
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=f"pip install {package}"):
        sinks.make_sinks(RunPaths(tmp_path), logging, first_step=0)


def test_nothing_is_needed_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert sinks.make_sinks(RunPaths(tmp_path), Logging(), first_step=0) == []


def test_only_numbers_are_plotted() -> None:
    values = {"step": 3, "reward": 0.5, "tokens": 7, "loss": None, "note": "x", "done": True}
    assert sinks.numbers(values) == {"reward": 0.5, "tokens": 7.0}


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of an offline run: a LevelDB log behind a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:  # no header fits into the rest of a block
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


@pytest.mark.filterwarnings("ignore")
def test_one_wandb_run_for_all_incarnations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real library, offline: one id, each step as it was logged, and the configuration
    without variables of the environment."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    paths = FakeRun(tmp_path / "runs").paths
    settings = load_settings(
        write_config(tmp_path), ["cluster.env={TOKEN: secret}"], root=tmp_path / "runs"
    )
    paths.config.write_text(dump(settings.config))
    for steps in (range(1, 5), range(3, 7)):  # the second continues from the commit of step 2
        sink = sinks.WeightsAndBiases(paths, Wandb(project="p"))
        for step in steps:
            sink.log(step, {"step": step, "reward": step / 8})
        sink.close()
        time.sleep(1.1)  # a folder of the library has the second in its name
    files = sorted(paths.run.glob("wandb/offline-run-*/*.wandb"))
    logged, ids = [], set()
    for file in files:
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
                config = {item.key: item.value_json for item in record.run.config.update}
                assert json.loads(config["experiment"]) == "add"
                assert "secret" not in str(config)
            elif record.WhichOneof("record_type") == "history":
                values = {item.key or item.nested_key[0]: item for item in record.history.item}
                reward = json.loads(values["reward"].value_json)
                logged.append((record.history.step.num, reward))
    assert ids == {json.loads(paths.identity.read_text())["uuid"]}
    assert logged == [(step, step / 8) for step in (1, 2, 3, 4, 3, 4, 5, 6)]


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator as accumulator

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
