"""The trials that evaluate each checkpoint of a trial (`evaluation.tasks`).

The batch process submits them, with ``slurmrl eval``, soon after a commit: that links the files of
the checkpoint, which may then be removed. Nobody waits for them, and what they find out is read
where they leave it (`monitor.evaluated`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import slurmrl
from slurmrl import log
from slurmrl.config import profiles
from slurmrl.config.load import load_resolved
from slurmrl.config.schema import WHOLE, Config
from slurmrl.errors import SlurmrlError
from slurmrl.fsio.atomic import exclusive_create, list_names, make_private_directory
from slurmrl.history.log import History
from slurmrl.history.record import Kind
from slurmrl.history.state import Commit, fold
from slurmrl.paths import RunPaths
from slurmrl.workers.supervisor.tasks_inside import signals_held_back, unblock

logger = log.get(__name__)

SNAPSHOT: Final = Path(slurmrl.__file__).parents[1]
"""The folder of the code that this process runs."""
LOOK_S: Final = 5.0
"""Seconds between two looks for a new commit."""
TIMEOUT_S: Final = 120.0
"""Longest time of one submission."""
TRIES: Final = 3
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
        self._tries: Counter[Path] = Counter()
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
        wanted = True
        while wanted and not self._stop.wait(LOOK_S):
            wanted = self._look()
        for _ in range(TRIES if wanted and self._last else 0):
            self._look()

    def _look(self) -> bool:
        """Submit what is missing. Return whether the configuration wants any evaluation."""
        try:
            config = load_resolved(self._paths.config)
            if config.evaluation is None or config.evaluation.tasks is None:
                return False
            state = fold(History(self._paths.history).read())
            if state.end is not None and state.end.kind is Kind.CANCELLED:
                return True
            for commit in state.commits:
                for suite, command in self._commands(config, commit):
                    self._submit(commit, suite, command)
        except SlurmrlError as error:
            logger.info("cannot look for a commit to evaluate, will try again: %s", error)
        return True

    def _commands(self, config: Config, commit: Commit) -> Iterator[tuple[str, list[str]]]:
        """The command that submits the evaluation of each suite, on as many rows as an evaluation
        during training has, rounded up to whole batches, and with the code that the trial runs,
        wherever that came from."""
        trial = f"{self._paths.experiment}/{self._paths.trial}@{commit.step}"
        root = str(self._paths.run.parents[2])
        whole = [sys.executable, "-P", "-m", "slurmrl", "eval", str(self._paths.config)]
        whole += ["--checkpoint", trial, "--root", root, "--scheduler", self._kind]
        whole += ["--profile", profiles.NONE]  # the configuration has what it set
        copies = [str(SNAPSHOT / Path(path).name) for path in config.code]
        own_code = [f"code={json.dumps(copies)}"] if copies else []
        for suite, own in config.evaluations.items():
            chosen = [] if suite == WHOLE else ["--suite", suite]
            samples = own.evaluation.samples if own.evaluation is not None else None
            steps = [] if samples is None else [-(-samples // config.algorithm["batch_size"])]
            limit = [f"total_steps={number}" for number in steps]
            yield suite, [*whole, *chosen, "--detach", "--no-check", *limit, *own_code]

    def _submit(self, commit: Commit, suite: str, command: list[str]) -> None:
        """Submit an evaluation, unless a link of this trial has done so. A failed submission is
        tried again at the next looks. A kill before the mark repeats the command, which then finds
        its trial.

        Raises EnvironmentFailure.
        """
        mark = self._paths.evaluation_mark(commit.directory, suite)
        make_private_directory(mark.parent)
        if self._tries[mark] >= TRIES or mark.name in list_names(mark.parent):
            return
        self._tries[mark] += 1
        error = _error(command)
        what = {"step": commit.step, **({"suite": suite} if suite != WHOLE else {})}
        if not error:
            exclusive_create(mark, b"")
            self._told("evaluation", what)
        elif self._tries[mark] < TRIES:
            logger.info("the evaluation of step %d will be tried again: %s", commit.step, error)
        else:
            logger.warning("the checkpoint of step %d is not evaluated: %s", commit.step, error)
            self._told("evaluation_failed", {**what, "reason": error})


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
