"""Each family of transformers has the results of the table in docs/models.md."""

from __future__ import annotations

from typing import Final

import pytest

from tests.support.family_table import (
    COLUMNS,
    LIMIT_S,
    SERVERS,
    all_families,
    checked,
    commit,
    differences,
    kept_results,
    tenth,
)

TODAY: Final = tenth(commit())

pytestmark = pytest.mark.timeout(LIMIT_S + 60)


def compare(family: str) -> None:
    """Fail if a check of the family has another result than the kept one."""
    results = kept_results()
    known = results.get(family, {})
    # A server that fails is started three times, so this is not repeated.
    columns = [one for one in COLUMNS if one in known and not (one in SERVERS and known[one])]
    wrong = differences({family: checked(family, columns)}, results)
    assert not wrong, "\n".join([*wrong, f"see build/models/{family}.log"])


@pytest.mark.long
@pytest.mark.parametrize("family", TODAY)
def test_recorded_model_results_hold_for_a_tenth_of_the_families(family: str) -> None:
    compare(family)


@pytest.mark.soak
@pytest.mark.parametrize("family", sorted(set(all_families()) - set(TODAY)))
def test_recorded_model_results_hold_for_the_other_families(family: str) -> None:
    compare(family)
