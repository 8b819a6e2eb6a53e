"""Engines, which execute models: their contracts in ``base``, and a module or folder for each.

To add an engine, write a class and add a line to ``ENGINES``. This file does not import torch.
"""

from __future__ import annotations

from slurmrl.registry import Registry

ENGINES = Registry(
    "engine",
    {
        "fsdp": "slurmrl.engines.fsdp.engine:FSDPEngine",
        "megatron": "slurmrl.engines.megatron:make",
        "sglang": "slurmrl.engines.server_engine:SglangEngine",
        "vllm": "slurmrl.engines.server_engine:VllmEngine",
        "native": "slurmrl.engines.native_engine:NativeEngine",
    },
)
