"""Read test cases from rows, find the program in a completion, and compare results."""

from __future__ import annotations

import ast
import builtins
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose, isinf
from typing import Any, Final, Literal

from slurmrl.errors import UsageError
from slurmrl.rewards.code_sandbox import preamble
from slurmrl.rewards.code_tests import PROGRAM_MODULES, runnable

KEYS: Final = ("tests", "input_output", "test_list", "test")
"""Keys under which a row may have its tests; the first that exists counts."""
MOST_EXPECTED: Final = 1 << 20
"""Maximum number of characters of an expected output."""
SPARE_BYTES: Final = 4096
TOLERANCE: Final = 1e-6
"""Relative and absolute tolerance between two numbers, if one has a fraction or an exponent."""
NUMBER: Final = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
FENCE: Final = re.compile(
    r"(?:^(?P<indent>[ \t]+))?(?P<fence>```|~~~)"
    r"(?:[ \t]*(?P<alone>\w*)[ \t]*|\{?\.?(?P<word>\w[\w.+#-]*)[^\n`]*)"
    r"\r?\n(?P<body>.*?)(?:\n?[ \t]*(?(indent)|(?<![ \t]{4}))(?P=fence)|\Z)",
    re.DOTALL | re.MULTILINE,
)
"""Pattern of a Markdown code block. Other words may follow the language: ```` ```python
title="a.py" ````. A fence after four spaces, as in a docstring, does not end the block."""
PYTHON: Final = re.compile(r"py3?|python(3(\.\d+)*)?", re.IGNORECASE)
"""Pattern of the languages of blocks with Python code."""
BEGIN: Final = re.compile(r"^[ \t]*\[(?:BEGIN|PYTHON)\][ \t]*\n?", re.MULTILINE)
DONE: Final = re.compile(r"^[ \t]*\[(?:DONE|/PYTHON)\]", re.MULTILINE)
"""Patterns of lines around a program in the prompts of MBPP and Code Llama."""
READS: Final = re.compile(r"\binput\s*\(|\bstdin\b|\bopen\s*\(\s*0|\bread\s*\(\s*0|\bfileinput\b")
WRITES: Final = re.compile(r"\bprint\b|\bstdout\b|\bwrite\s*\(")
DEFINED: Final = re.compile(
    r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)|^(\w+)[ \t]*(?::[^=\n]+)?=(?!=)", re.MULTILINE
)
"""Pattern of definitions, in code that need not be complete: functions, methods, classes and
variables of the module."""


@dataclass(frozen=True)
class Case:
    """One test."""

    kind: Literal["script", "call", "check"]
    """A script reads input and prints, a call calls a function, a check runs code after the
    program."""
    stdin: str = ""
    function: str = ""
    arguments: Sequence[Any] = ()
    check: str = ""
    calls: str = ""
    """Code after ``check`` that calls the tests in ``check``."""
    expected: Any = field(default=None)
    """The output of a script, or the result of a call."""

    @property
    def most_bytes(self) -> int:
        """Maximum size of the output or result. A larger output or result is wrong."""
        script = self.kind == "script"
        size = len(self.expected.encode(errors="replace") if script else json.dumps(self.expected))
        return 2 * size + SPARE_BYTES

    def request(self) -> dict[str, Any]:
        """Return the data for the sandbox, without the expected result."""
        return {
            "kind": self.kind,
            "stdin": self.stdin,
            "function": self.function,
            "arguments": list(self.arguments),
            "check": self.check + self.calls,
            "most_bytes": self.most_bytes,
        }

    def passed(self, result: Mapping[str, Any]) -> bool:
        """Return whether a result of the sandbox is as expected."""
        if "failed" in result:
            return False
        if self.kind == "script":
            return same_output(result["output"], self.expected)
        if self.kind == "call":
            return same_value(result["value"], self.expected)
        return True


