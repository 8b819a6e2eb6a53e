from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.load import dump
from slurmrl.config.schema import Logging, Mlflow, Wandb
from slurmrl.errors import MissingDependencyError, StaleIncarnationError, TrialEndedError
from slurmrl.plan.settings import load_settings
from slurmrl.run import metrics
from slurmrl.run.paths import RunPaths
from slurmrl.watch import sinks
from slurmrl.watch.sinks import MetricsRecorder
from slurmrl.watch.sinks.feeder import Feeder, Lines, numbers
from slurmrl.watch.sinks.wandb import held_by
from tests.fake_runs import FakeRun, write_config
from tests.support.sink_readers import (
    ALL_SINKS,
    READERS,
    mlflow_run,
    mlflow_runs,
    tensorboard_points,
    wandb_records,
)
from tests.support.trials import REPOSITORY, wait_until

DATABASE = Logging(mlflow=Mlflow(experiment="e", tracking_uri="sqlite:////runs.db"))
PROGRAM = "tests.support.sink_incarnation"


@pytest.mark.parametrize(
    ("package", "logging"),
    [
        ("tensorboard", Logging(tensorboard=True)),
        ("wandb", Logging(wandb=Wandb(project="p"))),
        ("mlflow-skinny", Logging(mlflow=Mlflow(experiment="e"))),
    ],
)
def test_missing_package_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, package: str, logging: Logging
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=f"pip install {package}"):
        sinks.check(logging)


def test_database_uri_needs_the_full_mlflow_package(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "sqlalchemy" else found(name)
    )
    with pytest.raises(MissingDependencyError, match=r"tracking_uri needs .*: pip install mlflow$"):
        sinks.check(DATABASE)


def test_no_package_is_needed_without_sinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    sinks.check(Logging())
    assert not sinks.make_feeders(RunPaths(tmp_path), Logging(), committed=-1, incarnation=None)


