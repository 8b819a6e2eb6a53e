from __future__ import annotations

from typing import Any

import pytest

from slurmrl.errors import CorruptFileError
from slurmrl.run.history.slots import Kind, Record
from slurmrl.run.history.state import Commit, Export, TrialState, fold


def records(*entries: tuple[Kind, int, dict[str, Any]]) -> list[Record]:
    return [Record(slot, kind, by, 0.0, data) for slot, (kind, by, data) in enumerate(entries)]


def at(step: int, directory: str = "") -> dict[str, Any]:
    return {"step": step, "directory": directory or f"d{step}"}


BEGIN_1 = (Kind.BEGIN, 1, {"job": "a"})
BEGIN_2 = (Kind.BEGIN, 2, {"job": "b"})


def test_empty_history_gives_the_initial_state() -> None:
    assert fold([]) == TrialState()


def test_state_lists_commits_except_deleted_commits() -> None:
    state = fold(
        records(
            BEGIN_1,
            (Kind.COMMIT, 1, at(10)),
            (Kind.COMMIT, 1, {**at(20), "more": 1}),
            BEGIN_2,
            (Kind.COMMIT, 2, at(30)),
            (Kind.DELETE, 2, at(10)),
        )
    )
    assert state.incarnation == 2
    assert state.commits == (
        Commit(20, "d20", 1, {**at(20), "more": 1}),
        Commit(30, "d30", 2, at(30)),
    )
    assert state.last_commit == state.commits[-1]
    assert (state.begin_data, state.begin_slot) == ({"job": "b"}, 3)


def test_last_commit_is_the_newest_commit_not_deleted() -> None:
    entries = [BEGIN_1, (Kind.COMMIT, 1, at(10)), (Kind.COMMIT, 1, at(20))]
    newest_gone = fold(records(*entries, (Kind.DELETE, 1, at(20))))
    assert newest_gone.last_commit == Commit(10, "d10", 1, at(10))
    all_gone = fold(records(*entries, (Kind.DELETE, 1, at(20)), (Kind.DELETE, 1, at(10))))
    assert (all_gone.last_commit, all_gone.commits) == (None, ())


def test_state_counts_starts_since_the_last_commit() -> None:
    begins = [(Kind.BEGIN, number, {}) for number in (1, 2, 3)]
    assert fold(records(*begins)).begins_without_commit == 3
    assert fold(records(*begins, (Kind.COMMIT, 3, at(1)))).begins_without_commit == 0
    failed = [*begins, (Kind.FAILED, 3, {})]
    assert fold(records(*failed)).begins_without_commit == 3
    resumed = [*failed, (Kind.RESUME, 3, {})]
    assert fold(records(*resumed)).begins_without_commit == 0
    assert fold(records(*resumed, (Kind.BEGIN, 4, {}))).begins_without_commit == 1


@pytest.mark.parametrize("kind", [Kind.FINISHED, Kind.FAILED, Kind.CANCELLED])
def test_end_of_a_trial_holds_until_a_resume(kind: Kind) -> None:
    ended = records(BEGIN_1, (kind, 1, {"reason": "why"}))
    assert fold(ended).end == ended[-1]
    resumed = fold(records(BEGIN_1, (kind, 1, {}), (Kind.RESUME, 1, {})))
    assert (resumed.end, resumed.ended_slot) == (None, 1)


def test_resume_clears_a_cancel_before_the_first_incarnation() -> None:
    state = fold(records((Kind.CANCELLED, 0, {}), (Kind.RESUME, 0, {}), BEGIN_1))
    assert (state.incarnation, state.end) == (1, None)


def test_state_lists_exports() -> None:
    state = fold(records(BEGIN_1, (Kind.EXPORT, 1, at(3, "x")), (Kind.EXPORT, 1, at(5, "y"))))
    assert state.exports == (Export(3, "x", 1), Export(5, "y", 1))


@pytest.mark.parametrize(
    "entries",
    [
        [(Kind.BEGIN, 2, {})],
        [BEGIN_1, (Kind.BEGIN, 1, {})],
        [BEGIN_1, (Kind.BEGIN, 3, {})],
        [BEGIN_1, BEGIN_2, (Kind.COMMIT, 1, at(1))],
        [(Kind.COMMIT, 1, at(1))],
    ],
)
def test_contradictory_records_are_corruption(
    entries: list[tuple[Kind, int, dict[str, Any]]],
) -> None:
    with pytest.raises(CorruptFileError, match="slot"):
        fold(records(*entries))
