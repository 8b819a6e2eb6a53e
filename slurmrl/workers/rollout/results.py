"""The samples and the result log of an attempt, of which its worker is the only writer."""

from __future__ import annotations

from collections.abc import Sequence

from slurmrl import log
from slurmrl.channel.log import LogWriter
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.monitor.reports import Identity
from slurmrl.paths import RunPaths
from slurmrl.rollouts.sample_files import SampleWriter
from slurmrl.rollouts.sample_group import SampleGroup
from slurmrl.workers.rollout_messages import RESULT_LOG, GroupsFinished, Joined, RolloutResult

logger = log.get(__name__)


class ResultWriter:
    """Records results in the order in which they are given."""

    def __init__(self, paths: RunPaths, agent: Identity, *, calls: SystemCalls = REAL) -> None:
        """Raises EnvironmentFailure, FileExistsError if the attempt has a log already."""
        place = agent.group, agent.task, agent.attempt
        self._samples = SampleWriter(paths.rollout_samples(*place), calls=calls)
        self._log = LogWriter(paths.rollout_results(*place), calls=calls, durable=True)
        self.settled = True
        """Whether all messages are on disk; others wait for the next call of `record`."""
        self._append(Joined(agent=agent))

    def record(self, messages: Sequence[RolloutResult], groups: Sequence[SampleGroup]) -> None:
        """Record messages, then groups in one file.

        Raises EnvironmentFailure: the messages are recorded by the next call, whatever it is given;
        the groups are to be given again.
        """
        if messages or not self.settled:
            self._append(*messages)
        if not groups:
            return
        stored = self._samples.write(groups)
        try:
            self._append(GroupsFinished(groups=stored))
        except EnvironmentFailure as error:
            logger.warning("%d groups are recorded later: %s", len(groups), error)

    def _append(self, *messages: RolloutResult) -> None:
        self.settled = False
        self._log.append(*map(RESULT_LOG.to_json, messages))
        self.settled = True
