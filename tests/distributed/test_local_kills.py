"""A local trial whose processes are killed has the result of an undisturbed trial."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmrl.run.events import read_all
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.paths import RunPaths
from tests.support.held import NO_LIMIT, Hold
from tests.support.rotation import CODE_ERRORS, HANGS, in_turn, rotating
from tests.support.sink_readers import ALL_SINKS, READERS
from tests.support.trials import (
    Site,
    generate_config,
    kill_one,
    ppo_config,
    processes,
    sft_config,
    wait_until,
)

CONFIGS: dict[str, Callable[..., dict[str, Any]]] = {
    "sft": sft_config,
    "ppo": ppo_config,
    "generate": generate_config,
}
STEPS = 10
KILLS = 6
"""Number of kills that take turns, so every run has one."""


def config_of(kind: str, site: Site) -> dict[str, Any]:
    """Return settings of PPO with all its calls, and a filter that drops more than half of the
    groups.
    """
    config = CONFIGS[kind](total_steps=STEPS, checkpoint={"every_steps": 2})
    if kind == "ppo":
        more = {"recompute_logprobs": True, "max_truncated": 0.5}
        config["algorithm"] = {**config["algorithm"], **more}
        config["rollout"] = {**config["rollout"], "n": 2}
    hold = Hold(site)
    return hold.sft(config) if kind == "sft" else hold.judged(config, "HeldMatch")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Outcome of an undisturbed run, computed once per algorithm."""
    outcomes: dict[str, dict[str, Any]] = {}

    def outcome(kind: str) -> dict[str, Any]:
        if kind not in outcomes:
            site = Site(tmp_path_factory.mktemp(f"undisturbed-{kind}"))
            Hold(site).allow(NO_LIMIT)
            config = site.write("config.yaml", config_of(kind, site))
            site.slurmrl("submit", str(config), "--scheduler", "local", "--wait")
            outcomes[kind] = site.outcome(f"{kind}/1")
        return outcomes[kind]

    return outcome


pytestmark = pytest.mark.timeout(1800)
long = pytest.mark.long


def begun_by(site: Site, trial: str) -> list[tuple[int, str]]:
    """Return the link and the round of each incarnation."""
    records = History(site.paths(trial).history).read()
    return [
        (record.data["link"], record.data["job"].rpartition(".")[2])
        for record in records
        if record.kind is Kind.BEGIN
    ]


def started(site: Site, kind: str, logging: Any = None, **cluster: Any) -> Path:
    """Start a detached trial that waits at its third step until `check_end`. Return its run
    directory.
    """
    changes = {"cluster": {"gpus_per_worker": 0, **cluster}} if cluster else {}
    changes |= {"logging": logging} if logging else {}
    Hold(site).allow(3)
    config = site.write("config.yaml", {**config_of(kind, site), **changes})
    site.slurmrl("submit", str(config), "--scheduler", "local", "--detach")
    site.wait_for_step(f"{kind}/1", 3)
    return site.paths(f"{kind}/1").run


def check_end(site: Site, kind: str, undisturbed: Callable[[str], dict[str, Any]]) -> None:
    trial = f"{kind}/1"
    Hold(site).allow(NO_LIMIT)
    status = site.wait_for_end(trial)
    assert status["state"] == "COMPLETED"
    assert status["step"] == STEPS
    assert site.outcome(trial) == undisturbed(kind)
    wait_until("all processes to leave", lambda: not any(processes(site.paths(trial).run).values()))


def go_on(site: Site, kind: str, step: int) -> None:
    """Let a trial train up to ``step``."""
    Hold(site).allow(step)
    site.wait_for_step(f"{kind}/1", step)


