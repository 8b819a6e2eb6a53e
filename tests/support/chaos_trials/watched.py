"""A trial with an observer from its submission to its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.chaos_trials.witness import Items, Witness
from tests.support.trials import Site

POLL_S = 0.005
ASK_S = 20.0
"""Seconds without news until the status is queried, which takes a process."""
TIMEOUT_S = 300.0
"""Maximum wait without any news of the trial."""


@dataclass(frozen=True)
class Outcome:
    """All results that must not depend on the disturbances of a trial."""

    final: dict[str, Any]
    """`Site.outcome`: files, export, ledger, metrics, results, evaluations."""
    batches: dict[int, Items]
    """Items of each committed step."""
    state: str
    step: int

    def differences(self, other: Outcome) -> list[str]:
        """Return the differences in words."""
        found = [
            f"{where}: {name}"
            for where in ("files", "metrics", "evaluations")
            for name in _differing(self.final[where], other.final[where])
        ]
        for name in ("export", "ledger", "results"):
            if self.final[name] != other.final[name]:
                found.append(name)
        if self.batches != other.batches:
            found.append(f"batches of steps {_differing(self.batches, other.batches)}")
        if (self.state, self.step) != (other.state, other.step):
            found.append(f"{self.state} at {self.step}, {other.state} at {other.step}")
        return found


def _differing(one: Any, other: Any) -> list[Any]:
    """Return the keys or positions at which two collections differ."""
    if isinstance(one, list):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


class Watched:
    """A trial that is submitted in ``site``. Its witness observes it during each `until`."""

    def __init__(self, site: Site, config: dict[str, Any], scheduler: str) -> None:
        self.site = site
        self.name = f"{config['experiment']}/{config.get('trial', '1')}"
        path = site.write("config.yaml", config)
        site.slurmrl("submit", str(path), "--scheduler", scheduler, "--detach")
        self.witness = Witness(site.paths(self.name), site.folder / "witness")

    @property
    def incarnation(self) -> int:
        """Number of the newest incarnation."""
        return self.witness.state.incarnation

    def resume(self) -> None:
        self.site.slurmrl("resume", self.name, "--detach")

    def over(self) -> bool:
        """Update the observations; return whether the trial has ended."""
        self.witness.look()
        return self.witness.state.end is not None

    def until(self, what: str, check: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> bool:
        """Observe until ``check`` holds. Return False if the trial ends first. Raises TimeoutError
        after ``timeout_s`` without changes, and AssertionError if the trial no longer has jobs.
        """
        heard_at = ask_at = time.monotonic()
        news = -1
        while not (over := self.over()) and not check():
            now = time.monotonic()
            if news != (news := self.witness.news):
                heard_at, ask_at = now, now + ASK_S
            elif now > heard_at + timeout_s:
                raise TimeoutError(
                    f"no news of {self.name} for {timeout_s:.0f} s, waiting for {what}"
                )
            elif now > ask_at:
                state = self.site.status(self.name)["state"]
                assert state != "INTERRUPTED", f"{self.name} stopped before {what}"
                ask_at = time.monotonic() + ASK_S
            time.sleep(POLL_S)
        return not over

    def outcome(self) -> Outcome:
        """Wait until the trial has completed, and return its result. Raises AssertionError if it
        ends otherwise.
        """
        self.until("the end", lambda: False)
        status = self.site.wait_for_end(self.name)
        if status["state"] != "COMPLETED":
            raise AssertionError(
                f"{self.name} ended as {status['state']}: {status['reason']}\n"
                f"{status['traceback'] or ''}"
            )
        final = self.site.outcome(self.name)
        return Outcome(final, self.witness.committed(), status["state"], status["step"])
