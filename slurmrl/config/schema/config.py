"""The whole configuration, and its sections for checkpoints, logs and notices."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator

from slurmrl.config.schema.base import (
    Line,
    Name,
    NonNegativeInt,
    PathText,
    PlainPathText,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    Sequence,
    Unit,
    Word,
)
from slurmrl.config.schema.cluster import Cluster
from slurmrl.config.schema.data import Dataset
from slurmrl.config.schema.evaluation import WHOLE, Evaluation
from slurmrl.config.schema.reward import Reward
from slurmrl.config.schema.roles import Model
from slurmrl.config.schema.rollout import EARNS_NOTHING, Rollout, Transfer
from slurmrl.config.source import KeyPath
from slurmrl.errors import UsageError


def _check_variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("must be the name of an environment variable, not the secret itself")
    return name


def _check_tracking_uri(uri: str) -> str:
    """Reject a URL with a password or token, because others may read files with the URL."""
    parts = urlsplit(uri)
    if "@" in parts.netloc and parts.scheme in ("http", "https"):
        raise ValueError(
            "must not contain a user name or password; set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD in cluster.variables_file instead"
        )
    known = ("http", "https", "file", "databricks", *DATABASES)
    if not uri.startswith("/") and parts.scheme.partition("+")[0] not in known:
        raise ValueError("must be a URL (https://…) or an absolute path")
    return uri


DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
VariableName = Annotated[Word, AfterValidator(_check_variable)]
ExportDtype = Literal["auto", "source", "float32", "bfloat16", "float16"]
ExportForm = Literal["merged", "adapter"]


class Checkpoint(Section):
    """Commits of the run, and the checkpoints that it keeps. A run always commits at its end."""

    every_steps: PositiveInt | None = 10
    """Steps between commits. `null` disables commits by steps."""
    every_seconds: PositiveFloat | None = None
    """Time between commits. The run commits at the end of a step. `null` disables commits by time.
    Example: `1800`"""
    every_epochs: PositiveInt | None = None
    """Epochs of the dataset between commits. `null` disables commits by epochs. Example: `1`"""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_every_steps: PositiveInt | None = None
    """Also keep each checkpoint permanently if its step is a multiple of this number. `null` keeps
    only the newest checkpoints. Example: `100`"""
    asynchronous: bool = True
    """Continue training while a checkpoint is written. Each rank first copies its weights and
    optimizer state to host memory, which needs additional host memory of the same size. A job waits
    for its last checkpoint."""
    export_at_end: bool = True
    """Export the trained actor in Hugging Face format when a run of at least one step finishes."""
    export_dtype: ExportDtype = "auto"
    """Data type of exported weights; `slurmrl export --dtype` overrides it. Checkpoints are always
    in float32.

    - `source`: each tensor keeps its type in the folder `<role>.path`. A new model has the
      `dtype` of its `architecture`, or float32.
    - `auto`: `source` if at least 90 % of the training's update survives rounding to that type,
      else float32.
    - `float32`, `bfloat16`, `float16`: all tensors have this type."""
    export_form: ExportForm = "merged"
    """Form of the export of an actor with `lora`; `slurmrl export --form` overrides it.

    - `merged`: a complete model, which transformers and `trial:` paths load.
    - `adapter`: a folder for PEFT with only the adapters, which PEFT adds to the model of
      `actor.path`."""


class Wandb(Section):
    """Logging of metrics to Weights & Biases (requires the wandb package).

    Example: `{project: my-project, mode: online}`
    """

    project: Word
    """Name of the project. Example: `my-project`"""
    mode: Literal["offline", "online"] = "offline"
    """`offline` writes files for a later `wandb sync`; `online` sends metrics during the run."""


class Mlflow(Section):
    """Logging of metrics to MLflow (requires the mlflow-skinny package, or mlflow).

    Example: `{experiment: my-experiment}`
    """

    experiment: Word
    """Name of the experiment. Example: `my-experiment`"""
    tracking_uri: Annotated[Word, AfterValidator(_check_tracking_uri)] | None = None
    """URL of a tracking server, or absolute path of a folder. Set the user, password or token of a
    server in `cluster.variables_file` (`MLFLOW_TRACKING_USERNAME`, …). Default: the folder
    `mlflow/` in the run directory. Example: `https://mlflow.example.org`"""

    @property
    def is_database(self) -> bool:
        """Whether the URL names a database, which the library accesses directly."""
        scheme = (self.tracking_uri or "").partition(":")[0].partition("+")[0]
        return scheme in DATABASES


class Logging(Section):
    """Logs and outputs in addition to `metrics.jsonl`."""

    every_steps: PositiveInt | None = 1
    """Steps between progress lines in the log; `metrics.jsonl` has every step. `null` disables
    lines by steps."""
    every_seconds: PositiveFloat | None = None
    """Time between progress lines. Lines are written at the end of a step. `null` disables lines by
    time. Example: `60`"""
    every_epochs: PositiveInt | None = None
    """Epochs of the dataset between progress lines. `null` disables lines by epochs. Example: `1`
    """
    tensorboard: bool = False
    """Also write TensorBoard event files to `tensorboard/` in the run directory (requires the
    tensorboard package)."""
    wandb: Wandb | None = None
    """Also log metrics to Weights & Biases."""
    mlflow: Mlflow | None = None
    """Also log metrics to MLflow."""
    output_mib: PositiveInt = 64
    """Maximum size in `logs/` of the output of one host's processes, over all attempts. The master
    has a separate limit of the same size. slurmrl keeps the newest output. Sizes are checked every
    few seconds, so a file may briefly exceed the limit."""
    samples: Annotated[NonNegativeInt, Unit("completions")] = 4
    """Number of completions per step and per evaluation that each rank writes to `samples/`,
    rounded up to all completions of a prompt. `sft` writes rows that it trains on, in the first
    10 steps and in every 100th step. 0 writes none."""
    sample_tokens: NonNegativeInt = 256
    """Number of tokens of each completion in `samples/` that are written with their advantages,
    log-probabilities and weight versions. `slurmrl report` shows these tokens. 0 writes none."""
    report: bool = True
    """Write `report.html`, as `slurmrl report` does, when the run has finished or failed."""


class Notify(Section):
    """Notifications at the end of a trial."""

    webhook: VariableName | None = None
    """Name of the environment variable that holds a URL. slurmrl posts a JSON object to this URL
    when the trial has finished or failed. Define the variable in `cluster.variables_file`;
    compute nodes must reach the URL. Default: none. Example: `SLACK_WEBHOOK`"""


FOLLOWERS: Final = ("critic", "ref", "teacher", "reward_model")
"""Roles that have the actor's layout unless they set a layout."""
ROLES: Final = ("actor", *FOLLOWERS)
OWN_ROLE: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")


