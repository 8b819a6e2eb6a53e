"""Configurations of the separate trials with which `slurmrl eval` evaluates a checkpoint."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from slurmrl.algorithms.offline_schema import MEASURED
from slurmrl.config.hub import PREFIX as HUB_PREFIX
from slurmrl.config.load import Derive, load
from slurmrl.config.profiles import expanded
from slurmrl.config.schema import WHOLE, evaluation_key
from slurmrl.config.schema.roles import TRIAL_PREFIX
from slurmrl.config.source import KeyPath, Mark, Source, value_at
from slurmrl.desk.trials import DEFAULT_ROOT
from slurmrl.env import user_name
from slurmrl.errors import ConfigError, UsageError
from slurmrl.plan.algorithms import ALGORITHMS
from slurmrl.plan.dataflow import REWARD_MODEL
from slurmrl.plan.trial_references import LAST, parse
from slurmrl.registry import near
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import fold
from slurmrl.run.paths import BEING_EVALUATED, EVALUATED, RunPaths
from slurmrl.tensors.checkpoint.manifest import is_pinned, read_origin

EVALUATE: Final = "evaluate"
KEPT: Final = (
    "root",
    "seed",
    "deterministic",
    "code",
    "allocation_mode",
    "cluster",
    "transfer",
    "reward",
    "reward_model",
    "step_timeout_s",
    "logging",
    "notify",
)
"""Sections that an evaluation takes from the configuration of the trained model."""
OF_TRAINING: Final = ("path", "architecture", "optimizer", "lora", "ema", "cpu_offload")
"""Settings of `actor` that apply only to training or that the checkpoint replaces."""
OF_ROLLOUTS: Final = ("tasks", "publish", "slurm")
OF_ENGINES: Final = (
    *("backend", "gpus", "offload", "tensor_parallel_size", "pipeline_parallel_size"),
    *("servers", "server_weights", "server_keys"),
    *("python", "server_args", "server_start_s", "server_silence_s"),
)
"""Settings of `rollout` that concern only a generation engine (see `_actor_generates`)."""
OF_LAYOUT: Final = ("model", "gpus")
OF_HOSTS: Final = ("hosts", "workers_per_host")
"""Settings of `actor` and `cluster` that concern the layout of the trainers."""
OF_TRAINING_SAMPLES: Final = ("n", "temperature", "greedy", "top_p", "top_k", "replay_experts")
"""Settings of `rollout` that an evaluation does not take from training."""
SAMPLING: Final = ("n", "temperature", "greedy", "max_new_tokens")
"""Settings of `evaluation` that become settings of `rollout`."""
SCORING: Final = ("pass_score", "vote_pattern")
"""Settings of `evaluation` that become settings of the algorithm `evaluate`."""
LONGEST_NAME: Final = 64
EXPERIMENT: Final = "experiment="


@dataclass(frozen=True)
class EvaluatedModel:
    """A model to evaluate."""

    path: str
    """Value of `actor.path`."""
    name: str
    """Name of the trial that evaluates the model. The same command always gives the same name."""


def find_checkpoint(text: str, root: Path) -> EvaluatedModel:
    """Return the model that ``EXPERIMENT/TRIAL[@STEP]``, a folder or a hub repository names.

    Without a step, use the newest checkpoint that the trial has now. Raises UsageError for any
    other ``text``.
    """
    if text.startswith(HUB_PREFIX):
        return EvaluatedModel(text, _as_name(text.removeprefix(HUB_PREFIX)))
    folder = Path(os.path.expanduser(text))
    if not text.startswith(TRIAL_PREFIX) and (text.startswith(("/", ".", "~")) or folder.is_dir()):
        if not folder.is_dir():
            raise UsageError(f"--checkpoint {text}: no such folder")
        path = Path(os.path.abspath(folder))
        if path.parent.name == BEING_EVALUATED and is_pinned(path):
            origin = read_origin(path)
            return EvaluatedModel(str(path), _name_of(origin.trial, origin.step))
        return EvaluatedModel(str(path), _as_name("-".join(path.parts[-2:])))
    reference = parse(TRIAL_PREFIX + text.removeprefix(TRIAL_PREFIX))
    step = reference.step
    if not isinstance(step, int):
        step = _newest(RunPaths.of(root, user_name(), reference.experiment, reference.trial))
    return EvaluatedModel(f"{TRIAL_PREFIX}{reference.name}@{step}", _name_of(reference.name, step))


def _newest(paths: RunPaths) -> int | Literal["last"]:
    """Return the newest commit's step, else `LAST`, which a later check rejects with a reason."""
    commit = fold(History(paths.history).read()).last_commit if paths.history.exists() else None
    return LAST if commit is None else commit.step