def cases_of(row: Mapping[str, Any], value: Any) -> list[Case]:
    """Return the tests under a key of a row (docs/rewards.md has the forms).

    :raises UsageError: the value has none of these forms.
    """
    if isinstance(value, str):
        value = _parsed(value)
    if isinstance(value, str):
        return [_check(row, value)] if value.strip() else []
    if isinstance(value, Mapping):
        return _of_lists(value)
    if not isinstance(value, Sequence):
        raise UsageError(f"they are {_kind(value)}; allowed: an object, a list or a string")
    return [_of_item(row, item) for item in value]


def _parsed(text: str) -> Any:
    """Return the JSON in a string if it is an object or a list; else the string."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict | list) else text


def _of_lists(value: Mapping[str, Any]) -> list[Case]:
    """Return the tests in ``{"inputs": […], "outputs": […]}``; ``"fn_name"`` means calls."""
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise UsageError("an object needs the lists inputs and outputs")
    if len(inputs) != len(outputs):
        raise UsageError(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
    name = value.get("fn_name")
    if name:
        return [_call(str(name), *pair) for pair in zip(inputs, outputs, strict=True)]
    return [_script(*pair) for pair in zip(inputs, outputs, strict=True)]


def _of_item(row: Mapping[str, Any], item: Any) -> Case:
    if isinstance(item, str):
        return _check(row, item)
    if isinstance(item, Mapping) and "input" in item and "output" in item:
        if item.get("fn_name"):
            return _call(str(item["fn_name"]), item["input"], item["output"])
        return _script(item["input"], item["output"])
    raise UsageError("an entry of a list must be code (a string) or have input and output")


def _script(given: Any, expected: Any) -> Case:
    return Case("script", stdin=_lines(given), expected=_bounded(_lines(expected)))


def _lines(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise UsageError(f"input and output must be strings or lists of lines, not {_kind(value)}")
    return value


def _call(function: str, arguments: Any, expected: Any) -> Case:
    if not function.isidentifier():
        raise UsageError(f"fn_name {function!r} is not the name of a function")
    if not isinstance(arguments, list):
        raise UsageError(
            f"the input of a call must be a list of its arguments, not {_kind(arguments)}"
        )
    _bounded(json.dumps(expected))
    return Case("call", function=function, arguments=arguments, expected=expected)


def _check(row: Mapping[str, Any], code: str) -> Case:
    imports = row.get("test_imports") or []
    setup = row.get("test_setup_code") or ""
    lines = [*imports, setup, code] if isinstance(imports, list) else [setup, code]
    text = "\n".join(str(line) for line in lines if line)
    check, calls = runnable(text, row.get("entry_point"))
    return Case("check", check=check, calls=calls)


def _bounded(text: str) -> str:
    if len(text) > MOST_EXPECTED:
        raise UsageError(f"an expected output has more than {MOST_EXPECTED} characters")
    return text


def _kind(value: Any) -> str:
    """Return the type of a JSON value, for a message."""
    names = {str: "a string", list: "a list", dict: "an object", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def same_output(output: str, expected: str) -> bool:
    """Return whether two outputs have the same lines.

    White space at the ends of lines and of the outputs is ignored. Numbers with a fraction or an
    exponent may differ by `TOLERANCE`.
    """
    ours, theirs = _stripped(output), _stripped(expected)
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _same_line(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    words, wanted = ours.split(), theirs.split()
    return len(words) == len(wanted) and all(map(_same_word, words, wanted))


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if not NUMBER.fullmatch(word) or not NUMBER.fullmatch(wanted):
        return False
    if word.lstrip("+-").isdigit() and wanted.lstrip("+-").isdigit():
        return False
    return _close(float(word), float(wanted))


def _close(ours: float, theirs: float) -> bool:
    """Return whether two numbers differ by no more than `TOLERANCE`.

    Integers may have any size. Numbers with a fraction that do not fit into a float equal no
    number.
    """
    try:
        return not isinf(theirs) and isclose(ours, theirs, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:
        return ours == theirs


def same_value(value: Any, expected: Any) -> bool:
    """Return whether a function's result is as expected.

    The result may also equal the only element of an expected list. Some datasets use lists.
    """
    if _equal(value, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _equal(value, expected[0])


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, bool) or isinstance(theirs, bool):
        return ours is theirs
    if isinstance(ours, float) or isinstance(theirs, float):
        numbers = isinstance(ours, int | float) and isinstance(theirs, int | float)
        return numbers and (ours == theirs or _close(ours, theirs))
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_equal(ours[key], theirs[key]) for key in ours)
    return bool(ours == theirs)


def program_of(completion: str, cases: Sequence[Case] = ()) -> str:
    """Return the code block with the program to test; without blocks, the whole string.

    Blocks without a language count only if no block is labeled Python. Of several blocks, choose
    the block that defines the most names in the tests. Among equals, for printed output, choose the
    most complete program, then the last block.
    """
    tagged: list[str] = []
    bare: list[str] = []
    for block in FENCE.finditer(completion):
        language = block["alone"] or block["word"] or ""
        if language == "" or PYTHON.fullmatch(language):
            (tagged if language else bare).append(_body(block))
    blocks = tagged or bare
    if len(blocks) < 2:
        return (blocks[0] if blocks else BEGIN.split(DONE.split(completion)[0])[-1]).lstrip(
            "\ufeff"
        )
    used = {name for case in cases for name in _used(case)}
    known = [len(used.intersection(_defined(block))) for block in blocks]
    reads = any(case.kind == "script" and case.stdin.strip() for case in cases)
    scripts = any(case.kind == "script" for case in cases)
    ranks = [_completeness(block, reads=reads) if scripts else () for block in blocks]
    at = max(range(len(blocks)), key=lambda index: (known[index], ranks[index], index))
    return _completed(blocks[at], blocks[:at])


def _completed(code: str, earlier: Sequence[str]) -> str:
    """Return the code, with earlier blocks before it that define or import its missing names."""
    lacking = _free(_tree(code)) - {*dir(builtins)}
    for block in reversed(earlier):
        tree = _tree(block)
        made = _defined(block) | _imported(tree) - preamble().keys()
        if tree is not None and lacking & made:
            code = f"{block}\n{code}"
            lacking = (lacking | _free(tree) - {*dir(builtins)}) - made
    return code


def _body(block: re.Match[str]) -> str:
    indent = len(block["indent"] or "")
    return re.sub(rf"^[ \t]{{0,{indent}}}", "", block["body"], flags=re.MULTILINE)


def _used(case: Case) -> set[str]:
    """Return the names that a test may use from the program."""
    if case.kind == "call":
        return {case.function}
    return _free(_tree(case.check)) if case.kind == "check" else set()


def _defined(code: str) -> set[str]:
    return {name for found in DEFINED.findall(code) for name in found if name}


def _imported(tree: ast.Module | None) -> set[str]:
    nodes = (
        [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        if tree
        else []
    )
    return {each.asname or each.name.partition(".")[0] for node in nodes for each in node.names}


def _completeness(code: str, *, reads: bool) -> tuple[bool, bool, bool, bool]:
    """Return a sort key: code with a higher key looks more like a whole program.

    The values: the code is Python, it reads input if ``reads``, it has all names that it uses, and
    it prints.
    """
    tree = _tree(code)
    if tree is None:
        return False, False, False, False
    whole = not _free(tree) - {*dir(builtins), *preamble()}
    return True, not reads or bool(READS.search(code)), whole, bool(WRITES.search(code))


def _free(tree: ast.AST | None) -> set[str]:
    """Return the names that code uses and does not define, including Python's own names.

    The result is empty if the code contains ``import *``, which may import any name.
    """
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
    """Parse code; return None if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
