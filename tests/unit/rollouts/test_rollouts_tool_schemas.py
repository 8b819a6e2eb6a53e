"""JSON schemas of tools by the rules of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest

from slurmrl.config.schema import EpisodeSettings
from slurmrl.errors import UsageError
from slurmrl.rollouts.tools import ToolSchemas, tool_schema


class Lookup:
    """Look up a word.

    Args:
        word: The word.
        book: Where to look.
    """

    def __init__(self, *, path: str) -> None: ...

    async def __call__(self, word: str, book: Literal["a", "b"] = "a") -> str:
        return word


class Unwritten:
    async def __call__(self, word: str) -> str:
        return word


class Nameless(Lookup):
    """Look up anything.

    Args:
        word: The word.
    """

    def __call__(self, word) -> str:  # type: ignore[no-untyped-def, override]
        return str(word)


def undescribed(word: str) -> str:
    """Look up a word."""
    return word


def unknown(word: Missing) -> str:  # type: ignore[name-defined]  # noqa: F821
    """Look up a word.

    Args:
        word: The word.
    """


@pytest.mark.parametrize("tool", [Lookup, Lookup(path="x"), Lookup(path="x").__call__])
def test_schema_comes_from_signature_and_docstring(tool: Any) -> None:
    if not isinstance(tool, Lookup | type):
        tool.__func__.__doc__ = Lookup.__doc__
    function = tool_schema("find", tool)["function"]
    assert (function["name"], function["description"]) == ("find", "Look up a word.")
    assert function["parameters"]["required"] == ["word"]
    assert function["parameters"]["properties"] == {
        "word": {"type": "string", "description": "The word."},
        "book": {"type": "string", "enum": ["a", "b"], "description": "Where to look."},
    }


@pytest.mark.parametrize(
    ("tool", "lacks"),
    [
        (Unwritten, "for find because it has no docstring"),
        (Nameless, "Argument word is missing a type hint in function find"),
        (undescribed, "no description for the argument 'word'"),
        (unknown, "the signature of find cannot be read: name 'Missing' is not defined"),
        (len, "find"),
        (lambda word: word, "for find because it has no docstring"),
    ],
)
def test_rejected_schema_names_missing_parts_of_the_tool(
    tool: Callable[..., Any], lacks: str
) -> None:
    with pytest.raises(UsageError) as caught:
        tool_schema("find", tool)
    assert lacks in str(caught.value)


def test_each_tool_has_a_schema_or_a_reason_for_none() -> None:
    tools = {"calculator": {}, "run": {"name": "python"}, "far": {"name": "nowhere:far"}}
    made = ToolSchemas(EpisodeSettings(name="mine:episode", tools=tools))
    assert [each["function"]["name"] for each in made.schemas] == ["calculator", "run"]
    assert made.reason("run") == ""
    assert "no module 'nowhere'" in made.reason("far")


@pytest.mark.parametrize(
    ("episode", "described"),
    [
        ({"name": "multi_turn", "environment": {"name": "tools"}}, True),
        ({"name": "multi_turn", "environment": {"name": "mine:Own"}}, True),
        (
            {
                "name": "multi_turn",
                "environment": {"name": "tools", "options": {"format": "brackets"}},
            },
            False,
        ),
        ({"name": "verifiers"}, False),
    ],
)
def test_schemas_are_made_only_for_json_calls(episode: dict[str, Any], described: bool) -> None:
    made = ToolSchemas(EpisodeSettings(tools={"calculator": {}}, **episode))
    assert bool(made.schemas) == described
    assert made.reason("calculator") == ""
