"""Read a run directory into a report, without files that are damaged or missing.

Functions compute the times of calls and tasks from events, metrics and the plan, and the
differences between the settings of trials.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from pydantic import BaseModel

from slurmrl.config import source
from slurmrl.config.problems import keys, names_sections, section_of
from slurmrl.config.schema import Config
from slurmrl.desk import provenance, trial_code
from slurmrl.desk.report.report_data import (
    CallTime,
    CommitRow,
    TaskSpan,
    TrialReport,
    curves,
    read_samples,
    thinned,
)
from slurmrl.errors import (
    CheckpointError,
    ConfigError,
    CorruptFileError,
    EnvironmentFailure,
    SlurmrlError,
    UnreadableInputError,
)
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.documents import (
    COUNT,
    INTEGER,
    NUMBER,
    SECONDS,
    SIZE,
    TEXT,
    Fields,
    each,
    items,
    list_of,
    table,
)
from slurmrl.name_resolve.store import NameStore
from slurmrl.plan.algorithms import ALGORITHMS
from slurmrl.plan.estimates.call_costs import MeanTokens
from slurmrl.plan.estimates.shape import lengths_of, shape_of
from slurmrl.plan.model import Plan
from slurmrl.plan.plan_values import predicted_seconds
from slurmrl.plan.settings import load_run_settings
from slurmrl.run import events as event_files
from slurmrl.run import metrics
from slurmrl.run.events import Event
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import place
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint.manifest import read_manifest
from slurmrl.watch import published

STEP_S = "time/step"
TOKENS_PER_S = "tokens_per_s"
PLAN: Fields = {"calls": list_of(table({"name": TEXT, "ranks": list_of(COUNT)}, ("name",)))}
RECORD: Fields = {"command": list_of(TEXT), "environment": table({}), "git": table({})}
PLANNED: Fields = {
    "gpus": COUNT,
    "tokens": COUNT,
    "hardware": table({"name": TEXT, "source": TEXT}),
    "memory": table({"bytes": SIZE, "margin_bytes": SIZE, "gpu_bytes": SIZE, "fullest_gpu": COUNT}),
    "calls": each(table({"flops": NUMBER, "seconds": SECONDS})),
}
TIMELINE: Fields = {
    "steps": list_of(
        table(
            {
                "step": INTEGER,
                "calls": list_of(
                    table(
                        {"name": TEXT, "ranks": list_of(items(COUNT, SECONDS, SECONDS))},
                        ("name", "ranks"),
                    )
                ),
            },
            ("step", "calls"),
        )
    ),
    "peaks": list_of(items(COUNT, SIZE)),
}
MOST_DIFF = 1 << 20
RECENT = 50
"""Number of newest steps whose times are averaged."""
PREFIX = "time/"
TOKENS = "tokens"
"""The metric of a step's tokens, in prompts and completions."""
OWN: Final = ("experiment", "trial", "root")
"""Settings that always differ between trials."""
NO_DEFAULT: Final = object()


def collect(paths: RunPaths, status: Mapping[str, Any]) -> TrialReport:
    """Read everything that a report shows; ``status`` is the trial's object from `watch.overview`.

    Raises CorruptFileError for a damaged history, EnvironmentFailure.
    """
    lines = metrics.read(paths.metrics)
    shown = metrics.with_evaluated(lines, metrics.read_evaluated(paths))
    events = event_files.read_all(paths)
    planned = _document(paths.estimates, PLANNED)
    timeline = _document(paths.timeline, TIMELINE)
    code = trial_code.current_code(paths)
    measured = measured_calls(paths)
    return TrialReport(
        name=paths.full_name,
        status=status,
        lines=len(lines),
        curves={name: thinned(curve) for name, curve in curves(shown).items()},
        calls=measured.calls,
        predictions=measured.predictions,
        step_s=mean(lines[-RECENT:], STEP_S),
        tokens_per_s=mean(lines[-RECENT:], TOKENS_PER_S),
        timeline=timeline.get("steps", []),
        peaks=timeline.get("peaks", []),
        planned=planned,
        tasks=task_spans(events),
        rollouts=_rollouts(paths),
        commits=_commits(paths, events),
        samples=read_samples(paths.samples),
        config=_text(paths.config),
        settings=settings(paths),
        environment=_document(code / provenance.RECORD_FILE, RECORD),
        diffs=dict(_diffs(code)),
    )


def settings(paths: RunPaths) -> dict[str, Any]:
    """Return the resolved configuration with dotted keys; nothing if it cannot be read."""
    try:
        return source.flat(source.read(paths.config).values)
    except (ConfigError, UnreadableInputError):
        return {}


