"""The program of a completion is the code block that defines the tested names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from slurmrl.rewards.code_cases import cases_of, program_of


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("x = 1", "x = 1"),
        ("First ```python\na\n``` then\n```py\nb\n```\nDone.", "b"),
        ("```\na\n```", "a"),
        ("```python\na", "a"),
        ("```python\na\n```\n```json\n{}\n```", "a"),
        ("```Python\na\n```", "a"),
        ("```PYTHON3.11\na\n```\n```JSON\n{}\n```", "a"),
        ("``` py3 \r\na\r\n```\r\n", "a\r"),
        ('```python title="a.py"\na\n```', "a"),
        ("```{.python .numbered}\na\n```", "a"),
        ("```python\na\n```\n```c++\nb\n```\n```python-repl\n>>> c\n```", "a"),
        ("1. So:\n   ```python\n   if a:\n     b\n   ```", "if a:\n  b"),
        ("```python\n    return b\n```", "    return b"),
        ("```python\na\n``` And so on\n```python\nb\n```", "b"),
        ("One ``` so to say\n```python\na\n```", "a"),
        ("```python\na\n```\nIt prints:\n```\n3\n```", "a"),
        ("```\na\n```\n```\nb\n```", "b"),
        ("~~~python\na = '```'\n~~~\n```\n3\n```", "a = '```'"),
        ("```python\nif a:\n    b = '\n    ```\n    '\n```\n", "if a:\n    b = '\n    ```\n    '"),
        ("- - So:\n      ```python\n      a\n      ```\n", "a"),
        ("\ufeffx = 1", "x = 1"),
        ("```python\n\ufeffx = 1\n```", "x = 1"),
        ("[BEGIN]\nx = 1\n[DONE]\n", "x = 1\n"),
        ("Here:\n [BEGIN]\nx = 1\n[DONE]\n\n[BEGIN]\ny = 2\n[DONE]", "x = 1\n"),
        ("    return 1\n[DONE]", "    return 1\n"),
        ("Sure!\n[PYTHON]\nx = 1\n[/PYTHON]\nIt works.", "x = 1\n"),
        ("[BEGIN]\n```python\nx = 1\n```\n[DONE]", "x = 1"),
    ],
)
def test_last_python_block_is_the_program(completion: str, program: str) -> None:
    assert program_of(completion) == program


def fenced(*blocks: str) -> str:
    """Return code blocks. The first line of each has its language."""
    return "\n".join(f"So:\n```{block}\n```" for block in blocks)


CALL = {"tests": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}}
SCRIPT = {"tests": [{"input": "1 2", "output": "3"}]}
SILENT = {"tests": [{"input": "", "output": "3"}]}
ASSERTS = {"tests": ["assert add(1, 2) == 3", "x = add(2, 2)\nassert x == 4"]}
CLASSES = {"tests": "q = Queue()\nq.push(1)\nassert size(q) == 1"}
CHECK = {"tests": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"}
ADD = "python\ndef add(a, b):\n    return a + b"
METHOD = "py\nclass Solution:\n    def add(self, a, b):\n        return a + b"
READS = "python\na, b = map(int, input().split())\nprint(a + b)"
MAIN = "python\nimport sys\ndef main():\n    print(sum(map(int, sys.stdin.read().split())))\nmain()"


@pytest.mark.parametrize(
    ("row", "blocks", "chosen"),
    [
        (CALL, (ADD, "python\nprint(add(1, 2))"), 0),
        (CALL, ("python\ndef add(a, b): ...", ADD), 1),
        (CALL, (METHOD, "python\nSolution().add(1, 2)"), 0),
        (CALL, (ADD, "python\nassert add(1, 2) == 3\nassert add(0, 0) == 0"), 0),
        (CALL, (ADD, "python\ndef add(a, b):\n    return (a +"), 1),
        (CALL, ("python\nadd = lambda a, b: a + b", "python\nresult = add(1, 2)"), 0),
        (CALL, ("\ndef add(a, b):\n    return a + b", "\n3"), 0),
        (CALL, ("python\nx = 1", "\ndef add(a, b):\n    return a + b"), 0),
        (ASSERTS, (ADD, "python\nx = add(1, 2)\nprint(x)"), 0),
        (CHECK, (ADD, "python\nprint(add(1, 2))"), 0),
        (
            CLASSES,
            (
                "python\nclass Queue: ...\ndef size(q): ...",
                "python\nclass Queue: ...\nprint(Queue())",
            ),
            0,
        ),
        (SCRIPT, (READS, "python\n3"), 0),
        (SCRIPT, (READS, "python\n1 2"), 0),
        (SCRIPT, (READS, "python\nprint(solve(1, 2))"), 0),
        (SCRIPT, (READS, MAIN), 1),
        (SCRIPT, (MAIN, "python\na, b = map(int, input().split())\nprint(solve(a, b))"), 0),
        (SCRIPT, (MAIN, "python\nmain()"), 0),
        (SCRIPT, (READS, "python\na, b = map(int, input().split()"), 0),
        (SILENT, ("python\nprint(3)", "python\n3"), 0),
        (SILENT, ("python\ndef f(): return 3\nprint(f())", "python\nf()"), 0),
    ],
)
def test_program_is_the_block_that_defines_the_tested_names(
    row: dict[str, Any], blocks: Sequence[str], chosen: int
) -> None:
    """Blocks that read and print count too. Of equal blocks, the last one is used."""
    program = program_of(fenced(*blocks), cases_of(row, row["tests"]))
    assert program == blocks[chosen].partition("\n")[2]


HELPED = "python\ndef add(a, b):\n    return total([a, b])"
TOTAL = "python\ndef total(a):\n    return np.sum(a)"
CALLS = "python\nprint(solve(*map(int, input().split())))"


@pytest.mark.parametrize(
    ("row", "blocks", "used"),
    [
        (CALL, ("python\ndef total(a):\n    return sum(a)", HELPED), (0, 1)),
        (CALL, ("python\nfrom math import fsum as total", "python\nprint(1)", HELPED), (0, 2)),
        (CALL, ("python\nimport numpy as np", TOTAL, HELPED), (0, 1, 2)),
        (CALL, ("python\ntotal = 1 +", HELPED), (1,)),
        (
            CALL,
            ("python\ndef count(*a):\n    return 3", "python\nadd = lambda *a: count(*a)"),
            (0, 1),
        ),
        (
            CALL,
            ("python\nfrom math import sqrt\nprint(0)", "python\nadd = lambda *a: sqrt(9)"),
            (1,),
        ),
        (CALL, ("python\ndef other(a): ...", HELPED), (1,)),
        (SCRIPT, ("python\ndef solve(a, b):\n    return a + b", CALLS), (0, 1)),
    ],
)
def test_program_includes_earlier_blocks_that_define_missing_names(
    row: dict[str, Any], blocks: Sequence[str], used: Sequence[int]
) -> None:
    program = program_of(fenced(*blocks), cases_of(row, row["tests"]))
    assert program == "\n".join(blocks[index].partition("\n")[2] for index in used)
