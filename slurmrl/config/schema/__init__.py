"""Schemas of the configuration. Docstrings of fields are the text of the reference."""

from __future__ import annotations

from slurmrl.config.schema.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Section,
)
from slurmrl.config.schema.cluster import Cluster, Profile, Slurm
from slurmrl.config.schema.config import (
    Checkpoint,
    Config,
    Logging,
    Mlflow,
    Notify,
    Wandb,
    evaluation_key,
    role_key,
)
from slurmrl.config.schema.data import Dataset, DataSource
from slurmrl.config.schema.evaluation import WHOLE, Evaluation, EvaluationTasks, Suite
from slurmrl.config.schema.reward import Reward, RewardPart, RewardPool
from slurmrl.config.schema.roles import Lora, Model, Optimizer, ParallelSizes
from slurmrl.config.schema.rollout import (
    EnvironmentChoice,
    EpisodeSettings,
    Publish,
    Rollout,
    ToolChoice,
    Transfer,
)

__all__ = [
    "WHOLE",
    "Checkpoint",
    "Cluster",
    "Config",
    "DataSource",
    "Dataset",
    "EnvironmentChoice",
    "EpisodeSettings",
    "Evaluation",
    "EvaluationTasks",
    "Logging",
    "Lora",
    "Mlflow",
    "Model",
    "NonNegativeFloat",
    "NonNegativeInt",
    "Notify",
    "Optimizer",
    "ParallelSizes",
    "PathText",
    "PositiveFloat",
    "PositiveInt",
    "Profile",
    "Publish",
    "Reward",
    "RewardPart",
    "RewardPool",
    "Rollout",
    "Section",
    "Slurm",
    "Suite",
    "ToolChoice",
    "Transfer",
    "Wandb",
    "evaluation_key",
    "role_key",
]
