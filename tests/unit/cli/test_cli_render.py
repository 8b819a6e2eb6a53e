from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmrl.cli import status_text
from slurmrl.cli.following import PlainView, curve, picture, remaining
from tests.fake_runs import FakeRun
from tests.fake_status import incarnation, pending, rollouts, status, timing


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.41234567, "0.4123"), (1234.5, "1,234"), (12, "12"), (None, "-"), (1e-5, "1e-05")],
)
def test_numbers_are_rounded_readably(value: Any, text: str) -> None:
    assert status_text.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (0.4, "0 s"), (119, "119 s"), (120, "2 min"), (9000, "2.5 h"), (2e5, "2.3 d")],
)
def test_ages_are_printed_in_readable_units(seconds: float | None, text: str) -> None:
    assert status_text.age(seconds) == text


def test_many_trials_are_printed_in_columns() -> None:
    two = [status(), pending("Priority", "other jobs come first")]
    hour_later = 1_003_600.0
    assert status_text.many(two, now=hour_later).splitlines() == [
        "TRIAL  STATE    AGE     STEP   REWARD  TOKENS/S  COMMIT                DIAGNOSIS",
        "add/1  RUNNING  60 min  12/60  0.4123  1,234     step 10, 3.3 min ago  "
        "2 s a step, about 96 s left",
        "add/1  PENDING  60 min  0/60   -       -         none yet              "
        "pending for 3 h (Priority): other jobs come first",
    ]
    assert status_text.many(two, 80, now=hour_later).splitlines() == [
        "TRIAL  STATE    AGE     STEP   REWARD  TOKENS/S  COMMIT",
        "add/1  RUNNING  60 min  12/60  0.4123  1,234     step 10, 3.3 min ago",
        "    2 s a step, about 96 s left",
        "add/1  PENDING  60 min  0/60   -       -         none yet",
        "    pending for 3 h (Priority): other jobs come first",
    ]


def test_rollout_task_lines_show_count_speed_age_and_losses() -> None:
    """The lines show the number of tasks, their speed, the age of samples, and losses. An empty
    section has no lines.
    """
    shown = status(rollouts=rollouts())
    lines = status_text.one(shown).splitlines()
    assert [line.strip() for line in lines if line.startswith("  ")][4:7] == [
        "rollouts       1 of 4 tasks, 812.4 tokens/s; the trainers wait for groups of rollout "
        "tasks: 3 of 8",
        "groups by age  trained 0: 80, 1: 16; finished 0: 3",
        "not trained    dropped stale: 2; refused late: 1, rolled back: 1; "
        "queued again damaged: 1, given back: 5, lost: 2",
    ]
    head = lines.index("ROLLOUTS   ATTEMPT  HOST  STATE     WEIGHTS  PROMPTS  TOKENS/S  LAST WORD")
    assert lines[head + 1 : head + 3] == [
        "rollout/0  1        n7    works     12.2     4        812.4     0 s ago",
        "rollout/3  0        -     starting  -        0        -         9 s ago",
    ]
    task = rollouts()["tasks"][0]
    stuck = {**task, "problem": "cannot write x: No space left on device"}
    text = status_text.one(status(rollouts=rollouts(tasks=[task, stuck, stuck])))
    assert "  no weights     rollout/0 on n7 (and 1 more): cannot write x: No space left" in text
    many = status(rollouts=rollouts(tasks=[task] * 20))
    assert sum(line.startswith("rollout/0") for line in status_text.one(many).splitlines()) == 8
    assert "and 12 more" in status_text.one(many)
    counts: dict[str, Any] = {name: {} for name in ("trained", "finished", "dropped", "refused")}
    nothing = rollouts(tasks=[], waits_for="", damaged=0, given_back=0, lost=0, **counts)
    assert "rollouts     0 of 4 tasks\n" in (text := status_text.one(status(rollouts=nothing)))
    assert "by age" not in text
    assert "not trained" not in text


def test_no_line_is_wider_than_the_terminal() -> None:
    words = "jobs of higher priority are ahead of it; " * 3
    waits = pending("Priority", words, incarnations=[incarnation(1, how=words)])
    for one in (waits, status(state="FAILED", reason=words)):
        for text in (status_text.one(one, 80), status_text.many([one, one], 80)):
            assert max(map(len, text.splitlines())) <= 80


def tasks(count: int, **changes: Any) -> list[dict[str, Any]]:
    (one,) = status()["groups"][0]["tasks"]
    return [{**one, "host": f"n{index}", **changes} for index in range(count)]


def test_many_hosts_in_the_same_state_share_a_line() -> None:
    late = {**tasks(13)[12], "lease_age_s": 7.0, "state": "FAILED"}
    groups = [{"name": "trainer", "links_left": 0, "tasks": [*tasks(12), late]}]
    assert status_text.one(status(groups=groups)).splitlines()[9:11] == [
        "trainer/0-11  41_1  n0,n1,n2 +9  RUNNING  1        0 s ago",
        "trainer/12    41_1  n12          FAILED   1        7 s ago",
    ]
    groups[0]["tasks"] = tasks(3, state="PENDING", host=None, lease_age_s=None, reason="Resources")
    text = status_text.one(status(groups=groups))
    assert "trainer/0-2  41_1  -     PENDING  1        -          Resources\n" in text


