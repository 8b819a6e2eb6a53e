"""The datasets of an incarnation: rank 0 prepares them, all ranks read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from slurmrl import log
from slurmrl.backoff import READ_S, Interval, retry
from slurmrl.config.schema import Config
from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data import dataset, preparation
from slurmrl.data.dataset import SampleRows
from slurmrl.data.prepared import PreparedRows
from slurmrl.errors import EnvironmentFailure
from slurmrl.parallel.activity import Activity
from slurmrl.workers.messages import Preparing
from slurmrl.workers.run_store import RunStore

logger = log.get(__name__)

KEY = "prepared data"
REPORT_S = 10.0
REPORTS_PER_TIMEOUT = 4


class Datasets:
    """Prepares and opens the datasets of a configuration.

    Rank 0 of an incarnation is the only process that looks for prepared data, so no two processes
    can disagree about what is there, and no lock can be left behind. The others learn the names of
    the directories from the store of their world, in the run directory.
    """

    def __init__(
        self, folder: Path, incarnation: int, config: Config, store: RunStore, activity: Activity
    ) -> None:
        self._folder = folder
        self._incarnation = incarnation
        self._config = config
        self._sections = list(config.datasets().values())
        self._store = store
        self._activity = activity

    def provide(
        self, tokenizer: PreTrainedTokenizerBase, rank: int, say: Callable[[Preparing], None]
    ) -> tuple[SampleRows, ...]:
        """Return the training dataset and those of `Config.evaluations`. ``say`` sends
        `Preparing` to the master now and then while rank 0 tokenises."""
        if rank == 0:
            self._prepare(tokenizer, lambda: say(Preparing(rank=rank)))
        return self._open()

    def _prepare(self, tokenizer: PreTrainedTokenizerBase, report: Callable[[], None]) -> None:
        """Find or make the prepared data, and tell the other ranks."""
        timeout_s = self._config.cluster.start_timeout_s
        every_s = min(REPORT_S, timeout_s / REPORTS_PER_TIMEOUT)
        due = Interval(every_s, after_s=every_s)

        def progress(what: str) -> None:
            self._activity.phase(what)
            if due.due():
                logger.info("%s", what)
                report()

        directories = []
        for part in (part for section in self._sections for part in section.parts.values()):
            make = partial(
                preparation.prepare, self._folder, self._incarnation, part, tokenizer, progress
            )
            directories.append(retry("prepare the dataset", make, timeout_s=READ_S))
        try:
            preparation.sweep(self._folder, self._incarnation, directories)
        except EnvironmentFailure as error:
            logger.warning("old prepared data stays: %s", error)
        self._store.set(KEY, json.dumps([directory.name for directory in directories]))

    def _open(self) -> tuple[SampleRows, ...]:
        """Wait for rank 0, however long it takes: the agents end this rank if rank 0 fails."""
        self._activity.phase("waiting for rank 0 to tokenise the dataset")
        self._store.wait([KEY], timedelta.max)
        names = iter(json.loads(self._store.get(KEY)))
        opened = []
        for section in self._sections:
            make = partial(self._open_one, section, [next(names) for _ in section.parts])
            opened.append(retry("open the dataset", make, timeout_s=READ_S))
        return tuple(opened)

    def _open_one(self, section: DatasetConfig, names: Sequence[str]) -> SampleRows:
        return dataset.make(section, [PreparedRows(self._folder / name) for name in names])
