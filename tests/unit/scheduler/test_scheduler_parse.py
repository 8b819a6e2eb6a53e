"""Parsing of words in Slurm's answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmrl.errors import SchedulerError
from slurmrl.scheduler import parse
from slurmrl.scheduler.client import may_have_worked


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ("gpu:4", [("", 4)]),
        ("gpu", [("", 1)]),
        ("gpu:1g.5gb:2", [("1g.5gb", 2)]),
        ("gpu:2080ti:4(S:0,1)", [("2080ti", 4)]),
        ("gpu:2080:4", [("2080", 4)]),
        ("gpu:a100:4(S:0-1)", [("a100", 4)]),
        ("gpu:nvidia_h100_80gb_hbm3:8", [("nvidia_h100_80gb_hbm3", 8)]),
        ("gpu:7g.80gb:1(S:0),gpu:1g.10gb:7(S:0,2-3)", [("7g.80gb", 1), ("1g.10gb", 7)]),
        ("gpu:tesla:no_consume:2,bandwidth:lustre:4G", [("tesla", 2)]),
        ("gpu:a:1K", [("a", 1024)]),
        ("gres/gpu:a100:2,gres/gpu=3", [("a100", 2), ("", 3)]),
        ("mps:400,shard:a100:16,gpumem:80G", []),
        ("(null)", []),
        ("", []),
    ],
)
def test_gpus_are_counted_by_type_in_gres(resources: str, expected: list[tuple[str, int]]) -> None:
    assert parse.gpus(resources) == expected
    assert parse.gpu_count(resources) == sum(count for _, count in expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", (3,)),
        ("[4-9%4]", (4, 5, 6, 7, 8, 9)),
        ("4-6%1", (4, 5, 6)),
        ("0,2-6:2", (0, 2, 4, 6)),
        ("N/A", ()),
        ("", ()),
    ],
)
def test_array_elements_are_parsed(text: str, expected: tuple[int, ...]) -> None:
    assert parse.elements(text) == expected


def test_truncated_element_lists_are_rejected() -> None:
    with pytest.raises(SchedulerError, match="not a range"):
        parse.elements("1,3,5,7,...")


@given(st.sets(st.integers(0, 60), min_size=1))
def test_element_list_survives_a_round_trip(values: set[int]) -> None:
    assert parse.elements(parse.element_list(values)) == tuple(sorted(values))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("n0", ("n0",)),
        ("n[0-2]", ("n0", "n1", "n2")),
        ("n[008-010,12],m", ("n008", "n009", "n010", "n12", "m")),
        ("rack[1-2]gpu[3,5]-ib", ("rack1gpu3-ib", "rack1gpu5-ib", "rack2gpu3-ib", "rack2gpu5-ib")),
        ("a-1,b[2]", ("a-1", "b2")),
    ],
)
def test_host_lists_are_parsed(text: str, expected: tuple[str, ...]) -> None:
    assert parse.hosts(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "41\n",
        "41;cluster\n",
        "a message of the site\n41\n",
        "41\n*** 3 jobs of yours are queued ***\n",
        "Welcome to cluster 7\n\n41;cluster\n\nquota: 12 of 100 GB\n",
    ],
)
def test_job_id_is_parsed(text: str) -> None:
    assert parse.job_id(text) == "41"


@pytest.mark.parametrize("text", ["", "Submitted batch job 41", "x41", "41;a b"])
def test_job_id_is_rejected_in_other_output(text: str) -> None:
    with pytest.raises(SchedulerError, match="job id"):
        parse.job_id(text)


@pytest.mark.parametrize("text", ["2026\n41\nbye\n", "41\n2026", "12\n41;cluster", "41\n41\n"])
def test_job_id_is_not_guessed_among_several_numbers(text: str) -> None:
    with pytest.raises(SchedulerError, match="one job id but with") as caught:
        parse.job_id(text)
    assert may_have_worked(caught.value), "the job is then looked for by its name"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("768", (3, None)), ("9", (0, 9)), ("0", (0, None)), ("3:0", (3, None)), ("0:15", (0, 15))],
)
def test_exit_status_is_parsed(text: str, expected: tuple[int | None, int | None]) -> None:
    assert parse.exit_status(text) == expected


@pytest.mark.parametrize("text", ["", "N/A", "1:x"])
def test_missing_exit_status_is_unknown(text: str) -> None:
    assert parse.exit_status(text) == (None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10:00", 600.0),
        ("2:03:04", 7384.0),
        ("1-00:00:01", 86401.0),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("NOT_SET", None),
    ],
)
def test_duration_is_parsed(text: str, expected: float | None) -> None:
    assert parse.duration_s(text) == expected


def test_assignments_are_parsed() -> None:
    text = (
        "Configuration data as of 2026-11-21\nMaxArraySize            = 1001\nX = a = b\nEmpty = \n"
    )
    assert parse.assignments(text) == {"MaxArraySize": "1001", "X": "a = b", "Empty": ""}
