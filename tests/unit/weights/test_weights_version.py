from __future__ import annotations

import pytest

from slurmrl.errors import CorruptFileError
from slurmrl.tensors.weights.format import VersionId


def test_version_of_a_later_incarnation_is_newer_at_any_step() -> None:
    ids = [VersionId(2, 2), VersionId(10, 1), VersionId(9, 1), VersionId(1, 3)]
    assert [one.name for one in sorted(ids)] == ["9.1", "10.1", "2.2", "1.3"]


def test_version_names_survive_a_round_trip() -> None:
    assert VersionId.parse("12.3") == VersionId(12, 3)
    assert str(VersionId.parse("0.1")) == "0.1"


@pytest.mark.parametrize("name", ["", "1", "1.", "01.1", "1.1.1", "-1.1", "1.1\n", "١.١", "a.b"])
def test_version_names_in_another_form_are_rejected(name: str) -> None:
    with pytest.raises(CorruptFileError, match=r"expected STEP\.INCARNATION"):
        VersionId.parse(name)
