from __future__ import annotations

import pytest

from slurmrl.display.terminal import sparkline


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [
        ([0.0, 7.0], 10, "▁█"),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 10, "▁▂▃▄▅▆▇█"),
        ([0.0, 0.0, 0.0, 7.0, 7.0, 7.0, 7.0], 2, "▁█"),
        ([2.0, 2.0, 2.0], 2, "▅▅"),
        ([-3.0], 10, "▅"),
    ],
)
def test_sparkline_has_one_bar_per_value_or_range(
    values: list[float], width: int, bars: str
) -> None:
    assert sparkline(values, width) == bars
