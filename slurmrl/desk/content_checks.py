"""Checks of a trial's rows: changes since the last commit, lengths, and a score by the reward.

The module is torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from slurmrl.config.schema import Config, Reward
from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.config.schema.config import StopWhen
from slurmrl.data.image_files import base_of
from slurmrl.data.image_sources import HALF, Sources, images_of
from slurmrl.data.prepared import PreparedManifest, read_manifest
from slurmrl.data.rows import DatasetRows
from slurmrl.data.sources import open_source
from slurmrl.desk.trial_checks import POSITIONS, Finding, Weight
from slurmrl.env import user_name
from slurmrl.errors import ConfigError, CorruptFileError, DamagedCheckpointError, EnvironmentFailure
from slurmrl.plan.algorithms import Algorithm
from slurmrl.plan.metric_names import known_metrics, misnamed
from slurmrl.plan.settings import Settings
from slurmrl.registry import describe, near
from slurmrl.rewards.weighted import WeightedReward
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import TrialState, fold
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint.manifest import read_state

MOST_BYTES: Final = 256 * 2**20
"""Maximum size of a source that is read, so that a login node needs only a few seconds."""


def changed_data(config: Config) -> Iterator[Finding]:
    """Yield a finding for each source that has changed since the last commit of the trial.

    Commits of older versions do not record their sources. Raises EnvironmentFailure.
    """
    paths = RunPaths.of(Path(config.root), user_name(), config.experiment, config.trial)
    state = fold(History(paths.history).read()) if paths.config.exists() else TrialState()
    if state.last_commit is None:
        return
    try:
        committed = read_state(paths.checkpoints / state.last_commit.directory).get("dataset") or {}
    except (DamagedCheckpointError, EnvironmentFailure):
        return  # The job waits for the file system, or resumes from an earlier commit.
    known: dict[str, Any] = committed.get("sources") or {}
    step = state.last_commit.step
    for name, part in config.dataset.parts.items():
        changed = "" if name not in known else _changed(part, known[name], paths.data)
        if changed == "":
            continue
        weight = _weight(config, state)
        message = (
            f"{changed} has changed since step {step}, so the trial cannot keep its order of rows: "
            "put the old content back, or start another trial: slurmrl submit CONFIG --new"
        )
        if changed is None:
            weight = Weight.WARNING
            message = (
                f"{part.path} was written since step {step} and is too large to be compared here: "
                "the run compares it, and fails if the content has changed"
            )
        key = f"dataset.sources.{name}.path" if name else "dataset.path"
        yield Finding("data", weight, message, key)


def _changed(part: DatasetConfig, fingerprint: str, prepared: Path) -> str | None:
    """Return the changed file or image of a source, whose ``fingerprint`` the commit recorded.

    Return "" if nothing has changed. Return None if sizes and times in ``prepared`` do not answer
    this, and the files are too large to be read.
    """
    try:
        files = open_source(Path(part.path), part.split).files
    except ConfigError:  # another check reports the error
        return ""
    base, images = base_of(part), None
    what = "image or video" if part.videos_key else "image"
    for directory, manifest in _manifests(prepared):
        try:
            listed = images_of(directory) if manifest.pictures else None
        except CorruptFileError:
            continue
        sources = Sources(files, base, listed)
        if (present := sources.state()) and manifest.source_state == present:
            return "" if manifest.source == fingerprint else part.path
        if manifest.source == fingerprint:
            before = [int(size) for size in manifest.source_state.split()[::3]]
            now = sources.sizes()
            if before and before[: len(files)] != now[: len(files)]:
                return part.path
            if before and before != now and sum(now) > MOST_BYTES:
                return f"an {what} of {part.path}"
            images = listed
    sources = Sources(files, base, images)
    if sum(sources.sizes()) > MOST_BYTES:
        return None
    present = sources.fingerprint(lambda share: None)
    if present == fingerprint:
        return ""
    if not part.media_keys or not fingerprint.startswith(present[:HALF]):
        return part.path
    # Without a list of images, only the run can compare images, after it has prepared the data.
    return "" if images is None else f"{what} {sources.changed_image()} of {part.path}"


def _manifests(prepared: Path) -> Iterator[tuple[Path, PreparedManifest]]:
    for directory in prepared.glob("*.*"):
        with suppress(CorruptFileError):
            if (manifest := read_manifest(directory)) is not None:
                yield directory, manifest


def _weight(config: Config, state: TrialState) -> Weight:
    """Return the severity of changed data: a warning if the trial will not read the data again."""
    end = state.end
    if end is None or end.kind is not Kind.FINISHED:
        return Weight.FAILED
    more = config.total_steps is not None and end.data["step"] < config.total_steps
    return Weight.FAILED if more and end.data["reason"] == "total_steps" else Weight.WARNING


def score_first_row(
    reward: Reward, key: str, function: WeightedReward, rows: DatasetRows, settings: Settings
) -> Iterator[Finding]:
    """Score the first row with its own answer as the completion.

    Only the user's functions are tried, and only if they need no tokens and no scores of models.
    This process has a copy of the code in another folder, like a job. A file of data next to the
    user's code is therefore missing here too. ``key`` is the dotted key of the reward's settings.
    """
    if not any(":" in part.name for part in reward.functions.values()):
        return
    (answer,), (prompt,) = rows.answers([0]), rows.prompts([0])
    known: dict[str, Any] = {"finished": [True], "sample_ids": ["0@0"], "indices": [0]}
    known |= {"siblings": [[answer]], "step": 1, "evaluation": False}
    wanted = function.wanted()
    if not wanted <= known.keys():
        return
    (row,), place = rows.scored([0]), rows.records.where(0)
    extras = {name: known[name] for name in wanted}
    tried = f"reward '{reward.title}', tried on the first row with its answer as the completion"
    try:
        function.score([prompt], [answer], [row], [place], extras)
        if why := misnamed(function.stats(), settings.config, settings.algorithm):
            yield Finding("reward", Weight.FAILED, f"reward '{reward.title}': {why}", key)
        metric = unknown_metric(settings.config, settings.algorithm)
        names = list(function.metrics())
        if metric and function.has_stats and not any(f"/{metric}".endswith(f"/{n}") for n in names):
            found = f"{tried}: it records {', '.join(names) or 'no metrics'}, not '{metric}'"
            yield Finding("reward", Weight.WARNING, found, "stop_when")
    except FileNotFoundError as error:
        message = (
            f"{tried}: {describe(error)}; a job has only the code, in another folder: name the "
            "file by its absolute path"
        )
        yield Finding("reward", Weight.FAILED, message, key)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        yield Finding("reward", Weight.WARNING, f"{tried}: {describe(error)}", key)


def unknown_metric(config: Config, algorithm: Algorithm) -> str:
    """Return the metric of ``stop_when`` if only a user's reward can record it; "" otherwise."""
    metric = StopWhen.parse(config.stop_when).metric if config.stop_when else ""
    return "" if metric in known_metrics(config, algorithm) else metric


