"""Compare values in test code so that a program's objects cannot feign equality.

The sandbox runs this source next to its own, so this file imports nothing of slurmrl.
"""

from __future__ import annotations

import ast
import sys
from collections import deque
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
CONTAINERS = (set, frozenset, list, tuple, dict, deque)
BASES: tuple[Any, ...] = (int, float, complex, str, bytes, *CONTAINERS)
COMPARES = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
DIFFERENT: tuple[tuple[Any, ...], ...] = (
    (1, 2, 10**9),  # No number equals all of these, not even with a tolerance or a modulus.
    (0.5, 2.5, 1e9),
    (True, False),
    ("", "a", "b 1"),
    ([0], [1, 2]),
    ((0,), (1, 2)),
    ({0: 0}, {1: 2}),
    ({0}, {1, 2}),
    (object(), object()),
)
"""Different values of each kind. No object may equal all values of a kind."""


def with_plain_operands(code: str, space: dict[str, Any]) -> ast.Module:
    """Return test code that compares ``__plain__(operand)``; define this function in ``space``.

    Operands are the operands of ``==``, ``!=``, ``in`` and ``not in``, and the arguments of
    methods such as ``assertEqual`` and ``assertIn``.
    """
    space["__plain__"] = partial(plain, mocks="mock" in code)
    tree = ast.parse(code)
    nodes = [*ast.walk(tree)]
    kept: list[ast.AST] = []  # comparisons that may make an expression, such as (x == 1).sql()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            kept.append(node.value)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", "")
            if name.startswith("assert") and (
                "qual" in name or name in ("assertIn", "assertNotIn")
            ):
                node.args = [*map(_operand, node.args)]
                for keyword in node.keywords:
                    keyword.value = _operand(keyword.value) if keyword.arg else keyword.value
            elif getattr(node.func, "id", name) not in ("", "all", "any", "bool"):
                kept += [] if name.startswith("assert") else node.args
    others = set(map(id, kept))
    for node in nodes:
        if not isinstance(node, ast.Compare) or id(node) in others:
            continue
        if any(isinstance(each, COMPARES) for each in node.ops):
            node.left, *node.comparators = map(_operand, (node.left, *node.comparators))
    return tree


def _operand(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Constant | ast.Starred):
        return node
    name = ast.copy_location(ast.Name("__plain__", ast.Load()), node)
    return ast.copy_location(ast.Call(name, [node], []), node)


def plain(value: Any, mocks: bool = False) -> Any:
    """Return a value in which objects that equal different values are replaced.

    The replacement is a copy of a builtin type, an empty list for another object without items, or
    else an object that equals only itself.

    :param mocks: keep objects of ``mock``, such as ``ANY``, because the tests use them.
    """
    if type(value) in PLAIN:
        return value
    try:
        return _plain(value, mocks)
    except RecursionError:  # the value contains itself
        return value


def _plain(value: Any, mocks: bool) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind not in CONTAINERS and not _is_trusted(kind, mocks) and _equals_different(value):
        base = next((base for base in BASES if issubclass(kind, base)), None)
        copy = None
        with suppress(Exception):
            copy = base(value) if base else None if [*islice(value, 1)] else []
        return _plain(copy, mocks) if type(copy) is (base or list) else object()
    base = next((base for base in CONTAINERS if issubclass(kind, base)), None)
    if base is None:
        return value
    old = [*base.__iter__(value), *(dict.values(value) if base is dict else ())]
    if PLAIN.issuperset(map(type, old)):
        return value
    new = [_plain(each, mocks) for each in old]
    if all(map(lambda one, other: one is other, old, new)):
        return value
    half = len(new) // 2
    return dict(zip(new[:half], new[half:], strict=True)) if base is dict else base(new)


def _is_trusted(kind: Any, mocks: bool) -> bool:
    """Return whether objects of a type equal only themselves, or the tests define the type."""
    equals, module = kind.__eq__, str(kind.__module__)
    if equals is object.__eq__ and type(kind) is type:
        return True
    if mocks and "mock" in module and vars(sys.modules.get(module, sys)).get(kind.__name__) is kind:
        return True
    return getattr(getattr(equals, "__code__", None), "co_filename", "") == "tests.py"


def _equals_different(value: Any) -> bool:
    for different in DIFFERENT:
        with suppress(Exception):
            if all(value == each for each in different):
                return True
    return False
