"""Slurm's forms of time limits, which must be longer than the warning time."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from slurmrl.config.schema.cluster import Cluster, Slurm

FORMS = {
    "90": 5400,
    "2:30": 150,
    "1:02:03": 3723,
    "1-2": 93600,
    "1-2:3": 93780,
    "2-00:00:01": 172801,
}


@pytest.mark.parametrize(("text", "seconds"), FORMS.items())
def test_warning_lead_must_be_shorter_than_the_time_limit(text: str, seconds: int) -> None:
    assert Slurm(time=text, signal_lead_s=seconds - 1).time == text
    with pytest.raises(ValidationError, match="must be shorter than time"):
        Slurm(time=text, signal_lead_s=seconds)


def test_any_warning_lead_is_allowed_without_a_time_limit() -> None:
    assert Slurm(time="UNLIMITED", signal_lead_s=10**6).time == "UNLIMITED"


@pytest.mark.parametrize(
    "text", ["99999999999", "71582789", "4294967296", "10001-0", "１０", "1-２", "0-240001:00"]
)
def test_limit_that_slurm_would_misread_is_rejected(text: str) -> None:
    """Slurm reads 71582789 minutes, which 32 bits do not hold in seconds, as one minute."""
    with pytest.raises(ValidationError, match="must be"):
        Slurm(time=text)
    assert Slurm(time="10000-0").time == "10000-0"


@pytest.mark.parametrize("text", ["1０G", "１G", "1G\\n"])
def test_memory_has_only_digits_that_slurm_reads(text: str) -> None:
    with pytest.raises(ValidationError):
        Cluster(mem_per_worker=text)