def _check_role(name: str) -> str:
    if not OWN_ROLE.fullmatch(name) or keyword.iskeyword(name):
        raise ValueError(
            "a role has a name of 1 to 32 lower-case letters, digits or '_' that starts with a "
            "letter"
        )
    if name in Config.model_fields:
        raise ValueError(f"'{name}' is already a section of the configuration")
    return name


RoleName = Annotated[str, AfterValidator(_check_role)]


def role_key(role: str) -> KeyPath:
    """Return the key of a role's section."""
    return (role,) if role in ROLES else ("models", role)


def evaluation_key(suite: str) -> KeyPath:
    """Return the key of a suite's section, or of the evaluation section for `WHOLE`."""
    return ("evaluation",) if suite == WHOLE else ("evaluation", "suites", suite)


class Config(Section):
    """One trial."""

    experiment: Name
    """Name of the experiment, which groups its trials in one folder. Example: `addition`"""
    trial: Name = "1"
    """Name of this trial."""
    seed: Seed = 1
    """Seed of all random numbers."""
    root: PlainPathText = "./runs"
    """Folder of all runs, in a directory that all hosts share. A relative path starts at the
    current directory. Colons are not allowed. `--root` and SLURMRL_ROOT take precedence."""
    total_steps: NonNegativeInt | None = None
    """Number of steps after which the run is finished. 0 only evaluates the models. Required for
    training. `generate` and `evaluate` process the dataset once, or this many batches of it.
    Default: none. Example: `400`"""
    stop_when: str | None = None
    """Condition that ends the run early: `METRIC >= NUMBER` or `METRIC <= NUMBER`. slurmrl rejects
    a metric that no step reports. If a custom reward may report the metric, the log warns while
    it is absent. Default: none. Example: `eval/reward >= 0.4`"""
    deterministic: bool | None = None
    """Give bit-identical results regardless of interruptions. On GPUs this is slower. Default: true
    on CPUs, false on GPUs."""
    max_restarts_without_commit: PositiveInt = 3
    """Number of consecutive starts without a new commit after which the trial fails."""
    step_timeout_s: PositiveFloat = 1800.0
    """Time after which an unfinished call counts as failed."""
    code: Sequence[PathText] = ()
    """Your Python files and folders that the run imports. slurmrl copies them when you submit. The
    modules in `algorithm.name`, `reward.name` and `dataset.type`, and their imports from the same
    folder, are copied too. Each file and folder can be imported by its name. Example: `[rewards.py,
    my_package]`"""
    allocation_mode: Line = ""
    """Deprecated: the layouts of all roles in one string, as ReaL and AReaL write it. Write
    `<role>.backend` instead; a warning shows the new spelling. Example: `sglang.d2t2p1+d1t4p1`"""
    algorithm: dict[str, Any]
    """The algorithm: its `name` and the settings of this algorithm. Example: `{name: grpo,
    batch_size: 64}`"""
    cluster: Cluster = Cluster()
    actor: Model
    """The model that is trained and exported."""
    critic: Model | None = None
    """The value model, for algorithms that have one. Default: initialized from the actor."""
    ref: Model | None = None
    """The reference model of the KL penalty, for algorithms that have one. Default: the initial
    actor."""
    teacher: Model | None = None
    """The model from which `distill` learns. `teacher` needs a `path`, and must have the actor's
    tokenizer."""
    reward_model: Model | None = None
    """The model behind a reward named `model`. `path` is required: an export of `algorithm.name:
    reward_model`, or another folder with a scalar head. It needs the actor's tokenizer."""
    models: dict[RoleName, Model] = Field(default_factory=dict)
    """Models of a custom algorithm, by the names of its roles (docs/algorithms/custom.md). A role
    without a section is the initial actor."""
    rollout: Rollout = Rollout()
    transfer: Transfer = Transfer()
    reward: Reward | None = None
    dataset: Dataset
    evaluation: Evaluation | None = None
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    notify: Notify = Notify()

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the built-in roles and of the roles in `models`."""
        return (*ROLES, *self.models)

    def find_model(self, role: str) -> Model | None:
        """Return the section of a role; None without a section."""
        section: Model | None = getattr(self, role) if role in ROLES else self.models.get(role)
        return section

    def model(self, role: str) -> Model:
        """Return the section of a role that the algorithm uses."""
        section = self.find_model(role)
        assert section is not None, f"the configuration has no section for {role}"
        return section

    def with_models(self, models: Mapping[str, Model]) -> Config:
        """Return the configuration with other sections for some roles."""
        own = {role: model for role, model in models.items() if role not in ROLES}
        known = {role: model for role, model in models.items() if role in ROLES}
        return self.model_copy(update={**known, "models": {**self.models, **own}})

    @property
    def evaluations(self) -> dict[str, Config]:
        """Mapping from a suite's name to the configuration with which the suite is evaluated.

        Each configuration has the suite's dataset, settings and reward. An evaluation without
        suites has the name `WHOLE`.
        """
        if self.evaluation is None or not self.evaluation.suites:
            return {} if self.evaluation is None else {WHOLE: self}
        return {
            name: self.model_copy(
                update={
                    "evaluation": part,
                    "reward": self.evaluation.suites[name].reward or self.reward,
                }
            )
            for name, part in self.evaluation.parts.items()
        }

    @property
    def asks_slurm(self) -> bool:
        """Whether the configuration has settings that apply only to a cluster."""
        tasks = self.evaluation.tasks if self.evaluation is not None else None
        options = [self.rollout.slurm, *([tasks.slurm] if tasks is not None else [])]
        return self.cluster.asks_slurm or any(
            each.model_dump(exclude_none=True) for each in options
        )

    @property
    def trainers_evaluate(self) -> bool:
        """Whether the trainers run the evaluations; false without evaluations."""
        return self.evaluation is not None and self.evaluation.tasks is None

    @property
    def rollout_evaluates(self) -> bool:
        """Whether the engine of `rollout.backend` also generates for evaluations.

        With rollout tasks, the trainers' ranks generate for evaluations instead.
        """
        return self.trainers_evaluate and self.rollout.tasks is None

    @property
    def evaluation_trials_roll_out(self) -> bool:
        """Whether evaluations in separate trials generate with an engine like `rollout.backend`."""
        tasks = self.evaluation.tasks if self.evaluation is not None else None
        if tasks is None or tasks.backend or not self.rollout.backend:
            return False
        return self.rollout.tasks is None and not self.rollout.servers

    @property
    def held_out(self) -> Dataset:
        """The held-out dataset of a configuration that `evaluations` returned."""
        assert self.evaluation is not None, "the caller evaluates"
        assert self.evaluation.dataset is not None, "one of `evaluations`"
        return self.evaluation.dataset

    def datasets(self) -> dict[KeyPath, Dataset]:
        """Return a mapping from section keys to the datasets for training and evaluations."""
        held_out = {
            (*evaluation_key(suite), "dataset"): own.held_out
            for suite, own in self.evaluations.items()
        }
        return {("dataset",): self.dataset, **held_out}

    def with_datasets(self, changed: Callable[[KeyPath, Dataset], Dataset]) -> Config:
        """Return the configuration with other datasets.

        ``changed`` returns the new dataset for a section's key and its dataset.
        """
        update: dict[str, Any] = {"dataset": changed(("dataset",), self.dataset)}
        if (evaluation := self.evaluation) is not None:
            own: dict[str, Any] = {
                "suites": {
                    name: suite.model_copy(
                        update={
                            "dataset": changed((*evaluation_key(name), "dataset"), suite.dataset)
                        }
                    )
                    for name, suite in evaluation.suites.items()
                }
            }
            if evaluation.dataset is not None:
                own["dataset"] = changed((*evaluation_key(WHOLE), "dataset"), evaluation.dataset)
            update["evaluation"] = evaluation.model_copy(update=own)
        return self.model_copy(update=update)

    def rewards(self) -> dict[KeyPath, Reward]:
        """Return a mapping from section keys to the trial's reward and the rewards of suites."""
        found: dict[KeyPath, Reward | None] = {("reward",): self.reward}
        for name, suite in (self.evaluation.suites if self.evaluation else {}).items():
            found[*evaluation_key(name), "reward"] = suite.reward
        return {key: reward for key, reward in found.items() if reward is not None}

    @property
    def evaluates_completions(self) -> bool:
        """Whether evaluations of an algorithm that trains on given answers generate completions.

        Otherwise evaluations compute the loss of held-out answers.
        """
        return self.evaluation is None or self.held_out.kind == "prompt"

    @property
    def default_pass_score(self) -> float | None:
        """Minimum reward of a correct completion if rewards are 1 or 0; None for other rewards."""
        episode = self.rollout.episode
        earns = episode.has_turns and (
            episode.environment is None or episode.environment.name != EARNS_NOTHING
        )
        return 1.0 if self.reward is not None and self.reward.is_binary and not earns else None

    def data_paths(self) -> tuple[str, ...]:
        """Return the files and folders of all datasets."""
        sections = self.datasets().values()
        paths = [part.path for section in sections for part in section.parts.values()]
        return tuple(dict.fromkeys(paths))

    @field_validator("stop_when")
    @classmethod
    def _stop_when_parses(cls, text: str | None) -> str | None:
        if text is not None:
            StopWhen.parse(text)
        return text


