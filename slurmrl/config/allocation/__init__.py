"""Engine strings such as ``fsdp:d2``: an engine, and the layout of its model over ranks.

``allocation`` has the table of engines with their dimensions, and the meaning of a string. A string
may join allocations by ``+`` (on separate ranks) or ``|`` (on the same ranks). ``parser`` reads
strings. ``legacy_spellings`` reads strings and host lists of earlier systems.
"""

from __future__ import annotations

from slurmrl.config.allocation.allocation import AXES, Allocation, Components, ExpertSizes
from slurmrl.config.allocation.parser import parse, parse_components

__all__ = ["AXES", "Allocation", "Components", "ExpertSizes", "parse", "parse_components"]
