"""Run directories and a scheduler for tests without processes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurmrl.env import user_name
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import atomic
from slurmrl.name_resolve.store import NameStore
from slurmrl.plan.dataflow import Estimate, Summary
from slurmrl.run import keys
from slurmrl.run.events import EventKind, EventWriter
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import begin, end, fold, resume
from slurmrl.run.metrics import MetricsWriter
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import JobIds, JobState, Scheduler, SubmissionRequest, TaskState
from slurmrl.workers.master.results import summary_text

ADDITION = Path(__file__).parents[1] / "examples" / "addition"
CONFIG = f"""\
experiment: add
total_steps: 6
algorithm: {{name: sft, batch_size: 8}}
actor:
  architecture: {{model_type: llama, hidden_size: 32, num_hidden_layers: 1,
                 num_attention_heads: 2, intermediate_size: 64, vocab_size: 64}}
  tokenizer: {ADDITION / "tokenizer"}
dataset: {{type: prompt_answer, path: data.jsonl}}
"""


def write_config(folder: Path) -> Path:
    """Write a configuration that every check accepts."""
    (folder / "data.jsonl").write_text('{"id": "1", "prompt": "a", "answer": "b"}\n')
    path = folder / "sft.yaml"
    path.write_text(CONFIG)
    return path


class FakeRun:
    """A run directory with the files that real processes write."""

    def __init__(
        self, root: Path, experiment: str = "add", trial: str = "1", *, hosts: int = 1
    ) -> None:
        self.paths = RunPaths.of(root, user_name(), experiment, trial)
        for directory in self.paths.directories():
            atomic.make_private_directory(directory)
        self.paths.identity.write_text(json.dumps({"uuid": f"{experiment}{trial}" * 8}))
        group = {"name": "trainer", "hosts": hosts, "elastic": False}
        self.paths.plan.write_text(json.dumps({"groups": [group]}))
        self.history = History(self.paths.history, clock=lambda: time.time())

    def submission(self, number: int = 1, scheduler: str = "local", **more: Any) -> None:
        atomic.make_private_directory(self.paths.submission(number))
        request = {"scheduler": scheduler, "total_steps": 60, "heartbeat_s": 0.2, **more}
        self.paths.submission_request(number).write_text(json.dumps(request))

    def begin(self, **data: Any) -> int:
        return begin(self.history, data).incarnation

    def append(self, kind: Kind, **data: Any) -> None:
        records = self.history.read()
        self.history.append(kind, fold(records).incarnation, data, after=len(records) - 1)

    def commit(self, step: int) -> None:
        self.append(Kind.COMMIT, step=step, directory=f"step-{step:08d}.1")

    def end(self, kind: Kind, **data: Any) -> None:
        end(self.history, kind, data)

    def resume(self) -> None:
        resume(self.history, {})

    def attempt(
        self, job_id: str, *, task: int = 0, number: int = 0, host: str = "n0", job: str = ""
    ) -> None:
        value = {"group": "trainer", "task": task, "attempt": number, "host": host, "job": job}
        names = NameStore(self.paths.names)
        names.add(
            keys.attempt("trainer", task, number),
            json.dumps({**value, "job_id": job_id}),
        )

    def say(self, incarnation: int, **said: Any) -> None:
        names = NameStore(self.paths.names)
        value = {"incarnation": incarnation, **said}
        names.add(keys.status(), json.dumps(value), replace=True)

    def name(self, key: str, **value: Any) -> None:
        names = NameStore(self.paths.names)
        names.add(key, json.dumps(value))

    def event(self, writer: str, kind: EventKind, **data: Any) -> None:
        EventWriter(self.paths, writer).write(kind, **data)

    def metrics(self, *lines: Mapping[str, Any]) -> None:
        writer = MetricsWriter(self.paths.metrics)
        for line in lines:
            writer.write(line)

    def log(self, name: str, text: str, group: str = "trainer") -> None:
        atomic.make_private_directory(self.paths.logs / group)
        (self.paths.logs / group / name).write_text(text)


def evaluation(
    paths: RunPaths,
    trial: str,
    model: str,
    suite: str | None = None,
    root: str = "/elsewhere",
    **estimates: float,
) -> Path:
    """Make a finished trial that has evaluated a model."""
    own = RunPaths(paths.evaluated() / trial)
    own.run.mkdir(parents=True)
    folder = f"{root}/me/{paths.experiment}/{paths.trial}/export/{model}"
    algorithm = {"name": "evaluate", "suite": suite}
    head: dict[str, Any] = {"version": 1, "trial": trial, "algorithm": algorithm, "model": folder}
    found = {name: Estimate(value, value - 0.1, float("nan")) for name, value in estimates.items()}
    scores = [{"id": str(number), "rewards": [1.0]} for number in range(3)]
    own.summary.write_bytes(b"".join(summary_text(head, Summary(found, scores))))
    return own.summary


def task(
    element: int, state: JobState, *, job: str = "41", group: str = "trainer", **more: Any
) -> TaskState:
    values = {"raw": state.value, "reason": "", "hosts": (), **more}
    return TaskState(f"{job}_{element}", group, element, state, **values)


class FakeScheduler(Scheduler):
    """A scheduler that gives prepared answers and records the calls of its methods."""

    def __init__(self, tasks: Sequence[TaskState] = ()) -> None:
        self.tasks = list(tasks)
        self.problem: str | None = None
        self.done: list[str] = []
        self.questions = 0
        self.requests: list[SubmissionRequest] = []
        self.jobs: dict[tuple[Path, int], dict[str, tuple[str, ...]]] = {}

    def check(self) -> None:
        if self.problem is not None:
            raise EnvironmentFailure(self.problem)

    def scripts(self, request: SubmissionRequest) -> dict[str, str]:
        return {group.name: f"#!/bin/bash\nlinks {group.links}\n" for group in request.groups}

    def submit(self, request: SubmissionRequest) -> dict[str, tuple[str, ...]]:
        self.requests.append(request)
        ids = {group.name: ("41",) for group in request.groups}
        self.jobs[request.run.run, request.number] = ids
        return self.recover(request.run, request.number)

    def extend(self, run: RunPaths, number: int, group: str, *, by: str) -> str:
        self.check()
        self.done.append(f"extend {group}")
        self.jobs[run.run, number][group] += ("42",)
        return "42"

    def recover(self, run: RunPaths, number: int) -> dict[str, tuple[str, ...]]:
        return self.jobs.get((run.run, number), {})

    def query(self, jobs: JobIds) -> list[TaskState]:
        self.check()
        self.questions += 1
        return [
            replace(task, group=group)
            for group, ids in jobs.items()
            for task in self.tasks
            if task.job_id.partition("_")[0] in ids
        ]

    def cancel(self, jobs: JobIds, *, spare: str = "") -> None:
        self.done.append("cancel")
        self.tasks = [replace(task, state=JobState.CANCELLED) for task in self.tasks]

    def interrupt(self, jobs: JobIds) -> None:
        self.done.append("interrupt")

    def kill(self, jobs: JobIds) -> None:
        self.done.append("kill")
