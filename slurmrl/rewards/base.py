"""The contract of reward functions and their scores; exact match; scores of a reward model.

Scores are finite numbers. Scores become the rewards of completions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from numbers import Real
from typing import Any, ClassVar

from slurmrl.errors import RewardError, UsageError


class RewardFunction(ABC):
    """A reward, constructed with the configuration's ``reward.options`` as keywords."""

    cores: int = 1
    """CPU cores of the rank; set before the first call."""
    needs_answers: ClassVar[bool] = False
    """Whether every row must have a reference answer."""

    @abstractmethod
    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
    ) -> list[float]:
        """Return one score per completion.

        A row is a line of the dataset, with its answer (a string) under ``answer``.
        """

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the reason why each row cannot be scored; "" for a row that can.

        ``submit`` calls this method on the login node, so the method must not import torch.
        """
        return [""] * len(rows)

    def stats(self) -> dict[str, tuple[float, float]]:
        """Return additional metrics of the latest call: name -> (sum, count)."""
        return {}

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Release processes. The function is not called again."""


class ExactMatch(RewardFunction):
    """Reward 1 if completion and answer are equal without the white space around them, else 0."""

    needs_answers: ClassVar[bool] = True

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
    ) -> list[float]:
        return [
            float(completion.strip() == str(row["answer"]).strip())
            for completion, row in zip(completions, rows, strict=True)
        ]


class ModelReward:
    """``(score - bias) * scale`` with the scores of the role ``reward_model``.

    :param scale: factor of each score.
    :param bias: subtracted from each score before scaling.
    """

    def __init__(self, *, scale: float = 1.0, bias: float = 0.0) -> None:
        self._scale = _number("scale", scale)
        self._bias = _number("bias", bias)

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        *,
        model_scores: Sequence[float],
    ) -> list[float]:
        return [(score - self._bias) * self._scale for score in model_scores]


def _number(name: str, value: Any) -> float:
    number = None if isinstance(value, bool) else as_number(value)
    if number is None or not isfinite(number):
        raise UsageError(f"{name} must be a finite number, but is {shown(value)}")
    return number


FLOAT32_MAX = 3.4028234e38
"""Maximum absolute value of a reward. Rewards become float32 tensors."""
LIMITS = "of at most 3.4e+38, float32's largest"
SHOWN_CHARACTERS = 200
METRIC = "reward/"
"""Prefix of the metric of a reward part, which is the mean of its unweighted scores."""
Stats = Mapping[str, tuple[float, float]]
"""Metrics: name -> (sum, count)."""


def as_scores(
    reward: str, returned: Any, completions: Sequence[str], places: Sequence[str]
) -> list[float]:
    """Convert an iterable of numbers to one finite number for each completion.

    For example, the iterable may be a list, a tuple, a tensor or an array. ``places`` are the
    source lines of the completions' rows.

    :raises RewardError: a value is missing or is not a finite number.
    """
    values = _values(reward, returned, len(completions))
    if len(values) != len(completions):
        raise RewardError(
            f"reward {reward} returned {len(values)} scores for {len(completions)} completions"
        )
    scores = []
    for value, completion, place in zip(values, completions, places, strict=True):
        score = as_number(value)
        if score is None or not abs(score) <= FLOAT32_MAX:
            raise RewardError(
                f"reward {reward} returned {shown(value)} for {place}, completion "
                f"{shortened(completion)}; a score must be a finite number ({LIMITS})"
            )
        scores.append(score)
    return scores


def check_sum(score: float, place: str, parts: str) -> None:
    """Check a completion's reward, the sum of ``parts`` (which the message shows).

    :raises RewardError: the reward is too large for a float32.
    """
    if not abs(score) <= FLOAT32_MAX:
        raise RewardError(
            f"the reward for {place} is {score:g} = {parts}; it must be a finite number ({LIMITS})"
        )


def shown(value: Any) -> str:
    """Return the beginning of a value's ``repr``, for a message."""
    try:
        return repr(value)[:SHOWN_CHARACTERS]
    except ValueError:  # Python prints no integers with thousands of digits
        return f"{type(value).__name__} of thousands of digits"


def _values(reward: str, returned: Any, count: int) -> list[Any]:
    shape = getattr(returned, "shape", None)  # Only tensors and arrays have a shape.
    if isinstance(returned, Iterable) and not isinstance(returned, str | bytes | Mapping | set):
        if shape is None:
            return list(returned)
        if len(shape) == 1:
            values: list[Any] = returned.tolist()  # type: ignore[attr-defined]
            return values
    kind = "None" if returned is None else f"a {type(returned).__name__}"
    of_shape = f" of shape {list(shape)}" if shape is not None else ""
    raise RewardError(
        f"reward {reward} returned {kind}{of_shape}; it must return a list of {count} numbers, "
        "one for each completion"
    )


def as_number(value: Any) -> float | None:
    """Return a value as a float, even a scalar of torch or numpy; None if it is not a number."""
    if not isinstance(value, Real) and hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError):  # an array or tensor with several elements
            return None
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def shortened(text: str) -> str:
    """Return the string in quotes. Omit the middle of a long string."""
    half = SHOWN_CHARACTERS // 2
    return repr(text if len(text) <= 2 * half else f"{text[:half]} … {text[-half:]}")


def scores_problem(
    scores: Sequence[float | None],
    parts: Sequence[Mapping[str, float]],
    stats: Stats,
    count: int,
) -> str | None:
    """Return why these numbers are not finite scores of ``count`` completions; None if they are."""
    if (len(scores), len(parts)) != (count, count):
        return f"has {len(scores)} scores for {count} completions"
    numbers = [
        *(score for score in scores if score is not None),
        *(score for part in parts for score in part.values()),
        *(number for pair in stats.values() for number in pair),
    ]
    return None if all(map(isfinite, numbers)) else "has a number that is not finite"


def metrics(stats: Stats, parts: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Return ``stats`` and the parts' scores: mapping from name to (sum, count)."""
    given = ({METRIC + name: (score, 1.0) for name, score in part.items()} for part in parts)
    return added([stats, *given])


def added(stats: Iterable[Stats]) -> dict[str, tuple[float, float]]:
    """Return one metric for each name: the sums of its sums and of its counts."""
    sums: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for each in stats:
        for name, (total, count) in each.items():
            before = sums[name]
            sums[name] = before[0] + total, before[1] + count
    return dict(sums)
