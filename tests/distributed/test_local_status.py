"""``slurmrl status`` and ``events`` of a real run whose processes are killed one by one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.rotation import ENDS, in_turn
from tests.support.trials import Site, kill_one, processes, sft_config, wait_until

TRIAL = "sft/1"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site with a run that outlasts every test."""
    site = Site(tmp_path)
    config = site.write("config.yaml", sft_config(total_steps=100_000))
    site.slurmrl("submit", str(config), "--scheduler", "local", "--detach")
    try:
        site.wait_for_step(TRIAL, 3)
        yield site
    finally:
        site.slurmrl("cancel", TRIAL, code=None)


def incarnation(site: Site, number: int) -> dict[str, Any]:
    """Return the status when the incarnation with this number trains."""

    def trains() -> dict[str, Any] | None:
        status = site.status(TRIAL)
        there = status["incarnation"] == number and status["phase"] == "running"
        return status if there else None

    return wait_until(f"incarnation {number} to train", trains)


@pytest.mark.long
@in_turn(2, ENDS)
def test_status_and_events_describe_a_killed_run(site: Site) -> None:
    status = incarnation(site, 1)
    assert status["findings"][0]["code"] == "running"
    assert status["timing"]["step_s"] > 0
    assert 0 < status["timing"]["effective_ratio"] <= 1
    see_a_stopped_worker_waited_for(site)
    kill_one(site.paths(TRIAL).run, "worker", 1)
    status = incarnation(site, 2)
    first, second = status["incarnations"]
    assert first["cause"] == "died"
    assert "died: SIGKILL" in first["how"]
    assert first["commit"] is not None
    assert (second["how"], second["from_step"]) == ("running", first["commit"])
    kill_chain(site)
    ended = site.wait_for_end(TRIAL)
    assert ended["state"] == "INTERRUPTED"
    assert ended["diagnosis"].startswith("no links left (the last one: ")
    assert ended["diagnosis"].endswith(f"to continue: slurmrl resume {TRIAL}")
    text = site.slurmrl("status", TRIAL).stdout
    assert ended["diagnosis"] in text
    assert first["how"] in text
    assert ended["diagnosis"] in site.slurmrl("status").stdout
    events = site.slurmrl("events", TRIAL, "--json").stdout.splitlines()
    found = [json.loads(line) for line in events]
    assert {"ready", "commit", "failure"} <= {event["kind"] for event in found}
    again = [event for event in found if event["kind"] == "repeats"]
    assert sum(event["last"] - event["first"] + 1 for event in again) == first["lost_steps"]
    assert [event["time"] for event in found] == sorted(event["time"] for event in found)


def kill_chain(site: Site) -> None:
    """Kill the chain, which ends all processes of the run."""
    run = site.paths(TRIAL).run
    kill_one(run, "chain")
    wait_until("all processes to be gone", lambda: not any(processes(run).values()))


def see_a_stopped_worker_waited_for(site: Site) -> None:
    run = site.paths(TRIAL).run
    (*_, stopped) = wait_until("two workers", lambda: processes(run)["worker"][1:] or None)
    os.kill(stopped, signal.SIGSTOP)
    try:
        waiting = wait_until("somebody to be waited for", lambda: long_wait(site))
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert set(waiting["for"]) <= {0, 1}
    assert waiting["what"].startswith("to finish ")
    assert len(waiting["hosts"]) == 1


def long_wait(site: Site) -> dict[str, Any] | None:
    waiting: dict[str, Any] | None = site.status(TRIAL)["waiting"]
    return waiting if waiting is not None and waiting["since_s"] > 5 else None
