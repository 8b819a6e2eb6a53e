"""Intervals at which the processes of an idle trial access the shared directory.

An idle trial causes at most ``max(200, 0.5 x hosts)`` file operations a second in all. Hosts of
larger trials therefore poll less often, and notice changes up to `poll_s` later. Busy rollout
tasks cause up to ``max(1000, 2 x hosts)`` operations a second in addition, the master's reads of
their results less than 500.
"""

from __future__ import annotations

from dataclasses import dataclass

OPERATIONS_PER_S = 200.0
OPERATIONS_PER_S_AND_HOST = 0.5

BEAT = 3
"""File operations of a heartbeat, of reading a lease, of polling a log: open, transfer, close."""
CHECK = 3
"""File operations of polling the history without news (list, look up the next slot) and of reading
the size of the host's output, which happens as often."""
PUBLISH = 16
"""File operations of replacing the status, generously."""

TASKS_OPERATIONS_PER_S = 1000.0
TASKS_OPERATIONS_PER_S_AND_HOST = 2.0
LOOK = 4
"""File operations of a rollout task's look for requests and weights: read a log, list the
versions."""
RESULTS_PER_S = 150.0
"""Logs of results that the master reads, one after the other: at a millisecond for each of three
operations it has more than half of its time for the trainers."""

SHORTEST_POLL_S = 0.05
SHORTEST_RESULTS_S = 0.2
SHORTEST_TASK_S = 1.0
POLL_JITTER = 1.2
"""Pauses between polls are randomly shortened (see `backoff`), by less than this factor."""


@dataclass(frozen=True)
class PollIntervals:
    """Intervals in seconds."""

    beat_s: float
    """Between two heartbeats of an agent."""
    check_s: float
    """Between two reads of the history by an agent."""
    status_s: float
    """Between two rounds of the master: read all leases, replace the status."""
    poll_s: float
    """Longest pause between two polls of a log where nothing announces its changes (no inotify)."""
    results_s: float
    """Between two reads of the results of a busy rollout task."""
    task_s: float
    """Shortest pause of a rollout task between two looks for requests and weights."""
    record_s: float
    """Shortest time between two records of results by a task, each of which it announces."""
    spread_s: float
    """Over which the tasks' looks are spread after the master has announced something to all."""

    @staticmethod
    def of(hosts: int, heartbeat_s: float) -> PollIntervals:
        """Return the intervals of a trial on ``hosts`` hosts; none of the periodic ones is below
        ``heartbeat_s``. Heartbeats get the largest share of the budget, so they are the last to
        slow down: to one every 15 s at 10,000 hosts."""
        budget = max(OPERATIONS_PER_S, OPERATIONS_PER_S_AND_HOST * hosts)
        beat_s = max(heartbeat_s, BEAT * hosts / (0.40 * budget))
        check_s = max(heartbeat_s, CHECK * hosts / (0.12 * budget))
        status_s = max(heartbeat_s, (BEAT * hosts + PUBLISH) / (0.10 * budget))
        used = BEAT * hosts / beat_s + CHECK * hosts / check_s
        used += (BEAT * hosts + PUBLISH) / status_s
        # Every agent polls the master's log, and the master polls every agent's.
        polls = 2 * BEAT * hosts * POLL_JITTER
        poll_s = max(SHORTEST_POLL_S, polls / (budget - used))
        record_s = hosts / RESULTS_PER_S
        results_s = max(SHORTEST_RESULTS_S, record_s)
        tasks = max(TASKS_OPERATIONS_PER_S, TASKS_OPERATIONS_PER_S_AND_HOST * hosts)
        spread_s = LOOK * hosts / tasks
        task_s = max(SHORTEST_TASK_S, spread_s)
        return PollIntervals(
            *(beat_s, check_s, status_s, poll_s, results_s, task_s, record_s, spread_s)
        )
