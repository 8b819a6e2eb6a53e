"""Rewards of users: functions and classes, valid and invalid."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

Rows = Sequence[Mapping[str, Any]]
CONSTANT = 3


def nan_for_the_second(prompts: Sequence[str], completions: Sequence[str], rows: Rows) -> Any:
    return [float("nan") if index == 1 else 1.0 for index in range(len(completions))]


def returning(
    prompts: Sequence[str], completions: Sequence[str], rows: Rows, *, what: str = "list"
) -> Any:
    """Return the scores 0, 1, 2, ... of the completions, in one of several forms."""
    scores = range(len(completions))
    forms: dict[str, Any] = {
        "list": [float(score) for score in scores],
        "ints": list(scores),
        "bools": [score > 0 for score in scores],
        "tuple": tuple(scores),
        "generator": (score for score in scores),
        "tensor": torch.arange(len(scores), dtype=torch.bfloat16, requires_grad=True),
        "array": np.arange(len(scores), dtype=np.int64),
        "list of tensors": [torch.tensor(score) for score in scores],
        "list of numpy": [np.float32(score) for score in scores],
        "one": [1.0],
        "nothing": None,
        "number": 1.0,
        "dict": dict.fromkeys(scores, 1.0),
        "text": "11",
        "column": torch.zeros(len(scores), 1),
        "texts": ["1"] * len(scores),
        "nones": [None] * len(scores),
        "infinite": [float("inf")] * len(scores),
        "more than float32": [1e39] * len(scores),
        "huge": [10**400] * len(scores),
        "unprintable": [10**5000] * len(scores),
    }
    return forms[what]


def of_any(*arguments: Any, by: float = 0.0) -> list[float]:
    return [by] * len(arguments[1])


async def asynchronous(
    prompts: Sequence[str], completions: Sequence[str], rows: Rows, *, by: float = 0.0
) -> list[float]:
    await asyncio.sleep(0)
    return [len(completion) + by for completion in completions]


def in_another_order(completions: Sequence[str], prompts: Sequence[str], rows: Rows) -> list[float]:
    return [float(len(completion)) for completion in completions]


def single_argument(completion: str) -> float:
    return 1.0


class Looks:
    """A class with the methods of a RewardFunction, but without the base class."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.loop: asyncio.AbstractEventLoop | None = None
        self.closed = False

    async def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], rows: Rows
    ) -> list[float]:
        assert self.loop in (None, asyncio.get_running_loop())
        self.loop = asyncio.get_running_loop()
        return [self.scale for _ in completions]

    def stats(self) -> dict[str, tuple[int, int]]:
        return {"scaled": (1, 2)}

    async def close(self) -> None:
        assert self.loop is asyncio.get_running_loop()
        self.closed = True


class Asking:
    """A reward that stores the additional arguments of its latest call."""

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Rows,
        token_ids: Sequence[Sequence[int]],
        *,
        finished: Sequence[bool],
        sample_ids: Sequence[str],
        indices: Sequence[int],
        siblings: Sequence[Sequence[str]],
        step: int,
        evaluation: bool = False,
        other: int = 0,
    ) -> list[float]:
        self.asked = {
            "token_ids": token_ids,
            "finished": finished,
            "sample_ids": sample_ids,
            "indices": indices,
            "siblings": siblings,
            "step": step,
            "evaluation": evaluation,
        }
        return [0.0] * len(completions)


class Silent:
    """A class without __call__."""


class WrongStats(Looks):
    def stats(self) -> Any:
        return {"scaled": 0.5}


class HugeStats(Looks):
    def stats(self) -> Any:
        return {"scaled": (10**5000, 1)}


def counted(*arguments: Any) -> list[float]:
    return [1.0] * len(arguments[1])


counted.stats = lambda: {"seen": (1, 1)}  # type: ignore[attr-defined]


class Counting:
    """A reward whose method is set when the object is created."""

    def __init__(self) -> None:
        self.stats = lambda: {"seen": (1, 1)}

    def __call__(self, *arguments: Any) -> list[float]:
        return counted(*arguments)


class Wrapping:
    """A reward with the attributes of another object."""

    def __init__(self) -> None:
        self._inner = Counting()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *arguments: Any) -> list[float]:
        return self._inner(*arguments)
