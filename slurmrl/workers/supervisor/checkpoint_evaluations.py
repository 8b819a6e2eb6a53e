"""Submission of the trials that evaluate each checkpoint of a trial (`evaluation.tasks`).

Soon after a commit, the batch process links the files of the checkpoint into a folder of
``being_evaluated/`` and submits the evaluations with ``slurmrl eval``. Because of the links, the
trial may delete the checkpoint before its evaluations begin. Training does not wait for
evaluations. Readers find the results in the evaluation trials (`run.metrics`).

The folder is removed when all evaluations of the checkpoint have ended. Folders in ``export/``,
which `slurmrl eval` and ``trial:`` references make, remain, because other trials may read them.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import slurmrl
from slurmrl import child, log
from slurmrl.backoff import Backoff, Interval, attempts
from slurmrl.config import profiles, source
from slurmrl.config.load import load_resolved
from slurmrl.config.schema import WHOLE, Config
from slurmrl.errors import SlurmrlError
from slurmrl.fsio import atomic
from slurmrl.fsio.atomic import exclusive_create, list_names, make_private_directory
from slurmrl.fsio.calls import is_temporary
from slurmrl.registry import resolve
from slurmrl.run import metrics
from slurmrl.run.events import EventKind
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import Commit, fold, place, recent
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint.manifest import ORIGIN, is_pinned
from slurmrl.workers.supervisor.tasks_inside import signals_held_back

logger = log.get(__name__)

SNAPSHOT: Final = Path(slurmrl.__file__).parents[1]
"""The folder of the code that this process runs."""
LOOK_S: Final = 5.0
"""Seconds between two checks for a new commit."""
LAST_PAUSE_S: Final = 5.0
"""Seconds between attempts at the end of the trial."""
TIMEOUT_S: Final = 120.0
"""Maximum time of one submission."""
PAUSES_S: Final = (60.0, 900.0)
"""Minimum and maximum pause before a failed submission is retried. Slurm may need minutes until it
answers or accepts jobs again."""
TRIES: Final = 3
"""Number of failures before they are reported, and number of attempts at the end of the trial."""
SWEEP_S: Final = 60.0
SAID: Final = 500
"""Maximum number of characters to report from a failed command's message."""
PIN: Final = "slurmrl.workers.master.exporting:pin_to_evaluate"
"""The function that links a checkpoint. Its imports are slow, so it is loaded only if needed."""
_FOLDER: Final = re.compile(r"(step-(\d+)\.(\d+))-checkpoint")
HAND_OVER_S: Final = 180.0
"""Maximum time for which a job waits until its evaluation results are sent to the sinks."""


