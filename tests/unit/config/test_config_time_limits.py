"""Slurm's forms of time limits, and the warning that must fit into them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from slurmrl.config.schema.cluster import Slurm

FORMS = {
    "90": 5400,
    "2:30": 150,
    "1:02:03": 3723,
    "1-2": 93600,
    "1-2:3": 93780,
    "2-00:00:01": 172801,
}


@pytest.mark.parametrize(("text", "seconds"), FORMS.items())
def test_a_warning_comes_before_the_limit(text: str, seconds: int) -> None:
    assert Slurm(time=text, signal_lead_s=seconds - 1).time == text
    with pytest.raises(ValidationError, match="must be shorter than time"):
        Slurm(time=text, signal_lead_s=seconds)


def test_no_limit_can_always_be_warned_of() -> None:
    assert Slurm(time="UNLIMITED", signal_lead_s=10**6).time == "UNLIMITED"
