"""Layouts without engines. (That they equal the engines' own: `move_cases.placed_layouts`.)"""

from __future__ import annotations

from slurmrl.engines import ENGINES
from slurmrl.engines.planned import LAYOUTS


def test_every_engine_has_planned_layouts() -> None:
    assert set(LAYOUTS) == set(ENGINES)
