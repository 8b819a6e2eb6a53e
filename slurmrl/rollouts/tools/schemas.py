"""JSON schemas of tools, which chat templates describe to the policy.

Torch-free, except for what transformers imports.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any

from slurmrl.config.schema import EpisodeSettings
from slurmrl.errors import UsageError
from slurmrl.registry import describe
from slurmrl.rollouts.tools.toolbox import find_tool


class ToolSchemas:
    """Schemas of an episode's tools, by name.

    transformers makes a schema of annotations and of a docstring in Google's form (``Args:``).
    """

    def __init__(self, episode: EpisodeSettings) -> None:
        self._episode = episode

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The schemas of the tools that have one."""
        return [each for each in self._made.values() if not isinstance(each, str)]

    def reason(self, name: str) -> str:
        """Why a tool has no schema; "" if it has one, or if none are made for the episode."""
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
    """Return the schema of a function, or of a class's objects, that the policy calls by ``name``.

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
    named: Any = wraps(call)(lambda: None)  # it has the tool's signature
    named.__name__, named.__doc__ = name, doc or ""
    try:
        schema: dict[str, Any] = get_json_schema(named)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise UsageError(" ".join(str(error).split())) from error
    except (AttributeError, LookupError, NameError, TypeError, ValueError) as error:
        raise UsageError(f"the signature of {name} cannot be read: {error}") from error
    return schema
