"""The scores of evaluations during training: one file for each evaluation, for any writing
incarnations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from slurmrl.algorithms.summaries import Z_95, wilson
from slurmrl.errors import CorruptFileError, EnvironmentFailure, StaleIncarnationError, UsageError
from slurmrl.fsio import atomic
from slurmrl.plan.settings import Settings
from slurmrl.run.paths import RunPaths, evaluation_prefix
from slurmrl.run.samples import write_part
from slurmrl.workers.master import results as scores_module
from slurmrl.workers.master.results import EvaluationScores, ScoringCall

ITEMS = ("a@0", "b@0", "c@0")


def scores_of(
    paths: RunPaths, settings: Settings, check: Callable[[], object] = lambda: None
) -> EvaluationScores:
    return EvaluationScores(paths, settings, check)


@pytest.fixture
def settings(make_settings: Any, make_evaluation: Callable[..., dict[str, Any]]) -> Settings:
    found: Settings = make_settings(evaluation=make_evaluation(n=2, pass_score=1.0))
    return found


@pytest.fixture
def several(make_settings: Any, make_evaluation: Callable[..., dict[str, Any]]) -> Settings:
    """Settings of an evaluation of two suites."""
    section = make_evaluation(n=2, pass_score=1.0, keep_last=1)
    suite = {"dataset": section.pop("dataset")}
    found: Settings = make_settings(evaluation={**section, "suites": {"a.1": suite, "b": suite}})
    return found


@pytest.fixture
def make_evaluation(make_settings: Any) -> Callable[..., dict[str, Any]]:
    """The section of the settings, with changes."""
    section = make_settings().config.evaluation.model_dump(mode="json")
    return lambda **changes: {**section, **changes}


def line(name: str, *rewards: float, **more: Any) -> dict[str, Any]:
    mean = sum(rewards) / len(rewards)
    rates = {"pass@1": mean, "pass@2": float(any(rewards)), "maj@2": mean}
    return {"id": name, "rewards": list(rewards), "reward": mean, **rates, **more}


LINES = {"a@0": line("a", 1.0, 1.0), "b@0": line("b", 0.0, 1.0), "c@0": line("c", 0.0, 0.0)}


def record(
    paths: RunPaths, step: int, incarnation: int, lines: Mapping[str, Any], call: int = 1
) -> list[ScoringCall]:
    """Write the part files of two ranks of a call."""
    prefix = evaluation_prefix(step, incarnation, call)
    for rank in range(2):
        own = ITEMS[rank::2]
        write_part(paths.part(prefix, rank), {name: lines[name] for name in own}, own, ITEMS)
    return [ScoringCall(f"call_{call}", prefix, [0, 1])]


def read(paths: RunPaths, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(paths.evaluation(step).read_text())
    return found


def files(paths: RunPaths) -> list[str]:
    found = paths.evaluations.iterdir() if paths.evaluations.exists() else ()
    return sorted(path.name for path in found)


def test_score_file_has_all_item_scores_and_estimates(paths: RunPaths, settings: Settings) -> None:
    """Scores of several calls are in one file, in the order of the dataset.

    Estimates equal the metrics.
    """
    scores = scores_of(paths, settings)
    parts = record(paths, 20, 1, LINES)
    more = {name: {"id": name[0], "reverse_kl": [0.1, 0.2]} for name in ITEMS}
    parts += record(paths, 20, 1, more, call=2)
    metrics = scores.write(20, 3, parts)
    low, high = wilson(2 / 3, 3)
    assert (metrics["pass@2"], metrics["pass@2/low"], metrics["pass@2/high"]) == (2 / 3, low, high)
    assert metrics["reward"] == metrics["maj@2"] == 0.5
    assert (metrics["reward/low"], metrics["reward/high"]) == wilson(0.5, 3)
    found = read(paths, 20)
    assert found["scores"] == [{**each, **more[name]} for name, each in LINES.items()]
    assert found["estimates"]["pass@2"] == {"value": 2 / 3, "low": low, "high": high}
    assert (found["version"], found["step"], found["items"]) == (1, 20, 3)
    assert found["evaluation"]["pass_score"] == 1.0
    assert found["dataset"].endswith("jsonl")
    assert list(paths.parts.iterdir()) == []
    assert paths.evaluation(20).stat().st_mode & 0o077 == 0


def test_rewards_other_than_1_or_0_get_a_normal_interval(
    paths: RunPaths, make_settings: Any
) -> None:
    """The rewards may be negative or above 1."""
    reward = {"parts": {"half": {"name": "exact_match", "weight": 0.5}}}
    lines = {name: line(name[0], value) for name, value in zip(ITEMS, (-1, 0, 4), strict=True)}
    scores = scores_of(paths, make_settings(reward=reward))
    metrics = scores.write(20, 3, record(paths, 20, 1, lines))
    assert metrics["reward"] == 1.0
    half = Z_95 * (7 / 3) ** 0.5  # the variance of the rewards is 7
    assert metrics["reward/low"] == pytest.approx(1.0 - half)


def test_each_suite_has_a_score_file_kept_as_long_as_its_step(
    paths: RunPaths, several: Settings
) -> None:
    scores = scores_of(paths, several)
    for step in (10, 20, 30):
        for call, suite in enumerate(("a.1", "b")):
            scores.write(step, 3, record(paths, step, 1, LINES, call), suite)
    assert files(paths)[:2] == ["step-00000010.a.1.json", "step-00000010.b.json"]
    head = json.loads(paths.evaluation(10, "b").read_text())
    assert (head["suite"], head["evaluation"]["n"]) == ("b", 2)
    assert "suites" not in head["evaluation"]
    scores_of(paths, several).restart(20)
    assert files(paths) == ["step-00000020.a.1.json", "step-00000020.b.json"]


def test_evaluation_without_records_has_no_file(paths: RunPaths, settings: Settings) -> None:
    assert scores_of(paths, settings).write(20, 3, []) == {}
    assert files(paths) == []


def test_measures_without_any_scores_are_left_out(paths: RunPaths, settings: Settings) -> None:
    """A custom evaluation may give other scores."""
    own = {name: {"id": name[0], "beauty": 1.0} for name in ITEMS}
    scores = scores_of(paths, settings)
    assert scores.write(1, 3, record(paths, 1, 1, own)) == {}
    assert read(paths, 1)["estimates"] == {}
    assert read(paths, 1)["scores"][2] == own["c@0"]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"reward": "good"}, "item 'c' has 'good' as its score 'reward'"),
        ({}, "item 'c' has none as its score 'reward'"),
        ({"reward": 0.0, "pass@1": 3.0}, "the score 'pass@1' of item 'c' is 3: a rate must be"),
    ],
)
def test_scores_without_a_defined_measure_end_the_trial_with_the_reason(
    paths: RunPaths, settings: Settings, own: dict[str, Any], message: str
) -> None:
    lines = {**LINES, "c@0": {**LINES["c@0"], **own}}
    if not own:
        lines["c@0"] = {"id": "c"}
    with pytest.raises(UsageError, match=message):
        scores_of(paths, settings).write(3, 3, record(paths, 3, 1, lines))


def test_score_given_by_two_calls_ends_the_trial_with_both_names(
    paths: RunPaths, settings: Settings
) -> None:
    """Otherwise one score would replace the other in the estimates. The item's id does not count as
    a score.
    """
    parts = record(paths, 3, 1, LINES)
    parts += record(paths, 3, 1, {name: {"id": name[0], "maj@2": 0.5} for name in ITEMS}, call=2)
    message = "'call_1' and 'call_2' of the evaluation both give item 'a' the score 'maj@2'"
    with pytest.raises(UsageError, match=message):
        scores_of(paths, settings).write(3, 3, parts)
    assert files(paths) == []


def test_non_finite_scores_give_null_estimates(paths: RunPaths, settings: Settings) -> None:
    """A diverged model gives such scores."""
    lines = {name: {**each, "reward": math.nan} for name, each in LINES.items()}
    metrics = scores_of(paths, settings).write(3, 3, record(paths, 3, 1, lines))
    assert math.isnan(metrics["reward"])
    found = read(paths, 3)
    assert found["estimates"]["reward"] == {"value": None, "low": None, "high": None}
    assert found["scores"][0]["reward"] is None


def test_incarnation_continues_with_the_evaluations_of_its_commit(
    paths: RunPaths, settings: Settings
) -> None:
    """The incarnation removes files of later steps, which are repeated, and remains of killed
    evaluations.
    """
    scores = scores_of(paths, settings)
    scores.restart(-1)
    for step in (0, 20, 40, 60):
        scores.write(step, 3, record(paths, step, 1, LINES))
    before = paths.evaluation(40).read_bytes()
    record(paths, 70, 1, LINES)
    results = paths.part("step-00000041.1", 0)
    results.touch()
    for folder in (paths.parts, paths.evaluations):
        atomic.temporary_beside(folder / "x").touch()
    later = scores_of(paths, settings)
    later.restart(40)
    assert files(paths) == ["step-00000000.json", "step-00000020.json", "step-00000040.json"]
    assert list(paths.parts.iterdir()) == [results], "the results of steps are not its own"
    results.unlink()
    later.write(40, 3, record(paths, 40, 2, LINES))
    assert paths.evaluation(40).read_bytes() == before
    later.restart(-1)
    assert files(paths) == []


def test_part_directory_exists_before_ranks_write_and_is_kept(
    paths: RunPaths, settings: Settings
) -> None:
    """If the master looked for the folder before a rank on another host made it, its NFS client
    would show it as missing for a minute.
    """
    scores = scores_of(paths, settings)
    scores.restart(-1)
    folder = paths.parts.stat()
    for step in (20, 40):
        scores.write(step, 3, record(paths, step, 1, LINES))
        assert paths.parts.stat().st_ino == folder.st_ino
    assert folder.st_mode & 0o077 == 0


def test_kill_at_any_moment_leaves_a_complete_score_file_or_none(
    paths: RunPaths, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next incarnation makes the same files as if nothing had happened."""

    class Killed(BaseException):
        pass

    calls = ("make_private_directory", "replace_by_parts", "remove", "read_parts")
    count = 0
    for number in range(100):
        left = [number]

        def dying(action: Callable[..., Any], left: list[int] = left) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return action(*arguments)

            return run

        with monkeypatch.context() as patched:
            for name in calls:
                patched.setattr(scores_module, name, dying(getattr(scores_module, name)))
            scores = scores_of(paths, settings)
            try:
                scores.write(3, 3, record(paths, 3, 1, LINES))
            except Killed:
                count += 1
        assert files(paths) in ([], ["step-00000003.json"])
        again = scores_of(paths, settings)
        again.restart(-1)
        assert files(paths) == []
        again.write(3, 3, record(paths, 3, 2, LINES))
        assert (files(paths), list(paths.run.glob("parts/*"))) == (["step-00000003.json"], [])
        again.restart(-1)
        if left[0] >= 0:
            break
    assert count == 5, "a part read, a folder, the file, two removals"