def test_mlflow_telemetry_is_disabled(tmp_path: Path) -> None:
    """MLflow decides during its import whether it sends usage data."""
    code = (
        "import sys; from pathlib import Path; from slurmrl.config.schema import Logging, Mlflow; "
        "from slurmrl.watch import sinks; from slurmrl.run.paths import RunPaths; "
        "sinks.make_feeders(RunPaths(Path(sys.argv[1])), Logging(mlflow=Mlflow(experiment='e')), "
        "committed=-1, incarnation=None); from mlflow.telemetry import get_telemetry_client; "
        "print(get_telemetry_client())"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={"PATH": os.environ["PATH"]},  # it tells nobody of tests and CI either
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.stdout == "None\n", told.stderr


@pytest.mark.parametrize("uri", ["https://me:secret@host/mlflow", "mlruns", "ftp://host"])
def test_unusable_tracking_uri_is_rejected(uri: str) -> None:
    with pytest.raises(ValueError, match=r"variables_file|must be a URL"):
        Mlflow(experiment="e", tracking_uri=uri)


def test_only_numbers_are_plotted() -> None:
    values = {"step": 3, "time": 5.0, "reward": 0.5, "n": 7, "loss": None, "a": "x", "b": True}
    assert numbers(values) == {"reward": 0.5, "n": 7.0}


# -- all sinks, with the real libraries ------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_each_sink_has_each_committed_step_once_despite_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed when steps are delivered, and halfway through the delivery. Steps that
    were recorded but not committed have other values when they are repeated.
    """
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    paths = FakeRun(tmp_path / "runs").paths
    variables = "cluster.env={TOKEN: secret}"
    settings = load_settings(
        write_config(tmp_path),
        [variables, f"logging={json.dumps(ALL_SINKS)}"],
        root=tmp_path / "runs",
    )
    paths.config.write_text(dump(settings.config))
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM, str(paths.run), "kept", "half", "none"],
        cwd=REPOSITORY,
        env={**os.environ, "WANDB_SILENT": "true", "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "0.2"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rewards = [(step, step / 8) for step in range(1, 13)]
    scores = [(step, step / 16) for step in (4, 8, 12)]
    for name, points in READERS.items():
        assert points(paths, "reward") == rewards, name
        evaluated = "eval.pass_at_1" if name == "mlflow" else "eval/pass@1"
        assert points(paths, evaluated) == scores, name
    runs = list(wandb_records(paths, "run"))
    assert {run.run_id for run in runs} == {json.loads(paths.identity.read_text())["uuid"]}
    shown = {item.key: json.loads(item.value_json) for item in runs[-1].config.update}
    parameters = mlflow_run(paths)[1].data.params
    assert shown["experiment"] == parameters["experiment"] == "add"
    assert "secret" not in f"{shown} {parameters}"
    kept = {
        name: json.loads(paths.sink(name).read_text())
        for name in ("tensorboard", "wandb", "mlflow")
    }
    assert all(one == {"step": 12} for one in kept.values())


@pytest.mark.filterwarnings("ignore")
def test_emptied_or_new_sink_gets_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sink's files were removed, or the trial was resumed with another experiment."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    paths = FakeRun(tmp_path / "runs").paths
    settings = load_settings(write_config(tmp_path), [], root=tmp_path / "runs")
    paths.config.write_text(dump(settings.config))

    def link(first: int, last: int, experiment: str) -> None:
        logging = Logging(tensorboard=True, mlflow=Mlflow(experiment=experiment))
        recorder = MetricsRecorder(paths, logging, last_step=first - 1)
        for step in range(first, last + 1):
            recorder.write({"step": step, "reward": step / 8})
        recorder.committed(last)
        wait_until("the steps", lambda: not recorder.behind, 60.0)
        recorder.close()

    link(1, 2, "first")
    shutil.rmtree(paths.tensorboard)
    link(3, 4, "second")
    rewards = [(step, step / 8) for step in range(1, 5)]
    assert tensorboard_points(paths, "reward") == rewards
    client, runs = mlflow_runs(paths)
    held = [client.get_metric_history(run.info.run_id, "reward") for run in runs]
    assert sorted(map(len, held)) == [2, 4]


def test_newest_step_is_found_in_incomplete_wandb_files(tmp_path: Path) -> None:
    assert held_by(tmp_path, "a", "p", -1) == -1
    assert held_by(tmp_path, "a", "p", 7) == 7, "the files were sent and removed"
    run = tmp_path / "offline-run-1-a"
    run.mkdir()
    (run / "run-a.wandb").write_bytes(b":W&B\xb4\x51\x00" + b"\x00\x00\x00\x00\xff\x00\x01torn")
    assert held_by(tmp_path, "a", "p", -1) == -1


def test_steps_of_another_wandb_project_are_ignored(tmp_path: Path) -> None:
    def write(number: int, project: str, *steps: int) -> None:
        history = [messages.HistoryRecord(step={"num": step}) for step in steps]
        found = [messages.Record(run={"project": project, "run_id": "a"})]
        found += [messages.Record(history=each) for each in history]
        raw = [record.SerializeToString() for record in found]
        pieces = [b"\0" * 4 + len(each).to_bytes(2, "little") + b"\1" + each for each in raw]
        folder = tmp_path / f"offline-run-{number}-a"
        folder.mkdir()
        (folder / "run-a.wandb").write_bytes(b"\0" * 7 + b"".join(pieces))

    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    write(1, "old", 0, 1, 2)
    assert held_by(tmp_path, "a", "new", 2) == -1
    assert held_by(tmp_path, "a", "old", 1) == 2
    write(2, "new", 0, 1, 2, 3, 4)
    assert held_by(tmp_path, "a", "new", 4) == 4
    assert held_by(tmp_path, "a", "old", 4) == 2, "and back: the rest comes"
    assert held_by(tmp_path, "other", "new", -1) == -1


# -- the feeder ------------------------------------------------------------------------------


class Recorded:
    """A sink in memory."""

    def __init__(self, after: int, failures: int = 0) -> None:
        self.last = self.after = after
        self.failures = failures
        self.steps: list[int] = []
        self.closed = threading.Event()

    @property
    def kept(self) -> int:
        return self.last

    def log(self, lines: Lines) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no answer")
        self.steps += [line["step"] for line in lines]
        self.last = lines[-1]["step"]

    def close(self) -> None:
        self.closed.set()


class Fed:
    """A feeder of a trial whose metrics hold some steps, and the sinks that it opens."""

    def __init__(self, folder: Path, steps: range, **options: Any) -> None:
        self.paths = RunPaths(folder)
        self.opened: list[Recorded] = []
        self.options = {"committed": 0, "check": lambda: None, **options}
        writer = metrics.MetricsWriter(self.paths.metrics)
        for step in steps:
            writer.write({"step": step})

    def feeder(self, failures: int = 0, **options: Any) -> Feeder:
        def make(after: int) -> Recorded:
            self.opened.append(Recorded(after, failures if not self.opened else 0))
            return self.opened[-1]

        return Feeder("s", make, self.paths, **{**self.options, **options})

    @property
    def steps(self) -> list[int]:
        return [step for sink in self.opened for step in sink.steps]


def ended(feeder: Feeder) -> None:
    feeder.end()
    feeder.join(60.0)
    assert not feeder.is_behind


def test_sink_restarts_at_an_older_commit_after_a_rollback(
    tmp_path: Path,
) -> None:
    """The newest commits were damaged."""
    fed = Fed(tmp_path, range(9))
    ended(fed.feeder(committed=8))
    ended(fed.feeder(committed=5))
    assert [sink.after for sink in fed.opened] == [-1, 5]


def test_failed_sink_is_reopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("slurmrl.watch.sinks.feeder.PAUSES_S", (0.001, 0.001))
    fed = Fed(tmp_path, range(3))
    feeder = fed.feeder(failures=1, committed=2)
    wait_until("the steps", lambda: not feeder.is_behind)
    ended(feeder)
    assert (fed.steps, len(fed.opened)) == ([0, 1, 2], 2)
    assert "logging.s lacks steps up to 2: no answer" in caplog.text


def test_only_current_incarnation_or_ended_trial_feeds_sinks(
    tmp_path: Path,
) -> None:
    def raising(error: Exception) -> Any:
        def check() -> None:
            raise error

        return check

    fed = Fed(tmp_path, range(3), committed=2)
    ended(fed.feeder(check=raising(StaleIncarnationError("2 is the newest"))))
    assert not fed.opened
    ended(fed.feeder(check=raising(TrialEndedError("cancelled"))))
    assert fed.steps == [0, 1, 2]


def test_metrics_between_two_steps_are_read_once_in_order(tmp_path: Path) -> None:
    """Each step is returned once, in order, from its newest line. Lines of later steps are not
    read.
    """
    path = tmp_path / "metrics.jsonl"
    lines: list[Mapping[str, Any]] = [{"step": 1}, {"step": 2}, {"step": 4, "a": 1}, {"step": 3}]
    path.write_bytes(b"".join(map(metrics.encode, [*lines, {"step": 4, "a": 2}])) + b'{"step": 5')
    assert metrics.read_between(path, 2, 9) == [{"step": 3}, {"step": 4, "a": 2}]
    assert metrics.read_between(path, 0, 1) == [{"step": 1}]
    assert metrics.read_between(tmp_path / "none", -1, 9) == []


def test_recorder_names_sinks_that_lack_steps(tmp_path: Path) -> None:
    recorder = MetricsRecorder(RunPaths(tmp_path), Logging(tensorboard=True), last_step=-1)
    recorder.write({"step": 1, "reward": 0.5})
    recorder.write({"step": 2, "reward": 1.5})
    recorder.committed(1)
    wait_until("the steps", lambda: not recorder.behind)
    recorder.close()
    assert tensorboard_points(RunPaths(tmp_path), "reward") == [(1, 0.5)]
