"""The short job, which is submitted like the job of a run, with a folder next to the runs."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from slurmrl.config.schema import Cluster
from slurmrl.desk import copying
from slurmrl.desk.doctor import Check, directory, failed, guarded, ok, probe
from slurmrl.desk.trial_jobs import Jobs, clear_away
from slurmrl.env import user_name
from slurmrl.fsio import atomic, documents
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import make
from slurmrl.scheduler.base import Continue, GroupRequest, JobState, SubmissionRequest, TaskState
from slurmrl.scheduler.client import SRUN

FOLDER = ".doctor"
GROUP = "doctor"
MINUTES = "5"
"""Time limit of the job in minutes. Checks take seconds, or longer on a busy host or directory."""
LEAD_S = 1
"""Seconds between Slurm's warning and the time limit: the minimum, since the job saves nothing."""
RUNS_S = 180.0
"""Seconds that a started job may take, including Slurm's delays."""
LATE_S = 15.0
"""Seconds that results may take to become visible after the job has ended."""
SAY_EVERY_S = 10.0
CONTENT_BYTES = 2**20
ENDINGS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command: from `kill`, and from a terminal that is closed."""

Say = Callable[[str], None]


def gpus_of(group: GroupRequest) -> int:
    """Return the number of GPUs on each host of a group."""
    return group.workers_per_host * group.gpus_per_worker


@contextmanager
def scratch(root: Path) -> Iterator[RunPaths]:
    """Yield a temporary folder next to the runs; remove it later with the parents made for it."""
    folder = root / user_name() / FOLDER
    made = [path for path in folder.parents if not path.exists()]
    paths = RunPaths(folder / uuid.uuid4().hex)
    atomic.make_private_directory(paths.run)
    with _ended_in_order():
        try:
            yield paths
        finally:
            shutil.rmtree(paths.run, ignore_errors=True)
            with suppress(OSError):  # another process may have begun to use the folder
                for path in (folder, *made):
                    path.rmdir()


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Turn the first of ENDINGS into SystemExit, so that the job is cancelled; then ignore all.

    Ignored signals (nohup) stay ignored. Outside of the main thread, Python allows no handlers.
    """

    def end(number: int, frame: object) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    ours = ENDINGS if threading.current_thread() is threading.main_thread() else ()
    before = {one: old for one in ours if (old := signal.getsignal(one)) != signal.SIG_IGN}
    try:
        for one in before:
            signal.signal(one, end)
        yield
    finally:
        for one, old in before.items():
            signal.signal(one, old)


@dataclass
class ShortJob:
    """A job that runs a program on each of its hosts; each program writes a result file."""

    program: ClassVar = "slurmrl.desk.doctor.probe"
    minutes: ClassVar = MINUTES
    runs_s: ClassVar = RUNS_S
    srun_options: ClassVar[tuple[str, ...]] = ()

    paths: RunPaths
    kind: str
    """The scheduler."""
    cluster: Cluster
    group: GroupRequest
    """The resources that the job requests."""
    timeout_s: float
    say: Say

    @property
    def folder(self) -> Path:
        """The folder of the job's files."""
        return self.paths.run / "probe"

    def ended(self) -> tuple[Jobs, str]:
        """Submit the job and wait for its end; return the job and a description of its end.

        After an error, cancel the job.
        """
        scheduler = make(self.kind)
        self.write()
        jobs = None
        try:
            jobs = Jobs(1, scheduler, scheduler.submit(self.request()))
            return jobs, self._wait(jobs)
        except BaseException as error:
            if jobs is None and isinstance(error, (KeyboardInterrupt, SystemExit)):
                # The job may have been queued before the interruption.
                jobs = Jobs(1, scheduler, scheduler.recover(self.paths, 1))
            if jobs is not None:
                clear_away(jobs)
            raise

    def write(self) -> None:
        """Write the files that the job reads."""
        for folder in (*self.paths.directories(), self.folder):
            atomic.make_private_directory(folder)
        copying.copy_package(self.paths.code / "slurmrl")

    def request(self) -> SubmissionRequest:
        """Return the job's request for the scheduler."""
        once = {"time": self.minutes, "signal_lead_s": LEAD_S, "continue": Continue.NONE.value}
        slurm = {**self.cluster.slurm.model_dump(mode="json", by_alias=True), **once}
        run = (sys.executable, "-P", "-m", self.program, str(self.folder))
        command = run if self.kind == "local" else (*SRUN, *self.srun_options, *run)
        return SubmissionRequest(
            number=1,
            uuid=uuid.uuid4().hex,
            trial=self.group.name,
            run=self.paths,
            python=sys.executable,
            groups=(replace(self.group, links=1, command=command),),
            options={**self.cluster.model_dump(mode="json"), "slurm": slurm},
        )

    def answers(self) -> dict[int, dict[str, Any]]:
        """Return a mapping from the numbers of hosts to their visible results."""
        found = {}
        for task in range(self.group.hosts):
            with suppress(FileNotFoundError):
                found[task] = documents.read(self.folder / probe.result_name(task))
        return found

    def _wait(self, jobs: Jobs) -> str:
        """Wait until the job has ended; return a description of its final state."""
        began = time.monotonic()
        started: float | None = None
        said = began
        while True:
            now = time.monotonic()
            active = jobs.active()
            if not active:
                return self._last_words(jobs)
            state = _shown(active[0])
            if started is None and active[0].state is JobState.RUNNING:
                started = now
            if started is not None and now - started > self.runs_s:
                return f"{state}, after {self.runs_s:.0f} s"
            if started is None and now - began > self.timeout_s:
                return f"{state} after {self.timeout_s:.0f} s; it was cancelled"
            if now - said >= SAY_EVERY_S:
                said = now
                self.say(f"{state}, for {now - began:.0f} s of at most {self.timeout_s:.0f} s")
            time.sleep(0.2 if self.kind == "local" else 1.0)

    def _last_words(self, jobs: Jobs) -> str:
        """Wait for visible results, at most LATE_S; return a description of the job's end."""
        deadline = time.monotonic() + LATE_S
        while len(self.answers()) < self.group.hosts and time.monotonic() < deadline:
            time.sleep(0.2)
        ended = jobs.scheduler.query(jobs.ids)
        return _shown(ended[0]) if ended else "the scheduler no longer knows the job"

    def missing(self, results: Collection[int], ended: str) -> str:
        """Return a message about hosts without results and the job's end; "" without such hosts."""
        missing = sorted(set(range(self.group.hosts)) - set(results))
        if not missing:
            return ""
        hosts, last = ", ".join(map(str, missing)), self.log()
        output = f"; its output ends with: {last}" if last else ""
        return f"no result from host {hosts} of {self.group.hosts}: {ended}{output}"

    def log(self) -> str:
        """Return the last lines of the job's output."""
        folder = self.paths.logs / self.group.name
        logs = [
            path for kind in ("slurm", "local") for path in sorted(folder.glob(f"{kind}-*.out"))
        ]
        text = logs[-1].read_text(errors="replace") if logs else ""
        return " | ".join(text.strip().splitlines()[-3:])


