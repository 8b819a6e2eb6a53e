"""What a trial may be resumed with."""

from slurmrl.recover.differences import differences, may_change
from slurmrl.recover.layout import consequences, follow_actor
from slurmrl.recover.schedule import moved_schedules

__all__ = ["consequences", "differences", "follow_actor", "may_change", "moved_schedules"]
