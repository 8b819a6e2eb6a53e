"""Layouts that are computed without engines. `move_cases.placed_layouts` compares them with the
engines' layouts.
"""

from __future__ import annotations

from slurmrl.engines import ENGINES
from slurmrl.engines.planned import LAYOUTS


def test_planned_layouts_are_tested_for_every_engine() -> None:
    assert set(LAYOUTS) == set(ENGINES)
