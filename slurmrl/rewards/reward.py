"""The configured reward function behind one calling convention, with its scores checked."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from slurmrl.errors import RewardError, UnusableRowError, UsageError
from slurmrl.rewards.base import RewardFunction
from slurmrl.rewards.scores import as_scores

if TYPE_CHECKING:
    import asyncio

ARGUMENTS: Final = ("prompts", "completions", "rows")
Stats = dict[str, tuple[float, float]]


class CheckedReward:
    """A function, or an instance of a class with the methods of `RewardFunction`. Functions and
    methods may be ``async``; all run in one event loop.

    :param name: its name in the configuration, for messages.
    """

    def __init__(self, name: str, kind: Any, options: Mapping[str, Any], cores: int) -> None:
        self.name = name
        self._loop: asyncio.Runner | None = None
        self._object, keywords = kind, options
        if inspect.isclass(kind):
            self._object, keywords = _constructed(name, kind, options), {}
        if not callable(self._object):
            raise UsageError(f"reward '{name}' is {_what(kind)}; it must be a function or a class")
        _check_call(name, self._object, keywords)
        self._function = partial(self._object, **keywords)
        if isinstance(self._object, RewardFunction):
            self._object.cores = cores

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        places: Sequence[str],
    ) -> list[float]:
        """One finite score per completion; ``places`` are the rows' source lines, for messages.

        :raises RewardError: invalid scores, or a row that cannot be judged.
        """
        if not completions:
            return []
        try:
            returned = self._result(self._function, prompts, completions, rows)
        except UnusableRowError as error:
            raise RewardError(f"{places[error.index]}: {error}") from error
        return as_scores(self.name, returned, completions, places)

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """The reason why each row cannot be judged, "" if it can (see `RewardFunction`)."""
        problems = self._optional("check_rows", rows)
        return [""] * len(rows) if problems is None else list(problems)

    def stats(self) -> Stats:
        """Additional metrics of the latest call: name to (sum, count)."""
        stats = self._optional("stats") or {}
        try:
            return {str(name): (float(total), float(n)) for name, (total, n) in stats.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise RewardError(
                f"reward {self.name}: stats() returned {stats!r}; it must return a dict of "
                "name to (sum, count)"
            ) from error

    def close(self) -> None:
        self._optional("close")
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _optional(self, method: str, *arguments: Any) -> Any:
        function = getattr(self._object, method, None)
        return self._result(function, *arguments) if callable(function) else None

    def _result(self, function: Callable[..., Any], *arguments: Any) -> Any:
        returned = function(*arguments)
        if not inspect.isawaitable(returned):
            return returned
        if self._loop is None:
            import asyncio  # slow to import, and rarely needed

            self._loop = asyncio.Runner()
        return self._loop.run(_awaited(returned))


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _constructed(name: str, kind: type, options: Mapping[str, Any]) -> Any:
    try:
        return kind(**options)
    except TypeError as error:
        raise UsageError(f"reward '{name}' with options {dict(options)}: {error}") from error


def _check_call(name: str, function: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in function without a signature
        return
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    accepted = signature.replace(parameters=bare, return_annotation=signature.empty)
    passed = ", ".join([*ARGUMENTS, *(f"{key}=…" for key in keywords)])
    mismatch = f"reward '{name}' accepts {accepted}, but is called with ({passed})"
    try:
        signature.bind([], [], [], **keywords)
    except TypeError as error:
        raise UsageError(f"{mismatch}: {error}") from error
    for taken, argument in zip(signature.parameters, ARGUMENTS, strict=False):
        if taken != argument and taken in ARGUMENTS:
            raise UsageError(f"{mismatch}: '{taken}' would get the {argument}")


def _what(kind: Any) -> str:
    if inspect.isclass(kind):
        return "a class whose objects cannot be called (it has no __call__)"
    return f"a {type(kind).__name__}"