def test_only_newest_evaluations_of_committed_steps_are_kept(
    paths: RunPaths, make_settings: Any, make_evaluation: Callable[..., dict[str, Any]]
) -> None:
    """Older evaluations stay until the step of the newest one is committed, because it may be
    lost.
    """
    scores = scores_of(paths, make_settings(evaluation=make_evaluation(keep_last=2)))
    for step in (0, 20, 40, 60):
        scores.write(step, 3, record(paths, step, 1, LINES))
    scores.keep(40)
    assert files(paths) == [f"step-000000{step}.json" for step in (20, 40, 60)]
    scores.restart(20)
    assert files(paths) == ["step-00000020.json"]
    for step in (40, 60):
        scores.write(step, 3, record(paths, step, 2, LINES))
    scores.restart(60)
    assert files(paths) == [f"step-000000{step}.json" for step in (40, 60)], "killed before keep"


def test_stale_incarnation_writes_no_scores(paths: RunPaths, settings: Settings) -> None:
    """It may have been stopped while a newer incarnation removed files of uncommitted steps."""

    def stale() -> None:
        raise StaleIncarnationError("incarnation 1 must stop: 2 is the newest")

    scores = scores_of(paths, settings, stale)
    with pytest.raises(StaleIncarnationError):
        scores.write(3, 3, record(paths, 3, 1, LINES))
    assert files(paths) == []


