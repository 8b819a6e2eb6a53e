from __future__ import annotations

from typing import Any

import pytest

from slurmrl.cli import render
from slurmrl.cli.live import PlainView, picture, remaining


def status(**changes: Any) -> dict[str, Any]:
    task = {
        "job_id": "41_1",
        "host": "n0",
        "state": "RUNNING",
        "attempt": 1,
        "lease_age_s": 0.4,
        "reason": "",
    }
    base = {
        "trial": "add/1",
        "state": "RUNNING",
        "step": 12,
        "total_steps": 60,
        "incarnation": 2,
        "metrics": {"step": 12, "reward": 0.41234567, "tokens_per_s": 1234.5, "time/total": 2.0},
        "checkpoint": {"step": 10, "age_s": 200.0},
        "groups": [{"name": "trainer", "links_left": 6, "tasks": [task]}],
        "reason": None,
        "traceback": None,
        "run": "/runs/me/add/1",
        "export": None,
    }
    return {**base, **changes}


def waiting(reason: str) -> dict[str, Any]:
    one = status(state="PENDING", step=0, checkpoint=None, metrics={}, incarnation=0)
    one["groups"][0]["tasks"][0].update(
        state="PENDING", reason=reason, host=None, attempt=None, lease_age_s=None
    )
    return one


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.41234567, "0.4123"), (1234.5, "1,234"), (12, "12"), (None, "-"), (1e-5, "1e-05")],
)
def test_numbers(value: Any, text: str) -> None:
    assert render.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 d")],
)
def test_ages(seconds: float | None, text: str) -> None:
    assert render.age(seconds) == text


def test_many_trials_in_columns() -> None:
    lines = render.many([status(), waiting("Priority")]).splitlines()
    assert lines == [
        "TRIAL  STATE    STEP   REWARD  EVAL  TOKENS/S  COMMIT              NOTE",
        "add/1  RUNNING  12/60  0.4123  -     1,234     step 10, 3 min ago",
        "add/1  PENDING  0/60   -       -     -         none yet            waits: Priority",
    ]


def test_one_trial() -> None:
    assert render.one(status()).splitlines() == [
        "add/1  RUNNING  step 12/60",
        "  reward 0.4123  tokens_per_s 1,234",
        "  commit step 10, 3 min ago   incarnation 2",
        "  run directory /runs/me/add/1",
        "",
        "TASK       JOB   HOST  STATE    ATTEMPT  HEARTBEAT",
        "trainer/0  41_1  n0    RUNNING  1        0 s ago",
        "6 successors queued",
    ]


def test_a_failed_trial_says_why() -> None:
    text = render.one(status(state="FAILED", reason="rank 1: NaN\nmore", traceback="Trace\n  x\n"))
    assert "\n  rank 1: NaN\n" in text
    assert "Trace\n  x" in text
    assert render.note(status(state="FAILED", reason="rank 1: NaN\nmore")) == "rank 1: NaN"


def test_a_waiting_trial_says_what_for() -> None:
    assert render.note(waiting("Resources")) == "waits: Resources"
    assert render.note(waiting("")) == "waits"


def test_doubts_are_said() -> None:
    assert render.note(status(unconfirmed=True)) == "unconfirmed: no heartbeat seen"
    assert render.note(status(problem="squeue did not answer", unconfirmed=True)) == (
        "squeue did not answer"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": "COMPLETED", "export": "/x/export"}, ["exported model  /x/export"]),
        (
            {"state": "FAILED", "reason": "NaN", "traceback": "Trace"},
            ["NaN", "Trace", "slurmrl logs add/1 --root /r"],
        ),
        ({"state": "INTERRUPTED"}, ["slurmrl resume add/1 --root /r", "last commit step 10"]),
        ({"state": "CANCELLED"}, ["slurmrl resume add/1"]),
        ({"state": "RUNNING"}, ["the run goes on", "slurmrl cancel add/1 --root /r"]),
    ],
)
def test_what_is_said_at_the_end(changes: dict[str, Any], words: list[str]) -> None:
    text = render.conclusion(status(**changes), " --root /r")
    assert all(word in text for word in words), text


def test_time_left() -> None:
    assert remaining(status()) == "2 s/step, 96 s left"
    assert remaining(status(step=60)) == ""
    assert remaining(status(metrics={})) == ""
    assert remaining(status(total_steps=None)) == ""


@pytest.mark.parametrize("one", [status(), status(total_steps=None), waiting("Priority")])
def test_the_picture_shows_it_all(one: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(picture(one))
    console.file.close()
    text = console.export_text()
    for part in (one["trial"], one["state"], render.progress(one), render.commit(one)):
        assert part in text


def test_plain_lines(tmp_path: Any) -> None:
    from tests.fake_runs import FakeRun

    run = FakeRun(tmp_path)
    lines: list[str] = []
    view = PlainView(write=lines.append)

    def look(**changes: Any) -> list[str]:
        lines.clear()
        view.update(status(run=str(run.paths.run), **changes))
        return list(lines)

    assert look(state="PENDING", incarnation=0, checkpoint=None) == ["PENDING waits"]
    run.metrics({"step": 0, "eval/reward": 0.1}, {"step": 1, "reward": 0.5, "kl": 0.25})
    first = look(incarnation=1, checkpoint=None)
    assert first == ["RUNNING", "step 0/60  eval/reward 0.1", "step 1/60  reward 0.5  kl 0.25"]
    assert look(incarnation=1, checkpoint=None) == []
    assert look(incarnation=1, checkpoint={"step": 1, "age_s": 0}) == ["committed step 1"]
    run.metrics({"step": 2, "reward": 0.5})
    assert look(incarnation=1, checkpoint={"step": 1, "age_s": 0}) == ["step 2/60  reward 0.5"]
    again = look(incarnation=2, checkpoint={"step": 1, "age_s": 0})
    assert again == ["incarnation 2 goes on from step 1", "step 2/60  reward 0.5"]


@pytest.mark.parametrize("checkpoint", [None, {"step": 2, "age_s": 0}])
def test_a_resumed_run_does_not_repeat_old_steps(tmp_path: Any, checkpoint: Any) -> None:
    from tests.fake_runs import FakeRun

    run = FakeRun(tmp_path)
    run.metrics(*({"step": step} for step in range(1, 5)))
    lines: list[str] = []
    view = PlainView(3, lines.append)
    view.update(status(run=str(run.paths.run), incarnation=3, checkpoint=checkpoint))
    assert lines == ["RUNNING"]
    first = checkpoint["step"] + 1 if checkpoint else 1
    run.paths.metrics.unlink()
    run.metrics(*({"step": step} for step in range(1, first + 1)))
    view.update(status(run=str(run.paths.run), incarnation=4, checkpoint=checkpoint))
    assert lines[1:3] == [f"incarnation 4 goes on from step {first - 1}", f"step {first}/60"]