def unrecorded_metric(
    metric: str, config: Config, algorithm: Algorithm, with_stats: Sequence[bool]
) -> Iterator[Finding]:
    """Yield a finding if no reward can record ``metric``, the result of `unknown_metric`.

    ``with_stats`` maps each reward that could be constructed to whether it has ``stats()``.
    """
    if metric and len(with_stats) == len(config.rewards()) and not any(with_stats):
        hint = near(metric, known_metrics(config, algorithm))
        message = f"no step records '{metric}', and no reward has a method stats(); {hint}"
        yield Finding("reward", Weight.FAILED, message, "stop_when")


def beyond(lines: str, key: str, dataset: DatasetConfig, most: int | None) -> Finding:
    """Return the finding that rows have more tokens than a model has positions."""
    setting, what = "max_tokens", "allows"
    if dataset.kind == "prompt":
        setting, what = "max_prompt_tokens", "allows before a completion"
    message = (
        f"{lines} of {dataset.path} have more than {most} tokens, the maximum that "
        f"max_position_embeddings {what}; to leave them out, set {setting}: {most}"
    )
    section, _, _ = key.partition(".sources.")
    return Finding("data", Weight.FAILED, message, f"{section}.{setting}")


def past_positions(prompt: int, new: int, positions: int, key: str) -> Finding:
    """Return a note on sequences for which the model has no positions."""
    section = key.partition(".sources.")[0]
    setting = f"set {section}.max_prompt_tokens: {positions - new} to leave out longer prompts, or "
    message = (
        f"the longest prompt ({prompt} tokens) and a completion (max_new_tokens {new}) may exceed "
        f"the model's {positions} positions (max_position_embeddings); "
        f"{setting if new < positions else ''}lower max_new_tokens"
    )
    return Finding(POSITIONS, Weight.NOTE, message, section)
