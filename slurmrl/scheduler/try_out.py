"""Whether sbatch would accept the jobs of a trial, and which directives it refuses."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slurmrl.scheduler import directives, render
from slurmrl.scheduler.base import GroupRequest, SubmissionRequest
from slurmrl.scheduler.client import SlurmClient

MOST: Final = 4
"""Directives of a group that are reported."""
CHOSEN: Final = (
    *(name for name in directives.PASSED if name != "partition"),
    *("gres", "gpus-per-node", "mem", "cpus-per-task", "nodes", "partition"),
)
"""Directives that settings choose. The partition comes last, because without it other hosts are
asked for."""
WAITS: Final = re.compile(r"busy|down, drained|not available now|inactive or drain", re.IGNORECASE)
"""Slurm's words for a job that sbatch accepts and that waits."""
UNCLEAR: Final = "Requested node configuration is not available"
"""Slurm's words both for hosts that do not exist and for hosts that are out of service."""


@dataclass(frozen=True)
class Refusal:
    """A job that sbatch would not accept, or that would not start."""

    group: str
    words: str
    """Slurm's own."""
    directive: str = ""
    """Name of the directive that causes it, or the user's line; empty if no single one does."""

    @property
    def waits(self) -> bool:
        """Whether sbatch accepts the job."""
        return WAITS.search(self.words) is not None

    @property
    def unclear(self) -> bool:
        """Whether hosts that are out of service may be the cause."""
        return UNCLEAR in self.words


def refusals(client: SlurmClient, request: SubmissionRequest) -> Iterator[Refusal]:
    """Yield what ``sbatch --test-only`` refuses; nothing is submitted. Raises SchedulerError if
    Slurm does not answer."""
    with tempfile.TemporaryDirectory(prefix="slurmrl-sbatch-") as folder:
        file = Path(folder) / "job.sh"
        for group in request.groups:
            yield from _of_group(client, request, dataclasses.replace(group, links=1), file)


def _of_group(
    client: SlurmClient, request: SubmissionRequest, group: GroupRequest, file: Path
) -> Iterator[Refusal]:
    def refused(text: str) -> str | None:
        file.write_text(text, encoding="utf-8")
        return client.refusal(file)

    text = render.script(request, group, "srun")
    words = refused(text)
    for _ in range(MOST):
        if words is None:
            return
        for name, line in _candidates(text, directives.extra_lines(request, group)):
            rest = text.replace(f"{line}\n", "", 1)
            if (other := refused(rest)) != words:
                yield Refusal(group.name, words, name)
                text, words = rest, other
                break
        else:
            yield Refusal(group.name, words)
            return


def _candidates(text: str, extra: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the line of each directive that may be left out."""
    lines = text.splitlines()
    yield from ((line, line) for line in extra if line in lines)
    for name in CHOSEN:
        yield from ((name, line) for line in lines if line.startswith(f"#SBATCH --{name}="))
