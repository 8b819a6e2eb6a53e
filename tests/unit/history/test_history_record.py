from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmrl.errors import CorruptFileError
from slurmrl.run.history.slots import Kind, Record, pack, unpack

DATA = {"step": 7, "directory": "d"}
GOOD = {"slot": 3, "kind": "commit", "incarnation": 1, "time": 1.5, "nonce": "x", "data": DATA}


def test_record_survives_a_round_trip() -> None:
    record = Record(
        3, Kind.COMMIT, 2, 12.5, {"step": 7, "directory": "d", "deep": {"a": [1, None]}}
    )
    assert unpack(pack(record, "nonce"), 3) == record
    assert pack(record, "one") != pack(record, "other")


@pytest.mark.parametrize(
    "change",
    [
        {"slot": 4},
        {"kind": "unheard of"},
        {"kind": 1},
        {"incarnation": "1"},
        {"incarnation": True},
        {"time": None},
        {"data": []},
        {"data": {"step": 7}},
        {"data": {"directory": "d"}},
        {"data": {**DATA, "step": "7"}},
        *({"data": {**DATA, "directory": name}} for name in ("", "..", "a/b", "a\0", "\ud800", 1)),
    ],
)
def test_wrong_fields_are_corrupt(change: dict[str, object]) -> None:
    with pytest.raises(CorruptFileError, match="slot 3"):
        unpack(json.dumps({**GOOD, **change}).encode(), 3)


@pytest.mark.parametrize("missing", ["slot", "kind", "incarnation", "time", "data"])
def test_missing_fields_are_corrupt(missing: str) -> None:
    with pytest.raises(CorruptFileError):
        unpack(json.dumps({key: GOOD[key] for key in GOOD if key != missing}).encode(), 3)


@settings(deadline=None)
@given(st.binary() | st.builds(lambda cut: json.dumps(GOOD).encode()[:cut], st.integers(0, 60)))
def test_any_bytes_give_a_typed_error(data: bytes) -> None:
    with pytest.raises(CorruptFileError):
        unpack(data, 3)


def test_finished_failed_and_cancelled_records_end_a_trial() -> None:
    assert [kind for kind in Kind if kind.is_end] == [Kind.FINISHED, Kind.FAILED, Kind.CANCELLED]
