"""Rewards: a function that scores completions, or a weighted sum of several functions."""

from __future__ import annotations

from itertools import combinations, starmap
from typing import Annotated, Any, Final

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr, model_validator

from slurmrl.config.schema.base import (
    OWN_CODE,
    PositiveFloat,
    PositiveInt,
    Section,
    Sequence,
    Word,
    name_of,
)

BINARY: Final = ("exact_match", "math", "code")
"""Built-in rewards that can be 1 for a correct completion and 0 otherwise."""
WITH_PROCESSES: Final = ("math", "code")
"""Built-in rewards that score in separate processes."""
MODEL: Final = "model"
"""Name of the reward that a model computes."""
ALONE: Final = ""
"""Name of the part of a reward that is a single function."""


PartName = Annotated[str, name_of("a part")]
Scalar = StrictBool | StrictInt | StrictFloat | StrictStr


class RewardPool(Section):
    """Processes in which your own reward runs, one completion at a time.

    A completion has no score if the reward raises, hangs, dies or returns no finite number.
    Baselines, losses and means leave such a completion out, unless `unjudged_score` gives it a
    score. The log shows the sample and the reason. The metric `reward_unjudged` is the share of
    completions without a score.

    The run fails if no completion of a call gets a score, or if most completions of five
    consecutive steps get none. Example: `{timeout_s: 10}`
    """

    processes: PositiveInt | None = None
    """Number of processes per rank. Default: the CPU cores of the host per rank, at most 8.
    Example: `4`"""
    timeout_s: PositiveFloat = 30.0
    """Time for one completion, after which slurmrl kills and replaces the process."""
    batch_timeout_s: PositiveFloat = 600.0
    """Time for all completions of a call, after which the remaining completions get no score."""
    memory_mib: PositiveInt = 4096
    """Maximum private memory of one process (`RLIMIT_DATA`)."""
    unjudged_score: float | None = None
    """Score of a completion that the reward could not score. `null` sets none. Example: `0.0`"""


class RewardPart(Section):
    """One function of a reward that is a sum."""

    name: Word
    """Built-in reward (`exact_match`, `math`, `code`, `model`), or your own function or class as
    `FILE.py:name` or `package.module:name` (docs/rewards.md). Example: `math`"""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the named reward. Example: `{timeout_s: 10}`"""
    pool: RewardPool | None = None
    """Run your own function or class in separate processes. `{}` uses the default limits.
    Default: the rank's process scores all completions of the rank in one call."""
    weight: float = 1.0
    """Factor of the function's score in the sum. With 0, the score is only a metric. Example: `0.2`
    """
    where: dict[Word, Scalar | Sequence[Scalar]] = Field(default_factory=dict)
    """Rows that the function scores, by the values of their fields. Write a field inside an object
    with dots: `extra_info.source`. Default: all rows. Example: `{source: [gsm8k, math]}`"""

    @property
    def has_processes(self) -> bool:
        """Whether the function scores in separate processes."""
        return self.pool is not None or self.name in WITH_PROCESSES

    @property
    def is_binary(self) -> bool:
        """Whether the function's scores are 1 for a correct completion, else 0."""
        whole = self.name != "code" or self.options.get("score", "all") == "all"
        return self.name in BINARY and whole

    @model_validator(mode="after")
    def _pool_for_own(self) -> RewardPart:
        _check_pool(self.name, self.pool)
        return self


class Reward(Section):
    """The reward that scores completions: one function (`name`), or a weighted sum (`parts`).

    Example: `{name: math}`
    """

    name: Word | None = None
    """Built-in reward (`exact_match`, `math`, `code`, `model`), or your own function or class as
    `FILE.py:name` or `package.module:name` (docs/rewards.md). Required without `parts`. Example:
    `math`"""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the named reward. Example: `{timeout_s: 10}`"""
    pool: RewardPool | None = None
    """Run your own function or class in separate processes. `{}` uses the default limits.
    Default: the rank's process scores all completions of the rank in one call."""
    parts: dict[PartName, RewardPart] = Field(default_factory=dict)
    """Functions whose weighted scores are added, by names of your choice. Each part is also the
    metric `reward/<name>`: the mean of its scores, not weighted. Example: `{correct: {name:
    math}, form: {name: "rewards.py:form", weight: 0.2}}`"""

    @model_validator(mode="after")
    def _one_form(self) -> Reward:
        if self.name is None and not self.parts:
            raise ValueError("needs a name, or parts")
        if self.parts and (self.name is not None or self.options or self.pool is not None):
            raise ValueError(
                "has both parts and settings of a single function (name, options, pool); move "
                "these settings into the parts"
            )
        for name in ("low", "high"):
            if name in self.parts:
                raise ValueError(
                    f"has the part '{name}', but the metric reward/{name} is the {name} end of the "
                    "confidence interval of evaluations; choose another name"
                )
        if self.name is not None:
            _check_pool(self.name, self.pool)
        return self

    @property
    def functions(self) -> dict[str, RewardPart]:
        """Mapping from the name of a part to its function (`ALONE` for a single function)."""
        if self.name is None:
            return dict(self.parts)
        return {ALONE: RewardPart(name=self.name, options=self.options, pool=self.pool)}

    @property
    def title(self) -> str:
        """Name of the reward for messages."""
        return self.name or " + ".join(self.parts)

    @property
    def may_not_score(self) -> bool:
        """Whether a completion may get no score."""
        pools = (part.pool for part in self.functions.values() if part.weight)
        return any(pool is not None and pool.unjudged_score is None for pool in pools)

    @property
    def uses_model(self) -> bool:
        """Whether the role ``reward_model`` scores completions."""
        return any(part.name == MODEL for part in self.functions.values())

    @property
    def is_binary(self) -> bool:
        """Whether each completion scores 1 if it is correct, else 0.

        This holds if all functions with a nonzero weight are binary, have weight 1 and score
        different rows.
        """
        counted = [part for part in self.functions.values() if part.weight]
        plain = all(part.weight == 1.0 and part.is_binary for part in counted)
        return (
            bool(counted) and plain and not any(starmap(_may_share_rows, combinations(counted, 2)))
        )

    @property
    def has_own(self) -> bool:
        """Whether one of the functions is the user's own."""
        return any(OWN_CODE.fullmatch(part.name) for part in self.functions.values())


def _may_share_rows(one: RewardPart, other: RewardPart) -> bool:
    """Return whether two parts may score the same row."""
    shared = one.where.keys() & other.where.keys()
    return all(_values(one, key) & _values(other, key) for key in shared)


def _values(part: RewardPart, key: str) -> set[Scalar]:
    wanted = part.where[key]
    return set(wanted) if isinstance(wanted, tuple) else {wanted}


def _check_pool(name: str, pool: RewardPool | None) -> None:
    if pool is not None and not OWN_CODE.fullmatch(name):
        raise ValueError(
            f"pool is not allowed with '{name}', only with your own reward (module:name); "
            "built-in rewards have options instead"
        )
