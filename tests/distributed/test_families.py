"""Each family of transformers has the results of the table in docs/models.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

from tests.support.family_table import (
    COLUMNS,
    LIMIT_S,
    TENTHS,
    WITHOUT_TRIALS,
    all_families,
    checked,
    differences,
    kept_results,
)
from tests.support.rotation import rotating

TRIALS: Final = [column for column in COLUMNS if column not in WITHOUT_TRIALS]
TRIED: Final = [name for name, known in kept_results().items() if {*TRIALS} & {*known}]
TRAINED: Final = [name for name in TRIED if not kept_results()[name].get("grpo", "no")]
HALVES: Final = (("sft", "export", "lora", "t2"), ("grpo", "resume"))
"""The columns in two parts, which take turns. Each takes 40 s on an idle machine."""
assert {*sum(HALVES, ())} == {*TRIALS}

pytestmark = pytest.mark.timeout(LIMIT_S + 60)


def compare(family: str, columns: Sequence[str]) -> None:
    """Fail if a check of the family has another result than the kept one."""
    results = kept_results()
    asked = [column for column in columns if column in results.get(family, {})]
    wrong = differences({family: checked(family, asked)}, results)
    assert not wrong, "\n".join([*wrong, f"see build/models/{family}.log"])


@pytest.mark.parametrize("family", rotating(*all_families(), shares=TENTHS))
def test_recorded_model_results_hold_without_trials(family: str) -> None:
    compare(family, WITHOUT_TRIALS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "columns"),
    rotating(
        *(
            pytest.param(family, columns, id=f"{family}-{columns[0]}")
            for family in TRAINED
            for columns in HALVES
        )
    ),
)
def test_recorded_model_results_hold_in_trials(family: str, columns: Sequence[str]) -> None:
    compare(family, columns)


@pytest.mark.soak
@pytest.mark.parametrize("family", sorted({*TRIED} - {*TRAINED}))
def test_recorded_model_results_hold_in_rejected_trials(family: str) -> None:
    compare(family, TRIALS)
