"""Tests of the data that a report reads from a run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slurmrl.config.schema import Config
from slurmrl.config.source import flat
from slurmrl.desk.report.collecting import collect, differences, task_spans
from slurmrl.desk.report.report_data import (
    MOST_TEXT,
    MOST_TOKENS,
    CallTime,
    Curve,
    TrialReport,
    read_samples,
    thinned,
)
from slurmrl.fsio import atomic
from slurmrl.run.history.slots import Kind
from slurmrl.run.samples import KeptSampleWriter
from slurmrl.scheduler.base import JobState
from slurmrl.watch.overview import collect as collect_statuses
from tests.fake_runs import FakeRun, FakeScheduler, task


def report_of(run: FakeRun) -> TrialReport:
    scheduler = FakeScheduler([task(0, JobState.COMPLETED)])
    (status,) = collect_statuses([run.paths], lambda kind: scheduler, detailed=True)
    return collect(run.paths, status)


def write_samples(
    run: FakeRun, step: int, *rows: dict[str, Any] | str, evaluation: bool = False
) -> None:
    lines = [row if isinstance(row, str) else json.dumps({"step": step, **row}) for row in rows]
    writer = KeptSampleWriter(run.paths.samples, 1, 0)
    writer.write(step, ("\n".join(lines) + "\n").encode(), evaluation=evaluation)


def test_report_reads_a_trial_from_its_files(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.submission()
    run.paths.config.write_text("algorithm: {name: grpo}\nactor: {optimizer: {lr: 0.001}}\n")
    calls = [{"name": "actor_gen", "ranks": [0, 1]}, {"name": "never", "ranks": [0]}]
    run.paths.plan.write_text(json.dumps({"groups": [], "calls": calls}))
    planned = {"actor_gen": {"flops": 10, "seconds": None}}
    figures = {"memory": {"bytes": 5}, "tokens": 600, "calls": planned}
    run.paths.estimates.write_text(json.dumps(figures))
    spans = [{"step": 2, "calls": [{"name": "actor_gen", "ranks": [[0, 1.5, 2.0]]}]}]
    run.paths.timeline.write_text(json.dumps({"steps": spans, "peaks": [[0, 7]]}))
    run.begin(job="41.0.0")
    run.metrics(
        {"step": 1, "reward": 0.5, "time/actor_gen": 2.0, "time/step": 3.0, "tokens": 20},
        {"step": 2, "note": "text", "tokens": 40, "time/actor_gen": 4.0, "time/step": 5.0},
        {"step": 2, "reward": float("nan")},
    )
    run.commit(1)
    run.event("master.1", "commit", step=1, seconds=0.4, stall_s=0.1)
    run.append(Kind.DELETE, step=1, directory="step-00000001.1")
    run.commit(2)
    write_samples(run, 2, {"id": "a", "prompt": "p", "completion": "c", "reward": 1.0}, "torn {")
    run.say(1, rollouts={"trained": {"0": 7}, "dropped": {"stale": 2}})
    run.end(Kind.FINISHED, step=2)
    atomic.make_private_directory(run.paths.code)
    (run.paths.code / "environment.json").write_text('{"host": "n0"}')
    (run.paths.code / "slurmrl.diff").write_text("+ new\n")

    found = report_of(run)

    assert found.status["state"] == "COMPLETED"
    assert found.curves["reward"].y == [0.5, None]
    assert "note" not in found.curves
    assert found.calls == [CallTime(name="actor_gen", ranks=[0, 1], seconds=3.0, flops=0.5)], (
        "the plan's operations, scaled to 30 of 600 tokens"
    )
    assert (found.timeline, found.peaks, found.planned["memory"]) == (spans, [[0, 7]], {"bytes": 5})
    assert found.step_s == 4.0
    assert found.rollouts is not None
    assert (found.rollouts["trained"], found.rollouts["dropped"]) == ({"0": 7}, {"stale": 2})
    assert [(row.step, row.deleted, row.seconds) for row in found.commits] == [
        (1, True, 0.4),
        (2, False, None),
    ]
    assert [row["completion"] for row in found.samples.rows] == ["c"]
    assert found.settings == {"algorithm.name": "grpo", "actor.optimizer.lr": 0.001}
    assert found.environment == {"host": "n0"}
    assert found.diffs == {"slurmrl": "+ new\n"}


def test_report_leaves_out_missing_and_damaged_files(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    (run.paths.code / "environment.json").write_text('{"command": 3}')
    write_samples(run, 1, {"prompt": "p", "completion": "c", "turns": "none"})
    run.paths.plan.write_text(json.dumps({"groups": []}))
    run.say(1, rollouts={"trained": 3})
    run.paths.timeline.write_text(
        '{"steps": [{"step": 1, "calls": [{"name": "a", "ranks": [[0]]}]}]}'
    )
    run.paths.estimates.write_text('{"memory": 3}')
    found = report_of(run)
    assert (found.curves, found.commits, found.samples.rows) == ({}, [], [])
    assert found.environment == {}
    assert found.rollouts is None
    assert (found.timeline, found.peaks, found.planned) == ([], [], {})
    assert (found.config, found.settings) == ("", {})


def test_thinning_keeps_every_peak_and_the_order() -> None:
    values: list[float | None] = [0.0] * 50_000
    values[12_345], values[33_333], values[49_999] = 9.0, -9.0, None
    curve = thinned(Curve(x=range(50_000), y=values), 1000)
    assert len(curve.x) <= 1000
    assert list(curve.x) == sorted(set(curve.x))
    points = dict(zip(curve.x, curve.y, strict=True))
    assert (points[12_345], points[33_333]) == (9.0, -9.0)


def test_first_and_newest_samples_are_kept_and_long_texts_cut(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    for step in range(1, 101):
        write_samples(run, step, *[{"prompt": "p", "completion": "x" * (MOST_TEXT + 5)}] * 2)
    found = read_samples(run.paths.samples, most=20)
    steps = [row["step"] for row in found.rows]
    assert (found.steps, found.shown, len(found.rows)) == (100, 10, 20)
    assert (steps[0], steps[-1]) == (1, 100)
    assert found.rows[0]["completion"].endswith("x … 5 more characters")


def test_evaluation_samples_follow_training_samples_and_take_at_most_half(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    for step in range(1, 13):
        write_samples(run, step, {"prompt": "p", "completion": "trained"})
        write_samples(run, step, {"prompt": "p", "completion": "judged"}, evaluation=True)
    found = read_samples(run.paths.samples, most=10)
    assert (found.steps, found.shown, len(found.rows)) == (24, 10, 10)
    shown = [(row["completion"], row.get("evaluation")) for row in found.rows]
    assert shown == [("trained", None)] * 5 + [("judged", True)] * 5
    assert [row["step"] for row in found.rows[5:]][-1] == 12


def test_token_values_come_from_the_newest_samples(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    told = {"prompt": "p", "completion": "c", "tokens": ["t"] * (MOST_TOKENS // 2), "left_out": 1}
    versions = {"names": ["1.1"], "drawn_by": [0]}
    for step in range(1, 4):
        write_samples(run, step, {**told, "values": {"advantages": [None]}, "versions": versions})
    write_samples(run, 4, {"prompt": "p", "completion": "old"})
    write_samples(run, 5, {**told, "values": {"advantages": ["text"]}})
    rows = read_samples(run.paths.samples).rows
    assert [row["step"] for row in rows] == [1, 2, 3, 4], "a damaged row is left out"
    assert ["values" in row for row in rows] == [False, True, True, False]
    assert set(rows[0]) == {"step", "prompt", "completion"}


def test_setting_differences_are_listed_by_key_without_names() -> None:
    one = flat({"trial": "1", "a": {"b": 1, "c": []}, "only": [1]})
    two = flat({"trial": "2", "a": {"b": 2, "c": []}})
    assert differences([one, two]) == {"a.b": [1, 2], "only": [[1], None]}


def test_missing_section_differs_only_in_fields_that_others_set() -> None:
    rows = {"type": "prompt", "path": "/rows"}

    def resolved(**changes: Any) -> dict[str, Any]:
        values = {"algorithm": {"name": "grpo"}, "actor": {}, "dataset": rows, **changes}
        return flat(json.loads(Config(experiment="e", **values).model_dump_json()))

    plain = resolved()
    tasks = {"max_staleness": 4}
    held_out = {"dataset": {**rows, "path": "/held"}, "n": 4, "tasks": {}}
    more = resolved(rollout={"n": 8, "tasks": tasks}, evaluation=held_out, models={"judge": {}})
    set_in = {"dataset.type": "prompt", "dataset.path": "/held", "n": 4}
    assert differences([more, plain, more]) == {
        "models": [{}, None, {}],
        "rollout.n": [8, 1, 8],
        "rollout.tasks": [tasks, None, tasks],
        "evaluation": [set_in, None, set_in],
    }
    plain |= {"algorithm.kl.coef": 0.1}
    added = ("notify.", "algorithm.kl.")
    older = {k: v for k, v in plain.items() if k != "seed" and not k.startswith(added)}
    assert differences([older, plain]) == {}, "what a newer slurmrl has added is at its default"
    assert differences([older, plain | {"seed": 2}]) == {"seed": [None, 2]}


def test_rollout_tasks_have_a_span_per_attempt() -> None:
    def told(time: float, state: str, **more: Any) -> dict[str, Any]:
        return {"time": time, "writer": "master.1", "kind": "rollout_task", "state": state, **more}

    spans = task_spans(
        [
            told(1.0, "joined", task="rollout/0", attempt=0, host="n7"),
            told(2.0, "joined", task="rollout/0", attempt=1),
            told(3.0, "lost", task="rollout/0", attempt=0, reason="silent"),
            told(4.0, "left", task="rollout/9", attempt=0),
        ]
    )
    assert [(one.attempt, one.began, one.ended, one.how) for one in spans] == [
        (0, 1.0, 3.0, "lost: silent"),
        (1, 2.0, None, ""),
    ]
