"""Conversion of a reward function's return value to finite numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from slurmrl.errors import RewardError

FLOAT32_MAX = 3.4028234e38
"""Rewards become float32 tensors; larger values would overflow to infinity."""
LIMITS = "of at most 3.4e+38, float32's largest"
SHOWN_CHARACTERS = 200


def as_scores(
    reward: str, returned: Any, completions: Sequence[str], places: Sequence[str]
) -> list[float]:
    """Convert a list, tuple, tensor, array or other iterable of numbers to one finite number for
    each completion. ``places`` are the source lines of their rows.

    :raises RewardError: anything else was returned.
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
    """Check a completion's reward, which adds up ``parts`` (for the message).

    :raises RewardError: it is too large for a float32.
    """
    if not abs(score) <= FLOAT32_MAX:
        raise RewardError(
            f"the reward for {place} is {score:g} = {parts}; it must be a finite number ({LIMITS})"
        )


def shown(value: Any) -> str:
    """The beginning of a value for a message."""
    try:
        return repr(value)[:SHOWN_CHARACTERS]
    except ValueError:  # integers of thousands of digits are not printed
        return f"{type(value).__name__} of thousands of digits"


def _values(reward: str, returned: Any, count: int) -> list[Any]:
    shape = getattr(returned, "shape", None)  # of tensors and arrays
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
    """The value as a float, scalars of torch and numpy included; None if it is not a number."""
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
    """The text in quotes; a long one without its middle."""
    half = SHOWN_CHARACTERS // 2
    return repr(text if len(text) <= 2 * half else f"{text[:half]} … {text[-half:]}")
