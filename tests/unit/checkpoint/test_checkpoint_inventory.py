"""Retention: the kept commits and the reasons."""

from __future__ import annotations

import pytest

from slurmrl.run.history.state import Commit
from slurmrl.watch.checkpoints import kept_by


@pytest.mark.parametrize(
    ("last", "every", "kept"),
    [
        (1, None, {10: ["last"]}),
        (2, None, {8: ["last"], 10: ["last"]}),
        (99, None, {n: ["last"] for n in (2, 4, 6, 8, 10)}),
        (1, 4, {4: ["every"], 8: ["every"], 10: ["last"]}),
        (3, 5, {6: ["last"], 8: ["last"], 10: ["last", "every"]}),
    ],
)
def test_newest_and_periodic_checkpoints_are_kept(
    last: int, every: int | None, kept: dict[int, list[str]]
) -> None:
    commits = [Commit(step, f"step-{step}", 1) for step in (2, 4, 6, 8, 10)]
    found = kept_by(commits, last, every)
    assert {int(name[5:]): why for name, why in found.items() if why} == kept
    assert found.keys() == {commit.directory for commit in commits}


def test_no_checkpoint_is_kept_if_none_exists() -> None:
    assert kept_by([], 2, 5) == {}
