"""A sentence that names which ranks wait for which."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurmrl.run import hang
from slurmrl.run.hang import PendingCollective, RankProgress, explain, grouped


def row(rank: int, call: str, **more: Any) -> RankProgress:
    return RankProgress(**{"rank": rank, "call": call, "step": 4, "since_s": 140.0, **more})


def waits(rank: int, call: str, number: int = 1841, **more: Any) -> RankProgress:
    known = {"name": "all_reduce", "number": number, "group": "0", "since_s": 140.0}
    collective = PendingCollective(**{**known, "ranks": (0, 1, 2, 3), **more})
    return row(rank, call, collective=collective)


THREE = [waits(rank, "actor_train") for rank in (0, 1, 2)]
FOR = "ranks 0-2 have waited 2.3 min in actor_train (all_reduce #1841) for rank 3"


@pytest.mark.parametrize(
    ("fourth", "expected"),
    [
        (row(3, "reward_inf"), f"{FOR}, which has been in reward_inf for 2.3 min"),
        (
            row(3, "reward_inf", phase="forward", part=2, parts=8, frame="own.py:4 in f"),
            f"{FOR}, which has been in reward_inf for 2.3 min "
            "(forward, micro-batch 2 of 8, own.py:4 in f)",
        ),
        (
            row(3, ""),
            f"{FOR}, which has been waiting for the master's next message for 2.3 min",
        ),
        (
            replace(waits(3, "actor_train"), silent_s=14.0),
            f"{FOR}, which has sent no heartbeat for 14 s (last in actor_train)",
        ),
        (
            waits(3, "actor_train", 1842),
            "ranks 0-2 have waited 2.3 min in actor_train (all_reduce #1841) and rank 3 has waited "
            "2.3 min in actor_train (all_reduce #1842): these are different operations, so they "
            "wait for each other",
        ),
        (
            waits(3, "actor_train"),
            "ranks 0-3 have waited 2.3 min in actor_train (all_reduce #1841), which all of its "
            "ranks have entered",
        ),
    ],
)
def test_hang_names_the_rank_that_three_others_wait_for(
    fourth: RankProgress, expected: str
) -> None:
    assert explain(grouped([*THREE, fourth])) == expected


def test_hang_blames_ranks_without_a_report() -> None:
    assert explain(grouped(THREE)) == f"{FOR}, which reported nothing"


def test_rank_outside_the_group_is_not_blamed() -> None:
    pair = [waits(0, "ref_inf", ranks=(0, 1)), row(1, "reward_inf"), row(2, "gen")]
    assert "for rank 1, which has been in reward_inf" in explain(grouped(pair))
    assert "rank 2" not in explain(grouped(pair))


def test_hang_without_waiting_ranks_blames_none() -> None:
    assert explain([]) == ""
    told = explain(grouped([row(0, ""), row(1, "reward_inf"), row(2, "")]))
    assert told == "rank 1 has been in reward_inf for 2.3 min"


def test_ranks_in_the_same_call_are_one_group() -> None:
    rows = [row(rank, "gen", since_s=float(rank)) for rank in (0, 1, 2, 5)] + [row(3, "load")]
    groups = grouped(rows)
    assert [(one.ranks, one.call, one.since_s) for one in groups] == [
        ("0-2,5", "gen", 5.0),
        ("3", "load", 140.0),
    ]
    many = [row(rank, f"call {rank}") for rank in range(10_000)]
    assert len(grouped(many)) == hang.MOST_GROUPS


def test_status_groups_have_all_documented_fields() -> None:
    waiting, idle = (group.document() for group in grouped([*THREE, row(3, "", step=None)]))
    assert waiting == {
        "ranks": "0-2",
        "call": "actor_train",
        "step": 4,
        "phase": "",
        "part": 0,
        "parts": 0,
        "since_s": 140.0,
        "silent_s": 0.0,
        "collective": {
            "name": "all_reduce",
            "number": 1841,
            "group": "0",
            "ranks": "0-3",
            "since_s": 140.0,
        },
    }
    assert (idle["step"], idle["collective"]) == (None, None)


def test_single_rank_is_shown_on_one_line() -> None:
    assert hang.describe(THREE[1]) == "has waited 2.3 min in actor_train (all_reduce #1841)"
    assert hang.describe(row(3, "gen")) == "has been in gen for 2.3 min"


def test_ranks_of_another_world_are_separate_and_named() -> None:
    """Rank 0 of a rollout task is not rank 0 of the trainers. They are never in one group, and an
    explanation of the trainers' wait never names the task.
    """
    away = row(3, "generate", world="rollout/7")
    found = grouped([away, *THREE, row(3, "generate")])
    assert [(one.document().get("world"), one.ranks) for one in found] == [
        (None, "0-2"),
        (None, "3"),
        ("rollout/7", "3"),
    ]
    assert explain(grouped([away, *THREE])) == f"{FOR}, which reported nothing"
    assert hang.describe(away) == "has been in generate for 2.3 min"
