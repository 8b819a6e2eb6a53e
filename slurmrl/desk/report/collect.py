"""Reading a run directory into a report. What is damaged or missing is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurmrl.config import source
from slurmrl.desk import provenance, trial_code
from slurmrl.desk.report.contents import CommitRow, TrialReport
from slurmrl.desk.report.curves import curves, thinned
from slurmrl.desk.report.samples import read_samples
from slurmrl.desk.report.settings import flat
from slurmrl.desk.report.story import RECENT, call_times, mean, task_spans
from slurmrl.errors import (
    CheckpointError,
    ConfigError,
    CorruptFileError,
    EnvironmentFailure,
    UnreadableInputError,
)
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.shapes import (
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
from slurmrl.name_resolve.file import FileNameStore
from slurmrl.run import evaluated, metrics
from slurmrl.run import events as event_files
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


def collect(paths: RunPaths, status: Mapping[str, Any]) -> TrialReport:
    """Read everything that a report shows; ``status`` is the object of `watch.overview`.

    A trial that runs is read as it stands. Raises CorruptFileError for a damaged history,
    EnvironmentFailure.
    """
    lines = metrics.read(paths.metrics)
    shown = evaluated.merged(lines, evaluated.read(paths))
    events = event_files.read_all(paths)
    planned = _document(paths.estimates, PLANNED)
    timeline = _document(paths.timeline, TIMELINE)
    code = paths.snapshot(trial_code.current_snapshot(paths))
    return TrialReport(
        name=f"{paths.experiment}/{paths.trial}",
        status=status,
        lines=len(lines),
        curves={name: thinned(curve) for name, curve in curves(shown).items()},
        calls=call_times(lines, _document(paths.plan, PLAN).get("calls", []), planned),
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
    """Return the resolved configuration by dotted key; nothing where it cannot be read."""
    try:
        return flat(source.read(paths.config).values)
    except (ConfigError, UnreadableInputError):
        return {}


def _commits(paths: RunPaths, events: Sequence[Event]) -> list[CommitRow]:
    """Return all commits, by time."""
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
    with FileNameStore(paths.names) as names:
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
    """Yield the diffs of a snapshot by the name of the repository."""
    for path in sorted(code.glob("*.diff")):
        text = _text(path)
        more = len(text) - MOST_DIFF
        yield path.stem, f"{text[:MOST_DIFF]}\n… {more} more" if more > 0 else text
