"""Construction, calls and schemas of tools. Torch-free."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, wraps
from typing import Any, Final, NamedTuple

from slurmrl.config.schema import EpisodeSettings, ToolChoice
from slurmrl.errors import UsageError
from slurmrl.registry import construct, describe
from slurmrl.rollouts import TOOLS

MOST_CHARACTERS: Final = 4000
"""Maximum number of characters of a result. Longer results are cut."""
MOST_REASON: Final = 300
"""Maximum number of characters of an error message for the policy."""


class ToolResult(NamedTuple):
    text: str
    failed: bool = False


class Tools(Mapping[str, Callable[..., Any]]):
    """Tools, each with the name that the policy uses in calls.

    All episodes of a rank share the tools, but each episode counts its calls separately.
    """

    def __init__(self, tools: Mapping[str, Callable[..., Any]]) -> None:
        self._tools = dict(tools)
        self.calls = 0
        self.failures = 0
        """Number of failed calls. ``calls`` is the number of all calls."""

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._tools[name]

    def of_episode(self) -> Tools:
        """Return the same tools with new call counts, for one episode."""
        return Tools(self._tools)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    async def call(self, name: str, /, *arguments: Any, **keywords: Any) -> ToolResult:
        """Call a tool. A function that is not ``async`` runs in a thread.

        An exception of the tool becomes a result that begins with ``error:``, and the episode
        continues.
        """
        if name not in self._tools:
            return self.rejected(f"there is no tool {name!r}; tools: {', '.join(self._tools)}")
        tool = self._tools[name]
        try:
            if _is_async(tool):
                value = await tool(*arguments, **keywords)
            else:
                value = await in_thread(lambda: tool(*arguments, **keywords))
        except Exception as error:  # noqa: BLE001 - a user's tool may raise anything
            reason = (str(error).splitlines() or [""])[0] or type(error).__name__
            return self.rejected(reason)
        self.calls += 1
        return ToolResult(str(value)[:MOST_CHARACTERS])

    def rejected(self, reason: str) -> ToolResult:
        """Count a failed call, and return its result."""
        self.calls += 1
        self.failures += 1
        return ToolResult(f"error: {reason[:MOST_REASON]}", failed=True)

    def close(self) -> None:
        """Release the resources of the tools, such as processes."""
        for tool in self._tools.values():
            close = getattr(tool, "close", None)
            if callable(close):
                close()


def make_tools(choices: Mapping[str, ToolChoice]) -> Tools:
    """Make the configured tools.

    :raises UsageError: an unknown name, an object that cannot be called, or unsuitable options.
    :raises UnreadableInputError: the module of a user's own code cannot be imported.
    """
    return Tools({name: _made(name, choice) for name, choice in choices.items()})


def find_tool(key: str, choice: ToolChoice) -> Callable[..., Any]:
    """Return the function or the class that a tool's settings name. Raises as `make_tools`."""
    name = choice.name or key
    kind = TOOLS.find(name)
    if not callable(kind):
        raise UsageError(f"tool '{name}' is {type(kind).__name__}, not a function or a class")
    return kind  # type: ignore[no-any-return]


def _made(key: str, choice: ToolChoice) -> Callable[..., Any]:
    name = choice.name or key
    kind = find_tool(key, choice)
    if not inspect.isclass(kind):
        if choice.options:
            raise UsageError(f"tool '{name}' is a function, which takes no options; use a class")
        return kind
    tool: Any = construct("tool", name, kind, choice.options)
    if not callable(tool):
        raise UsageError(f"tool '{name}' has no method __call__")
    return tool  # type: ignore[no-any-return]


def _is_async(tool: Callable[..., Any]) -> bool:
    call = getattr(type(tool), "__call__", None)  # noqa: B004 - of the class, as a call uses it
    return inspect.iscoroutinefunction(tool) or inspect.iscoroutinefunction(call)


class Job:
    """A function that another thread calls; ``future`` returns its result in this asyncio loop."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def run(self, *arguments: Any) -> None:
        """Call the function, unless ``future`` was cancelled."""
        if self.future.cancelled():
            return
        value, problem = None, None
        try:
            value = self._function(*arguments)
        except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
            problem = error
        except BaseException as error:  # noqa: BLE001 - SystemExit would end only the thread
            problem = RuntimeError(f"{type(error).__name__}: {error}")
        with suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(self._deliver, value, problem)

    def _deliver(self, value: Any, error: Exception | None) -> None:
        if self.future.cancelled():
            return
        if error is None:
            self.future.set_result(value)
        else:
            self.future.set_exception(error)


async def in_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a separate thread.

    A hanging function does not block other functions or the end of the process.
    """
    job = Job(function)
    threading.Thread(target=job.run, daemon=True).start()
    return await job.future


class ToolSchemas:
    """Schemas of an episode's tools, by name.

    transformers makes a schema from annotations and from a docstring in Google's style (``Args:``).
    """

    def __init__(self, episode: EpisodeSettings) -> None:
        self._episode = episode

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The schemas of all tools with a schema."""
        return [each for each in self._made.values() if not isinstance(each, str)]

    def reason(self, name: str) -> str:
        """Return why a tool has no schema; "" if it has one, or if the episode uses no schemas."""
        made = self._made.get(name, "")
        return made if isinstance(made, str) else ""

    @cached_property
    def _made(self) -> dict[str, dict[str, Any] | str]:
        if not self._episode.describes_tools:
            return {}
        made: dict[str, dict[str, Any] | str] = {}
        for name, choice in self._episode.tools.items():
            try:
                made[name] = tool_schema(name, find_tool(name, choice))
            except UsageError as error:
                made[name] = str(error)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - of the user's own module
                made[name] = describe(error)
        return made


def tool_schema(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a function or of a callable class that the policy calls by ``name``.

    Raises UsageError that names the missing parts.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    call, doc = tool, tool.__doc__
    if not inspect.isroutine(tool):
        owner = tool if inspect.isclass(tool) else type(tool)
        call = owner.__call__
        doc = call.__doc__ or inspect.getdoc(owner)
    named: Any = wraps(call)(lambda: None)  # This function has the tool's signature.
    named.__name__, named.__doc__ = name, doc or ""
    try:
        schema: dict[str, Any] = get_json_schema(named)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise UsageError(" ".join(str(error).split())) from error
    except (AttributeError, LookupError, NameError, TypeError, ValueError) as error:
        raise UsageError(f"the signature of {name} cannot be read: {error}") from error
    return schema
