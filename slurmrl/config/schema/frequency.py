"""Things that happen every so often: checkpoints, evaluations, log lines."""

from __future__ import annotations

from typing import Literal

from slurmrl.config.schema.base import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Word,
)
from slurmrl.config.schema.data import Dataset

ExportDtype = Literal["source", "float32", "bfloat16", "float16"]


class Checkpoint(Section):
    """When the run commits, and what it keeps. It always commits at its end."""

    every_steps: PositiveInt | None = 10
    """Steps between two commits; null for none by steps."""
    every_seconds: PositiveFloat | None = None
    """Seconds after which the next step commits."""
    every_epochs: PositiveInt | None = None
    """Epochs of the dataset between two commits."""
    keep_last: PositiveInt = 2
    """How many of the newest checkpoints are kept."""
    keep_every_steps: PositiveInt | None = None
    """Checkpoints of steps that are a multiple of this are kept too, for good."""
    asynchronous: bool = True
    """Train on while checkpoints are written: each rank first copies weights and optimizer state to
    host memory, which takes as much memory again. The last checkpoint of a job is waited for."""
    export_at_end: bool = True
    """Write the trained actor in Hugging Face form when the run is finished."""
    export_dtype: ExportDtype = "source"
    """Type of the weights in exports, unless `slurmrl export --dtype` says otherwise. `source`
    gives each tensor the type that it has in the folder of `<role>.path`, and those of a new model
    the `dtype` of its `architecture` or float32. Checkpoints are in float32 in any case."""


class Evaluation(Section):
    """Judging held-out prompts. It uses the run's reward and has a random stream of its own."""

    dataset: Dataset
    """The held-out prompts."""
    samples: PositiveInt | None = 512
    """Prompts of one evaluation, from the top of the dataset; null takes all."""
    every_steps: PositiveInt | None = None
    """Steps between two evaluations."""
    every_seconds: PositiveFloat | None = None
    """Seconds after which the next step evaluates."""
    every_epochs: PositiveInt | None = None
    """Epochs of the training dataset between two evaluations."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    temperature: PositiveFloat = 1.0
    """Divides the logits before sampling."""
    greedy: bool = False
    """Always take the most probable token."""
    max_new_tokens: PositiveInt | None = None
    """Most tokens of a completion. Default: that of `rollout`."""


class Wandb(Section):
    """Metrics to Weights & Biases (needs the wandb package)."""

    project: Word
    """Name of the project there."""
    mode: Literal["offline", "online"] = "offline"
    """`offline` writes files for a later `wandb sync`."""


class Logging(Section):
    """What is written besides `metrics.jsonl`."""

    every_steps: PositiveInt | None = 1
    """Steps between two lines of progress in the log; `metrics.jsonl` has every step."""
    every_seconds: PositiveFloat | None = None
    """Seconds after which the next step is logged."""
    every_epochs: PositiveInt | None = None
    """Epochs of the dataset between two lines."""
    tensorboard: bool = False
    """Write TensorBoard event files too (needs the tensorboard package)."""
    wandb: Wandb | None = None
    """Send metrics to Weights & Biases too."""
    output_mib: PositiveInt = 64
    """MiB that the output of one host's processes may take in `logs/`, that of all its attempts
    together, and that of the master as much again. The newest is kept. A file can be longer for as
    long as nobody has looked at it: seconds."""
    samples: NonNegativeInt = 4
    """Completions of each step that are written to `samples/`."""
