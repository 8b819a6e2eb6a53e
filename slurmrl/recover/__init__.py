"""Changes of the configuration with which a trial may be resumed, and their consequences."""

from slurmrl.recover.consequences import (
    consequences,
    follow_actor,
    keep_precision,
    moved_schedules,
)
from slurmrl.recover.differences import differences, may_change

__all__ = [
    "consequences",
    "differences",
    "follow_actor",
    "keep_precision",
    "may_change",
    "moved_schedules",
]
