"""Optimizers on local shards, by the names of the configuration. Every engine steps with them."""

from __future__ import annotations

from slurmrl.registry import Registry

OPTIMIZERS = Registry(
    "optimizer",
    {
        "adamw": "slurmrl.engines.optimizers.adamw:AdamW",
        "adam": "slurmrl.engines.optimizers.adamw:Adam",
        "adamax": "slurmrl.engines.optimizers.functional:Adamax",
        "nadam": "slurmrl.engines.optimizers.functional:NAdam",
        "radam": "slurmrl.engines.optimizers.functional:RAdam",
        "rmsprop": "slurmrl.engines.optimizers.functional:RMSprop",
        "adagrad": "slurmrl.engines.optimizers.functional:Adagrad",
        "adadelta": "slurmrl.engines.optimizers.functional:Adadelta",
        "sgd": "slurmrl.engines.optimizers.sgd:SGD",
    },
)
