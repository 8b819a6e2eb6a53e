"""Extension of a group by another array, which starts when the earlier ones are used up.

Each claim yields exactly one array (see ``extensions``). A claim whose claimant is gone is void.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from slurmrl import log
from slurmrl.errors import EnvironmentFailure, SchedulerError, UsageError
from slurmrl.run.history.log import History
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import exclusion, extensions, limits, submission
from slurmrl.scheduler.base import TaskState
from slurmrl.scheduler.client import TIMEOUT_S, SlurmClient, may_have_worked
from slurmrl.scheduler.extensions import Claim, Extension
from slurmrl.scheduler.processes import is_gone

logger = log.get(__name__)

SETTLE_S = TIMEOUT_S + 30.0
"""Seconds after which a claim without a job is void: its sbatch has timed out by then."""
LOOK_S = 5.0


class Extender:
    """One group of one submission."""

    def __init__(
        self,
        client: SlurmClient,
        run: RunPaths,
        number: int,
        group: str,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._run, self._number, self._group = client, run, number, group
        self._sleep, self._clock = sleep, clock

    def extend(
        self,
        tasks: Sequence[TaskState],
        *,
        known: Sequence[str],
        by: str,
        count: int | None = None,
    ) -> str:
        """Submit another array; return its job id. ``tasks``: the elements at the time when
        ``known`` were the group's arrays; ``by``: the caller's unique name; ``count``: number of
        new elements, which may all run at once (None: length and throttle of the first array).

        Raises UsageError if another process is extending the group or has extended it since that
        query, or if array indices run out; SchedulerError where sbatch refuses.
        """
        before = extensions.read(self._run, self._number, self._group)
        if {one.job for one in before} - {None, *known}:
            raise UsageError(f"group {self._group} was extended by another process in the meantime")
        if before and before[-1].open:
            found = self._settle(before[-1], tasks, by)
            if found is not None:
                return found
        claim = self._claim(before, by, count)
        if not extensions.take(self._run, self._number, self._group, claim):
            raise UsageError(f"group {self._group} is being extended by another process")
        active = {
            task.job_id.partition("_")[0]
            for task in tasks
            if task.group == self._group and task.state.active
        }
        after = () if count else sorted(active, key=int)
        try:
            job = self._submit(claim, after, all_at_once=count is not None)
        except SchedulerError as error:
            if not may_have_worked(error):
                extensions.note(self._run, self._number, self._group, claim.index, None)
            raise
        extensions.note(self._run, self._number, self._group, claim.index, job)
        self._close([one for one in before if one.open])
        return job

    def _claim(self, before: Sequence[Extension], by: str, count: int | None) -> Claim:
        at_first, _ = extensions.length(self._run, self._number, self._group)
        used = [one.claim for one in before if not one.refused]
        first = used[-1].first + used[-1].count if used else at_first
        most = limits.of_arrays(self._client.settings())
        room = at_first if most is None else most - first
        wanted = count or at_first
        if room <= 0:
            raise UsageError(
                f"group {self._group} has used all {most} array indices of this cluster: resume "
                "the trial when its last link has ended"
            )
        return Claim(
            index=before[-1].claim.index + 1 if before else 1,
            first=first,
            count=min(wanted, room) if most is not None else wanted,
            by=by,
            records=History(self._run.history).count(),
        )

    def _submit(self, claim: Claim, after: Sequence[str], *, all_at_once: bool) -> str:
        """Call sbatch, with half as many elements after each refusal because of a limit. Indices
        left over stay unused."""
        _, at_once = extensions.length(self._run, self._number, self._group)
        options = [f"--job-name={self._name(claim.index)}"]
        if after:
            options.append(f"--dependency=afterany:{':'.join(after)}")
        options += exclusion.option(self._run, self._number, self._group)
        script = self._run.submission_script(self._number, self._group)
        inherited = submission.read_environment(self._run, self._number)
        count = claim.count
        while True:
            throttle = count if all_at_once else at_once
            array = f"--array={claim.first}-{claim.first + count - 1}%{throttle}"
            try:
                return self._client.submit(script, array, *options, inherited=inherited)
            except SchedulerError as error:
                if count == 1 or not limits.TOO_MANY.search(str(error)):
                    raise
                logger.info("sbatch refused %d more elements: %s", count, error)
                count //= 2

    def _settle(self, last: Extension, tasks: Sequence[TaskState], by: str) -> str | None:
        """Return the job of a claim without a note; None once the claim is void."""
        deadline = self._clock() + SETTLE_S
        while True:
            job = self._noted(last) or self._by_name(last)
            if job is not None:
                extensions.note(self._run, self._number, self._group, last.claim.index, job)
                return job
            if _is_void(last.claim, tasks, by) or self._clock() >= deadline:
                return None
            self._sleep(LOOK_S)

    def _close(self, void: Sequence[Extension]) -> None:
        """Look for the jobs of void claims a last time. Slurm has accepted a later array by now, so
        earlier ones show. Otherwise each later query would look for them again."""
        if not void:
            return
        try:
            found = {row.name: row.job for row in self._client.queue_by_name(o.name for o in void)}
            for one in void:
                index, job = one.claim.index, found.get(one.name)
                if job is None:
                    extensions.close(self._run, self._number, self._group, index)
                else:
                    extensions.note(self._run, self._number, self._group, index, job)
        except EnvironmentFailure as error:
            logger.info("void extensions were not recorded; the next top-up tries again: %s", error)

    def _noted(self, last: Extension) -> str | None:
        for one in extensions.read(self._run, self._number, self._group):
            if one.claim.index == last.claim.index:
                return one.job
        return None

    def _by_name(self, last: Extension) -> str | None:
        return next((row.job for row in self._client.queue_by_name([last.name])), None)

    def _name(self, index: int) -> str:
        return extensions.name(self._run, self._number, self._group, index)


def _is_void(claim: Claim, tasks: Sequence[TaskState], by: str) -> bool:
    """Return whether the claimant can no longer submit: it was this element before a requeue, an
    element that has ended, or a process that is gone."""
    element = next((task for task in tasks if task.job_id == claim.by), None)
    ended = element is not None and not element.state.active
    return claim.by == by or ended or bool(is_gone(asdict(claim.claimant)))
