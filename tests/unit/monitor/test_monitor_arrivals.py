"""Results of separate evaluation trials reach the sinks of the training trial."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.load import dump
from slurmrl.config.schema import Logging
from slurmrl.errors import EnvironmentFailure
from slurmrl.plan.settings import load_settings
from slurmrl.run import metrics
from slurmrl.run.paths import RunPaths
from slurmrl.watch.sinks import MetricsRecorder, arrivals
from tests.fake_runs import FakeRun, evaluation, write_config
from tests.support.sink_readers import ALL_SINKS, arrived_points, mlflow_run, wandb_records
from tests.support.trials import REPOSITORY


def trained(root: Path, **logging: Any) -> FakeRun:
    """A trial with 40 steps, of which two were committed."""
    run = FakeRun(root / "runs")
    configure(run, root, **logging)
    run.begin()
    run.commit(20)
    run.commit(40)
    run.metrics(*({"step": step, "reward": step / 100} for step in range(1, 41)))
    return run


def configure(run: FakeRun, root: Path, **logging: Any) -> Logging:
    overrides = [f"logging={json.dumps(logging)}"]
    config = load_settings(write_config(root), overrides, root=root / "runs").config
    run.paths.config.write_text(dump(config))
    return config.logging


def arrived_steps(paths: RunPaths) -> list[str]:
    """Return the steps in TensorBoard's files, in the order of their arrival."""
    return [path.name.rpartition("-")[2] for path in sorted(paths.arrived_tensorboard.iterdir())]


def evaluated(run: FakeRun, step: int, value: float, suite: str | None = None) -> None:
    name = f"add-1-step-{step}" + (f"-{suite}" if suite else "")
    evaluation(run.paths, name, f"step-{step:08d}.1-checkpoint", suite, **{"avg@1": value})


@pytest.mark.filterwarnings("ignore")
def test_each_sink_gets_each_evaluation_once_despite_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for any order and any kill, and for sinks that the configuration adds later."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = trained(tmp_path, tensorboard=True)
    paths = run.paths
    evaluated(run, 40, 0.75)
    arrivals.hand_over(paths)
    logging = configure(run, tmp_path, **ALL_SINKS)
    MetricsRecorder(paths, Logging(mlflow=logging.mlflow), last_step=40).close()
    evaluated(run, 20, 0.5)
    evaluated(run, 20, 0.25, "a")
    places = ["recorded", "tensorboard", "wandb", "mlflow", "held", "none", "none"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.killed_arrivals", str(paths.run), *places],
        cwd=REPOSITORY,
        env={**os.environ, "WANDB_SILENT": "true", "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "0.2"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metrics.read(paths.arrived)] == [40, 20]
    for sink, points in arrived_points(paths, "eval/reward").items():
        assert sorted(points) == [(20, 0.5), (40, 0.75)], sink
    for sink, points in arrived_points(paths, "eval/a/reward").items():
        assert points == [(20, 0.25)], sink
    own = json.loads(paths.identity.read_text())["uuid"]
    assert {run.run_id for run in wandb_records(paths, "run")} == {f"{own}-evaluations"}
    assert {run.run_group for run in wandb_records(paths, "run")} == {"add/1"}
    assert mlflow_run(paths)[1].info.status == "FINISHED", "as its trial left it"


def test_only_the_trial_itself_creates_its_mlflow_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = trained(tmp_path, tensorboard=True, mlflow={"experiment": "e"})
    evaluated(run, 20, 0.5)
    arrivals.hand_over(run.paths)
    assert "logging.mlflow lacks evaluations: experiment e has no run of the trial" in caplog.text
    assert json.loads(run.paths.arrived_sinks.read_bytes()) == {"held": {"tensorboard": 1}}


def test_result_counts_once_and_the_trials_own_takes_precedence(tmp_path: Path) -> None:
    run = trained(tmp_path, tensorboard=True)
    evaluated(run, 20, 0.5)
    arrivals.hand_over(run.paths)
    evaluation(run.paths, "add-1-step-20-2", "step-00000020.1-checkpoint", **{"avg@1": 0.1})
    run.metrics({"step": 41, "eval/reward": 0.3})
    evaluated(run, 41, 0.9)
    arrivals.hand_over(run.paths)
    [first, second] = metrics.read(run.paths.arrived)
    assert (first["step"], first["eval/reward"]) == (20, 0.5)
    assert second["step"] == 41
    assert "eval/reward" not in second
    assert arrived_steps(run.paths) == ["20", "41"]


def test_failed_sink_gets_its_evaluations_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = trained(tmp_path, tensorboard=True)
    evaluated(run, 20, 0.5)

    def failing(*_: Any) -> None:
        raise EnvironmentFailure("no space")

    with monkeypatch.context() as patch:
        patch.setattr(arrivals.tensorboard, "write_arrived", failing)
        arrivals.hand_over(run.paths)
    assert "logging.tensorboard lacks evaluations: no space" in caplog.text
    arrivals.hand_over(run.paths)
    assert arrived_steps(run.paths) == ["20"]


def test_writers_take_turns_and_skip_a_dead_holder(tmp_path: Path) -> None:
    slept: list[float] = []
    (tmp_path / "1").write_bytes(b"of one that was killed")
    with arrivals.turn(tmp_path, slept.append):
        assert sum(slept) == arrivals.GONE_S
        assert (tmp_path / "2").exists()
        order: list[str] = []

        def wait() -> None:
            with arrivals.turn(tmp_path, lambda _: time.sleep(0.01), held_s=0):
                order.append("second")

        waiting = threading.Thread(target=wait, daemon=True)
        monitored = arrivals.signal.alarm
        arrivals.signal.alarm = lambda _: 0  # type: ignore[assignment]
        waiting.start()
        time.sleep(0.1)
        order.append("first")
    waiting.join(60.0)
    arrivals.signal.alarm = monitored
    assert order == ["first", "second"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "3.ended"]
    with arrivals.turn(tmp_path, slept.append):
        assert sum(slept) == arrivals.GONE_S


def test_process_suspended_before_its_turn_does_not_reuse_a_past_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may be stopped between its check and the creation of its file. Its time limit
    starts before the check.
    """
    (tmp_path / "8").touch()
    (tmp_path / "8.ended").touch()
    create, listed, alarms = arrivals.atomic.exclusive_create, arrivals.atomic.list_names, []
    looks = iter((["5", "5.ended"],))

    def created(path: Path, data: bytes) -> bool:
        alarms.append(arrivals.signal.getitimer(arrivals.signal.ITIMER_REAL)[0] > 0)
        return create(path, data)

    monkeypatch.setattr(
        arrivals.atomic, "list_names", lambda path: next(looks, None) or listed(path)
    )
    monkeypatch.setattr(arrivals.atomic, "exclusive_create", created)
    slept: list[float] = []
    with arrivals.turn(tmp_path, slept.append):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["8", "8.ended", "9"]
    assert slept == [arrivals.LOOK_S]
    assert alarms == [True] * 3, "turns 6 and 9, and the end of that"
    assert arrivals.signal.getitimer(arrivals.signal.ITIMER_REAL)[0] == 0
