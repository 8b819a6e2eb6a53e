"""Executes plans on a running trial and observes how it recovers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.chaos_trials.causes import CAUSES, strike
from tests.support.chaos_trials.kills import Plan
from tests.support.chaos_trials.watched import Watched


@dataclass(frozen=True)
class Usual:
    """Lengths of an undisturbed run's phases in seconds."""

    start_s: float
    """Seconds from BEGIN until the ranks are ready."""
    step_s: float
    commit_s: float

    def of(self, phase: str) -> float:
        return {"start": self.start_s, "step": self.step_s, "commit": self.commit_s}[phase]


@dataclass
class Kill:
    """The outcome of a plan."""

    plan: Plan
    at: float
    """Time of the kill in seconds since the epoch."""
    incarnation: int
    """The newest incarnation at the time of the kill."""
    successor: int | None = None
    """The incarnation that trained again; None if no new incarnation was needed."""
    how: str = ""
    """Description of the start of the next incarnation."""
    seconds: float | None = None
    """Seconds from the kill to the end of the next trained step."""


class Monkey:
    """Disturbs a trial according to plans."""

    def __init__(self, trial: Watched, usual: Usual) -> None:
        self.trial = trial
        self.usual = usual
        self.kills: list[Kill] = []

    def run(self, plans: Sequence[Plan]) -> list[Kill]:
        """Execute the plans. Return the kills before the trial's end. Raises TimeoutError."""
        for plan in plans:
            if not self._may_follow_at_once(plan):
                self._wait_for_recovery()
            self.trial.until(f"the moment of {plan}", lambda plan=plan: self._has_come(plan))
            time.sleep(plan.fraction * self.usual.of(plan.phase))
            if not self._carry_out(plan):
                break
        self._wait_for_recovery()
        return self.kills

    def _carry_out(self, plan: Plan) -> bool:
        """Execute one plan; return False if the trial ended before a process could be killed."""
        cause = CAUSES[plan.cause]
        if not strike(cause, self.trial.witness.paths.run, plan.choice, self.trial.over):
            return False
        self.kills.append(Kill(plan, time.time(), self.trial.incarnation))
        if cause.resumes:
            self.trial.resume()
        return True

    def _may_follow_at_once(self, plan: Plan) -> bool:
        """Return whether the start to disturb follows the previous kill."""
        return plan.phase == "start" and not (
            self.kills and CAUSES[self.kills[-1].plan.cause].resumes
        )

    def _has_come(self, plan: Plan) -> bool:
        incarnation = self.trial.incarnation
        if incarnation <= (self.kills[-1].incarnation if self.kills else 0):
            return False
        if plan.phase == "start":
            return True
        if plan.phase == "step":
            return self.trial.witness.has_posted(incarnation, plan.step)
        return self.trial.witness.is_committing(incarnation, plan.step)

    def _wait_for_recovery(self) -> None:
        if self.kills:
            self.trial.until(f"recovery from {self.kills[-1]}", self._recovered)

    def _recovered(self) -> bool:
        """Return whether the trial has recovered from the last kill. Complete the results of all
        kills that wait for this recovery.
        """
        incarnation, witness = self.trial.incarnation, self.trial.witness
        if incarnation <= self.kills[-1].incarnation or not witness.has_trained(incarnation):
            return False
        now = time.time()
        for kill in reversed(self.kills):
            if kill.successor is not None:
                break
            kill.successor, kill.seconds = incarnation, now - kill.at
            before, after = kill.incarnation, kill.incarnation + 1
            kill.how = succession(witness.job(before), witness.job(after))
        return True


def succession(before: str, after: str) -> str:
    """Return how one incarnation followed another, from the tags of their jobs."""
    (id_before, *rest_before), (id_after, *rest_after) = before.split("."), after.split(".")
    if id_before != id_after:
        return "next link"
    if rest_before == rest_after:
        return "in the job"
    return "requeue" if rest_before[:1] != rest_after[:1] else "next round"
