"""Checks of what the interfaces of an algorithm return, which may be a user's own. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmrl.algorithms.base import CallResult
from slurmrl.errors import UsageError
from slurmrl.plan.model import CallPlan


def checked(result: Any, call: CallPlan, *, leads: bool) -> CallResult:
    """The result of a call on a rank that ``leads`` those that work on the same samples, or on
    another one, which need not return them.

    :raises UsageError: it is none, lacks an output of the call, or has a metric that is no pair.
    """
    made = f"{call.interface}.{call.method.value}() of call '{call.name}'"
    if not isinstance(result, CallResult):
        raise UsageError(f"{made} returned {type(result).__name__}, must return a CallResult")
    keys = () if result.sample is None else result.sample.keys
    if leads and (missing := [key for key in call.outputs if key not in keys]):
        raise UsageError(
            f"{made} returned a sample without {', '.join(missing)}, which calls() states as "
            f"outputs; it has {', '.join(keys) or 'no keys'}"
        )
    if wrong := [name for name, value in _items(result.stats) if not _is_pair(value)]:
        raise UsageError(
            f"{made} returned metrics that are no pair (sum, count) of numbers: "
            f"{', '.join(map(str, wrong))}"
        )
    return result


def _items(stats: Any) -> list[tuple[Any, Any]]:
    return [*stats.items()] if isinstance(stats, Mapping) else [("stats", stats)]


def _is_pair(value: Any) -> bool:
    both = isinstance(value, tuple | list) and len(value) == 2
    return both and all(isinstance(number, int | float) for number in value)