@pytest.mark.filterwarnings("ignore")  # libraries of sinks warn
@in_turn(5, KILLS)
def test_outcome_is_unchanged_after_master_agent_and_chain_are_killed(
    tmp_path: Path,
    undisturbed: Callable[[str], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the master was killed, the agent starts new workers from the same fork server.

    After the agent was killed, the supervisor starts another agent in the same link. After the
    chain was killed, `resume` finishes the trial. Sinks hold each committed step once.
    """
    site = Site(tmp_path, {"WANDB_SILENT": "true"})
    run = started(site, "sft", ALL_SINKS)
    before = processes(run)
    kill_one(run, "master")
    after = wait_until("the next incarnation's workers", lambda: others(run, before))
    assert after["agent"] == before["agent"]
    assert after["fork_server"] == before["fork_server"]
    go_on(site, "sft", 5)
    kill_one(run, "agent")
    go_on(site, "sft", 7)
    assert begun_by(site, "sft/1") == [(0, "0"), (0, "0"), (0, "1")]
    kill_one(run, "chain")
    assert site.wait_for_end("sft/1")["state"] == "INTERRUPTED"
    site.slurmrl("resume", "sft/1", "--detach")
    check_end(site, "sft", undisturbed)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the library's own wish
    tokens = [(line["step"], line["tokens"]) for line in site.metrics("sft/1")]
    for name, points in READERS.items():
        assert points(site.paths("sft/1"), "tokens") == tokens, name


@pytest.mark.parametrize(
    ("kind", "role", "begun"),
    rotating(
        pytest.param("generate", "worker", [(0, "0"), (0, "0")]),
        pytest.param("ppo", "worker", [(0, "0"), (0, "0")]),
        pytest.param("ppo", "master", [(0, "0"), (0, "0")]),
        pytest.param("sft", "fork_server", [(0, "0"), (0, "0")]),
        pytest.param("ppo", "supervisor", [(0, "0"), (1, "0")]),
        shares=KILLS,
    ),
)
def test_outcome_is_unchanged_after_a_process_is_killed(
    tmp_path: Path,
    undisturbed: Callable[[str], dict[str, Any]],
    kind: str,
    role: str,
    begun: list[tuple[int, str]],
) -> None:
    """The agent continues, with a new fork server if the old one was killed. If the supervisor was
    killed, the next link starts.
    """
    site = Site(tmp_path)
    run = started(site, kind)
    before = processes(run)
    kill_one(run, role)
    after = wait_until("the next incarnation's workers", lambda: others(run, before))
    assert (after["agent"] == before["agent"]) == (role != "supervisor")
    kept = role not in ("fork_server", "supervisor")
    assert (after["fork_server"] == before["fork_server"]) == kept
    check_end(site, kind, undisturbed)
    assert begun_by(site, f"{kind}/1") == begun


ONCE = '''
from pathlib import Path
from slurmrl.rewards.base import ExactMatch

class Once(ExactMatch):
    """Raises once in the life of a trial, at its fifth judgement."""

    def __init__(self, *, folder):
        self.marker, self.calls = Path(folder) / "raised", 0

    def __call__(self, prompts, completions, rows):
        self.calls += 1
        if self.calls == 5:
            try:
                self.marker.touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                raise LookupError("no such verdict")
        return super().__call__(prompts, completions, rows)
'''


def without_intervals(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return metrics without confidence intervals. The intervals of a custom reward differ, because
    its scores need not be 1 or 0.
    """
    metrics = [
        {name: value for name, value in line.items() if not name.endswith(("/low", "/high"))}
        for line in outcome["metrics"]
    ]
    return {**outcome, "metrics": metrics, "evaluations": sorted(outcome["evaluations"])}


@long
@in_turn(0, CODE_ERRORS)
def test_user_code_that_raises_once_is_retried(
    tmp_path: Path, undisturbed: Callable[[str], dict[str, Any]]
) -> None:
    """The same agent starts new workers, although its other ranks did not fail."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "once.py").write_text(ONCE)
    site = Site(tmp_path)
    config = {
        **config_of("ppo", site),
        "reward": {"name": "once:Once", "options": {"folder": str(tmp_path)}},
        "cluster": {
            "gpus_per_worker": 0,
            "slurm": {"setup": [f"export PYTHONPATH={modules}"]},
        },
    }
    submit = ("submit", str(site.write("config.yaml", config)), "--scheduler", "local")
    site.slurmrl(*submit, "--detach")
    assert site.wait_for_end("ppo/1")["state"] == "COMPLETED"
    assert without_intervals(site.outcome("ppo/1")) == without_intervals(undisturbed("ppo"))
    assert begun_by(site, "ppo/1") == [(0, "0"), (0, "0")]
    events = read_all(site.paths("ppo/1"))
    failures = [event for event in events if event["kind"] == "failure"]
    assert [(event["cause"], event["reason"].split(": ", 1)[1]) for event in failures] == [
        ("exception", "LookupError: no such verdict")
    ]


def others(run: Path, before: dict[str, list[int]]) -> dict[str, list[int]] | None:
    """Return the processes of a run when it has two new workers and a new master."""
    now = processes(run)
    new = [set(now[role]) - set(before[role]) for role in ("worker", "master")]
    return now if [len(pids) for pids in new] == [2, 1] else None


@long
@in_turn(0, HANGS)
def test_outcome_is_unchanged_after_a_worker_and_an_agent_hang(
    tmp_path: Path, undisturbed: Callable[[str], dict[str, Any]]
) -> None:
    """The agent replaces a silent worker. The master kills a hanging agent on its host, because the
    agent does not renew its lease.
    """
    site = Site(tmp_path)
    run = started(site, "sft", silence_s=20, lease_ttl_s=20)
    before = processes(run)
    os.kill(before["worker"][-1], signal.SIGSTOP)
    after = wait_until("the next incarnation's workers", lambda: others(run, before))
    assert after["agent"] == before["agent"]
    go_on(site, "sft", 5)
    os.kill(after["agent"][0], signal.SIGSTOP)
    check_end(site, "sft", undisturbed)
    assert begun_by(site, "sft/1") == [(0, "0"), (0, "0"), (0, "1")]
    events = read_all(RunPaths(run))
    assert [one["cause"] for one in events if one["kind"] == "failure"][:1] == ["hung"]
    assert [one["reason"] for one in events if one["kind"] == "failed"][-1] == (
        "the agent trainer/0 hangs: it no longer renews its lease, but its host is alive"
    )