def test_control_characters_are_not_printed() -> None:
    text = "rank 1: \x1b[2J\x07"
    one = status(state="FAILED", reason=text, traceback=f"{text}\n\tx\n")
    one["findings"] = [{"code": "failed", "text": text}]
    assert status_text.one(one).replace("\n", "").isprintable()


def test_all_findings_are_shown() -> None:
    found = [{"code": "signal_lead", "text": "x"}, {"code": "running", "text": "running, y"}]
    text = status_text.one(status(diagnosis="x", findings=found))
    assert text.splitlines()[1:3] == ["  x", "  also: running, y"]


@pytest.mark.parametrize(
    ("hosts", "text"), [([], "-"), (["a"], "a"), ([f"n{i}" for i in range(9)], "n0,n1,n2 +6")]
)
def test_long_host_lists_are_cut(hosts: list[str], text: str) -> None:
    assert text in status_text.one(status(incarnations=[incarnation(1, hosts=hosts)]))


def test_status_gives_the_reason_of_a_waiting_trial() -> None:
    assert status_text.note(pending("Resources")) == "waits: Resources"
    assert status_text.note(pending("")) == "waits"


def test_note_states_unconfirmed_heartbeat_or_scheduler_problem() -> None:
    assert status_text.note(status(unconfirmed=True)) == "unconfirmed: no heartbeat seen"
    assert status_text.note(status(problem="squeue did not answer", unconfirmed=True)) == (
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
        ({"state": "RUNNING"}, ["the run continues", "slurmrl stop add/1 --root /r"]),
    ],
)
def test_conclusion_of_a_run_names_outcome_and_next_command(
    changes: dict[str, Any], words: list[str]
) -> None:
    text = status_text.conclusion(status(**changes), " --root /r")
    assert all(word in text for word in words), text


def test_remaining_time_is_estimated() -> None:
    assert remaining(status()) == "2 s/step, 96 s left"
    assert remaining(status(timing=timing(left_s=0.0))) == ""
    assert remaining(status(timing=timing(step_s=None, left_s=None))) == ""


@pytest.mark.parametrize("one", [status(), status(total_steps=None), pending("Priority")])
def test_rich_view_shows_the_same_facts_as_text(one: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(picture(one))
    console.file.close()
    text = console.export_text()
    for part in (one["trial"], one["state"], status_text.progress(one), status_text.commit(one)):
        assert part in text
    assert one["phase"] == "running" or one["diagnosis"].strip() in text


def test_rich_view_shows_the_curve_of_the_first_metric() -> None:
    lines = [{"step": n, "reward": None if n == 1 else n / 8, "loss": 1.0} for n in (1, 2, 4, 6)]
    assert curve(lines) == "reward ▁▅█ 0.25 to 0.75, steps 2 to 6"
    assert curve(lines[:2]) == "loss ▅▅ 1 to 1, steps 1 to 2"
    assert curve([{**line, "reward": None, "eval/reward": 0.5} for line in lines])[:4] == "loss"
    assert curve([{"step": 1, "loss": 1.0}]) == ""


def test_plain_view_prints_one_line_per_change(tmp_path: Any) -> None:
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
    assert again == ["incarnation 2 continues from step 1", "step 2/60  reward 0.5"]


def test_watch_without_terminal_prints_the_end_after_the_last_steps(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.metrics({"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0})
    lines: list[str] = []
    ended = status(state="COMPLETED", run=str(run.paths.run), incarnation=1, checkpoint=None)
    PlainView(write=lines.append).update(ended)
    state = lines.index("COMPLETED")
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 2
    assert all(lines.index(line) < state for line in steps)


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
    assert lines[1:3] == [f"incarnation 4 continues from step {first - 1}", f"step {first}/60"]


def test_rates_are_shown_with_their_confidence_intervals() -> None:
    values = {
        "eval/pass@8": 0.5,
        "eval/pass@8/low": 0.42,
        "eval/pass@8/high": 0.58,
        "eval/maj@8": 0.25,
        "eval/margin": -0.5,
        "eval/margin/low": -1.0,
        "eval/margin/high": -0.1,
        "reward": 1.0,
        "eval/reward": 0.5,
        "eval/reward/low": None,
        "eval/reward/high": None,
    }
    shown = "eval/pass@8 0.5 (0.42 to 0.58)  eval/margin -0.5 (-1 to -0.1)"
    assert status_text.metrics(values) == f"reward 1  eval/reward 0.5  {shown}"


def test_suite_results_are_shown_like_evaluation_results() -> None:
    values = {
        "reward": 0.5,
        "eval/gsm8k/reward": 0.25,
        "eval/gsm8k/response_length": 9.0,
        "eval/a/reward": 0.5,
        "eval/a/reward/low": 0.4,
        "eval/a/reward/high": 0.6,
    }
    wanted = "reward 0.5  eval/gsm8k/reward 0.25  eval/a/reward 0.5 (0.4 to 0.6)"
    assert status_text.metrics(values) == wanted
