"""The paths of a trial. Other modules take the names in a run directory from here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DAMAGED_PREFIX = "damaged-"
EVALUATED = "-eval"
"""Suffix that turns an experiment's name into the experiment of its evaluation trials."""
BEING_EVALUATED = "being_evaluated"
"""The folder of a trial with the checkpoints that ``evaluation.tasks`` evaluates."""
EVALUATION = "evaluation-"
"""Prefix of part files of evaluations."""


def part_prefix(step: int, incarnation: int) -> str:
    """Return the prefix of the names of the part files that an incarnation writes for a step."""
    return f"step-{step:08d}.{incarnation}"


def evaluation_prefix(step: int, incarnation: int, call: int) -> str:
    """Return the prefix of the part files of the ``call``-th call of an evaluation after a step."""
    return f"{EVALUATION}{step:08d}.{incarnation}.{call}"


def rotated(log: Path) -> Path:
    """Return the path of the previous part of a rotated output file."""
    return log.with_name(f"{log.name}.1")


class _RunEntry:
    """The path of a file or folder of the run directory, as an attribute of `RunPaths`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: RunPaths, owner: type[RunPaths]) -> Path:
        return paths.run / self._name


@dataclass(frozen=True)
class RunPaths:
    """The run directory ``<root>/<user>/<experiment>/<trial>`` and the names inside it."""

    run: Path

    @staticmethod
    def of(root: Path, user: str, experiment: str, trial: str) -> RunPaths:
        return RunPaths(Path(root) / user / experiment / trial)

    @property
    def trial(self) -> str:
        return self.run.name

    @property
    def experiment(self) -> str:
        return self.run.parent.name

    @property
    def full_name(self) -> str:
        """``EXPERIMENT/TRIAL``."""
        return f"{self.experiment}/{self.trial}"

    config = _RunEntry("config.yaml")
    """The resolved configuration."""
    plan = _RunEntry("plan.json")
    identity = _RunEntry("trial.json")
    """The trial's uuid and creation time."""
    code = _RunEntry("code")
    """Snapshot of the run's code from the creation of the trial."""

    def snapshot(self, number: int) -> Path:
        """Return the path of the ``number``-th snapshot of the code (``code``, ``code.2``, …)."""
        return self.code if number == 1 else self.run / f"code.{number}"

    history = _RunEntry("history")
    names = _RunEntry("names")
    leases = _RunEntry("leases")
    hosts = _RunEntry("hosts")
    """Failed starts by host, and the hosts that jobs avoid."""
    control = _RunEntry("control")
    samples = _RunEntry("samples")
    data = _RunEntry("data")
    """Tokenized datasets."""
    weights = _RunEntry("weights")
    """Weight versions that ``rollout.servers`` read."""
    versions = _RunEntry("versions")
    """Weight versions that trainers publish for rollout hosts: one directory per version."""
    rollouts = _RunEntry("rollouts")
    """Requests to rollout tasks and their answers: one directory per attempt of a task.
    Incarnations share the folder."""

    def rollout_task(self, group: str, task: int, attempt: int) -> Path:
        return self.rollouts / f"{group}.{task}.{attempt}"

    def rollout_requests(self, group: str, task: int, attempt: int, incarnation: int) -> Path:
        """Return the log of requests that the master of an incarnation writes for the task."""
        return self.rollout_task(group, task, attempt) / f"{incarnation:08d}.requests"

    def rollout_results(self, group: str, task: int, attempt: int) -> Path:
        """Return the log of results that the task writes for the masters of all incarnations."""
        return self.rollout_task(group, task, attempt) / "results"

    def rollout_samples(self, group: str, task: int, attempt: int) -> Path:
        """Return the folder of the sample files that the result log names."""
        return self.samples_of(self.rollout_task(group, task, attempt).name)

    def samples_of(self, attempt: str) -> Path:
        """Return the folder of the sample files of the attempt with this directory name."""
        return self.rollouts / attempt / "samples"

    def rollout_meeting(self, group: str, task: int, attempt: int) -> Path:
        """Return the file through which the ranks of the task find each other."""
        return self.rollout_task(group, task, attempt) / "meeting"

    def scale(self, group: str) -> Path:
        """Return the file with the number of tasks that a user has set for an elastic group."""
        return self.run / f"scale.{group}.json"

    def orphaned(self, group: str) -> Path:
        """Return the file in which the group's last task records that the trainers were missing."""
        return self.run / f"orphaned.{group}.json"

    checkpoints = _RunEntry("checkpoints")
    exports = _RunEntry("export")
    results = _RunEntry("results.jsonl")
    """Results of a trial that records a line for each item."""
    summary = _RunEntry("summary.json")
    """Summary of the results."""
    overview = _RunEntry("overview.json")
    """A finished trial's line in lists of trials (see `watch.overview`)."""
    parts = _RunEntry("parts")
    """Folder of the results of single steps."""

    def part(self, prefix: str, number: int) -> Path:
        """Return the ``number``-th part file of a step (see `part_prefix`)."""
        return self.parts / f"{prefix}.{number}.jsonl"

    def evaluated(self) -> Path:
        """Return the folder of the trials in which ``slurmrl eval`` evaluates the checkpoints."""
        return self.run.parent.parent / f"{self.experiment}{EVALUATED}"

    evaluations = _RunEntry("evaluations")
    """The scores of the items of evaluations during training."""

    def evaluation(self, step: int, suite: str = "") -> Path:
        name = f".{suite}" if suite else ""
        return self.evaluations / f"step-{step:08d}{name}.json"

    def evaluation_mark(self, directory: str, suite: str) -> Path:
        """Return the empty file that exists once the evaluation of a commit was submitted."""
        name = f".{suite}" if suite else ""
        return self.evaluation_marks / f"{directory}{name}"

    evaluation_marks = _RunEntry("submitted_evaluations")
    metrics = _RunEntry("metrics.jsonl")
    arrived = _RunEntry("evaluations.jsonl")
    """Results of trials that evaluate checkpoints of this trial, in order of arrival."""
    report = _RunEntry("report.html")
    """HTML file of ``slurmrl report``."""

    def notice(self, slot: int) -> Path:
        """Return the claim file of the notice about the end of the trial that ``slot`` records.

        The process that creates the file posts the notice.
        """
        return self.run / f"notice.{slot}.json"

    timeline = _RunEntry("timeline.json")
    """Times at which the ranks executed the calls of the newest steps."""
    estimates = _RunEntry("estimates.json")
    """Estimates of memory and time from the plan."""
    tensorboard = _RunEntry("tensorboard")
    arrived_tensorboard = _RunEntry("tensorboard/evaluations")
    wandb = _RunEntry("wandb")
    mlflow = _RunEntry("mlflow")

    def sink(self, name: str) -> Path:
        """Return the record of the last step whose metrics a sink has."""
        return self.run / "sinks" / f"{name}.json"

    arrived_sinks = _RunEntry("sinks/evaluations.json")
    """Record of how many of the arrived evaluations each sink has."""
    arrived_turns = _RunEntry("sinks/turns")
    """Claims of the right to send arrived results to sinks (see `watch.sinks.arrivals.turn`)."""
    events = _RunEntry("events")
    logs = _RunEntry("logs")
    submissions = _RunEntry("submissions")

    def submission(self, number: int) -> Path:
        return self.submissions / str(number)

    def submission_request(self, number: int) -> Path:
        """Return the request of a submission. The submission exists once this file is created."""
        return self.submission(number) / "request.json"

    def submission_script(self, number: int, group: str) -> Path:
        """Return the batch script of a group."""
        return self.submission(number) / f"{group}.sh"

    def submission_jobs(self, number: int) -> Path:
        """Return the file with the job ids of each group."""
        return self.submission(number) / "jobs.json"

    def submission_stop(self, number: int) -> Path:
        """Return the file with which a user requests that the submission stops."""
        return self.submission(number) / "stop"

    def submission_environment(self, number: int) -> Path:
        """Return the file with the variables that the jobs inherit from the submitting shell."""
        return self.submission(number) / "environment.json"

    def extension_claim(self, number: int, group: str, index: int) -> Path:
        """Return the claim file whose creator may extend a group by another array."""
        return self.submission(number) / f"{group}.more.{index}.json"

    def extension_job(self, number: int, group: str, index: int) -> Path:
        """Return the file with the job id of the array that an extension added."""
        return self.submission(number) / f"{group}.more.{index}.job.json"

    def local_chain(self, number: int, group: str) -> Path:
        """Return the file with the state of the local scheduler's chain of a group."""
        return self.submission(number) / f"local.{group}.json"

    def lease(self, group: str, task: int, attempt: int) -> Path:
        """Return the lease file of one attempt of a task's agent."""
        return self.leases / f"{group}.{task}.{attempt}"

    def master_log(self, incarnation: int) -> Path:
        """Return the control log that the master writes and all agents read."""
        return self.control / f"{incarnation:08d}.master"

    def meeting(self, incarnation: int) -> Path:
        """Return the file through which the trainers' ranks find each other."""
        return self.control / f"{incarnation:08d}.meeting"

    def agent_log(self, incarnation: int, group: str, task: int) -> Path:
        """Return the control log that one agent writes and the master reads."""
        return self.control / f"{incarnation:08d}.{group}.{task}"

    def checkpoint(self, step: int, incarnation: int) -> Path:
        return self.checkpoints / f"step-{step:08d}.{incarnation}"

    def damaged_checkpoint(self, directory: str) -> Path:
        """Return the place where the damaged commit in ``directory`` is kept for inspection."""
        return self.checkpoints / f"{DAMAGED_PREFIX}{directory}"

    def damaged_checkpoints(self) -> list[Path]:
        return sorted(self.checkpoints.glob(f"{DAMAGED_PREFIX}*"))

    def export(self, step: int, role: str = "actor", *, adapter: bool = False) -> Path:
        other = ("" if role == "actor" else f"-{role}") + ("-adapter" if adapter else "")
        return self.exports / f"step-{step:08d}{other}"

    def pinned(self, directory: str) -> Path:
        """Return the model folder with links to the files of the commit in ``directory``."""
        return self.exports / f"{directory}-checkpoint"

    being_evaluated = _RunEntry(BEING_EVALUATED)
    """Model folders with links to commits, for running trials of ``evaluation.tasks``."""

    def checkpoint_to_evaluate(self, directory: str) -> Path:
        return self.being_evaluated / self.pinned(directory).name

    def log(self, group: str, task: int, attempt: int) -> Path:
        return self.logs / group / f"{task}.{attempt}.log"

    def stacks(self, group: str, task: int, attempt: int, incarnation: int, number: int) -> Path:
        """Return the file for the stacks of a host's processes.

        ``number`` is the number of a user's request for stacks, or 0 for stacks that are collected
        before an incarnation ends.
        """
        return self.logs / group / f"{task}.{attempt}.stacks-{incarnation}.{number}.txt"

    def batch_log(self, group: str, element: str) -> Path:
        """Return the output file of the batch process of one array ``element`` (``slurm-41_0``)."""
        return self.logs / group / f"{element}.out"

    def event_file(self, writer: str) -> Path:
        return self.events / f"{writer}.jsonl"

    def channels(self) -> tuple[Path, ...]:
        """Return the directories with contents that do not outlive an incarnation."""
        return (self.control, self.leases)

    def directories(self) -> tuple[Path, ...]:
        """Return all directories that ``submit`` creates."""
        return (
            self.run,
            self.code,
            self.submissions,
            self.history,
            self.names,
            self.leases,
            self.hosts,
            self.control,
            self.samples,
            self.data,
            self.checkpoints,
            self.exports,
            self.events,
            self.logs,
        )
