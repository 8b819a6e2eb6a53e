"""The whole configuration."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator

from slurmrl.config.conditions import StopWhen
from slurmrl.config.schema.base import (
    Line,
    Name,
    PathText,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    Sequence,
    Word,
)
from slurmrl.config.schema.cluster import Cluster
from slurmrl.config.schema.data import Dataset
from slurmrl.config.schema.frequency import Checkpoint, Evaluation, Logging
from slurmrl.config.schema.model import Model
from slurmrl.config.schema.rollout import Reward, Rollout


class Config(Section):
    """One trial."""

    experiment: Name
    """Name of the experiment; trials of one experiment lie together."""
    trial: Name = "1"
    """Name of this trial."""
    seed: Seed = 1
    """Seed of everything that is random."""
    root: Word = "./runs"
    """Folder of all runs, on a directory that all hosts share. Relative to where the command runs;
    `--root` and SLURMRL_ROOT come first."""
    total_steps: PositiveInt
    """Steps after which the run is finished."""
    stop_when: str | None = None
    """Finish earlier once this holds: `METRIC >= NUMBER` or `METRIC <= NUMBER`. A metric that no
    step has is refused; where your own reward may add it, the log warns if it does not come."""
    deterministic: bool | None = None
    """Bit-identical results however often the run is interrupted. Default: true on CPUs; false on
    GPUs, where it costs speed."""
    max_restarts_without_commit: PositiveInt = 3
    """Starts in a row without a new commit after which the trial has failed."""
    step_timeout_s: PositiveFloat = 1800.0
    """Seconds after which a call that has not ended counts as failed."""
    code: Sequence[PathText] = ()
    """Your own files and folders of Python code that the run imports (`rewards.py`, `my_package`).
    They are copied when the trial is submitted, with the module that `reward.name` names and what
    that imports from beside it; each is importable by its own name."""
    allocation_mode: Line = ""
    """Deprecated: the layouts of all roles in one string, also in the spellings of ReaL and AReaL
    (`sglang.d2t2p1+d1t4p1`). Write `<role>.backend` instead; a note says how."""
    algorithm: dict[str, Any]
    """The algorithm: its `name` and its own settings (see the algorithms' sections)."""
    cluster: Cluster = Cluster()
    actor: Model
    """The model that is trained and exported."""
    critic: Model | None = None
    """The model of values, for algorithms that have one. Default: made from the actor."""
    ref: Model | None = None
    """The model whose distance is priced, for algorithms that have one. Default: the actor as it
    is at the start."""
    rollout: Rollout = Rollout()
    reward: Reward | None = None
    dataset: Dataset
    evaluation: Evaluation | None = None
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()

    @field_validator("stop_when")
    @classmethod
    def _stop_when_parses(cls, text: str | None) -> str | None:
        if text is not None:
            StopWhen.parse(text)
        return text