def _commits(paths: RunPaths, events: Sequence[Event]) -> list[CommitRow]:
    """Return all commits, sorted by time."""
    written = {
        (event["writer"], event.get("step")): event for event in events if event["kind"] == "commit"
    }
    records = History(paths.history).read()
    deleted = {place(one)[1] for one in records if one.kind is Kind.DELETE}
    exported = {place(one)[0] for one in records if one.kind is Kind.EXPORT}
    rows = []
    for one in records:
        if one.kind is not Kind.COMMIT:
            continue
        step, directory = place(one)
        told = written.get((f"master.{one.incarnation}", step), {})
        gone = directory in deleted
        rows.append(
            CommitRow(
                step=step,
                directory=directory,
                incarnation=one.incarnation,
                time=one.time,
                bytes=None if gone else _bytes(paths.checkpoints / directory),
                seconds=told.get("seconds"),
                stall_s=told.get("stall_s"),
                deleted=gone,
                exported=step in exported,
            )
        )
    return rows


def _rollouts(paths: RunPaths) -> dict[str, Any] | None:
    names = NameStore(paths.names)
    try:
        said = published.rollouts(published.status(names))
    except CorruptFileError:
        return None
    return None if said is None else asdict(said)


def _bytes(checkpoint: Path) -> int | None:
    try:
        return sum(file.size for file in read_manifest(checkpoint).files)
    except (CheckpointError, EnvironmentFailure):
        return None


def _document(path: Path, fields: Fields) -> Mapping[str, Any]:
    try:
        return documents.read(path, fields)
    except (FileNotFoundError, CorruptFileError):
        return {}


def _text(path: Path) -> str:
    try:
        return atomic.read(path).decode(errors="replace")
    except (FileNotFoundError, CorruptFileError):
        return ""


