"""What a trial may be resumed with."""

from slurmrl.recover.differences import differences

__all__ = ["differences"]
