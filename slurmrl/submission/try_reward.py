"""Trial run of a configuration's reward on rows of its data, without Slurm, models or torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmrl.config.schema import Dataset, Reward
from slurmrl.data.records import read_records
from slurmrl.data.rows import DatasetRows
from slurmrl.errors import ConfigError, Problem, RunFailedError, UsageError, WaitTimeoutError
from slurmrl.fsio import variables
from slurmrl.plan.settings import Settings
from slurmrl.rewards import trial
from slurmrl.submission import own_code
from slurmrl.submission.checks.run import Code, environment


@dataclass(frozen=True)
class Item:
    """One completion to judge, for the row at ``index`` of the data."""

    index: int
    completion: str


@dataclass(frozen=True)
class Judged:
    """One completion and its score."""

    line: int
    """Line of the row in the data file."""
    id: str
    completion: str
    answer: str
    score: float


@dataclass(frozen=True)
class Tried:
    items: tuple[Judged, ...]
    stats: dict[str, float]
    """Means of the reward's other statistics."""
    made_s: float
    """Seconds to import and construct the reward."""
    scored_s: float
    """Seconds of its call, including the start of its processes."""


class RewardData:
    """The rows that a configuration's reward judges.

    :raises ConfigError: a configuration without a reward, or without prompts to judge.
    """

    def __init__(self, settings: Settings) -> None:
        config = settings.config
        if config.reward is None:
            raise ConfigError(
                (settings.source.problem(("reward",), "the configuration has no reward"),)
            )
        self.reward: Reward = config.reward
        evaluation = [config.evaluation.dataset] if config.evaluation else []
        prompts = [data for data in (config.dataset, *evaluation) if data.type == "prompt"]
        if not prompts:
            message = "has no prompts for a reward to judge: type 'prompt' is required"
            raise ConfigError((settings.source.problem(("dataset",), message),))
        self.dataset: Dataset = next(iter(prompts[0].parts.values()))
        self.rows = DatasetRows(self.dataset)
        file = config.cluster.variables_file
        self.variables = variables.read(Path(file)) if file else {}

    def references(self, count: int) -> list[Item]:
        """Return the answers of the first rows as completions."""
        if not self.rows.have_references:
            raise UsageError(
                f"{self.dataset.path} has no answers under '{self.dataset.answer_key}': "
                "give --completion or --completions"
            )
        indices = range(min(count, len(self.rows)))
        return [
            Item(index, text)
            for index, text in zip(indices, self.rows.answers(indices), strict=True)
        ]

    def texts(self, count: int, completions: Sequence[str]) -> list[Item]:
        """Return each completion for each of the first rows."""
        indices = range(min(count, len(self.rows)))
        return [Item(index, text) for index in indices for text in completions]

    def file(self, path: Path, count: int | None) -> list[Item]:
        """The first completions of a JSONL file of ``{"id": …, "completion": …}``, as a run's
        ``samples/`` are; without ids they are of the first, second, … row.

        :raises ConfigError: lines without a completion, or of rows that are not in the data.
        """
        records = read_records(path, "")  # an id may occur more than once
        numbered = list(zip(records.numbers, records.rows, strict=True))[:count]
        problems: list[Problem] = []
        items = []
        for position, (line, row) in enumerate(numbered):
            where, text = f"{path}:{line}", row.get("completion")
            index = self._index(row["id"]) if "id" in row else position
            if not isinstance(text, str):
                problems.append(Problem(where, "completion", "must be a text"))
            elif index is None or index >= len(self.rows):
                which = repr(row["id"]) if "id" in row else f"number {position + 1}"
                message = f"{self.dataset.path} has no row {which}"
                problems.append(Problem(where, "id", message))
            else:
                items.append(Item(index, text))
        if problems:
            raise ConfigError(tuple(problems))
        return items

    def _index(self, name: Any) -> int | None:
        """Return the row of an id, or of a sample's id, which ends in ``@`` and the epoch."""
        ids = self.rows.records.ids
        for wanted in (str(name), str(name).rpartition("@")[0]):
            if wanted in ids:
                return ids.index(wanted)
        return None


def try_reward(
    data: RewardData, items: Sequence[Item], code: own_code.OwnCode, timeout_s: float
) -> Tried:
    """Judge the items in one call, in a child process with the code and the environment that the
    run's would have.

    :raises UsageError: the reward or its return value is wrong.
    :raises RunFailedError: the reward raised something else; its traceback is on standard error.
    :raises WaitTimeoutError: the reward took longer than ``timeout_s``.
    """
    indices = [item.index for item in items]
    records, answers = data.rows.records, data.rows.answers(indices)
    lines = [records.numbers[index] for index in indices]
    ids = [records.ids[index] for index in indices]
    request = {
        "reward": data.reward.model_dump(mode="json"),
        "prompts": data.rows.prompts(indices),
        "completions": [item.completion for item in items],
        "rows": [
            {**records.rows[index], "answer": answer}
            for index, answer in zip(indices, answers, strict=True)
        ],
        "places": [records.where(line) for line in lines],
    }
    with tempfile.TemporaryDirectory(prefix="slurmrl-reward-") as folder:
        environ = environment(Path(folder), Code(paths=code.paths), data.variables)
        reply = _ask(data.reward.title, request, environ, timeout_s)
    each = zip(lines, ids, items, answers, reply["scores"], strict=True)
    return Tried(
        tuple(
            Judged(line, name, item.completion, answer, score)
            for line, name, item, answer, score in each
        ),
        {name: total / count for name, (total, count) in reply["stats"].items() if count},
        reply["made_s"],
        reply["scored_s"],
    )


def _ask(
    name: str, request: dict[str, Any], environ: dict[str, str], timeout_s: float
) -> dict[str, Any]:
    """``name`` is the reward's, for messages."""
    with (
        subprocess.Popen(
            [sys.executable, "-P", "-m", trial.__name__],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as process,
        _ending(process),
    ):
        try:
            output, _ = process.communicate(json.dumps(request).encode(), timeout_s)
        except subprocess.TimeoutExpired as error:
            raise WaitTimeoutError(
                f"reward '{name}' took longer than {timeout_s:g} s for {len(request['rows'])} "
                "completions; raise the limit with --timeout"
            ) from error
    if process.returncode not in (0, 2) or not output:
        raise RunFailedError(f"reward '{name}' failed, see above (exit code {process.returncode})")
    reply: dict[str, Any] = json.loads(output)
    if "error" in reply:
        raise UsageError(reply["error"])
    return reply


@contextlib.contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill the child together with everything that the user's code has started."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
