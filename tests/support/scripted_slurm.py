"""A fake Slurm whose queue is a dictionary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from slurmrl.errors import SchedulerError
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.parse import Accounts, HostKind, HostRow, Partition
from slurmrl.scheduler.states import QueueRow


class Slurm(SlurmClient):
    """A Slurm with a queue in memory: job -> (name, elements). Element 0 of job 41 runs."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[str, tuple[str, list[int]]] = {}
        self.running: tuple[str, int] = ("41", 0)
        self.state = "RUNNING"
        self.options: list[tuple[str, ...]] = []
        self.inherited: list[Mapping[str, str] | None] = []
        self.done: list[str] = []
        self.array_size = "1001"
        self.reject = ""
        self.tries = 0
        self.lose = False
        self.looked_for: list[str] = []
        self.rows: list[QueueRow] | None = None
        """The whole queue, in place of the queue of the jobs."""
        self.most: int | None = None
        """Maximum number of elements of an array that sbatch accepts."""
        self.limits = ""
        self.accounts: list[QueueRow] | None = None
        self.asked: list[tuple[str, ...]] = []

    def settings(self) -> dict[str, str]:
        return {"MaxArraySize": self.array_size}

    def submit_limits(self, user: str) -> str:
        return self.limits

    def accounting(self, jobs: Iterable[str]) -> list[QueueRow] | None:
        self.asked.append(tuple(jobs))
        return self.accounts

    def submit(
        self, script: Path, *options: str, inherited: Mapping[str, str] | None = None
    ) -> str:
        self.tries += 1
        if self.reject:
            raise SchedulerError(self.reject)
        text = script.read_text()
        said = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.MULTILINE))
        said |= dict(option.removeprefix("--").split("=", 1) for option in options)
        first, last = re.findall(r"\d+", said["array"].partition("%")[0])
        if self.most is not None and int(last) >= self.most:
            raise SchedulerError("sbatch: error: AssocMaxSubmitJobLimit")
        job = str(41 + len(self.jobs))
        self.jobs[job] = (said["job-name"], list(range(int(first), int(last) + 1)))
        self.options.append(options)
        self.inherited.append(inherited)
        if self.lose:
            raise SchedulerError("sbatch did not answer within 120 s")
        return job

    def queue(self, jobs: Iterable[str]) -> list[QueueRow]:
        return [row for row in self._rows() if row.job in set(jobs)]

    def queue_by_name(self, names: Iterable[str]) -> list[QueueRow]:
        wanted = list(names)
        self.looked_for += wanted
        return [row for row in self._rows() if row.name in wanted]

    def cancel(self, elements: Iterable[str]) -> None:
        self.done += [f"cancel {element}" for element in elements]

    def hold(self, elements: str) -> None:
        self.done.append(f"hold {elements}")

    def requeue(self, element: str) -> None:
        self.done.append(f"requeue {element}")

    def _rows(self) -> list[QueueRow]:
        if self.rows is not None:
            return self.rows
        return [
            QueueRow(job, (e,), self.state if (job, e) == self.running else "PENDING", (), name, "")
            for job, (name, elements) in self.jobs.items()
            for e in elements
            if (job, e) >= self.running  # earlier jobs have been forgotten
        ]


class PickySlurm(SlurmClient):
    """A Slurm that rejects scripts with certain words, and has two partitions and accounting."""

    def __init__(self, refused: Mapping[str, str]) -> None:
        super().__init__()
        self.refused = refused
        """Slurm's message for each word, in the order in which Slurm looks at them."""
        self.states = ["idle", "idle"]

    def rejection(self, script: Path) -> str | None:
        text = script.read_text()
        return next((words for part, words in self.refused.items() if part in text), None)

    def partitions(self) -> list[Partition]:
        kinds = (HostKind(2, 8, 16000, 6, ("a100", "1g.5gb")),)
        return [
            Partition("main", True, True, "infinite", kinds),
            Partition("short", False, True, "1:00:00", kinds),
        ]

    def hosts(self, partition: str | None, names: Sequence[str] = ()) -> list[HostRow]:
        return [HostRow(f"n{number}", state, 6) for number, state in enumerate(self.states)]

    def accounts(self, user: str) -> Accounts:
        return Accounts(("lab", "poor"), "lab")

    def qos_limits(self) -> dict[str, str]:
        return {"normal": "", "quick": "00:30:00"}

    def names(self, option: str, user: str) -> list[str] | None:
        scripted = {
            "constraint": ["fast_nvme", "ib"],
            "nodelist": ["n0", "n1"],
            "reservation": [],
            "licenses": ["ansys", "matlab"],
        }
        return scripted[option] if option in scripted else super().names(option, user)
