"""Engines, which execute models: one contract (``base.Engine``), one folder per engine.

A new engine is one class and one line in ``ENGINES``. This file is torch-free.
"""

from __future__ import annotations

from slurmrl.registry import Registry

ENGINES = Registry(
    "engine",
    {
        "fsdp": "slurmrl.engines.fsdp.engine:FSDPEngine",
        "archon": "slurmrl.engines.fsdp.engine:FSDPEngine",
        "megatron": "slurmrl.engines.megatron.entry:make",
    },
)
