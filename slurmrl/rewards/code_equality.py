"""Compare values in test code so that a program's objects cannot feign equality.

The sandbox runs this source next to its own, so this file imports nothing of slurmrl.
"""

from __future__ import annotations

import ast
import operator
import sys
from collections import deque
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import Any

PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
HASHED: tuple[Any, ...] = (set, frozenset, dict)
CONTAINERS: tuple[Any, ...] = (*HASHED, list, tuple, deque)
BASES: tuple[Any, ...] = (int, float, complex, str, bytes, *CONTAINERS)
COMPARES = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
MEMBERS: Any = ([ast.In], [ast.NotIn])
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
    methods such as ``assertEqual`` and ``assertIn``. A set or dict at the
    right of ``in`` becomes a `_Members`, because a walk through its elements would take too long.
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
                second = name in ("assertIn", "assertNotIn")
                node.args = [_operand(arg, second and i == 1) for i, arg in enumerate(node.args)]
                for keyword in filter(operator.attrgetter("arg"), node.keywords):
                    keyword.value = _operand(keyword.value, keyword.arg == "container")
            elif getattr(node.func, "id", name) not in ("", "all", "any", "bool"):
                kept += [] if name.startswith("assert") else node.args
    others = set(map(id, kept))
    for node in nodes:
        if not isinstance(node, ast.Compare) or id(node) in others:
            continue
        if any(isinstance(each, COMPARES) for each in node.ops):
            single = [*map(type, node.ops)] in MEMBERS
            node.left = _operand(node.left)
            node.comparators = [_operand(each, single) for each in node.comparators]
    return tree


def _operand(node: ast.expr, members: bool = False) -> ast.expr:
    if isinstance(node, ast.Constant | ast.Starred):
        return node
    name = ast.copy_location(ast.Name("__plain__", ast.Load()), node)
    flags = [ast.copy_location(ast.Constant(True), node)] * members
    return ast.copy_location(ast.Call(name, [node, *flags], []), node)


def plain(value: Any, members: bool = False, *, mocks: bool = False) -> Any:
    """Return a value without objects that claim to equal different values.

    The replacement is a copy as a builtin type. An object of no builtin type becomes an empty list
    if it has no items, and otherwise an object that equals only itself.

    :param members: return a `_Members` for a set or a dict.
    :param mocks: keep objects of ``mock``, such as ``ANY``, because the tests use them.
    """
    if type(value) in PLAIN:
        return value
    base = members and next((base for base in HASHED if issubclass(type(value), base)), None)
    if base and type(value).__contains__ is base.__contains__:
        return _Members(base, value, mocks)
    try:
        return _plain(value, mocks)
    except RecursionError:  # the value contains itself
        return value


class _Members:
    """Set or dict in which ``in`` compares elements or keys by their `plain` values."""

    def __init__(self, base: Any, value: Any, mocks: bool) -> None:
        self._base, self._value, self._mocks = base, value, mocks

    def __contains__(self, key: Any) -> bool:
        if not self._base.__contains__(self._value, key):
            return False
        key = frozenset(key) if type(key).__hash__ is None else key  # Sets convert such keys too.
        probe = _Probe(key)
        with suppress(Exception):  # A program's __eq__ may raise.
            self._base.__contains__(self._value, probe)
        rest = (each for each in self._base.__iter__(self._value) if hash(each) == hash(key))
        found = chain(probe.found, rest)
        return any(each is key or plain(each, mocks=self._mocks) == key for each in found)


class _Probe:
    """Key that records the element to which a set or dict finds it equal."""

    def __init__(self, key: Any) -> None:
        self._key, self.found = key, list[Any]()

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        self.found += [other] if other is self._key or other == self._key else []
        return bool(self.found)


def _plain(value: Any, mocks: bool) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    base = kind if kind in CONTAINERS else None
    if base is None and not _is_trusted(kind, mocks) and _equals_different(value):
        base = next((base for base in BASES if issubclass(kind, base)), None)
        copy = None
        with suppress(Exception):
            copy = base(value) if base else None if [*islice(value, 1)] else []
        return _plain(copy, mocks) if type(copy) is (base or list) else object()
    base = base or next((base for base in CONTAINERS if issubclass(kind, base)), None)
    if base is None:
        return value
    old = [*base.__iter__(value), *(dict.values(value) if base is dict else ())]
    if PLAIN.issuperset(map(type, old)):
        return value
    new = [_plain(each, mocks) for each in old]
    if all(map(operator.is_, old, new)):
        return value
    half = len(new) // 2
    if base is dict:
        return dict(zip(map(_hashable, new[:half]), new[half:], strict=True))
    return base(map(_hashable, new) if base in HASHED else new)


def _hashable(value: Any) -> Any:
    with suppress(Exception):
        hash(value)
        return value
    return object()


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
