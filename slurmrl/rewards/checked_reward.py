"""Call a reward function, and check its options, its signature and its scores."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from slurmrl.errors import RewardError, UnusableRowError, UsageError
from slurmrl.registry import construct, near
from slurmrl.rewards.base import RewardFunction, as_scores, shown

if TYPE_CHECKING:
    import asyncio

ARGUMENTS: Final = ("prompts", "completions", "rows")
MODEL_SCORES: Final = "model_scores"
"""Argument that exists only if a reward model scores the completions."""
PER_COMPLETION: Final = ("token_ids", "finished", "sample_ids", "indices", "siblings", MODEL_SCORES)
"""Arguments with a value for each completion, which a reward requests by its parameters' names."""
PER_CALL: Final = ("step", "evaluation")
"""Arguments with one value for a call. Rewards request such arguments by name, too."""
Stats = dict[str, tuple[float, float]]
Extras = Mapping[str, Any]
"""Mapping from name to value of additional arguments; values of `PER_COMPLETION` are lists."""
NO_EXTRAS: Final[Extras] = {}


class CheckedReward:
    """A function, or an instance of a class with methods of `RewardFunction`.

    Functions and methods may be ``async``; all run in one event loop.

    :param name: name of the reward in the configuration, for messages.
    """

    def __init__(self, name: str, kind: Any, options: Mapping[str, Any], cores: int) -> None:
        self.name = name
        self._loop: asyncio.Runner | None = None
        _check_options(name, kind, options)
        self._object, keywords = kind, options
        if inspect.isclass(kind):
            self._object, keywords = construct("reward", name, kind, options), {}
        if not callable(self._object):
            raise UsageError(f"reward '{name}' is {_what(kind)}; it must be a function or a class")
        self._wanted = _check_call(name, self._object, keywords)
        self._function = partial(self._object, **keywords)
        if isinstance(self._object, RewardFunction):
            self._object.cores = cores

    def wanted(self) -> Sequence[str]:
        """Return the names of the additional arguments that the function requests."""
        return self._wanted

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        places: Sequence[str],
        extras: Extras = NO_EXTRAS,
    ) -> list[float]:
        """Return one finite score per completion; ``places`` are the rows' lines, for messages.

        :raises RewardError: invalid scores, a row that cannot be scored, or an additional argument
            that is not in ``extras``.
        """
        if not completions:
            return []
        missing = [name for name in self._wanted if name not in extras]
        if missing:
            raise RewardError(
                f"reward {self.name} requests {missing[0]}, which only a run with a model has"
            )
        given = {name: extras[name] for name in self._wanted}
        try:
            returned = self._result(self._function, prompts, completions, rows, **given)
        except UnusableRowError as error:
            raise RewardError(f"{places[error.index]}: {error}") from error
        return as_scores(self.name, returned, completions, places)

    @property
    def needs_answers(self) -> bool:
        """Whether every row must have a reference answer."""
        return isinstance(self._object, RewardFunction) and self._object.needs_answers

    @property
    def checks_rows(self) -> bool:
        """Whether the function can check rows before it scores completions."""
        return self._defines("check_rows")

    @property
    def has_stats(self) -> bool:
        """Whether the function may report metrics in addition to its scores."""
        return self._defines("stats")

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the reason why each row cannot be scored; "" if it can (see `RewardFunction`)."""
        problems = self._optional("check_rows", rows)
        return [""] * len(rows) if problems is None else list(problems)

    def stats(self) -> Stats:
        """Return additional metrics of the latest call: name -> (sum, count)."""
        stats = self._optional("stats") or {}
        try:
            return {str(name): (float(total), float(n)) for name, (total, n) in stats.items()}
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise RewardError(
                f"reward {self.name}: stats() returned {shown(stats)}; it must return a dict of "
                "name to (sum, count)"
            ) from error

    def close(self) -> None:
        self._optional("close")
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _defines(self, name: str) -> bool:
        method = getattr(self._object, name, None)
        inherited = getattr(RewardFunction, name)
        return callable(method) and getattr(method, "__func__", method) is not inherited

    def _optional(self, method: str, *arguments: Any) -> Any:
        function = getattr(self._object, method, None)
        return self._result(function, *arguments) if callable(function) else None

    def _result(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        returned = function(*arguments, **keywords)
        if not inspect.isawaitable(returned):
            return returned
        if self._loop is None:
            import asyncio  # slow import, rarely needed

            self._loop = asyncio.Runner()
        return self._loop.run(_awaited(returned))


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _check_options(name: str, kind: Any, options: Mapping[str, Any]) -> None:
    """Raise UsageError for an option without a parameter in the class or function."""
    try:
        parameters = list(inspect.signature(kind).parameters.values())
    except (TypeError, ValueError):  # not callable, or built in without a signature
        return
    first = 0 if inspect.isclass(kind) else len(ARGUMENTS)
    allowed = [
        each.name
        for place, each in enumerate(parameters)
        if each.kind is inspect.Parameter.KEYWORD_ONLY
        or (place >= first and each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return
    for option in options:
        if option not in allowed:
            hint = near(option, allowed) if allowed else "it has no options"
            raise UsageError(f"reward '{name}' has no option '{option}'; {hint}")


def _check_call(
    name: str, function: Callable[..., Any], keywords: Mapping[str, Any]
) -> tuple[str, ...]:
    """Check the signature; return the names of the additional arguments that it requests."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in function without a signature
        return ()
    extras = _asked_for(signature, keywords)
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    accepted = signature.replace(parameters=bare, return_annotation=signature.empty)
    passed = ", ".join([*ARGUMENTS, *(f"{key}=…" for key in (*keywords, *extras))])
    mismatch = f"reward '{name}' accepts {accepted}, but is called with ({passed})"
    try:
        signature.bind([], [], [], **keywords, **dict.fromkeys(extras))
    except TypeError as error:
        known = ", ".join((*PER_COMPLETION, *PER_CALL))
        raise UsageError(f"{mismatch}: {error}; it may also request {known}") from error
    for taken, argument in zip(signature.parameters, ARGUMENTS, strict=False):
        if taken != argument and taken in ARGUMENTS:
            raise UsageError(f"{mismatch}: its '{taken}' would get the {argument}")
    return extras


def _asked_for(signature: inspect.Signature, keywords: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the additional arguments that parameters after the first three request.

    Parameters that have values in ``keywords`` do not count.
    """
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = list(signature.parameters.values())[len(ARGUMENTS) :]
    names = [each.name for each in rest if each.kind in named and each.name not in keywords]
    return tuple(name for name in names if name in (*PER_COMPLETION, *PER_CALL))


def of_completion(extras: Extras, indices: Sequence[int]) -> Extras:
    """Return the additional arguments of the completions with these indices."""
    return {
        name: value if name in PER_CALL else [value[index] for index in indices]
        for name, value in extras.items()
    }


def _what(kind: Any) -> str:
    if inspect.isclass(kind):
        return "a class whose objects cannot be called (it has no __call__)"
    return f"a {type(kind).__name__}"
