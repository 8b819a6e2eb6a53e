"""Test code that defines tests without calling them, and code without tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from slurmrl.rewards.code import CodeReward
from slurmrl.rewards.code_cases import cases_of, program_of
from slurmrl.rewards.code_sandbox import MODULES, preamble
from slurmrl.rewards.code_tests import CALL_TESTS

RIGHT = "def add(a, b): return a + b"
WRONG = "def add(a, b): return a - b"
PASS = "pass"
TEST = "assert add(1, 2) == 3"


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    made = CodeReward(processes=1)
    yield made
    made.close()


@pytest.mark.parametrize(
    "tests",
    [
        f"def test_a(): {TEST}",
        f"import math\ndef testA(): {TEST}\ndef test_b(x=1): assert add(0, x) == x",
        f"from solution import add\ndef test_a(): {TEST}",
        f"import solution as s\ndef test_a(): {TEST.replace('add', 's.add')}",
        f"class TestAdd:\n  def test_a(self): {TEST}",
        "class TestAdd:\n  def setup_method(self, method): self.three = add(1, 2)\n"
        "  def test_a(self): assert self.three == 3",
        f"class Base:\n  def test_a(self): {TEST}\nclass TestAdd(Base): pass",
        f"async def test_a(): {TEST}",
        f"def test_a(): {TEST}\nassert add(0, 0) == 0",
        f"def test_a(): {TEST}\nif __name__ == '__main__':\n  pytest.main([__file__])",
        "import unittest\nclass TestCases(unittest.TestCase):\n"
        "  def test_a(self): self.assertEqual(add(1, 2), 3)",
        "from unittest import IsolatedAsyncioTestCase as C, TestCase\nclass A(TestCase):\n"
        "  def test_a(self): self.assertEqual(add(1, 2), 3)\nclass B(A): pass",
        "import unittest\nfrom unittest.mock import patch\n@patch('builtins.print')\n"
        f"def test_a(mock): {TEST}",
        f"def check(candidate): {TEST.replace('add', 'candidate')}\ncheck(add)",
        f"def run_all():\n  {TEST}\nif __name__ == '__main__':\n  run_all()",
        [f"def test_a(): {TEST}", "def test_b(): assert add(2, 2) == 4"],
        f"def test_a(): {TEST}\nfor test in [test_a]: test()",
        "def test_a(): return add(1, 2) == 3",
        "add(1, 2) == 3 or exit(1)",
        f"def main():\n  {TEST}\nimport unittest\nclass T(unittest.TestCase):\n"
        f"  def test_a(self): {TEST}\nmain()",
        f"globals()['add'](1, 2)\n{TEST}",
    ],
)
def test_score_follows_the_tests_in_each_form_of_call(reward: CodeReward, tests: Any) -> None:
    row = {"tests": tests}
    assert reward.check_rows([row]) == [""]
    assert reward(["p"] * 3, [RIGHT, WRONG, PASS], [row] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("def test_a(numbers): assert add(*numbers)", "nothing gives test_a its parameters: numb"),
        ("class TestA:\n  def test_a(self, x): add(x, x)", "TestA.test_a its parameters: x"),
        (
            "import pytest\n@pytest.mark.parametrize('a', [1])\ndef test_a(a): assert add(a, a)",
            r"need pytest for @pytest.mark.parametrize\('a', \[1\]\) of test_a",
        ),
        ("@pytest.fixture\ndef x(): pass\ndef test_a(): add(1, 2)", "need pytest for @pytest.fix"),
        ("def setup_module(): pass\ndef test_a(): add(1, 2)", r"pytest for setup_module\(\)"),
        (f"def run(): {TEST}", "do not run the program"),
        (f"class Helper:\n  def test_a(self): {TEST}", "do not run the program"),
        ('"""\n>>> add(1, 2)\n3\n"""', "do not run the program"),
        (">>> add(1, 2)\n3", "not valid Python"),
        ("def test_a(): assert True", "do not run the program"),
        (f"# {TEST}", "do not run the program"),
        ("import math\nassert math.floor(1.5) == 1", "do not run the program"),
        ([TEST, "import math"], "do not run the program"),
        ("add(1, 2) == 3", r"no effect without assert: add\(1, 2\) == 3"),
        ("def test_a():\n  add(1, 2) == 3 and add(1, 1) == 2", "no effect without assert"),
        ("print('passed')", "do not run the program"),
        ("def check(candidate): pass", "needs the name of a function: entry_point"),
    ],
)
def test_row_whose_tests_pass_any_program_is_rejected(tests: Any, why: str) -> None:
    [problem] = CodeReward().check_rows([{"tests": tests}])
    assert re.search(why, problem)


@pytest.mark.parametrize("test", [TEST.replace("add", "candidate"), "return candidate(1, 2) == 3"])
def test_check_function_may_receive_a_method(reward: CodeReward, test: str) -> None:
    row = {"test": f"def check(candidate): {test}", "entry_point": "Solution().add"}
    programs = [f"class Solution:\n  {each.replace('(a', '(self, a')}" for each in (RIGHT, WRONG)]
    assert reward(["p"] * 3, [*programs, PASS], [row] * 3) == [1.0, 0.0, 0.0]


CALL = TEST.replace("add", "candidate")


@pytest.mark.parametrize(
    "tests",
    [
        CALL,
        [CALL, "assert candidate(2, 2) == 4"],
        f"def test_a():\n  {CALL}",
        f"from __future__ import annotations\n{CALL}",
        f"import unittest\nclass A(unittest.TestCase):\n  def test_a(self): {CALL}",
        f"candidate = add\n{CALL}",
    ],
)
def test_candidate_is_the_entry_point_in_plain_tests(reward: CodeReward, tests: Any) -> None:
    """A program may have a helper with the name ``candidate``."""
    row = {"tests": tests, "entry_point": "add"}
    programs = [f"def candidate(): pass\n{RIGHT}", RIGHT, WRONG, f"{PASS}\ncandidate = sum"]
    assert reward.check_rows([row]) == [""]
    assert reward(["p"] * 4, programs, [row] * 4) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("entry_point", ["", "add two", 3])
def test_row_with_an_invalid_entry_point_is_rejected(entry_point: Any) -> None:
    [problem] = CodeReward().check_rows([{"tests": CALL, "entry_point": entry_point}])
    assert "they use candidate, so the row needs the name of a function: entry_point" in problem


def test_tested_built_in_name_must_be_defined_by_the_program(reward: CodeReward) -> None:
    """Python's own functions pass tests of a function with the same name."""
    row = {"tests": ["assert pow(2, 3) == 8"]}
    programs = ["def pow(a, b): return a ** b", "def pow(a, b): return a", PASS]
    assert reward(["p"] * 3, programs, [row] * 3) == [1.0, 0.0, 0.0]


def test_skipped_tests_do_not_pass(reward: CodeReward) -> None:
    tests = (
        "import unittest\nclass A(unittest.TestCase):\n"
        f"  @unittest.skip('')\n  def test_a(self): {TEST}"
    )
    assert reward(["p"], [RIGHT], [{"tests": tests}]) == [0.0]


def test_calls_in_tests_do_not_use_names_of_the_program() -> None:
    assert not (preamble().keys() - MODULES) & set(re.findall(r"\w+", CALL_TESTS))


def test_program_is_the_block_that_tests_import() -> None:
    completion = f"```python\n{RIGHT}\n```\n```python\nprint(add(1, 2))\n```"
    tests = f"from solution import add\ndef test_a(): {TEST}"
    assert program_of(completion, cases_of({}, tests)) == RIGHT
