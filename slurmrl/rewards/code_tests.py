"""Complete a row's test code: call tests that it does not call; reject code without tests."""

from __future__ import annotations

import ast
import builtins
import itertools
import re
import symtable
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from slurmrl.errors import UsageError
from slurmrl.rewards.code_sandbox import MODULES

PROGRAM_MODULES: Final = ("solution", "program", "__main__")
"""The names under which test code may import the program."""
INDIRECT: Final = {"globals", "locals", "vars", "eval", "exec", "__import__", "importlib", "sys"}
"""Names with which test code may find the program without naming one of its functions."""
PYTEST_ONLY: Final = ("fixture", "parametrize", "usefixtures", "skip", "skipif", "xfail")
"""Decorators that only pytest understands."""
PYTEST_SETUP: Final = ("setup_module", "setup_function", "teardown_module", "teardown_function")
ENTRY_POINT: Final = re.compile(r"[^\W\d]\w*(\(\))?(\.[^\W\d]\w*)*")
"""Pattern of the name of a tested function: ``add`` or ``Solution().add``."""
CALL_TESTS: Final = """

def _call_tests(tests):
    import inspect, unittest

    def call(function, *given):
        result = function(*given[: len(inspect.signature(function).parameters)])
        if inspect.iscoroutine(result):
            import asyncio  # slow

            result = asyncio.run(result)
        assert result is not False

    def nothing():
        pass

    suite = unittest.TestSuite()
    for test in tests:
        if not isinstance(test, type):
            call(test)
        elif issubclass(test, unittest.TestCase):
            suite.addTests(unittest.defaultTestLoader.loadTestsFromTestCase(test))
        else:
            call(getattr(test, "setup_class", nothing))
            for name in [name for name in dir(test) if name.startswith("test")]:
                case = test()
                method = getattr(case, name)
                call(getattr(case, "setup_method", nothing), method)
                call(method)
                call(getattr(case, "teardown_method", nothing), method)
            call(getattr(test, "teardown_class", nothing))
    if suite.countTestCases():
        result = unittest.TextTestRunner().run(suite)
        assert result.wasSuccessful() and result.testsRun > len(result.skipped), result

"""
"""Code that runs test functions and classes as pytest does. The code must not contain names of
`code_sandbox.preamble`, because programs lose the names that occur in test code."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
Definitions = Mapping[str, Definition]


def runnable(code: str, entry_point: Any) -> tuple[str, str]:
    """Return test code, followed by calls of the tests that it defines but does not call.

    :param entry_point: name of the tested function: the argument of HumanEval's ``check``, and the
        value of ``candidate`` in other code; None if the row has no such name.
    :raises UsageError: the code is not Python, a test cannot be called, or no test uses the
        program.
    """
    code = _with_candidate(_without_pytest_main(code), entry_point)
    tree = _parsed(code)
    defined = {node.name: node for node in tree.body if isinstance(node, Definition)}
    run = _reached((node for node in tree.body if not _only_defines(node)), defined)
    if "check" in defined and defined["check"] not in run:
        call = f"assert check({_function(entry_point, 'define check(…)')}) is not False"
        code += f"\n{call}\n"
        run = _reached(_parsed(call).body, defined, run)
    tests = [node for node in defined.values() if node not in run and _is_test(node, defined)]
    if "unittest" in code and any(_runs_unittest(node, defined) for node in run):
        cases = [node for node in tests if _is_test_case(node, defined)]
        tests = [node for node in tests if node not in cases]
        run = _reached(cases, defined, run)
    run = _reached(tests, defined, run)
    _check_comparisons(run)
    calls = _check_of_names(code, run, defined)
    if tests:
        _check_callable(defined, tests)
        calls += f"{CALL_TESTS}_call_tests([{', '.join(node.name for node in tests)}])\n"
    return code, calls


def _without_pytest_main(code: str) -> str:
    """Remove ``pytest.main()``, which would look for files and would not raise if tests fail."""
    if "pytest.main(" not in code:
        return code
    lines = code.split("\n")
    for node in _parsed(code).body:
        place = slice(node.lineno - 1, node.end_lineno)
        text = lines[place]
        if not isinstance(node, Definition) and "pytest.main(" in "\n".join(text):
            lines[place] = [""] * len(text)
    return "\n".join(lines)


def _with_candidate(code: str, entry_point: Any) -> str:
    """Define ``candidate`` as the entry point if code uses this name and does not define it."""
    if entry_point is None or "candidate" not in code:
        return code
    tree = _parsed(code)
    if "candidate" not in _names(code, set())[1]:
        return code
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    ends = [node.end_lineno or 0 for node in future if node.module == "__future__"]
    lines = code.split("\n")
    lines.insert(max(ends, default=0), f"candidate = {_function(entry_point, 'use candidate')}")
    return "\n".join(lines)


def _function(entry_point: Any, why: str) -> str:
    if not isinstance(entry_point, str) or not ENTRY_POINT.fullmatch(entry_point):
        raise UsageError(f"they {why}, so the row needs the name of a function: entry_point")
    return entry_point


def _parsed(code: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code, "tests", "exec", dont_inherit=True)
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"they are not valid Python: {error}") from error


def _only_defines(node: ast.stmt) -> bool:
    """Return whether a statement only defines code. A decorated function may run at once."""
    if isinstance(node, Function) and node.decorator_list:
        return node.name.startswith("test")
    return isinstance(node, Definition)


def _reached(
    nodes: Iterable[ast.stmt], defined: Definitions, before: Sequence[ast.stmt] = ()
) -> list[ast.stmt]:
    """Return ``before``, then the ``nodes``, then the definitions of all names that they use."""
    reached = [*before, *(node for node in nodes if node not in before)]
    for node in itertools.islice(reached, len(before), None):  # the loop extends this list
        names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
        found = [defined[name] for name in dict.fromkeys(names) if name in defined]
        reached += [each for each in found if each not in reached]
    return reached


def _is_test(node: Definition, defined: Definitions) -> bool:
    """Return whether pytest would run this function or class."""
    if not isinstance(node, ast.ClassDef):
        return node.name.startswith("test")
    if _is_test_case(node, defined):
        return True
    methods = [each.name for each in _methods(node, defined)]
    tests = any(name.startswith("test") for name in methods)
    return node.name.startswith("Test") and tests and "__init__" not in methods


def _is_test_case(node: Definition, defined: Definitions) -> bool:
    """Return whether a definition is a ``unittest.TestCase`` with tests."""
    if not isinstance(node, ast.ClassDef):
        return False
    bases = [ast.unparse(base) for each in _classes(node, defined) for base in each.bases]
    tests = any(each.name.startswith("test") for each in _methods(node, defined))
    return tests and any(base.endswith("TestCase") for base in bases)


def _classes(node: ast.ClassDef, defined: Definitions) -> list[ast.ClassDef]:
    """Return a class and its base classes, if the code defines them."""
    classes = [node]
    for each in classes:  # the loop extends this list
        bases = [defined.get(base.id) for base in each.bases if isinstance(base, ast.Name)]
        own = [base for base in bases if isinstance(base, ast.ClassDef)]
        classes += [base for base in own if base not in classes]
    return classes


def _methods(node: ast.ClassDef, defined: Definitions) -> list[Function]:
    classes = _classes(node, defined)
    return [each for owner in classes for each in owner.body if isinstance(each, Function)]


def _runs_unittest(node: ast.AST, defined: Definitions) -> bool:
    runners = {"unittest.main", "main", "TextTestRunner", "unittest.TextTestRunner"} - {*defined}
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return any(ast.unparse(call.func) in runners for call in calls)


def _check_callable(defined: Definitions, tests: Sequence[Definition]) -> None:
    """Raise UsageError if a test needs a feature of pytest."""
    for name in PYTEST_SETUP:
        if name in defined:
            raise UsageError(f"they need pytest for {name}(); move its statements into the tests")
    others = [node for node in tests if not _is_test_case(node, defined)]
    for node in (*others, *(each for each in defined.values() if each not in others)):
        only = PYTEST_ONLY if node in others else PYTEST_ONLY[:1]
        for decorator in _decorators(node):
            if decorator.partition("(")[0].rpartition(".")[2] in only:
                raise UsageError(f"they need pytest for @{decorator[:60]} of {node.name}")
    for node in others:
        if isinstance(node, Function):
            _check_parameters(node, node.name, 0)
        else:
            for method in _methods(node, defined):
                if method.name.startswith("test"):
                    _check_parameters(method, f"{node.name}.{method.name}", 1)


def _decorators(node: Definition) -> list[str]:
    """Return the decorators of a function, or of a class and its methods."""
    methods = [each for each in node.body if isinstance(each, Function)]
    owners = [node, *methods] if isinstance(node, ast.ClassDef) else [node]
    return [ast.unparse(each) for owner in owners for each in owner.decorator_list]


def _check_parameters(node: Function, name: str, own: int) -> None:
    decorators = _decorators(node)
    if any("patch" in decorator for decorator in decorators):  # patch() adds arguments
        return
    own = 0 if "staticmethod" in decorators else own
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    needed = names[own : len(names) - len(arguments.defaults)]
    if needed:
        raise UsageError(
            f"nothing gives {name} its parameters: {', '.join(needed)}; tests are called without "
            "arguments, and fixtures of pytest are not supported"
        )


def _check_comparisons(run: Sequence[ast.stmt]) -> None:
    """Raise UsageError if a statement compares values without ``assert``."""
    classes = [node for node in run if isinstance(node, ast.ClassDef)]
    functions = [*run, *(each for node in classes for each in node.body)]
    bodies = [node.body for node in functions if isinstance(node, Function)]
    for node in itertools.chain(run, *bodies):
        value = node.value if isinstance(node, ast.Expr) else None
        parts = value.values if isinstance(value, ast.BoolOp) else [value]
        if all(isinstance(part, ast.Compare) for part in parts):
            raise UsageError(f"a comparison has no effect without assert: {ast.unparse(node)[:80]}")


def _check_of_names(code: str, run: Sequence[ast.stmt], defined: Definitions) -> str:
    """Return "" if the statements in ``run`` use names that only a program can define.

    If the statements use only names of Python itself, return code that fails unless the program
    defines one of these names.

    :raises UsageError: the code tests no program.
    """
    unused = {name for name, node in defined.items() if node not in run}
    used, free = _names(code, unused)
    given = {*dir(builtins), *MODULES, "__file__"}
    if free - given or used & INDIRECT:
        return ""
    if any(_may_import_program(each) for node in run for each in ast.walk(node)):
        return ""
    names = sorted(free.intersection(dir(builtins)))
    if not names or "assert" not in code:
        raise UsageError("they do not run the program, so every program would pass")
    return f"\nassert any(name in globals() for name in {names}), 'the program defines none'\n"


def _may_import_program(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module in PROGRAM_MODULES or node.names[0].name == "*"
    return isinstance(node, ast.Import) and any(each.name in PROGRAM_MODULES for each in node.names)


def _names(code: str, unused: set[str]) -> tuple[set[str], set[str]]:
    """Return the global names that code uses outside its ``unused`` definitions.

    The second set has the used names that the code does not define.
    """
    module = symtable.symtable(code, "tests", "exec")
    used = {each.get_name() for each in module.get_symbols() if each.is_referenced()}
    tables = [each for each in module.get_children() if each.get_name() not in unused]
    for table in tables:  # the loop extends this list
        tables += table.get_children()
        symbols = [each for each in table.get_symbols() if each.is_referenced()]
        used |= {each.get_name() for each in symbols if each.is_global()}
    bound = [each for each in module.get_symbols() if each.is_assigned() or each.is_imported()]
    return used, used - {each.get_name() for each in bound}