def _name_of(trial: str, step: int | str) -> str:
    """Return the name of the trial that evaluates a step of another trial."""
    return _as_name(f"{trial.replace('/', '-')}-step-{step}")


def _as_name(text: str) -> str:
    """Return a valid name. In a long name, a digest replaces the start, so that names differ."""
    name = re.sub(r"[^A-Za-z0-9._-]+|\.\.+", "-", text).strip(".-_")
    if len(name) > LONGEST_NAME:
        name = f"{hashlib.sha256(name.encode()).hexdigest()[:8]}-{name[9 - LONGEST_NAME :]}"
    return name or "model"


def of_evaluation(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of an evaluation for the overrides of the trained trial.

    ``experiment=NAME`` is the trained trial's experiment, which determines the experiment of the
    evaluation.
    """
    unset = (EXPERIMENT, f"{EXPERIMENT}null")
    return [
        f"{each}{EVALUATED}" if each.startswith(EXPERIMENT) and each not in unset else each
        for each in overrides
    ]


def choose_suites(config: Path, wanted: Sequence[str]) -> Sequence[str]:
    """Return the suites of a configuration's evaluation that are ``wanted``, or all of them.

    Return `WHOLE` for an evaluation without suites. Raises UsageError for unknown suites.
    """
    evaluation = load(config).values.get("evaluation")
    suites = evaluation.get("suites") if isinstance(evaluation, dict) else None
    known = [str(name) for name in suites] if isinstance(suites, dict) else []
    for name in wanted:
        if name not in known:
            hint = near(name, known) if known else f"{config} has no evaluation.suites"
            raise UsageError(f"--suite {name}: no such suite; {hint}")
    return list(dict.fromkeys(wanted)) or known or [WHOLE]


def evaluation_of(checkpoint: str, root: Path | None, suite: str = WHOLE) -> Derive:
    """Return the function that turns a configuration into an evaluation of ``checkpoint``.

    The checkpoint replaces the model. A named suite replaces dataset, reward, sampling and scoring.
    If the algorithm is not `evaluate`, it becomes `evaluate`: the `evaluation` section replaces the
    settings of training.

    Args:
        checkpoint: See `find_checkpoint`.
        root: Replaces the configuration's root.
        suite: One of the results of `choose_suites`.
    """

    def derive(source: Source) -> None:
        if not isinstance(algorithm := source.values.get("algorithm"), dict):
            return  # The check of the values will report this.
        folder = root or Path(_root_of(source))
        model = find_checkpoint(checkpoint, folder.absolute())
        if suite != WHOLE or algorithm.get("name") != EVALUATE:
            _from_evaluation(source, algorithm, suite)
        if "experiment" in source.values:  # Another check reports a missing name.
            source.values["experiment"] = f"{source.spelling(('experiment',))}{EVALUATED}"
        source.values["trial"] = _as_name(f"{model.name}-{suite}") if suite else model.name
        actor = source.values.setdefault("actor", {})
        if isinstance(actor, dict):
            actor["path"] = model.path

    return derive


def _root_of(source: Source) -> str:
    """Return the folder of all runs of a configuration."""
    text = str(source.values.get("root") or DEFAULT_ROOT)
    try:
        return text if source.resolved else expanded(text)
    except UsageError as error:
        raise ConfigError((source.problem(("root",), str(error)),)) from error


class _Derived:
    """The values of an evaluation, copied from a source with their places in the file."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.values: dict[str, Any] = {"algorithm": {"name": EVALUATE}}
        self.marks: dict[KeyPath, Mark] = {}

    def take(self, old: KeyPath, new: KeyPath, without: Sequence[str] = ()) -> None:
        value, section = value_at(self.source.values, old), value_at(self.values, new[:-1])
        if value is None or not isinstance(section, dict):
            return  # The check of the values will report that this is no section.
        if isinstance(value, dict):
            value = {key: each for key, each in value.items() if key not in without}
        section[str(new[-1])] = value
        count = len(old)
        marks = self.source.marks.items()
        self.marks.update({new + at[count:]: mark for at, mark in marks if at[:count] == old})

    def written(self, *key: str) -> Any:
        return value_at(self.source.values, key)


def _from_evaluation(source: Source, algorithm: dict[str, Any], suite: str) -> None:
    """Replace the training settings by the evaluation of a suite."""
    if not isinstance(source.values.get("evaluation"), dict):
        message = f"is required to evaluate a model of algorithm {algorithm.get('name')}"
        raise ConfigError((source.problem(("evaluation",), message),))
    where = evaluation_key(suite)
    measure = _measure(source, where, algorithm.get("name"))
    derived = _Derived(source)
    if algorithm.get("name") == EVALUATE:
        for key in source.values:
            derived.take((key,), (key,))
        derived.values.pop("evaluation")
    else:
        _from_training(derived)
    _for_tasks(derived)
    derived.values["algorithm"]["measure"] = measure
    if suite != WHOLE:
        derived.values["algorithm"]["suite"] = suite
    derived.take((*where, "dataset"), ("dataset",))
    if measure == "completions":
        derived.values.setdefault("rollout", {})
        derived.take((*where, "reward"), ("reward",))
        for section in dict.fromkeys((("evaluation",), where)):
            for name in SAMPLING:
                derived.take((*section, name), ("rollout", name))
            for name in SCORING:
                derived.take((*section, name), ("algorithm", name))
    else:
        for key in ("rollout", "reward", "reward_model"):
            derived.values.pop(key, None)
    source.values, source.marks = derived.values, derived.marks


def _from_training(derived: _Derived) -> None:
    """Take the settings that an evaluation shares with the trained trial."""
    for key in ("experiment", *KEPT):
        derived.take((key,), (key,))
    derived.take(("actor",), ("actor",), OF_TRAINING)
    derived.take(("algorithm", "batch_size"), ("algorithm", "batch_size"))
    engine = OF_ENGINES if _actor_generates(derived) else ()
    derived.take(("rollout",), ("rollout",), (*OF_ROLLOUTS, *OF_TRAINING_SAMPLES, *engine))


def _actor_generates(derived: _Derived) -> bool:
    """Return whether the actor's engine generates in the evaluation instead of training's engine.

    Training's engine cannot be used if it belongs to rollout tasks, has a different layout than the
    evaluation, or is a running server with the trainers' weights.
    """
    tasks = derived.written("evaluation", "tasks")
    return bool(
        derived.written("rollout", "tasks") is not None
        or derived.written("evaluation", "tasks", "backend")
        or (tasks is not None and derived.written("rollout", "servers"))
    )


def _for_tasks(derived: _Derived) -> None:
    """Apply `evaluation.tasks` to a configuration."""
    if derived.written("evaluation", "tasks", "backend"):
        derived.take(("actor",), ("actor",), (*OF_TRAINING, *OF_LAYOUT))
        derived.take(("cluster",), ("cluster",), OF_HOSTS)
        derived.take(("evaluation", "tasks", "backend"), ("actor", "backend"))
    changes = derived.written("evaluation", "tasks", "slurm")
    cluster = derived.values.setdefault("cluster", {})
    if not isinstance(changes, dict) or not isinstance(cluster, dict):
        return
    cluster["slurm"] = {}
    derived.take(("cluster", "slurm"), ("cluster", "slurm"))
    for key, value in changes.items():
        derived.take(("evaluation", "tasks", "slurm", key), ("cluster", "slurm", key))
        # An empty string selects the cluster's default: the setting is omitted.
        if value == "" and isinstance(cluster["slurm"], dict):
            cluster["slurm"].pop(key)


def _measure(source: Source, evaluation: KeyPath, algorithm: Any) -> str:
    """Return the measure for an evaluation's type of dataset.

    Preferences need a model with a scalar head, which only the algorithm `reward_model` trains as
    its actor. Raises ConfigError for a type that cannot be evaluated.
    """
    dataset = value_at(source.values, (*evaluation, "dataset"))
    kind = dataset.get("like") or dataset.get("type") if isinstance(dataset, dict) else None
    known = isinstance(algorithm, str) and algorithm in ALGORITHMS
    others = known and algorithm not in (EVALUATE, REWARD_MODEL)
    measured = dict(MEASURED)
    if others:
        del measured["preferences"]
    for measure, kinds in measured.items():
        if kind in kinds:
            return measure
    allowed = ", ".join(kind for kinds in measured.values() for kind in kinds)
    of_what = f" of a model of {algorithm}" if others else ""
    message = (
        f"{kind!r} cannot be evaluated by a separate trial{of_what}; allowed: {allowed}. To "
        "evaluate as in training, submit a trial with total_steps=0"
    )
    raise ConfigError((source.problem((*evaluation, "dataset", "type"), message),))