_CONDITION: Final = re.compile(r"\s*([A-Za-z_][\w./@-]*)\s*(>=|<=)\s*(\S+)\s*")


@dataclass(frozen=True)
class StopWhen:
    """A condition on a metric of a step: ``METRIC >= NUMBER`` or ``METRIC <= NUMBER``."""

    metric: str
    operator: str
    number: float

    @staticmethod
    def parse(text: str) -> StopWhen:
        """Parse a condition. Raises UsageError (a ValueError) with the expected form."""
        match = _CONDITION.fullmatch(text)
        number = _number(match[3]) if match else None
        if match is None or number is None:
            raise UsageError(
                "expected METRIC >= NUMBER or METRIC <= NUMBER, for example eval/reward >= 0.4"
            )
        return StopWhen(match[1], match[2], number)

    def met(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether the condition holds; return false for a step without the metric."""
        value = metrics.get(self.metric)
        if not isinstance(value, int | float):
            return False
        return value >= self.number if self.operator == ">=" else value <= self.number

    def __str__(self) -> str:
        return f"{self.metric} {self.operator} {self.number:g}"


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


class Frequency:
    """Decides when an action is due: after some steps, seconds or epochs, whichever comes first.

    All counters restart when the action is due. The run commits ``state``, so that a resumed run
    continues to count steps and epochs. Seconds start again with each process.
    """

    def __init__(
        self,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        every_epochs: int | None = None,
        *,
        now_s: float = 0.0,
    ) -> None:
        self.every_steps = every_steps
        self.every_seconds = every_seconds
        self.every_epochs = every_epochs
        self._step = 0
        self._epoch = 0
        self._time_s = now_s

    def check(self, step: int, epochs: int, now_s: float) -> bool:
        """Return whether the action is due.

        ``step`` and ``epochs`` are numbers of completed steps and epochs. ``now_s`` is the time of
        a monotonic clock in seconds.
        """
        due = (
            (self.every_steps is not None and step - self._step >= self.every_steps)
            or (self.every_epochs is not None and epochs - self._epoch >= self.every_epochs)
            or (self.every_seconds is not None and now_s - self._time_s >= self.every_seconds)
        )
        if due:
            self._step, self._epoch, self._time_s = step, epochs, now_s
        return due

    def state(self) -> dict[str, int]:
        return {"step": self._step, "epoch": self._epoch}

    def restore(self, state: Mapping[str, int]) -> None:
        self._step, self._epoch = state["step"], state["epoch"]
