"""The program in a completion: which of its fenced blocks the tests are about."""

from __future__ import annotations

import ast
import builtins
import re
import warnings
from collections.abc import Sequence
from typing import Final

from slurmrl.rewards.code_cases import Case
from slurmrl.rewards.code_sandbox import preamble
from slurmrl.rewards.code_tests import PROGRAM_MODULES

FENCE: Final = re.compile(
    r"(?:^(?P<indent>[ \t]+))?```(?:[ \t]*(?P<alone>\w*)[ \t]*|\{?\.?(?P<word>\w[\w.+#-]*)[^\n`]*)"
    r"\r?\n(?P<body>.*?)(?:\n?[ \t]*```|\Z)",
    re.DOTALL | re.MULTILINE,
)
"""A block of Markdown. Behind its language there may be more: ```` ```python title="a.py" ````."""
PYTHON: Final = re.compile(r"py3?|python(3(\.\d+)*)?", re.IGNORECASE)
"""The languages of blocks that hold Python."""
READS: Final = re.compile(r"\binput\s*\(|\bstdin\b|\bopen\s*\(\s*0|\bread\s*\(\s*0|\bfileinput\b")
WRITES: Final = re.compile(r"\bprint\b|\bstdout\b|\bwrite\s*\(")
DEFINED: Final = re.compile(
    r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)|^(\w+)[ \t]*(?::[^=\n]+)?=(?!=)", re.MULTILINE
)
"""Definitions, in code that need not be complete: functions, methods and classes, and variables of
the module."""


def program_of(completion: str, cases: Sequence[Case] = ()) -> str:
    """The fenced block of Python that the tests are about; the whole text if there is none. Blocks
    without a language count only if none is said to be Python. Of several, it is the last of those
    that define most of the names that the tests use; for tests of what a program prints, the last
    of those that look most like a whole program."""
    tagged: list[str] = []
    bare: list[str] = []
    for block in FENCE.finditer(completion):
        language = block["alone"] or block["word"] or ""
        if language == "" or PYTHON.fullmatch(language):
            (tagged if language else bare).append(_body(block))
    blocks = tagged or bare
    if len(blocks) < 2:
        return blocks[0] if blocks else completion
    used = {name for case in cases for name in _used(case)}
    known = [len(used.intersection(_defined(block))) for block in blocks]
    reads = any(case.kind == "script" and case.stdin.strip() for case in cases)
    scripts = any(case.kind == "script" for case in cases)
    ranks = [_completeness(block, reads=reads) if scripts else () for block in blocks]
    best = max(zip(known, ranks, strict=True))
    return next(
        block
        for block, *rank in reversed(list(zip(blocks, known, ranks, strict=True)))
        if tuple(rank) == best
    )


def _body(block: re.Match[str]) -> str:
    indent = len(block["indent"] or "")
    return re.sub(rf"^[ \t]{{0,{indent}}}", "", block["body"], flags=re.MULTILINE)


def _used(case: Case) -> set[str]:
    """The names that a test may want from the program."""
    if case.kind == "call":
        return {case.function}
    return _free(_tree(case.check)) if case.kind == "check" else set()


def _defined(code: str) -> set[str]:
    return {name for found in DEFINED.findall(code) for name in found if name}


def _completeness(code: str, *, reads: bool) -> tuple[bool, bool, bool, bool]:
    """How much code looks like a whole program, rather than an output or an example of use: whether
    it is Python, reads its input if it must, has all the names that it uses, and prints."""
    tree = _tree(code)
    if tree is None:
        return False, False, False, False
    whole = not _free(tree) - {*dir(builtins), *preamble()}
    return True, not reads or bool(READS.search(code)), whole, bool(WRITES.search(code))


def _free(tree: ast.AST | None) -> set[str]:
    """The names that code uses and does not define, with those of Python; none if it imports names
    that it does not name."""
    used, bound, tested = set[str](), {"__file__"}, set[str]()
    for node in ast.walk(tree) if tree is not None else ():
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                bound.add(name)
            case ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.ImportFrom(module=module, names=names) if module in PROGRAM_MODULES:
                tested.update(each.name for each in names)
            case ast.alias(name="*"):
                return set()
            case ast.alias(name=name, asname=other):
                bound.add(other or name.partition(".")[0])
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                bound.add(name)
            case ast.MatchMapping(rest=str(name)):
                bound.add(name)
    return used - bound | tested


def _tree(code: str) -> ast.Module | None:
    """None if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
