"""Tests of the sequence of weights that led to the newest incarnation."""

from __future__ import annotations

from typing import Any

import pytest

from slurmrl.run.history.slots import Kind, Record
from slurmrl.run.history.state import Lineage


def lineage(*entries: tuple[Kind, int, dict[str, Any]]) -> Lineage:
    return Lineage.of(
        Record(slot, kind, by, 0.0, data) for slot, (kind, by, data) in enumerate(entries)
    )


def begin(incarnation: int, **data: Any) -> tuple[Kind, int, dict[str, Any]]:
    return Kind.BEGIN, incarnation, data


def commit(step: int, by: int) -> tuple[Kind, int, dict[str, Any]]:
    return Kind.COMMIT, by, {"step": step, "directory": f"{step}.{by}"}


def delete(step: int, of: int, by: int) -> tuple[Kind, int, dict[str, Any]]:
    return Kind.DELETE, by, {"step": step, "directory": f"{step}.{of}"}


def test_all_steps_of_the_newest_incarnation_are_valid() -> None:
    found = lineage(begin(1), commit(2, 1))
    assert found.has(0, 1)
    assert found.has(9, 1)
    assert not found.has(9, 2)


def test_steps_after_the_commit_that_was_resumed_are_rolled_back() -> None:
    found = lineage(begin(1), commit(2, 1), commit(4, 1), begin(2, base="4.1"))
    assert found.has(4, 1)
    assert not found.has(5, 1)
    assert found.has(5, 2)


def test_incarnation_without_a_commit_leaves_no_valid_steps() -> None:
    found = lineage(begin(1), commit(2, 1), begin(2), begin(3))
    assert found.has(2, 1)
    assert not found.has(3, 2)


@pytest.mark.parametrize("base", [{"base": "2.1"}, {}])
def test_damaged_commit_is_rolled_back(base: dict[str, Any]) -> None:
    """Also covers records of older programs, which do not name the resumed commit."""
    found = lineage(begin(1), commit(2, 1), commit(4, 1), delete(4, 1, 1), begin(2, **base))
    assert found.has(2, 1)
    assert not found.has(4, 1)


def test_start_from_scratch_invalidates_earlier_steps() -> None:
    found = lineage(begin(1), commit(2, 1), begin(2, base=None))
    assert not found.has(2, 1)
    assert not found.has(0, 1)


def test_deleted_commits_still_connect_incarnations() -> None:
    found = lineage(
        *(begin(1), commit(2, 1), begin(2, base="2.1"), commit(5, 2), delete(2, 1, 2)),
        begin(3, base="5.2"),
    )
    assert found.has(2, 1)
    assert not found.has(3, 1)
    assert found.has(5, 2)
    assert not found.has(6, 2)