def test_missing_or_incomplete_part_is_an_error(paths: RunPaths, settings: Settings) -> None:
    scores = scores_of(paths, settings)
    parts = record(paths, 3, 1, LINES)
    prefix = parts[0].prefix
    with pytest.raises(CorruptFileError, match="has an item twice or lacks one"):
        scores.write(3, 3, [parts[0]._replace(numbers=[0])])
    with pytest.raises(CorruptFileError, match="has scores of 3 of 4 items"):
        scores.write(3, 4, parts)
    paths.part(prefix, 1).unlink()
    with pytest.raises(CorruptFileError, match="is missing"):
        scores.write(3, 3, parts)
    assert files(paths) == []


def test_scores_are_written_from_the_same_parts_after_a_full_disk(
    paths: RunPaths, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file can be written later from the same parts. Files that cannot be removed remain."""
    scores = scores_of(paths, settings)
    parts = record(paths, 3, 1, LINES)
    write = scores_module.replace_by_parts

    def full(*arguments: Any) -> None:
        monkeypatch.setattr(scores_module, "replace_by_parts", write)
        raise EnvironmentFailure("no space")

    def refused(path: Path) -> bool:
        raise EnvironmentFailure("read-only")

    monkeypatch.setattr(scores_module, "replace_by_parts", full)
    with pytest.raises(EnvironmentFailure):
        scores.write(3, 3, parts)
    monkeypatch.setattr(scores_module, "remove", refused)
    assert scores.write(3, 3, parts)["reward"] == 0.5