@dataclass
class ProbeJob(ShortJob):
    """A short job that runs the checks of its hosts."""

    servers: Mapping[str, Any] | None = None
    """Result of `server_checks.running_settings`: servers that the job's first host must reach."""
    narrow: Sequence[str] = ()
    """Models that compute in bfloat16 on processors."""

    def run(self) -> list[Check]:
        """Run the job and return its checks; an error becomes a failed check."""
        advice = "submit a job with the same options by hand, and read the message of sbatch"
        return guarded("job", advice, self._run)

    def _run(self) -> list[Check]:
        hosts = self.group.hosts
        self.say(f"a job of {hosts} host{'s' * (hosts > 1)} on {self.kind} runs the checks")
        jobs, ended = self.ended()
        cleared: list[Check] = []
        try:
            results = self._results()
        finally:
            cleared += guarded("job", "end it with scancel", lambda: _clear(jobs))
        checks = [check for task in sorted(results) for check in results[task]] + cleared
        if missing := self.missing(results, ended):
            advice = (
                "if the job does not start, raise --timeout or see 'squeue --me'; if it fails, "
                "see the first error of its output"
            )
            checks.append(failed("job", missing, advice))
        elif hosts == 1:
            checks.append(ok("other hosts", "not compared, because the job had one host"))
        return checks

    def write(self) -> None:
        """Write the files that the job reads: the package, the request, and content to compare."""
        super().write()
        content = os.urandom(CONTENT_BYTES)
        atomic.replace(self.folder / directory.CONTENT, content)
        script = self.paths.submission_script(1, GROUP) if self.kind != "local" else None
        request = {
            "token": secrets.token_hex(32),
            "hosts": self.group.hosts,
            "gpus": gpus_of(self.group),
            "interface": self.cluster.interface,
            "slurm": self.cluster.slurm.model_dump(include={"container", "container_python"}),
            "script": str(script) if script else None,
            "servers": self.servers,
            "narrow": list(self.narrow),
            "content": hashlib.sha256(content).hexdigest(),
        }
        atomic.replace(self.folder / directory.ASK, json.dumps(request).encode())

    def _results(self) -> dict[int, list[Check]]:
        results = {}
        for task, values in self.answers().items():
            with documents.expecting(self.folder / probe.result_name(task)):
                results[task] = [Check.from_json(check) for check in values["checks"]]
        return results


def _clear(jobs: Jobs) -> list[Check]:
    clear_away(jobs)
    return []


def _shown(task: TaskState) -> str:
    why = task.words or task.reason
    why = f" ({why})" if why else ""
    return f"job {task.job_id}: {task.raw or task.state}{why}"
