"""Engine strings such as ``fsdp:d2``: which engine, and how its model lies on ranks.

``backends`` is the table of engines and the dimensions that each takes (a new engine is one line
there), ``parser`` reads a string, ``allocation`` is what it means, ``components`` are several
joined by ``+`` (apart) and ``|`` (on the same ranks). ``legacy_spellings`` reads the strings of
earlier systems and ``mesh`` their lists of hosts.
"""

from __future__ import annotations

from slurmrl.allocation.allocation import AXES, Allocation, ExpertSizes
from slurmrl.allocation.components import Components
from slurmrl.allocation.parser import parse, parse_components

__all__ = ["AXES", "Allocation", "Components", "ExpertSizes", "parse", "parse_components"]
