"""Engine strings such as ``fsdp:d2``: an engine, and the layout of its model over ranks.

``allocation`` has the table of engines with their dimensions (a new engine is one line there) and
the meaning of a string; ``parser`` reads strings. ``components`` are several allocations joined by
``+`` (on separate ranks) or ``|`` (on the same ranks). ``legacy_spellings`` reads the strings of
earlier systems, and ``mesh`` their lists of hosts.
"""

from __future__ import annotations

from slurmrl.allocation.allocation import AXES, Allocation, ExpertSizes
from slurmrl.allocation.components import Components
from slurmrl.allocation.parser import parse, parse_components

__all__ = ["AXES", "Allocation", "Components", "ExpertSizes", "parse", "parse_components"]
