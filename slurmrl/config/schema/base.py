"""The base class of all sections, and the types that they share.

Values are strict, because YAML already distinguishes numbers, strings and booleans: ``no`` is never
false, and ``"3"`` is never three. Only integers are accepted as strings, because people write
``trial: 1`` and ``time: 30``.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict

T = TypeVar("T")

NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
CONTROL_CHARACTERS: Final = re.compile(r"[\x00-\x1f\x7f]")
OWN_CODE: Final = re.compile(r"[\w.]+:\w+")
"""Pattern of the name of the user's own code: ``module:name``."""


class Section(BaseModel):
    """The base class of all sections, which are frozen and reject unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
        validate_default=False,
    )
    null_means: ClassVar[str] = ""
    """Source from which all null keys take their values, in Markdown; empty if there is none."""


class HasVariables:
    """Marks a field in which ``~``, ``$NAME`` and ``${NAME}`` are replaced."""


class IsPath(HasVariables):
    """Marks a field that is a path; relative paths start at the folder of the configuration."""


class IsHubPath(IsPath):
    """Marks a path that may also name a repository of the Hugging Face hub."""


class Unit:
    """The unit of a number whose key has no suffix such as ``_s`` or ``_steps``."""

    def __init__(self, name: str) -> None:
        self.name = name


def _whole_number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _check_name(name: str) -> str:
    if not NAME_PATTERN.fullmatch(name) or ".." in name:
        raise ValueError(
            "a name has 1 to 64 letters, digits, '.', '_' or '-', starts with a letter or a digit, "
            "and has no '..'"
        )
    return name


def name_of(owner: str) -> AfterValidator:
    """Return a function that checks a name that the user gives ``owner``, such as ``a suite``."""

    def check(name: str) -> str:
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(
                f"{owner} has a name of 1 to 64 letters, digits, '.', '_' or '-' that starts with "
                "a letter or a digit"
            )
        return name

    return AfterValidator(check)


def _check_line(text: str) -> str:
    if CONTROL_CHARACTERS.search(text):
        raise ValueError("must be one line, without newlines or other control characters")
    return text


def _check_not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


Text = Annotated[str, BeforeValidator(_whole_number_as_text)]
Line = Annotated[Text, AfterValidator(_check_line)]
Word = Annotated[Line, AfterValidator(_check_not_empty)]
Name = Annotated[Text, AfterValidator(_check_name)]
PlainPathText = Annotated[Word, HasVariables()]
PathText = Annotated[Word, IsPath()]
HubPathText = Annotated[Word, IsHubPath()]

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""Seed of a trial, bounded so that the seed times the number of ranks fits into 64 bits."""
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]

Sequence = Annotated[tuple[T, ...], Strict(False)]
"""A YAML list, kept as a tuple."""
