"""The results of a trial contain each item once, for part files of any incarnations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmrl.errors import CorruptFileError
from slurmrl.plan.dataflow import Method
from slurmrl.plan.model import CallPlan, Plan
from slurmrl.plan.settings import Settings
from slurmrl.run.paths import RunPaths, part_prefix
from slurmrl.run.samples import write_part
from slurmrl.workers.master.progress import Progress, RecordedSteps
from slurmrl.workers.master.results import Results

SIZE = 10
"""Rows of the dataset, in batches of 4 by 2 ranks."""


@pytest.fixture
def settings(make_settings: Any) -> Settings:
    algorithm = {"name": "generate", "batch_size": 4}
    found: Settings = make_settings(algorithm=algorithm, total_steps=None, evaluation=None)
    return found


@pytest.fixture
def plan(plans: Callable[..., Plan], calls: Callable[..., CallPlan]) -> Plan:
    return plans(per_host=2, calls=(calls("record", role=None, method=Method.RECORD),))


class Incarnation:
    """The master's part of an incarnation. `step` also writes the files of its two ranks."""

    def __init__(
        self, paths: RunPaths, settings: Settings, plan: Plan, number: int, state: Any = None
    ) -> None:
        self._paths = paths
        self.number = number
        self.progress = Progress(settings, state)
        self.progress.use_dataset(SIZE, "f1", {})
        self.results = Results(paths, settings, plan, self.progress, number)

    def step(self, text: str = "") -> None:
        items = self.progress.take_batch()
        names = tuple(f"{index}@{epoch}" for epoch, index in items)
        for rank in range(2):
            own = names[rank::2]
            records = {name: {"id": name.partition("@")[0], "text": text} for name in own}
            prefix = part_prefix(self.progress.step + 1, self.number)
            write_part(self._paths.part(prefix, rank), records, own, names)
        self.progress.advance({})
        self.results.finish_step()

    def state(self) -> Any:
        """Return the state in the form of a commit."""
        return json.loads(json.dumps(self.progress.state()))


Begin = Callable[..., Incarnation]


@pytest.fixture
def begin(paths: RunPaths, settings: Settings, plan: Plan) -> Begin:
    return lambda number, state=None: Incarnation(paths, settings, plan, number, state)


def lines(paths: RunPaths) -> list[dict[str, Any]]:
    return [json.loads(line) for line in paths.results.read_text().splitlines()]


def test_offline_pass_ends_with_the_dataset(paths: RunPaths, begin: Begin) -> None:
    """The last batch is smaller. Each row occurs once, in the order of the file."""
    incarnation = begin(1)
    assert incarnation.progress.total_steps == 3
    for _ in range(3):
        assert incarnation.progress.finish_reason() is None
        incarnation.step()
    assert incarnation.progress.finish_reason() == "the end of the dataset"
    incarnation.results.write()
    assert [line["id"] for line in lines(paths)] == list(map(str, range(SIZE)))
    incarnation.results.remove_parts()
    assert not paths.parts.exists()


def test_number_of_pass_steps_is_known_after_reading_the_dataset(
    make_settings: Any, settings: Settings
) -> None:
    """Later incarnations know it before they read the dataset again. `total_steps` is a limit."""
    progress = Progress(settings, None)
    assert progress.known_steps is None
    progress.use_dataset(SIZE, "f1", {})
    assert progress.known_steps == 3
    state = json.loads(json.dumps(progress.state()))
    assert Progress(settings, state).known_steps == 3
    for limit, steps in ((2, 2), (100, 3)):
        algorithm = {"name": "generate", "batch_size": 4}
        limited = make_settings(algorithm=algorithm, total_steps=limit, evaluation=None)
        assert Progress(limited, None).known_steps is None
        assert Progress(limited, state).known_steps == steps


def test_uncommitted_steps_are_not_in_the_results(paths: RunPaths, begin: Begin) -> None:
    """The first incarnation ends after an uncommitted step, the second one while it writes a part
    file of that step. Both left other texts there.
    """
    first = begin(1)
    first.step("first")
    state = first.state()
    first.step("lost")
    second = begin(2, state)
    second.progress.take_batch()
    stray = paths.part(part_prefix(2, 2), 0)
    stray.write_text('{"place": 0, "record": {"id": "4", "te')
    third = begin(3, state)
    third.step("third")
    assert third.progress.recorded == [
        RecordedSteps(first=1, last=1, incarnation=1, files=2),
        RecordedSteps(first=2, last=2, incarnation=3, files=2),
    ]
    third.step("third")
    third.results.write()
    texts = ["first"] * 4 + ["third"] * 6
    assert [(line["id"], line["text"]) for line in lines(paths)] == [
        (str(index), text) for index, text in enumerate(texts)
    ]


def test_committed_state_does_not_grow_with_the_steps(begin: Begin) -> None:
    incarnation = begin(1)
    sizes = []
    for _ in range(3):
        incarnation.step()
        sizes.append(len(json.dumps(incarnation.state())))
    assert incarnation.state()["recorded"] == [
        {"first": 1, "last": 3, "incarnation": 1, "files": 2}
    ]
    assert max(sizes) - min(sizes) < 5


