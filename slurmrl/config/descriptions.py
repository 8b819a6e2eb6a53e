"""What the docstrings under the fields of a section say.

They are read from the source only where a person asks: reading them when the classes are made, as
pydantic offers, costs each process of a job more than compiling this package.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache

from pydantic import BaseModel


@cache
def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of a section's fields by attribute, inherited ones included."""
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if issubclass(kind, BaseModel) and kind is not BaseModel:
            found |= dict(_documented(kind))
    return found


def _documented(kind: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yield the fields that a class itself defines, with their docstrings; an empty one for a field
    without."""
    body = _body(kind)
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = inspect.cleandoc(str(following.value.value))
            yield statement.target.id, text


def _body(kind: type[BaseModel]) -> list[ast.stmt]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    except (OSError, TypeError, KeyError):  # a class without a file
        return []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
            return node.body
    return []
