"""Engine strings such as ``fsdp:d2``: which engine, and how its model lies on ranks.

``backends`` is the table of engines and the dimensions that each takes (a new engine is one line
there), ``parser`` reads a string, ``allocation`` is what it means.
"""

from __future__ import annotations

from slurmrl.allocation.allocation import AXES, Allocation
from slurmrl.allocation.parser import parse

__all__ = ["AXES", "Allocation", "parse"]