def test_results_are_complete_after_a_change_of_rank_count(
    paths: RunPaths, begin: Begin, settings: Settings, plans: Any, calls: Any
) -> None:
    """A resumed trial may have another layout: its steps have other numbers of part files."""
    first = begin(1)
    first.step()
    alone = plans(per_host=1, calls=(calls("record", role=None, method=Method.RECORD),))
    second = Incarnation(paths, settings, alone, 2, first.state())
    second.progress.take_batch()
    names = ("4@0", "5@0", "6@0", "7@0")
    records = {name: {"id": name[0]} for name in names}
    write_part(paths.part(part_prefix(2, 2), 0), records, names, names)
    second.progress.advance({})
    second.results.finish_step()
    second.results.write()
    assert [line["id"] for line in lines(paths)] == list("01234567")


def test_filtered_items_have_no_result_lines(paths: RunPaths, begin: Begin) -> None:
    """Covers items dropped before and after items that are trained later. A step without items has
    no part files.
    """
    incarnation = begin(1)
    progress = incarnation.progress
    candidates = progress.take(4)
    progress.drop(candidates, "dull")
    progress.advance({})
    incarnation.results.finish_step()
    progress.take(4)
    progress.drop([7], "dull")
    progress.give_back([5])
    for rank, own in enumerate((("4@0",), ("6@0",))):
        path = paths.part(part_prefix(2, 1), rank)
        write_part(path, {name: {"id": name[0]} for name in own}, own, ("4@0", "6@0"))
    progress.advance({})
    incarnation.results.finish_step()
    incarnation.results.write()
    assert [line["id"] for line in lines(paths)] == ["4", "6"]


def test_step_without_items_between_others_has_no_part_files(paths: RunPaths, begin: Begin) -> None:
    incarnation = begin(1)
    incarnation.step()
    incarnation.progress.drop(incarnation.progress.take(4), "dull")
    incarnation.progress.advance({})
    incarnation.results.finish_step()
    incarnation.step()
    incarnation.results.write()
    assert [line["id"] for line in lines(paths)] == list("012389")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), "is not JSON"),
        (lambda path: path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n"), "or lacks one"),
        (lambda path: path.write_bytes(path.read_bytes() * 2), "has an item twice"),
        (lambda path: path.write_bytes(b""), "or lacks one"),
    ],
)
def test_damaged_parts_never_become_results(
    paths: RunPaths, begin: Begin, damage: Callable[[Path], Any], words: str
) -> None:
    """Results are complete or absent."""
    incarnation = begin(1)
    incarnation.step()
    damage(paths.part(part_prefix(1, 1), 0))
    with pytest.raises(CorruptFileError, match=words):
        incarnation.results.write()
    assert not paths.results.exists()
    assert not any(name.name.startswith(".tmp") for name in paths.run.iterdir())


def test_missing_result_lines_are_detected_by_the_ledger(paths: RunPaths, begin: Begin) -> None:
    """Positions alone would not show it: if the last two items of a step are missing, there is no
    gap.
    """
    incarnation = begin(1)
    incarnation.step()
    for rank in range(2):
        path = paths.part(part_prefix(1, 1), rank)
        path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n")
    with pytest.raises(CorruptFileError, match="hold 2 lines, expected 4, one for each item"):
        incarnation.results.write()


def test_rank_records_only_its_own_items(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do not match this rank's items: b@0"):
        write_part(tmp_path / "part", {"a@0": {}, "b@0": {}}, ("a@0",), ("a@0", "b@0"))
    assert not (tmp_path / "part").exists()


def test_non_finite_numbers_become_null(tmp_path: Path) -> None:
    write_part(tmp_path / "part", {"a@0": {"logprob": float("-inf")}}, ("a@0",), ("a@0",))
    assert json.loads((tmp_path / "part").read_text())["record"] == {"logprob": None}


def test_summary_is_one_json_object(paths: RunPaths, make_settings: Any, plan: Plan) -> None:
    algorithm = {"name": "evaluate", "batch_size": 4}
    settings = make_settings(algorithm=algorithm, total_steps=1, evaluation=None)
    incarnation = Incarnation(paths, settings, plan, 1)
    items = incarnation.progress.take_batch()
    names = tuple(f"{index}@{epoch}" for epoch, index in items)
    judged = [{"text": "a", "reward": reward} for reward in (1.0, 0.0, 0.0, 1.0)]
    for rank in range(2):
        own = names[rank::2]
        records = {name: {"id": name, "completions": [judged[names.index(name)]]} for name in own}
        write_part(paths.part(part_prefix(1, 1), rank), records, own, names)
    incarnation.progress.advance({})
    incarnation.results.finish_step()
    metrics = incarnation.results.metrics()
    assert metrics["eval/pass@1"] == 0.5
    assert 0 < metrics["eval/pass@1/low"] < 0.5 < metrics["eval/pass@1/high"] < 1
    incarnation.results.write()
    summary = json.loads(paths.summary.read_text())
    assert summary["estimates"]["avg@1"]["value"] == 0.5
    assert [score["rewards"] for score in summary["scores"]] == [[1.0], [0.0], [0.0], [1.0]]
    assert summary["items"] == 4
    incarnation.results.remove_parts()
    assert paths.parts.exists(), "the trial may be resumed with more steps"
