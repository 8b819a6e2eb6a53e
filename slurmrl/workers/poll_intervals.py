"""How often the processes of a trial look at the shared directory while nothing happens.

A trial at rest causes at most ``max(200, 0.5 x hosts)`` file operations a second in all, whatever
its size. Hosts that poll less often also notice less soon: up to `poll_s` later.
"""

from __future__ import annotations

from dataclasses import dataclass

OPERATIONS_PER_S = 200.0
OPERATIONS_PER_S_AND_HOST = 0.5

BEAT = 3
"""File operations of a heartbeat, a look at a lease and a look at a log: open, transfer, close."""
CHECK = 3
"""Of a look at the history that finds nothing new: list, look for the next slot; and of a look at
the size of the host's output, which comes as often."""
PUBLISH = 16
"""Of replacing the status, generously."""

SHORTEST_POLL_S = 0.05
POLL_JITTER = 1.2
"""Pauses between polls are shortened at random (see `backoff`): by less than this factor."""


@dataclass(frozen=True)
class PollIntervals:
    """Intervals in seconds."""

    beat_s: float
    """Between an agent's heartbeats."""
    check_s: float
    """Between an agent's looks at the history."""
    status_s: float
    """Between the master's looks at all leases and its status."""
    poll_s: float
    """Longest pause between looks at a log that nobody announces changes of."""

    @staticmethod
    def of(hosts: int, heartbeat_s: float) -> PollIntervals:
        """The pace of a trial on ``hosts`` hosts; ``heartbeat_s`` is the shortest interval of
        what goes on for ever. Heartbeats get the largest part, so that they are the last to
        slow down: at 10,000 hosts to one in 15 s."""
        budget = max(OPERATIONS_PER_S, OPERATIONS_PER_S_AND_HOST * hosts)
        beat_s = max(heartbeat_s, BEAT * hosts / (0.40 * budget))
        check_s = max(heartbeat_s, CHECK * hosts / (0.12 * budget))
        status_s = max(heartbeat_s, (BEAT * hosts + PUBLISH) / (0.10 * budget))
        used = BEAT * hosts / beat_s + CHECK * hosts / check_s
        used += (BEAT * hosts + PUBLISH) / status_s
        # Every agent polls the master's log, and the master polls every agent's.
        polls = 2 * BEAT * hosts * POLL_JITTER
        return PollIntervals(
            beat_s, check_s, status_s, max(SHORTEST_POLL_S, polls / (budget - used))
        )
