"""Files with the stacks of this host's processes, and the report of them to the master."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from slurmrl import log
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import atomic
from slurmrl.run import hang
from slurmrl.run.hang import RankProgress
from slurmrl.workers.agent import stacks
from slurmrl.workers.agent.host import Host
from slurmrl.workers.agent.stacks import StacksAnswer
from slurmrl.workers.messages import Stacked
from slurmrl.workers.stacks import own as own_stacks

logger = log.get(__name__)

MOST_FILES = 10
"""Files that one agent keeps: a new one replaces the oldest."""


class Witness:
    """Writes the stacks of one host."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._files: deque[Path] = deque()

    def take(
        self,
        incarnation: int,
        number: int,
        why: str,
        pause: Callable[[float], None],
        ranks: Collection[int] | None = None,
    ) -> Stacked:
        """Write the file and return the message about it. ``pause`` waits. ``ranks`` None means all
        of them, the master and this agent."""
        host = self._host
        there = host.children.witnesses()
        wanted = [rank for rank in there if ranks is None or rank in ranks]
        answers = stacks.collect(host.children, wanted, pause)
        rows = self._rows(answers)
        own = f"\n=== the agent\n{own_stacks(stacks.MOST_BYTES)}" if ranks is None else ""
        path = host.paths.stacks(
            host.group.name, host.identity.task, host.identity.attempt, incarnation, number
        )
        try:
            text = self._text(incarnation, why, answers, rows) + own
            atomic.replace(path, text.encode(), durable=False)
            self._keep(path)
        except EnvironmentFailure as error:
            logger.warning("cannot write the stacks: %s", error)
        return Stacked(
            group=host.group.name,
            task=host.identity.task,
            number=number,
            file=str(path.relative_to(host.paths.run)),
            ranks=tuple(rows),
        )

    def _rows(self, answers: Sequence[StacksAnswer]) -> list[RankProgress]:
        """Return what the ranks are doing, with the code position of those that answered."""
        frames = {answer.rank: stacks.top_frame(answer.text) for answer in answers}
        return [replace(row, frame=frames.get(row.rank, "")) for row in self._host.children.doing()]

    def _text(
        self,
        incarnation: int,
        why: str,
        answers: Sequence[StacksAnswer],
        rows: Sequence[RankProgress],
    ) -> str:
        identity = self._host.identity
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        parts = [f"{identity.label} on {identity.host}, incarnation {incarnation}, {when}: {why}\n"]
        doing = {row.rank: hang.describe(row) for row in rows}
        for answer in answers:
            does = f": {doing[answer.rank]}" if answer.rank in doing else ""
            parts.append(f"\n=== {answer.name}{does}\n{answer.text}")
        return "".join(parts)

    def _keep(self, path: Path) -> None:
        self._files.append(path)
        while len(self._files) > MOST_FILES:
            atomic.remove(self._files.popleft())
