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
from itertools import islice
from pathlib import Path
from typing import Any

from slurmrl.config.schema import Reward
from slurmrl.data.fields import has
from slurmrl.data.records import MOST_PROBLEMS, RecordReader
from slurmrl.errors import ConfigError, Problem, RunFailedError, UsageError, WaitTimeoutError
from slurmrl.fsio import variables
from slurmrl.plan.settings import Settings
from slurmrl.submission import own_code, reward_trial
from slurmrl.submission.checks.run import Code, environment
from slurmrl.submission.found_rows import DataRow, FoundRows


@dataclass(frozen=True)
class Item:
    """One completion to judge, for a row of the data."""

    row: DataRow
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
        prompts = [data for data in (config.dataset, *evaluation) if data.kind == "prompt"]
        if not prompts:
            message = "has no prompts for a reward to judge: type 'prompt' is required"
            raise ConfigError((settings.source.problem(("dataset",), message),))
        self.rows = FoundRows(next(iter(prompts[0].parts.values())))
        self.tokenizer = config.actor.tokenizer
        file = config.cluster.variables_file
        self.variables = variables.read(Path(file)) if file else {}

    def references(self, count: int) -> list[Item]:
        """Return the answers of the first rows as completions."""
        rows = self.rows.first(count)
        config = self.rows.config
        if not has(rows[0].values, config.answer_key):
            raise UsageError(
                f"{config.path} has no answers under '{config.answer_key}': "
                "give --completion or --completions"
            )
        return [Item(row, self.rows.answer(row)) for row in rows]

    def texts(self, count: int, completions: Sequence[str]) -> list[Item]:
        """Return each completion for each of the first rows."""
        return [Item(row, text) for row in self.rows.first(count) for text in completions]

    def file(self, path: Path, count: int | None) -> list[Item]:
        """The first completions of a JSONL file of ``{"id": …, "completion": …}``, as a run's
        ``samples/`` are; without ids they are of the first, second, … row.

        :raises ConfigError: lines without a completion, or of rows that are not in the data.
        """
        reader = RecordReader(path, "")  # an id may occur more than once
        given = [(record.number, record.row) for record in islice(reader, count)]
        reader.finish()
        named = self.rows.named({str(row["id"]) for _, row in given if "id" in row})
        unnamed = any("id" not in row for _, row in given)
        first = self.rows.first(len(given)) if unnamed else []
        problems: list[Problem] = []
        items = []
        for position, (line, values) in enumerate(given):
            where, text = f"{path}:{line}", values.get("completion")
            row = first[position] if position < len(first) else None
            if "id" in values:
                row = named.get(str(values["id"]))
            if not isinstance(text, str):
                problems.append(Problem(where, "completion", "must be a text"))
            elif row is None:
                which = repr(values["id"]) if "id" in values else f"number {position + 1}"
                message = f"{self.rows.config.path} has no row {which}"
                problems.append(Problem(where, "id", message))
            else:
                items.append(Item(row, text))
        if problems:
            raise ConfigError(tuple(problems[:MOST_PROBLEMS]))
        return items


def try_reward(
    data: RewardData, items: Sequence[Item], code: own_code.OwnCode, timeout_s: float
) -> Tried:
    """Judge the items in one call, in a child process with the code and the environment that the
    run's would have.

    :raises UsageError: the reward or its return value is wrong.
    :raises RunFailedError: the reward raised something else; its traceback is on standard error.
    :raises WaitTimeoutError: the reward took longer than ``timeout_s``.
    """
    rows = [item.row for item in items]
    answers = [data.rows.answer(row) for row in rows]
    completions = [item.completion for item in items]
    request = {
        "reward": data.reward.model_dump(mode="json"),
        "tokenizer": data.tokenizer,
        "prompts": [data.rows.prompt(row) for row in rows],
        "completions": completions,
        "rows": [
            {**row.values, "answer": answer} for row, answer in zip(rows, answers, strict=True)
        ],
        "places": [row.where for row in rows],
        "extras": _extras(items),
    }
    with tempfile.TemporaryDirectory(prefix="slurmrl-reward-") as folder:
        environ = environment(Path(folder), Code(paths=code.paths), data.variables)
        reply = _ask(data.reward.title, request, environ, timeout_s)
    each = zip(items, answers, reply["scores"], strict=True)
    return Tried(
        tuple(
            Judged(item.row.number, item.row.id, item.completion, answer, score)
            for item, answer, score in each
        ),
        {name: total / count for name, (total, count) in reply["stats"].items() if count},
        reply["made_s"],
        reply["scored_s"],
    )


def _extras(items: Sequence[Item]) -> dict[str, Any]:
    """What a reward may ask for besides texts and rows, as in the first step of a run. The
    completions of a row are a group."""
    groups: dict[int, list[str]] = {}
    indices = []
    for item in items:
        group = groups.setdefault(item.row.number, [])
        indices.append(len(group))
        group.append(item.completion)
    return {
        "finished": [True] * len(items),
        "sample_ids": [f"{item.row.id}@0" for item in items],
        "indices": indices,
        "siblings": [groups[item.row.number] for item in items],
        "step": 1,
        "evaluation": False,
    }


def _ask(
    name: str, request: dict[str, Any], environ: dict[str, str], timeout_s: float
) -> dict[str, Any]:
    """``name`` is the reward's, for messages."""
    with (
        subprocess.Popen(
            [sys.executable, "-P", "-m", reward_trial.__name__],
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