class CheckpointEvaluations:
    """Submits the evaluations of each commit, in a separate thread.

    ``kind`` is the scheduler of the evaluation trials. ``told`` writes an event.
    """

    def __init__(
        self, paths: RunPaths, kind: str, told: Callable[[EventKind, Mapping[str, Any]], None]
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
        """Start the thread, which receives no signals."""
        with signals_held_back():
            self._thread.start()

    def stop(self, *, ended: bool) -> None:
        """Stop the thread.

        If the trial has ``ended``, submit the evaluations of its last commit first. Otherwise the
        next link submits them, so this link need not wait.
        """
        self._last = ended
        self._stop.set()
        if ended:
            self._thread.join(TIMEOUT_S)
        if ended and self._thread.is_alive():  # No later link submits the missing evaluations.
            reason = f"the last submissions took longer than {TIMEOUT_S:g} s"
            logger.warning("evaluations of the last checkpoint may be missing: %s", reason)
            self._told("evaluation_failed", {"reason": reason})

    def _run(self) -> None:
        remove_leftovers(self._paths)
        wanted = True
        while wanted and not self._stop.wait(LOOK_S):
            wanted = self._look()
        if wanted and self._last:
            for last in attempts((LAST_PAUSE_S,) * (TRIES - 1)):
                self._look(now=True)
                if last or not self._failed:
                    break
            remove_evaluated(self._paths, given_up=True)

    def _look(self, *, now: bool = False) -> bool:
        """Submit missing evaluations. With ``now``, also retry evaluations that failed recently.

        Return whether the configuration requests any evaluation.
        """
        try:
            config = load_resolved(self._paths.config)
            if config.evaluation is None or config.evaluation.tasks is None:
                return False
            state = fold(records := History(self._paths.history).read())
            if state.end is not None and state.end.kind is Kind.CANCELLED:
                return True
            own = (one for one in records[state.begin_slot + 1 :] if one.kind is Kind.COMMIT)
            made = [Commit(*place(one), one.incarnation) for one in own]  # includes deleted commits
            missing = list(self._missing(config, [*made, *state.commits]))
            for commit in {c.directory: c for c, _ in missing if c in state.commits}.values():
                with suppress(SlurmrlError):  # `_submit` retries and reports errors
                    link_files(self._paths, commit)
            for commit, suite in missing:
                self._submit(commit, suite, self._command(config, commit, suite), now=now)
            if self._sweep.due():
                remove_evaluated(self._paths)
        except SlurmrlError as error:
            logger.info("cannot look for a commit to evaluate, will retry: %s", error)
        return True

    def _missing(self, config: Config, commits: Sequence[Commit]) -> Iterator[tuple[Commit, str]]:
        """Yield each checkpoint and suite without a submitted evaluation, in the order of steps.

        Include deleted checkpoints whose files are linked, and ``commits``, which may be deleted.
        """
        marks = self._paths.evaluation_marks
        make_private_directory(marks)
        submitted = set(list_names(marks))
        known = {commit.directory: commit for commit in linked_commits(self._paths)}
        known.update((commit.directory, commit) for commit in commits)
        for commit in sorted(known.values(), key=lambda commit: commit.step):
            for suite in config.evaluations:
                if self._paths.evaluation_mark(commit.directory, suite).name not in submitted:
                    yield commit, suite

    def _command(self, config: Config, commit: Commit, suite: str) -> list[str]:
        """Return the command that submits the evaluation of a suite.

        The evaluation has as many rows as an evaluation during training, rounded up to whole
        batches. The command uses the trial's copy of the code.
        """
        folder = str(self._paths.checkpoint_to_evaluate(commit.directory))
        root = str(self._paths.run.parents[2])
        whole = [sys.executable, "-P", "-m", "slurmrl", "eval", str(self._paths.config)]
        whole += ["--checkpoint", folder, "--root", root, "--scheduler", self._kind]
        whole += ["--profile", profiles.NONE]  # The resolved configuration includes the profile.
        copies = [str(SNAPSHOT / Path(path).name) for path in config.code]
        own_code = [f"code={json.dumps(copies)}"] if copies else []
        chosen = [] if suite == WHOLE else ["--suite", suite]
        own = config.evaluations[suite].evaluation
        samples = own.samples if own is not None else None
        steps = [] if samples is None else [-(-samples // config.algorithm["batch_size"])]
        limit = [f"total_steps={number}" for number in steps]
        return [*whole, *chosen, "--detach", "--no-check", *limit, *own_code]

    def _submit(self, commit: Commit, suite: str, command: list[str], *, now: bool) -> None:
        """Submit an evaluation and mark it as submitted. Raises EnvironmentFailure.

        After a kill before the mark, the same command runs again and finds the existing trial.
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
            logger.warning("cannot evaluate the checkpoint of step %d: %s", commit.step, error)
            self._told("evaluation_failed", {**what, "reason": error})
        else:
            logger.info("cannot evaluate step %d, will retry: %s", commit.step, error)

    def _error(self, commit: Commit, command: list[str]) -> str:
        """Link the checkpoint and run the command; return the error."""
        try:
            link_files(self._paths, commit)
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
        """Whether the next attempt is due."""
        return time.monotonic() >= self._again

    def count(self) -> int:
        """Count a failure; return the number of failures."""
        self._again = time.monotonic() + self._backoff.next_s()
        self._count += 1
        return self._count


def _error(command: list[str]) -> str:
    """Run a command; return the reason if it failed, else ""."""
    try:
        done = child.run(command, TIMEOUT_S)
    except OSError as error:
        return str(error)
    if done.code is None:
        return f"it did not end within {TIMEOUT_S:g} s"
    return "" if done.code == 0 else done.errors[-SAID:] or f"exit code {done.code}"


def link_files(paths: RunPaths, commit: Commit) -> None:
    """Make the folder with links to a commit's files if it does not exist. Raises SlurmrlError."""
    if not is_pinned(paths.checkpoint_to_evaluate(commit.directory)):
        resolve(PIN)(paths, commit)


def linked_commits(paths: RunPaths) -> list[Commit]:
    """Return the checkpoints whose files are linked. Raises EnvironmentFailure."""
    try:
        names = atomic.list_names(paths.being_evaluated)
    except FileNotFoundError:
        return []
    found = (_FOLDER.fullmatch(name) for name in names)
    return [Commit(int(match[2]), match[1], int(match[3])) for match in found if match]


def remove_evaluated(paths: RunPaths, *, given_up: bool = False) -> None:
    """Remove folders that no evaluation needs any more. Never raise; a later call retries.

    Remove a folder when the evaluations of all suites were submitted and have ended. With
    ``given_up``, do not wait for unsubmitted evaluations. Any process may call this.
    """
    try:
        commits = linked_commits(paths)
        suites = load_resolved(paths.config).evaluations if commits else {}
        for commit in commits:
            wanted: Collection[str] = () if given_up else suites
            if _submitted(paths, commit, wanted) and not _in_use(paths, commit, len(wanted)):
                folder = paths.checkpoint_to_evaluate(commit.directory)
                atomic.remove(folder / ORIGIN)  # First: nobody may use a half-removed folder.
                shutil.rmtree(folder, ignore_errors=True)
    except (SlurmrlError, OSError) as error:
        logger.info("cannot remove evaluated checkpoints yet: %s", error)


def remove_leftovers(paths: RunPaths) -> None:
    """Remove incomplete folders of a killed process. No other process may link files now."""
    with suppress(OSError):
        for path in paths.being_evaluated.iterdir():
            if is_temporary(path.name):
                shutil.rmtree(path, ignore_errors=True)


def _submitted(paths: RunPaths, commit: Commit, suites: Collection[str]) -> bool:
    return all(paths.evaluation_mark(commit.directory, suite).exists() for suite in suites)


def _in_use(paths: RunPaths, commit: Commit, least: int) -> bool:
    """Return whether an evaluation may still read the folder. A failed evaluation can resume.

    Return True if fewer than ``least`` evaluation trials are visible, because the listing is stale.
    """
    folder = paths.checkpoint_to_evaluate(commit.directory)
    trials = evaluating_trials(paths, commit.step, folder)
    if len(trials) < least:
        return True
    ends = [recent(trial.history, exports=False).end for trial in trials]
    return any(end is None or end.kind is Kind.FAILED for end in ends)


def evaluated_trial(paths: RunPaths) -> RunPaths | None:
    """Return the trial whose checkpoint this trial evaluates, or None if it evaluates none.

    Raises ConfigError, UsageError.
    """
    model = _model(paths)
    if model is None or len(model.parents) < 2:
        return None
    found = RunPaths(model.parents[1])
    if metrics.checkpoint_of(found, model) is None or not found.config.is_file():
        return None
    return found if found.evaluated().resolve() == paths.run.parent.resolve() else None


def evaluating_trials(paths: RunPaths, step: int, model: Path) -> list[RunPaths]:
    """Return the trials that evaluate the folder ``model`` of a step. Raises ConfigError.

    Their configurations may name the folder by another path to the same root.
    """
    own = (trial for number, trial in metrics.evaluation_trials(paths) if number == step)
    found = ((trial, _model(trial)) for trial in own if trial.config.is_file())
    return [trial for trial, of in found if of is not None and of.parts[-4:] == model.parts[-4:]]


def _model(paths: RunPaths) -> Path | None:
    """Return the folder of a trial's initial model; None if there is none."""
    actor = source.read(paths.config).values.get("actor")
    path = actor.get("path") if isinstance(actor, dict) else None
    return Path(path) if isinstance(path, str) else None


def hand_over_results(paths: RunPaths) -> None:
    """Send new evaluation results to the sinks of the evaluated trial.

    Never raise. The evaluated trial is the trial of the evaluated checkpoint, or else this trial.
    """
    try:
        trained = evaluated_trial(paths) or paths
        remove_evaluated(trained)
        if not trained.evaluated().is_dir():
            return
        module = "slurmrl.watch.sinks.arrivals"
        command = [sys.executable, "-P", "-m", module, str(trained.run)]
        if child.run(command, HAND_OVER_S, shown=True).code is None:
            logger.warning(
                "evaluations were not sent to the logging sinks within %.0f s", HAND_OVER_S
            )
    except (SlurmrlError, OSError) as error:
        logger.warning("cannot send evaluations to the logging sinks: %s", error)
