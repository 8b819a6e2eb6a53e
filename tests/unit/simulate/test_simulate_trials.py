"""Simulated trials: exact times, the renewal formula, rollout tasks, and the command."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmrl.cli.main import main
from slurmrl.config.schema.rollout import Publish, Tasks
from slurmrl.errors import UsageError
from slurmrl.plan.estimates.pass_seconds import LengthDistribution
from slurmrl.plan.settings import load_settings
from slurmrl.simulate.host_events import HostLosses, HostSpeeds
from slurmrl.simulate.outcomes import commit_advice
from slurmrl.simulate.queue_waits import FixedWait, QueueTrace, duration_s, given_waits
from slurmrl.simulate.simulated_task import SimulatedTask
from slurmrl.simulate.task_pool import TaskPool
from slurmrl.simulate.trial_costs import (
    Conditions,
    Disturbances,
    LongestCompletion,
    TaskCosts,
    TrialCosts,
)
from slurmrl.simulate.trial_run import TrialRun

TEXT = """\
experiment: simulated
total_steps: 500
algorithm: {name: ppo, batch_size: 16, n_minibatches: 2}
actor:
  backend: fsdp:d8
  dtype: bfloat16
  architecture: {model_type: llama, vocab_size: 32000, hidden_size: 2048, intermediate_size: 5632,
    num_hidden_layers: 16, num_attention_heads: 16, num_key_value_heads: 8,
    max_position_embeddings: 8192}
rollout: {max_new_tokens: 512}
reward: {name: exact_match}
dataset: {type: prompt, path: train.jsonl, max_prompt_tokens: 256}
cluster: {slurm: {gpu_type: h100, time: "01:00:00"}}
checkpoint: {every_steps: 10}
"""
MEASURED = (
    "--step-seconds=10",
    "--start-seconds=100",
    "--restart-seconds=20",
    "--commit-seconds=5",
)
TRACE = """\
Submit|Eligible|Start|NNodes|Timelimit
2026-11-01T10:00:00|2026-11-01T10:00:00|2026-11-01T10:10:00|1|01:00:00
2026-11-01T10:00:00|2026-11-01T12:00:00|2026-11-01T12:05:00|1|01:00:00
2026-11-01T10:00:00|2026-11-01T10:00:00|Unknown|1|01:00:00
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ppo.yaml"
    path.write_text(TEXT)
    return path


