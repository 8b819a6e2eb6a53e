"""The paths of a trial. No other module joins path names of the run directory."""

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
    """Prefix of the part files that an incarnation writes for a step."""
    return f"step-{step:08d}.{incarnation}"


def evaluation_prefix(step: int, incarnation: int, call: int) -> str:
    """`part_prefix` of the ``call``-th call of an evaluation after a step."""
    return f"{EVALUATION}{step:08d}.{incarnation}.{call}"


def rotated(log: Path) -> Path:
    """Return the path of the previous part of a rotated output file."""
    return log.with_name(f"{log.name}.1")


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

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.run / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.run / "plan.json"

    @property
    def identity(self) -> Path:
        """The trial's uuid and creation time; its exclusive creation creates the trial."""
        return self.run / "trial.json"

    @property
    def code(self) -> Path:
        """Snapshot of the code that the run uses, taken when the trial was created."""
        return self.run / "code"

    def snapshot(self, number: int) -> Path:
        """Return the path of the ``number``-th snapshot of the code (``code``, ``code.2``, …)."""
        return self.code if number == 1 else self.run / f"code.{number}"

    @property
    def history(self) -> Path:
        return self.run / "history"

    @property
    def names(self) -> Path:
        return self.run / "names"

    @property
    def leases(self) -> Path:
        return self.run / "leases"

    @property
    def hosts(self) -> Path:
        """Failed starts by host, and the hosts that jobs avoid."""
        return self.run / "hosts"

    @property
    def control(self) -> Path:
        return self.run / "control"

    @property
    def samples(self) -> Path:
        return self.run / "samples"

    @property
    def data(self) -> Path:
        """Tokenized datasets."""
        return self.run / "data"

    @property
    def weights(self) -> Path:
        """Weight versions that ``rollout.servers`` read."""
        return self.run / "weights"

    @property
    def versions(self) -> Path:
        """Weight versions that trainers publish for rollout hosts.

        Each version has a directory with its name (see `weights`).
        """
        return self.run / "versions"

    @property
    def rollouts(self) -> Path:
        """Requests to rollout tasks and their answers, in a directory for each attempt of a task.

        The folder outlives incarnations.
        """
        return self.run / "rollouts"

    def rollout_task(self, group: str, task: int, attempt: int) -> Path:
        return self.rollouts / f"{group}.{task}.{attempt}"

    def rollout_requests(self, group: str, task: int, attempt: int, incarnation: int) -> Path:
        """Log of requests that the master of an incarnation writes and the task reads."""
        return self.rollout_task(group, task, attempt) / f"{incarnation:08d}.requests"

    def rollout_results(self, group: str, task: int, attempt: int) -> Path:
        """Log of results that the task writes and the masters of all incarnations read."""
        return self.rollout_task(group, task, attempt) / "results"

    def rollout_samples(self, group: str, task: int, attempt: int) -> Path:
        """Folder of the sample files that the result log names."""
        return self.samples_of(self.rollout_task(group, task, attempt).name)

    def samples_of(self, attempt: str) -> Path:
        """Folder of the sample files of an attempt, by the name of the attempt's directory."""
        return self.rollouts / attempt / "samples"

    def rollout_meeting(self, group: str, task: int, attempt: int) -> Path:
        """Return where the ranks of the task find each other."""
        return self.rollout_task(group, task, attempt) / "meeting"

    def scale(self, group: str) -> Path:
        """The number of tasks of an elastic group that a user has set."""
        return self.run / f"scale.{group}.json"

    def orphaned(self, group: str) -> Path:
        """Record that the trainers were absent for too long, written by the group's last task."""
        return self.run / f"orphaned.{group}.json"

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    @property
    def exports(self) -> Path:
        return self.run / "export"

    @property
    def results(self) -> Path:
        """Results of a trial that records a line for each item."""
        return self.run / "results.jsonl"

    @property
    def summary(self) -> Path:
        """Summary of the results."""
        return self.run / "summary.json"

    @property
    def overview(self) -> Path:
        """Line of a finished trial in lists of trials (see `watch.overview`)."""
        return self.run / "overview.json"

    @property
    def parts(self) -> Path:
        """Folder of the results of single steps."""
        return self.run / "parts"

    def part(self, prefix: str, number: int) -> Path:
        """The ``number``-th part file of a step (see `part_prefix`)."""
        return self.parts / f"{prefix}.{number}.jsonl"

    def evaluated(self) -> Path:
        """The folder of trials in which ``slurmrl eval`` evaluates this trial's checkpoints."""
        return self.run.parent.parent / f"{self.experiment}{EVALUATED}"

    @property
    def evaluations(self) -> Path:
        """The scores of the items of evaluations during training."""
        return self.run / "evaluations"

    def evaluation(self, step: int, suite: str = "") -> Path:
        name = f".{suite}" if suite else ""
        return self.evaluations / f"step-{step:08d}{name}.json"

    def evaluation_mark(self, directory: str, suite: str) -> Path:
        """Empty file whose existence says that the evaluation of a commit was submitted."""
        name = f".{suite}" if suite else ""
        return self.evaluation_marks / f"{directory}{name}"

    @property
    def evaluation_marks(self) -> Path:
        return self.run / "submitted_evaluations"

    @property
    def metrics(self) -> Path:
        return self.run / "metrics.jsonl"

    @property
    def arrived(self) -> Path:
        """Results of trials that evaluate checkpoints of this trial, in order of arrival."""
        return self.run / "evaluations.jsonl"

    @property
    def report(self) -> Path:
        """HTML file of ``slurmrl report``."""
        return self.run / "report.html"

    def notice(self, slot: int) -> Path:
        """Return the claim file of a notice.

        The process that creates it (exclusively) may post the notice of the end that this slot of
        the history records.
        """
        return self.run / f"notice.{slot}.json"

    @property
    def timeline(self) -> Path:
        """Times at which the ranks executed the calls of the newest steps."""
        return self.run / "timeline.json"

    @property
    def estimates(self) -> Path:
        """Estimates of memory and time from the plan."""
        return self.run / "estimates.json"

    @property
    def tensorboard(self) -> Path:
        return self.run / "tensorboard"

    @property
    def arrived_tensorboard(self) -> Path:
        return self.tensorboard / "evaluations"

    @property
    def wandb(self) -> Path:
        return self.run / "wandb"

    @property
    def mlflow(self) -> Path:
        return self.run / "mlflow"

    def sink(self, name: str) -> Path:
        """Record of the step up to which a sink has the metrics."""
        return self.run / "sinks" / f"{name}.json"

    @property
    def arrived_sinks(self) -> Path:
        """Record of how many of the arrived evaluations each sink has."""
        return self.sink("evaluations")

    @property
    def arrived_turns(self) -> Path:
        """Claims of the right to send arrived results to sinks, see `watch.sinks.arrivals.turn`."""
        return self.run / "sinks" / "turns"

    @property
    def events(self) -> Path:
        return self.run / "events"

    @property
    def logs(self) -> Path:
        return self.run / "logs"

    @property
    def submissions(self) -> Path:
        return self.run / "submissions"

    def submission(self, number: int) -> Path:
        return self.submissions / str(number)

    def submission_request(self, number: int) -> Path:
        """The request of a submission; its exclusive creation creates the submission."""
        return self.submission(number) / "request.json"

    def submission_script(self, number: int, group: str) -> Path:
        """Batch script of a group."""
        return self.submission(number) / f"{group}.sh"

    def submission_jobs(self, number: int) -> Path:
        """Job ids by group."""
        return self.submission(number) / "jobs.json"

    def submission_stop(self, number: int) -> Path:
        """A user's request that the submission stops."""
        return self.submission(number) / "stop"

    def submission_environment(self, number: int) -> Path:
        """Environment variables that the jobs inherit from the submitting shell."""
        return self.submission(number) / "environment.json"

    def extension_claim(self, number: int, group: str, index: int) -> Path:
        """Claim file: its exclusive creation grants the right to extend a group by an array."""
        return self.submission(number) / f"{group}.more.{index}.json"

    def extension_job(self, number: int, group: str, index: int) -> Path:
        """Job id of the array that an extension added."""
        return self.submission(number) / f"{group}.more.{index}.job.json"

    def local_chain(self, number: int, group: str) -> Path:
        """State of the local scheduler's chain of a group."""
        return self.submission(number) / f"local.{group}.json"

    def lease(self, group: str, task: int, attempt: int) -> Path:
        """Heartbeat file of one attempt of a task's agent."""
        return self.leases / f"{group}.{task}.{attempt}"

    def master_log(self, incarnation: int) -> Path:
        """Control log that the master writes and all agents read."""
        return self.control / f"{incarnation:08d}.master"

    def meeting(self, incarnation: int) -> Path:
        """Return where the trainers' ranks find each other."""
        return self.control / f"{incarnation:08d}.meeting"

    def agent_log(
        self, incarnation: int, group: str, task: int, attempt: int | None = None
    ) -> Path:
        """Control log that one agent writes and the master reads.

        ``attempt`` numbers the starts of a task in an incarnation; None for the trainers.
        """
        started = "" if attempt is None else f".{attempt}"
        return self.control / f"{incarnation:08d}.{group}.{task}{started}"

    def checkpoint(self, step: int, incarnation: int) -> Path:
        return self.checkpoints / f"step-{step:08d}.{incarnation}"

    def damaged_checkpoint(self, directory: str) -> Path:
        """Return where the directory of a damaged commit is kept for inspection."""
        return self.checkpoints / f"{DAMAGED_PREFIX}{directory}"

    def damaged_checkpoints(self) -> list[Path]:
        return sorted(self.checkpoints.glob(f"{DAMAGED_PREFIX}*"))

    def export(self, step: int, role: str = "actor", *, adapter: bool = False) -> Path:
        other = ("" if role == "actor" else f"-{role}") + ("-adapter" if adapter else "")
        return self.exports / f"step-{step:08d}{other}"

    def pinned(self, directory: str) -> Path:
        """A model folder with links to the files of a commit, named like its directory."""
        return self.exports / f"{directory}-checkpoint"

    @property
    def being_evaluated(self) -> Path:
        """Such a folder for a trial of ``evaluation.tasks``, as long as the trial needs it."""
        return self.run / BEING_EVALUATED

    def checkpoint_to_evaluate(self, directory: str) -> Path:
        return self.being_evaluated / self.pinned(directory).name

    def log(self, group: str, task: int, attempt: int) -> Path:
        return self.logs / group / f"{task}.{attempt}.log"

    def stacks(self, group: str, task: int, attempt: int, incarnation: int, number: int) -> Path:
        """Return the file for the stacks of a host's processes.

        The stacks are collected before an incarnation ends (``number`` 0) or for the request
        ``number``.
        """
        return self.logs / group / f"{task}.{attempt}.stacks-{incarnation}.{number}.txt"

    def batch_log(self, group: str, element: str) -> Path:
        """Output of the batch process of one array element, such as ``slurm-41_0``."""
        return self.logs / group / f"{element}.out"

    def event_file(self, writer: str) -> Path:
        return self.events / f"{writer}.jsonl"

    def channels(self) -> tuple[Path, ...]:
        """Directories whose contents do not outlive an incarnation."""
        return (self.control, self.leases)

    def directories(self) -> tuple[Path, ...]:
        """All directories that ``submit`` creates."""
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