def _diffs(code: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each repository of a snapshot and its diff, perhaps shortened."""
    for path in sorted(code.glob("*.diff")):
        text = _text(path)
        more = len(text) - MOST_DIFF
        yield path.stem, f"{text[:MOST_DIFF]}\n… {more} more" if more > 0 else text


def call_times(
    lines: Sequence[Mapping[str, Any]],
    calls: Iterable[Mapping[str, Any]],
    planned: Mapping[str, Any],
    predicted: Mapping[str, float],
) -> list[CallTime]:
    """Return the mean time and operations of each call, in the plan's order.

    ``planned`` maps names of calls to estimates, and has the assumed tokens of a step.
    ``predicted`` has the seconds of each call for the lengths in these steps. The operations of a
    step are nearly proportional to its tokens, so they are scaled to the tokens of the steps.
    """
    newest = lines[-RECENT:]
    tokens, assumed = mean(newest, TOKENS), planned.get("tokens")
    scale = tokens / assumed if tokens is not None and assumed else None
    estimates = planned.get("calls", {})
    found = []
    for call in calls:
        seconds = mean(newest, f"{PREFIX}{call['name']}")
        if seconds is None:
            continue
        estimate = estimates.get(call["name"], {})
        flops = estimate.get("flops")
        found.append(
            CallTime(
                name=call["name"],
                ranks=call.get("ranks") or (),
                seconds=seconds,
                predicted_s=predicted.get(call["name"]),
                flops=None if flops is None or scale is None else flops * scale,
            )
        )
    return found


class MeasuredCalls(NamedTuple):
    """Measured and predicted seconds of the newest steps of a trial."""

    calls: Sequence[CallTime]
    mean: MeanTokens | None
    """Mean lengths; None if they are unknown."""
    predictions: str
    """Origin of the predicted seconds, or the reason why there are none."""


def measured_calls(paths: RunPaths, hardware: str | None = None) -> MeasuredCalls:
    """Return the seconds of a trial's calls. Raises EnvironmentFailure.

    ``hardware`` names a hardware profile for predictions, in place of the trial's profile.
    """
    lines = metrics.read(paths.metrics)
    planned = _document(paths.estimates, PLANNED)
    tokens, predicted, predictions = predicted_calls(paths, lines, hardware)
    calls = _document(paths.plan, PLAN).get("calls", [])
    return MeasuredCalls(call_times(lines, calls, planned, predicted), tokens, predictions)


def predicted_calls(
    paths: RunPaths, lines: Sequence[Mapping[str, Any]], hardware: str | None = None
) -> tuple[MeanTokens | None, dict[str, float], str]:
    """Return the mean lengths of the newest steps, and the predicted seconds of each call.

    The string is the origin of the predictions, or the reason why there are none. ``hardware``
    names a hardware profile; None selects the trial's profile.
    """
    newest, found = lines[-RECENT:], None
    try:
        settings, plan = load_run_settings(paths), Plan.read(paths.plan)
        if hardware is not None:
            cluster = settings.config.cluster.model_copy(update={"hardware": hardware})
            config = settings.config.model_copy(update={"cluster": cluster})
            settings = replace(settings, config=config)
        shape = shape_of(settings.config.actor)
        assumed = lengths_of(settings.config, settings.algorithm, shape)
        prompt, response = mean(newest, "prompt_length"), mean(newest, "response_length")
        tokens = mean(newest, TOKENS)
        if assumed is None or tokens is None:
            return None, {}, "no step of the trial has lengths of sequences"
        if prompt is None or response is None:  # Each row of the data is a whole sequence.
            prompt, response = tokens / assumed.sequences, 0.0
        found = MeanTokens(prompt, response)
        seconds, source = predicted_seconds(settings, plan, found)
    except SlurmrlError as error:
        return found, {}, str(error)
    unknown = "the hardware is unknown (slurmrl profile-cluster measures it)"
    return found, seconds, source or unknown


def mean(lines: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """Return the mean of a metric; None if no line has it."""
    values = [value for line in lines if isinstance(value := line.get(name), int | float)]
    return statistics.fmean(values) if values else None


def task_spans(events: Iterable[Event]) -> list[TaskSpan]:
    """Return the attempts of rollout tasks that have joined, in the order of joining."""
    began: dict[tuple[str, int], Event] = {}
    ended: dict[tuple[str, int], Event] = {}
    for event in events:
        key = str(event.get("task", "")), event.get("attempt", 0)
        if event["kind"] == "rollout_task" and event.get("state") == "joined":
            began.setdefault(key, event)
        elif event["kind"] == "rollout_task":
            ended[key] = event
    return [_span(*key, event, ended.get(key)) for key, event in began.items()]


def _span(task: str, attempt: int, joined: Event, end: Event | None) -> TaskSpan:
    said = [] if end is None else [end.get("state"), end.get("reason")]
    return TaskSpan(
        task=task,
        attempt=attempt,
        host=str(joined.get("host", "")),
        began=float(joined["time"]),
        ended=None if end is None else float(end["time"]),
        how=": ".join(str(word) for word in said if word),
    )


Flat: TypeAlias = Mapping[str, Any]
"""Mapping from dotted keys to settings."""


def differences(settings: Sequence[Flat]) -> dict[str, list[Any]]:
    """Return the dotted keys in which trials differ, each with one value per trial.

    A value is None if a trial lacks the key.

    If a trial lacks a section, the key is the section's key. The values of the other trials then
    map keys within the section to settings, without defaults. A setting that a trial lacks does not
    count if the other trials have its default. The name of a trial never counts.
    """
    found: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for one in settings for key in one):
        if key in OWN:
            continue
        section = _lacking(key, settings)
        if section is not None:
            set_in = [_set_in(section, one) for one in settings]
            having = next(one for one in settings if _has(section, one))
            if any(set_in) or not isinstance(_default(section, having), BaseModel):
                found[section] = set_in
            continue
        values = [one.get(key) for one in settings]
        lacking = any(key not in one for one in settings)
        if lacking and all(one[key] == _default(key, one) for one in settings if key in one):
            continue
        if any(value != values[0] for value in values):
            found[key] = values
    return found


def _lacking(key: str, settings: Sequence[Flat]) -> str | None:
    """Return the outermost section around a setting that a trial lacks; None if all have it."""
    parts = key.split(".")
    for length in range(1, len(parts)):
        section = ".".join(parts[:length])
        if not all(_has(section, one) for one in settings):
            return section
    return None


def _has(section: str, settings: Flat) -> bool:
    return any(key.startswith(f"{section}.") for key in settings)


def _set_in(section: str, settings: Flat) -> dict[str, Any] | None:
    """Return the settings of a trial in a section; None without the section."""
    if not _has(section, settings):
        return None
    prefix = f"{section}."
    return {
        key.removeprefix(prefix): value
        for key, value in settings.items()
        if key.startswith(prefix) and value != _default(key, settings)
    }


def _default(key: str, settings: Flat) -> Any:
    """Return the default of a setting in the form of a configuration file.

    Return `NO_DEFAULT` if the setting has no default or is unknown.
    """
    name, *rest = key.split(".")
    if name != "algorithm" or not rest:
        return _default_in(Config, [name, *rest])
    algorithm = settings.get("algorithm.name")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        return NO_DEFAULT
    return _default_in(ALGORITHMS.load(algorithm), rest)


def _default_in(schema: type[BaseModel], parts: Sequence[str]) -> Any:
    field = dict(keys(schema)).get(parts[0])
    if field is None:
        return NO_DEFAULT
    below = section_of(field.annotation)
    rest = parts[2:] if names_sections(field.annotation) else parts[1:]
    if rest and below is not None:
        return _default_in(below, rest)
    if len(parts) > 1 or field.is_required():
        return NO_DEFAULT
    default = field.get_default(call_default_factory=True)
    return list(default) if isinstance(default, tuple) else default
