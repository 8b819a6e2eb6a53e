"""Optimizers on local shards, by the names of the configuration. Every engine steps with them."""

from __future__ import annotations

from slurmrl.registry import Registry

OPTIMIZERS = Registry(
    "optimizer",
    {
        "adamw": "slurmrl.engines.optimizers.adamw:AdamW",
        "adam": "slurmrl.engines.optimizers.adamw:Adam",
        "sgd": "slurmrl.engines.optimizers.sgd:SGD",
    },
)
