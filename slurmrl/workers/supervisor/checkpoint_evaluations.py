"""The trials that evaluate each checkpoint of a trial (`evaluation.tasks`).

The batch process links the files of a checkpoint soon after its commit
(`evaluated_checkpoints`), so that it may be removed, and submits them with ``slurmrl eval``. Nobody
waits for them, and what they find out is read where they leave it (`run.evaluated`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import slurmrl
from slurmrl import log
from slurmrl.backoff import Backoff, Interval, attempts
from slurmrl.config import profiles
from slurmrl.config.load import load_resolved
from slurmrl.config.schema import WHOLE, Config
from slurmrl.errors import SlurmrlError
from slurmrl.fsio.atomic import exclusive_create, list_names, make_private_directory
from slurmrl.run.history.log import History
from slurmrl.run.history.record import Kind
from slurmrl.run.history.state import Commit, fold
from slurmrl.run.paths import RunPaths
from slurmrl.workers.supervisor import evaluated_checkpoints
from slurmrl.workers.supervisor.evaluated_checkpoints import linked
from slurmrl.workers.supervisor.tasks_inside import signals_held_back, unblock

logger = log.get(__name__)

SNAPSHOT: Final = Path(slurmrl.__file__).parents[1]
"""The folder of the code that this process runs."""
LOOK_S: Final = 5.0
"""Seconds between two looks for a new commit."""
LAST_PAUSE_S: Final = 5.0
"""Seconds between the tries at the end of the trial."""
TIMEOUT_S: Final = 120.0
"""Longest time of one submission."""
PAUSES_S: Final = (60.0, 900.0)
"""First and longest pause before a submission that failed is tried again: a scheduler that does not
answer, or takes no more jobs, does so for minutes."""
TRIES: Final = 3
"""Failures after which one is told, and tries at the end of the trial."""
SWEEP_S: Final = 60.0
SAID: Final = 500
"""Characters of the message of a failed command that are reported."""


class CheckpointEvaluations:
    """Looks for commits in a thread of its own. ``kind`` is the scheduler that gets the trials,
    ``told`` writes an event."""

    def __init__(
        self, paths: RunPaths, kind: str, told: Callable[[str, Mapping[str, Any]], None]
    ) -> None:
        self._paths = paths
        self._kind = kind
        self._told = told
        self._failed: dict[Path, _Failures] = {}
        self._sweep = Interval(SWEEP_S)
        self._stop = threading.Event()
        self._last = True
        self._thread = threading.Thread(target=self._run, name="evaluations", daemon=True)

    def start(self) -> None:
        """Start. Signals stay with the caller's thread."""
        with signals_held_back():
            self._thread.start()

    def stop(self, *, ended: bool) -> None:
        """Stop. If the trial has ``ended``, look a last time, for its last commit; else the next
        link does so, for which this one must not wait."""
        self._last = ended
        self._stop.set()
        if ended:
            self._thread.join(TIMEOUT_S)
        if ended and self._thread.is_alive():  # no other link will look
            reason = f"the last submissions took longer than {TIMEOUT_S:g} s"
            logger.warning("evaluations of the last checkpoint may be missing: %s", reason)
            self._told("evaluation_failed", {"reason": reason})

    def _run(self) -> None:
        evaluated_checkpoints.remove_leftovers(self._paths)
        wanted = True
        while wanted and not self._stop.wait(LOOK_S):
            wanted = self._look()
        if wanted and self._last:
            for last in attempts((LAST_PAUSE_S,) * (TRIES - 1)):
                self._look(now=True)
                if last or not self._failed:
                    break
            evaluated_checkpoints.sweep(self._paths, given_up=True)

    def _look(self, *, now: bool = False) -> bool:
        """Submit what is missing, ``now`` also what has failed a moment ago. Return whether the
        configuration wants any evaluation."""
        try:
            config = load_resolved(self._paths.config)
            if config.evaluation is None or config.evaluation.tasks is None:
                return False
            state = fold(History(self._paths.history).read())
            if state.end is not None and state.end.kind is Kind.CANCELLED:
                return True
            missing = list(self._missing(config, state.commits))
            for commit in {commit.directory: commit for commit, _ in missing}.values():
                with suppress(SlurmrlError):  # it is told when this is tried again
                    evaluated_checkpoints.link(self._paths, commit)
            for commit, suite in missing:
                self._submit(commit, suite, self._command(config, commit, suite), now=now)
            if self._sweep.due():
                evaluated_checkpoints.sweep(self._paths)
        except SlurmrlError as error:
            logger.info("cannot look for a commit to evaluate, will try again: %s", error)
        return True

    def _missing(self, config: Config, commits: Sequence[Commit]) -> Iterator[tuple[Commit, str]]:
        """Checkpoints and suites that no link has submitted, by step; also of checkpoints that the
        trial has deleted, if they are linked."""
        marks = self._paths.evaluation_marks
        make_private_directory(marks)
        submitted = set(list_names(marks))
        known = {commit.directory: commit for commit in linked(self._paths)}
        known.update((commit.directory, commit) for commit in commits)
        for commit in sorted(known.values(), key=lambda commit: commit.step):
            for suite in config.evaluations:
                if self._paths.evaluation_mark(commit.directory, suite).name not in submitted:
                    yield commit, suite

    def _command(self, config: Config, commit: Commit, suite: str) -> list[str]:
        """The command that submits the evaluation of a suite, on as many rows as an evaluation
        during training has, rounded up to whole batches, and with the code that the trial runs,
        wherever that came from."""
        folder = str(self._paths.checkpoint_to_evaluate(commit.directory))
        root = str(self._paths.run.parents[2])
        whole = [sys.executable, "-P", "-m", "slurmrl", "eval", str(self._paths.config)]
        whole += ["--checkpoint", folder, "--root", root, "--scheduler", self._kind]
        whole += ["--profile", profiles.NONE]  # the configuration has what it set
        copies = [str(SNAPSHOT / Path(path).name) for path in config.code]
        own_code = [f"code={json.dumps(copies)}"] if copies else []
        chosen = [] if suite == WHOLE else ["--suite", suite]
        own = config.evaluations[suite].evaluation
        samples = own.samples if own is not None else None
        steps = [] if samples is None else [-(-samples // config.algorithm["batch_size"])]
        limit = [f"total_steps={number}" for number in steps]
        return [*whole, *chosen, "--detach", "--no-check", *limit, *own_code]

    def _submit(self, commit: Commit, suite: str, command: list[str], *, now: bool) -> None:
        """Submit an evaluation. A kill before the mark repeats the command, which then finds its
        trial.

        Raises EnvironmentFailure.
        """
        mark = self._paths.evaluation_mark(commit.directory, suite)
        failed = self._failed.setdefault(mark, _Failures())
        if not (now or failed.are_over):
            return
        error = self._error(commit, command)
        what = {"step": commit.step, **({"suite": suite} if suite != WHOLE else {})}
        if not error:
            exclusive_create(mark, b"")
            del self._failed[mark]
            self._told("evaluation", what)
        elif failed.count() == TRIES:
            logger.warning("the checkpoint of step %d is not evaluated: %s", commit.step, error)
            self._told("evaluation_failed", {**what, "reason": error})
        else:
            logger.info("the evaluation of step %d will be tried again: %s", commit.step, error)

    def _error(self, commit: Commit, command: list[str]) -> str:
        """Link the checkpoint and run the command; return what failed."""
        try:
            evaluated_checkpoints.link(self._paths, commit)
        except SlurmrlError as error:
            return str(error)
        return _error(command)


class _Failures:
    """The failed submissions of one evaluation."""

    def __init__(self) -> None:
        self._backoff = Backoff(*PAUSES_S, growth=2.0)
        self._again = 0.0
        self._count = 0

    @property
    def are_over(self) -> bool:
        """Whether it is time for the next one."""
        return time.monotonic() >= self._again

    def count(self) -> int:
        """Count one; return how many there are now."""
        self._again = time.monotonic() + self._backoff.next_s()
        self._count += 1
        return self._count


def _error(command: list[str]) -> str:
    """Run a command; return why it failed, or "" if it did not."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            preexec_fn=unblock,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        return str(error)
    said = done.stderr.decode(errors="replace").strip()
    return "" if done.returncode == 0 else said[-SAID:] or f"exit code {done.returncode}"