def simulated(
    capsys: pytest.CaptureFixture[str], config: Path, *arguments: str, code: int = 0
) -> dict[str, Any]:
    assert main(["simulate", str(config), "--json", *arguments]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def mean_seconds(found: dict[str, Any]) -> float:
    runs = found["time_limits"][0]["runs"]
    total: float = sum(one["seconds"] for one in runs)
    return total / len(runs)


def test_simulated_time_is_exact_without_disturbances(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    """Two jobs: the first stops at its warning, after 319 to 322 steps, and commits that step."""
    found = simulated(capsys, config, *MEASURED, "--queue-wait=fixed:1000s", "--runs=1")
    total = 2 * (1000 + 100) + 500 * 10 + 50 * 5
    (only,) = found["time_limits"]
    seconds = only["runs"][0]["seconds"]
    last_commit = 5 if seconds > total + 1 else 0  # unless it stops at a multiple of 10 steps
    assert seconds == pytest.approx(total + last_commit)
    assert (only["runs"][0]["jobs"], only["links"], only["runs"][0]["steps"]) == (2, 2, 500)
    assert only["parts"]["training"] == pytest.approx(5000)
    assert only["parts"]["queue"] == pytest.approx(2000)
    assert only["runs"][0]["gpu_hours"] == pytest.approx((seconds - 2000) * 8 / 3600)


def test_slurm_may_signal_a_job_30_s_early(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    """90 s of steps fit before the latest possible signal, and 60 s before the earliest."""
    given = ("--step-seconds=1", "--start-seconds=30", "--commit-seconds=0", "--steps=85")
    limit = ("cluster.slurm.time=00:03:00", "cluster.slurm.signal_lead_s=60")
    found = simulated(capsys, config, *given, *limit, "--runs=100")
    jobs = [one["jobs"] for one in found["time_limits"][0]["runs"]]
    assert set(jobs) == {1, 2}
    assert jobs.count(1) == pytest.approx(100 * 5 / 30, abs=12)


def test_simulated_time_parts_add_up_and_seeds_reproduce_runs(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    disturbed = (
        *MEASURED,
        "--failures=20",
        "--crashes=20",
        "--preemptions=5",
        "--stragglers=0.05",
        "--queue-wait=10m",
        "--runs=5",
        "max_restarts_without_commit=1000",
    )
    found = simulated(capsys, config, *disturbed)
    assert found == simulated(capsys, config, *disturbed)
    (limit,) = found["time_limits"]
    assert sum(limit["parts"].values()) == pytest.approx(mean_seconds(found))
    assert {"lost hosts", "crashes", "preemptions"} <= limit["events"].keys()
    assert limit["parts"]["work lost and repeated"] > 0
    other = simulated(capsys, config, *disturbed, "--seed=77")
    assert mean_seconds(other) != mean_seconds(found)


def test_simulated_failure_cost_equals_the_renewal_formula(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    """Daly 2006: a segment of w seconds takes exp(r/M) (exp(w/M) - 1) M with restarts of r."""
    found = simulated(
        capsys,
        config,
        "cluster.slurm.time=UNLIMITED",
        "max_restarts_without_commit=100000",
        "--step-seconds=10",
        "--start-seconds=20",
        "--restart-seconds=20",
        "--commit-seconds=5",
        "--crashes=432",
        "--runs=100",
    )
    between_s, restart_s, segment_s = 86400 / 432, 20, 105
    each = between_s * math.exp(restart_s / between_s) * math.expm1(segment_s / between_s)
    start_s = between_s * math.expm1(restart_s / between_s)
    assert mean_seconds(found) == pytest.approx(50 * each + start_s, rel=0.03)


def test_more_disturbances_never_shorten_a_trial(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    def seconds(*arguments: str) -> float:
        return mean_seconds(simulated(capsys, config, *MEASURED, *arguments, "--runs=20"))

    calm = seconds()
    by_failures = [seconds(f"--failures={rate}") for rate in (1, 8, 16)]
    by_waits = [seconds(f"--queue-wait={wait}m") for wait in (1, 10, 60)]
    assert [calm, *by_failures] == sorted([calm, *by_failures])
    assert [calm, *by_waits] == sorted([calm, *by_waits])
    assert calm < seconds("--stragglers=0.1", "--hosts=100")
    lost = ("--hosts=8", "--failures=2", "--queue-wait=1h")
    assert seconds("cluster.slurm.spares=1", *lost) < seconds(*lost)


@pytest.mark.parametrize(
    ("hosts", "spares", "first", "slurmd_timeout_s", "found_s"),
    [
        (4, 1, False, 300, 60 + 5 + 7.5 + 30),
        (4, 1, True, 300, 60 + 5 + 30),
        (4, 1, True, 70, 60 + 5 + 5),
        (4, 1, False, 5, 60 + 5 + 7.5 + 30),
        (4, 0, False, 5, 5),
        (4, 0, False, 300, 60 + 5 + 7.5 + 30),
        (1, 0, True, 300, 300),
        (1, 1, True, 300, 300 + 15),
    ],
)
def test_host_loss_is_found_by_other_hosts_or_by_slurm(
    hosts: int, spares: int, first: bool, slurmd_timeout_s: float, found_s: float
) -> None:
    """Leases expire after 60 s and are read every 10 s; agents ask Slurm for at most 30 s."""
    losses = HostLosses(hosts, spares, Disturbances(slurmd_timeout_s=slurmd_timeout_s), 60.0, 10.0)
    assert losses.found_s(first=first) == found_s


def test_slow_host_slows_all_steps_of_its_job(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    """Half of the hosts need twice the time. A trial has one job on one host."""
    given = (*MEASURED, "cluster.slurm.time=1-00:00:00", "--runs=100", "--slow-factor=2")
    usual = mean_seconds(simulated(capsys, config, *given))
    found = simulated(capsys, config, *given, "--slow-hosts=0.5")
    seconds = Counter(one["seconds"] for one in found["time_limits"][0]["runs"])
    assert sorted(seconds) == pytest.approx([usual, usual + 500 * 10])
    assert seconds[max(seconds)] == pytest.approx(50, abs=15)
    share = found["time_limits"][0]["events"]["jobs with slow hosts"]
    assert share == seconds[max(seconds)] / 100


def test_spare_may_replace_a_slow_host() -> None:
    slow = Disturbances(slow_hosts=0.25, slow_factor=3.0)
    factors = []
    for seed in range(400):
        speeds = HostSpeeds(1, slow, str(seed))
        before = speeds.new_job()
        speeds.replace_host()
        factors.append((before, speeds.factor()))
    counts = Counter(factors)
    assert counts.keys() == {(False, 1.0), (False, 3.0), (True, 1.0), (True, 3.0)}
    assert counts[True, 1.0] > counts[True, 3.0], "three of four spares are fast"


def test_reward_seconds_are_added_to_the_predicted_step(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    plain = simulated(capsys, config, "--runs=1")
    given = simulated(capsys, config, "--runs=1", "--reward-seconds=2.5")
    assert given["step_s"] == pytest.approx(plain["step_s"] + 2.5)
    assumed = "rewards: 0 s of a step (--reward-seconds)"
    assert assumed in plain["assumed"]
    assert assumed not in given["assumed"]


def test_delta_versions_take_a_twentieth_of_the_time(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    def published_s(every: int) -> float:
        given = ("rollout.backend=native:d1", "rollout.tasks.max_staleness=1", "--steps=5")
        limit = ("cluster.slurm.time=UNLIMITED", "--write-rate=0.01", "--runs=1")
        own = (*given, *limit, f"rollout.publish.whole_every={every}")
        (note,) = (
            one for one in simulated(capsys, config, *own)["assumed"] if one.startswith("weights")
        )
        assert f"{1 - 1 / every:.0%} of the versions are deltas" in note
        return float(note.split()[4])

    assert published_s(10) == pytest.approx(published_s(1) * (1 + 9 * 0.05) / 10, rel=0.01)


def test_lost_spares_do_not_interrupt_training(config: Path) -> None:
    given = replace(costs(config), tasks=None, hosts=2, spares=8, steps=2000)
    runs = [TrialRun(given, conditions(failures=10.0), str(seed)).run() for seed in range(200)]
    days = sum(run.seconds for run in runs) / 86400
    lost = sum(run.events.get("lost hosts", 0) for run in runs)
    assert lost / days == pytest.approx(2 * 10.0, rel=0.3), "only hosts that train count"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--crashes=100000",), "3 starts in a row without a new commit"),
        (("--commit-seconds=200",), "two jobs in a row reached it before their first commit"),
        (("--preemptions=100000",), "100 jobs in a row ended before a commit"),
        (("cluster.slurm.continue=none",), "nothing follows the job"),
        (
            ("cluster.slurm.links=1", "--commit-seconds=119", "checkpoint.every_steps=1000"),
            "",
        ),
    ],
)
def test_simulated_trial_ends_by_the_rules_of_a_real_trial(
    capsys: pytest.CaptureFixture[str], config: Path, arguments: tuple[str, ...], reason: str
) -> None:
    given = (*MEASURED, "checkpoint.every_steps=1000", *arguments, "--runs=1")
    found = simulated(capsys, config, *given, code=1 if reason else 0)
    assert reason in found["time_limits"][0]["runs"][0]["why"]


# -- rollout tasks ---------------------------------------------------------------------------


def costs(config: Path, *, staleness: int = 1, groups_per_s: float = 1.0) -> TrialCosts:
    """Return the costs of 200 steps of 1 s with 16 groups, and of two tasks."""
    settings = load_settings(config, (), scheduler="slurm", planning=True)
    longest = LongestCompletion(LengthDistribution(50.0, 100), 8)
    tasks = TaskCosts(
        count=2,
        gpus=1,
        settings=Tasks(max_staleness=staleness),
        publish=Publish(),
        slurm=settings.config.cluster.slurm,
        inside=False,
        longest=longest,
        token_s=lambda groups: groups / (groups_per_s * longest.mean),
        start_s=0.0,
        publish_s=0.0,
        load_s=0.0,
    )
    return TrialCosts(
        steps=200,
        batch_size=16,
        hosts=1,
        spares=0,
        gpus=8,
        step_s=1.0,
        decoding_s=0.0,
        longest=None,
        start_s=0.0,
        restart_s=0.0,
        stall_s=0.0,
        write_s=0.0,
        evaluation_s=0.0,
        checkpoint=settings.config.checkpoint,
        evaluation=None,
        slurm=settings.config.cluster.slurm,
        config=settings.config,
        tasks=tasks,
    )


def conditions(**rates: float) -> Conditions:
    none = FixedWait(0.0)
    return Conditions(Disturbances(**rates), none, none, math.inf)


@pytest.mark.parametrize(("staleness", "groups_per_s"), [(1, 1.0), (4, 1.0), (1, 100.0)])
def test_step_time_follows_the_slower_of_tasks_and_trainers(
    config: Path, staleness: int, groups_per_s: float
) -> None:
    given = costs(config, staleness=staleness, groups_per_s=groups_per_s)
    outcome = TrialRun(given, conditions(), "1").run()
    generation = given.batch_size / (2 * groups_per_s)
    slower = max(generation, given.step_s)
    # The master reads results every 0.2 s, and the tasks do not always have equally many groups.
    assert 0.98 * slower <= outcome.seconds / given.steps <= 1.15 * slower + 0.5
    assert sum(outcome.parts.values()) == pytest.approx(outcome.seconds)


def test_steps_wait_for_their_own_groups_without_staleness(config: Path) -> None:
    given = costs(config, staleness=0)
    outcome = TrialRun(given, conditions(), "1").run()
    assert outcome.seconds / given.steps > given.step_s + given.batch_size / 2


def test_jobs_too_short_to_make_a_group_are_rejected(config: Path) -> None:
    given = costs(config, groups_per_s=1e-4)
    assert given.tasks is not None
    slurm = given.tasks.slurm.model_copy(update={"time": "00:10:00"})
    given = replace(given, tasks=replace(given.tasks, slurm=slurm))
    with pytest.raises(UsageError, match="never make enough groups"):
        TrialRun(given, conditions(), "1").run()


def test_simulated_task_clock_never_goes_back_with_short_jobs(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm signals most jobs of 125 s when they start, because it may be 30 s early."""
    times: list[float] = []
    happen = TaskPool._happen

    def recording(pool: TaskPool, *event: Any) -> None:
        times.append(pool._now)
        happen(pool, *event)

    monkeypatch.setattr(TaskPool, "_happen", recording)
    given = costs(config)
    assert given.tasks is not None
    slurm = given.tasks.slurm.model_copy(update={"time": "00:02:05"})
    given = replace(given, steps=20, tasks=replace(given.tasks, slurm=slurm))
    assert TrialRun(given, conditions(), "1").run().finished
    assert times == sorted(times)


def test_each_item_is_trained_once_through_failures_of_tasks_and_trainers(config: Path) -> None:
    rates = conditions(failures=500.0, crashes=200.0, slurmd_timeout_s=60.0)
    run = TrialRun(costs(config), rates, "1")
    outcome = run.run()
    assert outcome.finished, outcome.why
    assert outcome.events["crashes"] + outcome.events["lost hosts"] > 5
    assert run._pool is not None
    assert run._pool.ledger.trained == 200 * 16


def test_lost_host_takes_all_of_its_rollout_tasks(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm starts their next jobs after its timeout, and not when their leases have expired."""
    lost: list[tuple[float, int]] = []
    away: dict[int, float] = {}
    end, begin, waits = TaskPool._end, TaskPool._begin, list[float]()

    def recording(pool: TaskPool, task: SimulatedTask, **options: bool) -> None:
        if options.get("lost"):
            lost.append((pool._now, task.number))
            away[task.number] = pool._now
        end(pool, task, **options)

    def beginning(pool: TaskPool, task: SimulatedTask) -> None:
        if task.number in away:
            waits.append(pool._now - away.pop(task.number))
        begin(pool, task)

    monkeypatch.setattr(TaskPool, "_end", recording)
    monkeypatch.setattr(TaskPool, "_begin", beginning)
    given = costs(config)
    assert given.tasks is not None
    given = replace(given, steps=2000, tasks=replace(given.tasks, count=6, per_host=4))
    outcome = TrialRun(given, conditions(failures=200.0, slurmd_timeout_s=90.0), "1").run()
    assert outcome.finished, outcome.why
    assert waits
    assert waits == pytest.approx([90.0] * len(waits))
    hosts = [{number for at, number in lost if at == time} for time, _ in lost]
    assert all(host <= {0, 1, 2, 3} or host <= {4, 5} for host in hosts)
    assert {0, 1, 2, 3} in hosts
    assert {4, 5} in hosts


@pytest.mark.parametrize("inside", [False, True])
def test_new_job_of_a_task_starts_without_unfinished_groups(config: Path, inside: bool) -> None:
    given = costs(config, groups_per_s=0.1)
    assert given.tasks is not None
    given = replace(given, steps=40, tasks=replace(given.tasks, inside=inside))
    for rates in ({"failures": 200.0, "slurmd_timeout_s": 60.0}, {"preemptions": 200.0}):
        outcome = TrialRun(given, conditions(**rates), "1").run()
        assert outcome.finished, outcome.why


def test_gpus_of_tasks_count_once_in_the_trainers_job(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    layout = ("rollout.backend=native:d4", "rollout.tasks={}", "cluster.workers_per_host=4")
    measured = (*MEASURED, "--groups-per-hour=10000", "--steps=20", "--runs=1")
    trainers = ("actor.backend=fsdp:d4", "critic.backend=fsdp:d4", "ref.backend=fsdp:d4")
    for place, gpus in (("rollout.gpus=4-7", 8), ("rollout.gpus=null", 4)):
        found = simulated(capsys, config, *trainers, *layout, place, *measured)
        (run,) = found["time_limits"][0]["runs"]
        assert (found["gpus"], found["rollout_tasks"]) == (gpus, 4)
        assert run["gpu_hours"] == pytest.approx(run["seconds"] * 8 / 3600)


@pytest.mark.parametrize(
    ("more", "gpus"),
    [(("--tasks=8",), 12), (("--tasks=2",), 6), (("--hosts=3",), 24)],
)
def test_gpus_follow_the_number_of_tasks_in_the_trainers_job(
    capsys: pytest.CaptureFixture[str], config: Path, more: tuple[str, ...], gpus: int
) -> None:
    layout = ("rollout.backend=native:d4", "rollout.tasks={}", "rollout.gpus=4-7")
    trainers = ("actor.backend=fsdp:d4", "critic.backend=fsdp:d4", "ref.backend=fsdp:d4")
    measured = (*MEASURED, "--groups-per-hour=10000", "--steps=20", "--runs=1")
    found = simulated(capsys, config, *trainers, *layout, *measured, *more)
    (run,) = found["time_limits"][0]["runs"]
    assert found["gpus"] == gpus
    assert run["gpu_hours"] == pytest.approx(run["seconds"] * gpus / 3600)
    spare = ("cluster.workers_per_host=8", "cluster.slurm.spares=1")
    found = simulated(capsys, config, *trainers, *layout, *spare, *measured, *more)
    assert found["gpus"] == gpus + gpus // max(found["hosts"], 1)


def test_rollout_tasks_start_in_the_given_seconds(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    """The first step needs the first group of the tasks, which are fast."""
    layout = ("rollout.backend=native:d4", "rollout.tasks={}", "--groups-per-hour=1e9")
    given = ("--step-seconds=1", "--restart-seconds=1", "--commit-seconds=0", "--write-rate=1e6")
    common = (*layout, *given, "--steps=10", "--runs=1")
    fast, slow = (
        mean_seconds(simulated(capsys, config, *common, f"--start-seconds={seconds}"))
        for seconds in (5, 500)
    )
    assert fast == pytest.approx(5 + 10, rel=0.2)
    assert slow == pytest.approx(500 + 10, rel=0.2)


# -- options ---------------------------------------------------------------------------------


def test_commit_advice_equals_youngs_interval(config: Path) -> None:
    given = costs(config)
    assert commit_advice(given, Disturbances()) is None
    daily = commit_advice(given, Disturbances(failures=0.5, crashes=0.5))
    assert daily is not None
    assert daily.between_failures_s == 86400
    assert daily.seconds == pytest.approx(math.sqrt(2 * 1e-3 * 86400), abs=0.5)


def test_trace_gives_the_waits_of_started_jobs(tmp_path: Path) -> None:
    path = tmp_path / "sacct.txt"
    path.write_text(TRACE)
    trace = QueueTrace.read(path)
    assert [job.wait_s for job in trace.jobs] == [600, 300]
    path.write_bytes(b"\xef\xbb\xbf" + TRACE.replace("\n", "\r\n").encode())
    assert QueueTrace.read(path).jobs == trace.jobs, "as an editor on another system saves it"
    large = "2026-11-01T10:00:00|2026-11-01T10:00:00|2026-11-01T20:00:00|64|01:00:00\n" * 10
    path.write_text(TRACE + large)
    assert set(QueueTrace.read(path).waits(64, 3600).seconds) == {36000}
    assert "all 12 of 12 jobs" in QueueTrace.read(path).waits(1, 3600).words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: has no column Submit and no column Start"),
        ("Submit|Elapsed\nx|y\n", ":1: has no column Start: write the file with 'sacct"),
        (TRACE.replace("10:10:00", "noon"), ":2: Start '2026-11-01Tnoon' is not a time"),
        (TRACE.replace("|1|01", "|one|01"), ":2: NNodes 'one' is not a number"),
        (TRACE.replace("Timelimit", "Timelimit|State"), ":2: has 5 columns, the header 6"),
        (TRACE.splitlines()[0], ": no job in the file has started"),
        (TRACE.replace("T10:10:00", "T10:10:00+01:00"), ":2: only some of the times"),
    ],
)
def test_wrong_trace_is_rejected(
    capsys: pytest.CaptureFixture[str], config: Path, text: str, message: str
) -> None:
    trace = config.with_name("sacct.txt")
    trace.write_text(text)
    assert main(["simulate", str(config), *MEASURED, f"--trace={trace}"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--failures=-1", "-1.0 is not in the range"),
        ("--failures=nan", "nan"),
        ("--slurmd-timeout=0", "0.0 is not in the range"),
        ("--queue-wait=30", "'30' is not a duration"),
        ("--queue-wait=often:3m", "'often:3m' is not a queue wait"),
        ("--time-limit=00:01:00", "must be longer than cluster.slurm.signal_lead_s"),
        ("--time-limit=soon", "'soon' is not a list of time limits"),
        ("--tasks=3", "need rollout tasks"),
        ("--task-wait=3h", "need rollout tasks"),
        ("--slow-hosts=1.5", "1.5 is not in the range"),
        ("--slow-factor=0.5", "0.5 is not in the range"),
        ("--step-seconds=0", "must be above 0"),
        ("--response-tokens=1e6", "a mean of 1e+06 tokens is too long: completions have at most"),
        ("--prompt-tokens=9e5", "a mean of 900000 tokens is too long: prompts have at most"),
    ],
)
def test_wrong_option_is_rejected(
    capsys: pytest.CaptureFixture[str], config: Path, argument: str, message: str
) -> None:
    assert main(["simulate", str(config), *MEASURED, argument]) == 2
    assert message in capsys.readouterr().err


def test_durations_and_waits_are_parsed() -> None:
    assert [duration_s(text) for text in ("90s", "1.5m", "2h", "1d")] == [90, 90, 7200, 86400]
    assert given_waits("fixed:1h") == FixedWait(3600)
    assert given_waits("0m") == FixedWait(0)
    with pytest.raises(UsageError, match="'inf' is not a duration"):
        duration_s("inf")
    with pytest.raises(UsageError, match="'1e308d' is not a duration"):
        duration_s("1e308d")


@pytest.mark.parametrize("mean", [5.0, 50.0, 95.0])
def test_lengths_are_sampled_from_the_distribution(mean: float) -> None:
    lengths = LengthDistribution(mean, 100)
    for tokens in (1.0, 20.0, 50.0, 99.0):
        assert lengths.exceeded_by(lengths.longer(tokens)) == pytest.approx(tokens, rel=1e-3)
    longest = LongestCompletion(lengths, 1)
    assert longest.mean == pytest.approx(mean, rel=0.01)


def test_report_shows_the_queue_waits_of_the_best_time_limit(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    trace = config.with_name("sacct.txt")
    short = "2026-11-01T10:00:00|2026-11-01T10:00:00|2026-11-01T10:01:00|1|02:00:00\n" * 10
    long = "2026-11-01T10:00:00|2026-11-01T10:00:00|2026-11-02T10:00:00|1|1-00:00:00\n" * 10
    trace.write_text(f"{TRACE.splitlines()[0]}\n{short}{long}")
    limits = "--time-limit=02:00:00,1-00:00:00"
    arguments = ["simulate", str(config), *MEASURED, limits, f"--trace={trace}", "--runs=1"]
    assert main(arguments) == 0
    assert "similar 10 of 20 jobs, mean 60 s" in capsys.readouterr().out
    large = ["--hosts=1000", "--steps=100", "--step-seconds=2000", "--time-limit=UNLIMITED"]
    assert main(["simulate", str(config), *large, "--runs=1"]) == 0
    text = capsys.readouterr().out
    assert "a step: 2,000 s" in text
    assert "e+" not in text


def test_report_shows_time_limits_and_commit_advice(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    arguments = ["--failures=1", "--time-limit=01:00:00,02:00:00", "--runs=3"]
    assert main(["simulate", str(config), *arguments]) == 0
    text = capsys.readouterr().out
    for words in (
        "1 h 00 min",
        "2 h 00 min",
        "commits: an interval of",
        "hardware profile h100",
        "training",
    ):
        assert words in text


def test_longest_row_limits_prompts_of_a_simulation(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    config.write_text(TEXT.replace(", max_prompt_tokens: 256", ""))
    arguments = ["simulate", str(config), "--json", "--runs=1", "--steps=10"]
    assert main(arguments) == 0
    long = capsys.readouterr()
    assert f"dataset.max_prompt_tokens={8192 - 512} (the maximum for this model)" in long.err
    config.with_name("train.jsonl").write_text('{"prompt": "7 + 5 =", "answer": "12"}\n')
    assert main(arguments) == 0
    short = capsys.readouterr()
    assert "(no row of the data is longer)" in short.err
    assert json.loads(short.out)["step_s"] < json.loads(long.out)["step_s"]


def test_simulated_trial_that_does_not_fit_is_reported(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    arguments = ["simulate", str(config), *MEASURED, "--runs=1"]
    assert main(arguments) == 0
    assert "does not fit" not in capsys.readouterr().err
    assert main([*arguments, "cluster.gpu_memory=6G"]) == 0
    assert "the configuration does not fit into GPU memory" in capsys.readouterr().err
