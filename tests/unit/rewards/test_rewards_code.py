"""Programs and their tests: scores, and programs that try to escape their limits."""

from __future__ import annotations

import json
import os
import sys
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import TestCase
from unittest.mock import Mock

import pytest

from slurmrl.errors import UnusableRowError, UsageError
from slurmrl.rewards import code_equality
from slurmrl.rewards.code import CodeReward
from slurmrl.rewards.code_cases import same_output, same_value
from slurmrl.rollouts.tools.shipped import PythonTool
from tests.support import apptainer

Make = Callable[..., CodeReward]
DEADLINE_S = 60.0

SUM = {"inputs": ["1 2\n", "5 -7\n"], "outputs": ["3\n", "-2\n"]}
ADDS = "print(sum(map(int, input().split())))"
DOUBLE = {"fn_name": "double", "inputs": [[2], [[1]]], "outputs": [4, [[1, 1]]]}
HUMAN = {
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}
ASSERTS = {"test_list": ["assert add(1, 2) == 3", "assert add(0.5, 0.25) == 0.75"]}


@pytest.fixture
def make() -> Iterator[Make]:
    rewards: list[CodeReward] = []

    def build(**options: Any) -> CodeReward:
        rewards.append(CodeReward(**{"processes": 1, **options}))
        return rewards[-1]

    yield build
    for reward in rewards:
        reward.close()


def judge(reward: CodeReward, row: dict[str, Any], programs: Sequence[str]) -> list[float]:
    return reward(["p"] * len(programs), programs, [row] * len(programs))


@pytest.mark.parametrize(
    ("row", "right", "wrong"),
    [
        ({"tests": SUM}, f"```python\n{ADDS}\n```", "print(3)"),
        ({"input_output": json.dumps(SUM)}, ADDS, "1/0"),
        ({"tests": [{"input": "4", "output": "4.0000001"}]}, "print(float(input()))", "print(5)"),
        ({"tests": [{"input": ["a", "b"], "output": "b"}]}, "input(); print(input())", "print()"),
        ({"tests": DOUBLE}, "def double(x): return x * 2", "def double(x): return x"),
        (
            {"tests": DOUBLE},
            "class Solution:\n  def double(self, x): return x * 2",
            "double = None",
        ),
        (HUMAN, "def add(a, b): return a + b", "def add(a, b): return a - b"),
        (ASSERTS, "def add(a, b): return a + b", "def add(a, b): return int(a + b)"),
        (
            {"test_list": ["assert f() == math.pi"], "test_imports": ["import math"]},
            "def f():\n  return 3.141592653589793",
            "def f(): return 3",
        ),
    ],
)
def test_every_form_of_tests_scores_right_and_wrong_programs(
    make: Make, row: dict[str, Any], right: str, wrong: str
) -> None:
    """A program that ends before its tests scores 0."""
    reward = make()
    assert reward.check_rows([row]) == [""]
    ends = "import os; os._exit(0)"
    assert judge(reward, row, [right, wrong, "", ends]) == [1.0, 0.0, 0.0, 0.0]
    assert reward.stats() == {"reward_unjudged": (0.0, 4.0)}


def test_partial_score_is_the_share_of_passed_tests(make: Make) -> None:
    """Later tests run although earlier ones fail or take too long."""
    row = {"tests": [{"input": str(n), "output": str(n)} for n in range(4)]}
    slow = "n = int(input())\nwhile n == 1: pass\nprint(0 if n == 2 else n)"
    assert judge(make(score="share", test_timeout_s=2.0), row, [slow]) == [0.5]
    assert judge(make(test_timeout_s=2.0), row, [slow, "print(input())"]) == [0.0, 1.0]


def test_prefix_of_the_row_is_prepended_to_the_program(make: Make) -> None:
    row = {**HUMAN, "prompt": "def add(a, b):\n"}
    assert judge(make(prefix_key="prompt"), row, ["    return a + b", "    pass"]) == [1.0, 0.0]


ESCAPES = {
    "leaves a process": "import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(3600)\n",
    "ignores signals": "import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
    "while True: pass",
    "sleeps": "import time; time.sleep(3600)",
    "bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "threads": "import threading, time\nwhile True:\n  threading.Thread(target=time.sleep,"
    " args=(99,)).start()",
    "memory": "x = bytearray(4 << 30)",
    "file": "f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "files": "n = 0\nwhile True:\n  n += 1\n  open(str(n), 'wb').write(bytes(1 << 20))",
    "output": "while True: print('x' * 10**6)",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "kills everybody": "import os; os.kill(-1, 9)",
    "closes pipes": "import os; os.closerange(0, 100); print(3)",
}


@pytest.mark.parametrize("namespaces", ["auto", "off"])
def test_programs_do_not_affect_each_other(make: Make, namespaces: str) -> None:
    programs = dict(ESCAPES)
    if namespaces == "off":  # what only namespaces prevent; the user's processes would be killed
        del programs["kills everybody"], programs["files"]
        if os.getuid() == 0:  # whose processes the kernel does not limit
            del programs["bomb"], programs["threads"]
    reward = make(namespaces=namespaces, test_timeout_s=3.0, files_mib=16, memory_mib=512)
    marked = [f"mark = 'escaped {os.getpid()}'\n{program}" for program in programs.values()]
    row = {"tests": [{"input": "", "output": ""}]}
    scores = judge(reward, row, [*marked, ""])
    assert dict(zip(programs, scores[:-1], strict=True)) == {
        **dict.fromkeys(programs, 0.0),
        "leaves a process": 1.0,
    }
    assert scores[-1] == 1.0
    assert reward.stats() == {"reward_unjudged": (0.0, len(scores))}
    pids = reward._pool.pids
    reward.close()
    deadline = time.monotonic() + DEADLINE_S
    while left := [pid for pid in pids if _group(pid)]:
        assert time.monotonic() < deadline, f"processes of the sandboxes {left} still run"
        time.sleep(0.02)


def _group(session: int) -> list[str]:
    """The processes of a session that have not ended."""
    alive = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            alive.append(str(path))
    return alive


def isolated(reward: CodeReward) -> dict[str, bool]:
    protections: dict[str, bool] = reward._pool.start()["protections"]
    return protections


def test_programs_have_no_network_and_cannot_change_files(make: Make, tmp_path: Path) -> None:
    reward = make()
    missing = [name for name, have in isolated(reward).items() if not have]
    if missing:
        pytest.skip(f"no namespaces here for: {missing}")
    (tmp_path / "mine").write_text("mine")
    programs = [
        "import socket; socket.create_connection(('127.0.0.1', 22), 1)",
        "import socket; socket.create_connection(('1.1.1.1', 80), 1)",
        f"open({str(tmp_path / 'mine')!r}, 'w')",
        f"import os; os.unlink({str(tmp_path / 'mine')!r})",
        "import subprocess; subprocess.run(['mount', '-o', 'remount,rw', '/'], check=True)",
        "import os; assert len([n for n in os.listdir('/proc') if n.isdigit()]) > 2",
        "import os; os.kill(1, 9); assert os.path.exists('gone')",
    ]
    row = {"tests": [{"input": "", "output": ""}]}
    assert judge(reward, row, programs) == [0.0] * len(programs)
    writes = "open('x', 'w').write('x'); import tempfile; tempfile.TemporaryFile()"
    sees = "import os; assert os.listdir('.') == []"
    assert judge(reward, row, [writes, sees]) == [1.0, 1.0], "a private folder, empty each time"
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("namespaces", ["auto", "off"])
def test_files_of_earlier_programs_are_removed(make: Make, namespaces: str) -> None:
    """Also covers an earlier program that wrote outside its folder, filled it, or made removal
    difficult.
    """
    reward = make(namespaces=namespaces, files_mib=16)
    programs = {
        "full": f"open('x', 'xb').write(bytes({15 << 20}))",
        "temporary": f"open('/tmp/x', 'xb').write(bytes({15 << 20}))",
        "deep": "import os\nfor _ in range(2000): os.mkdir('d'); os.chdir('d')",
        "locked": "import os; os.mkdir('d'); open('d/x', 'x'); os.chmod('d', 0); os.chmod('.', 0)",
    }
    if namespaces == "off" or not isolated(reward)["files"]:
        del programs["temporary"], programs["deep"]  # the latter would leave its folder
    row = {"tests": [{"input": "", "output": ""}] * 2}
    empty = "import os; assert os.listdir('.') == []\n"
    scores = judge(reward, row, [empty + program for program in programs.values()] * 2)
    assert scores == [1.0] * len(scores)
    assert reward.stats() == {"reward_unjudged": (0.0, len(scores))}


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Return a folder below the folder of the test."""
    with TemporaryDirectory(dir=request.param) as path:
        yield Path(path)


@pytest.mark.parametrize("folder", ["/tmp", "/var/tmp", "/dev/shm"], indirect=True)
def test_temporary_files_are_private_for_any_python_location(make: Make, folder: Path) -> None:
    """Programs can write to /tmp and /dev/shm, and find no files of others there, except the
    interpreter and its modules, which they cannot change.
    """
    venv.EnvBuilder(symlinks=True).create(folder / "venv")
    reward = make(python=str(folder / "venv" / "bin" / "python"))
    if not isolated(reward)["files"]:
        pytest.skip("no namespaces here")
    (folder / "mine").write_text("mine")
    writes = (
        "import subprocess, sys\n"
        "for place in ('/tmp', '/dev/shm'): open(f'{place}/x', 'x').write('x')\n"
        f"assert sys.prefix == {str(folder / 'venv')!r}\n"
        "import wave, tempfile; tempfile.NamedTemporaryFile().write(b'x')\n"
        "subprocess.run([sys.executable, '-c', 'import wave'], check=True)\n"
    )
    sees = f"import os; assert not os.path.exists({str(folder / 'mine')!r})"
    changes = "import sys; open(f'{sys.prefix}/mine', 'w')"
    row = {"tests": [{"input": "", "output": ""}] * 2}
    scores = judge(reward, row, [writes, writes, sees, changes])
    hidden = float(not folder.is_relative_to("/var/tmp"))
    assert scores == [1.0, 1.0, hidden, 0.0]


PERMUTES = "def f(s): return [''.join(p) for p in itertools.permutations(s)]"
LEETCODE = """\
from __future__ import annotations

class Solution:
    def top(self, nums: List[int], k: Optional[int] = 1) -> List[int]:
        heap = [(-n, x) for x, n in Counter(nums).items()]
        heapify(heap)
        return [heappop(heap)[1] for _ in range(min(k, floor(pi)))]
"""


@pytest.mark.parametrize(
    ("row", "program", "score"),
    [
        (
            {"tests": {"fn_name": "top", "inputs": [[[3, 3, 1], 2]], "outputs": [[3, 1]]}},
            LEETCODE,
            1,
        ),
        (
            {"tests": [{"input": "3 4", "output": "5.0"}]},
            "a, b = map(int, sys.stdin.read().split())\nprint(math.sqrt(a * a + b * b))",
            1,
        ),
        ({"tests": ["assert f('ab') == ['ab', 'ba']"]}, PERMUTES, 1),
        ({"tests": ["assert f(2, 3, 5) == 3"]}, "f = lambda a, b, c: pow(a, b, c)", 1),
        (
            {"tests": {"fn_name": "f", "inputs": [[[2, 1]]], "outputs": [2]}},
            "def f(a):\n    b = deepcopy(a)\n    random.shuffle(b)\n    assert timedelta(1)\n"
            "    return ascii_lowercase.index('c') + (mean(a) - mean(b)) * randint(1, 2)",
            1,
        ),
        ({"tests": ["assert P(2).x == 2"]}, "@dataclass\nclass P:\n    x: int", 1),
        (
            {"tests": [{"input": "1", "output": "3/2"}]},
            "class Half(Enum):\n    ONE = Fraction(1, 2)\nprint(Half.ONE.value + int(Decimal(1)))",
            1,
        ),
        ({"tests": ["assert f() == 1"]}, "def f(): return unknown", 0),
        ({"tests": ["assert gcd(4, 6) == 2"]}, "", 0),
        ({"tests": {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}}, "", 0),
        ({"tests": ["assert gcd(4, 6) == 2"]}, "def gcd(a, b): return math.gcd(a, b)", 1),
    ],
)
def test_program_has_the_usual_modules_without_importing_them(
    make: Make, row: dict[str, Any], program: str, score: float
) -> None:
    """Python's built-in names are unchanged, and the tested names must be the program's."""
    assert judge(make(), row, [program]) == [score]


def test_results_of_numpy_are_compared_as_numbers(make: Make) -> None:
    row = {"tests": {"fn_name": "f", "inputs": [[0], [1]], "outputs": [7, [7, 8]]}}
    program = "import numpy as np\ndef f(i): return np.array([7, 8]) if i else np.int64(7)"
    wrong = "def f(i): return object()"
    assert judge(make(memory_mib=4096), row, [program, wrong]) == [1.0, 0.0]


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.__stdout__.write('1')",
        "import sys; print(1); sys.stdout = None",
        "import io, sys; print(1); sys.stdout = io.StringIO(); print(2)",
        "out = open(1, 'w', closefd=False); out.write('1')",
        "import sys; print(1); sys.stdout.close()",
        "import io, sys; sys.stdout = io.TextIOWrapper(sys.stdout.detach()); print(1)",
    ],
)
def test_written_text_is_the_output_of_a_program(make: Make, program: str) -> None:
    assert judge(make(), {"tests": [{"input": "", "output": "1"}]}, [program]) == [1.0]


UNITTEST = """\
import unittest
class Tests(unittest.TestCase):
    def test_add(self): self.assertEqual(add(1, 2), 3)
    def test_more(self): self.assertEqual(add(2, 2), 4)
"""


@pytest.mark.parametrize(
    "end",
    [
        "unittest.main()",
        "unittest.main(exit=False)",
        "if __name__ == '__main__':\n    unittest.main(argv=['x'], verbosity=2)",
        "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(Tests))",
    ],
)
def test_unittest_determines_the_score_in_each_form_of_call(make: Make, end: str) -> None:
    """All tests must pass. A program that ends before or during its tests has failed."""
    row = {"tests": UNITTEST + end}
    programs = [
        "def add(a, b): return a + b",
        "def add(a, b): return 3",
        "import sys\ndef add(a, b): sys.exit(0)",
        "import unittest\nunittest.main()",
    ]
    assert judge(make(), row, programs) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "cheat",
    [
        "class Any:\n  def __eq__(self, other): return True\ndef add(a, b): return Any()",
        "class Any:\n  def __eq__(self, other): return 1\ndef add(a, b): return Any()",
        "class Any:\n  x = 1\n  def __eq__(self, other): return self.x\n"
        "def add(a, b): return Any()",
        "def add(a, b):\n  class Any(int):\n    __eq__ = lambda *given: True\n  return Any(0)",
        "import builtins\nbuiltins.AssertionError = KeyError\nbuiltins.exec = print",
        "import unittest\nunittest.TestCase.assertEqual = lambda *given: None",
        "import unittest\nunittest.main = unittest.TestCase.run = lambda *given: None",
        "from unittest.mock import ANY\ndef add(a, b): return ANY",
        "def add(a, b):\n  from unittest.mock import ANY\n  return ANY",
        "class Any(int): __eq__ = int.__add__\ndef add(a, b): return Any(1)",
        "def add(a, b):\n  import gc\n  class Any(int):\n"
        "    def __eq__(self, other): return isinstance(other, int) and gc.collect() >= 0\n"
        "  return Any(0)",
        "import gc\ngc.get_objects = lambda *given: []\n"
        "class Any(int): __eq__ = lambda *given: True\ndef add(a, b): return Any(0)",
        "class Any(int):\n  __eq__, __module__ = int.__add__, 'x'\ndef add(a, b): return Any(1)",
        "class Any(int):\n  def __new__(cls, n): return int.__new__(cls, n)\n"
        "  def __eq__(self, other): return isinstance(other, int)\ndef add(a, b): return Any(0)",
        "class Any: __eq__ = property(lambda self: lambda other: True)\n"
        "def add(a, b): return Any()",
        "from test.support import ALWAYS_EQ\ndef add(a, b): return ALWAYS_EQ",
        "import sys\nsys.modules.pop('unittest.mock', 0)\nfrom unittest.mock import ANY\n"
        "def add(a, b): return ANY",
    ],
)
def test_program_that_tampers_with_its_tests_fails(make: Make, cheat: str) -> None:
    programs = [f"def add(a, b): return 0\n{cheat}"]
    called = "def test_add():\n  assert add(1, 2) == 3\n"
    for tests in (["assert add(1, 2) == 3"], UNITTEST + "unittest.main()", called):
        assert judge(make(), {"tests": tests}, programs) == [0.0]


@pytest.mark.parametrize(
    "test", ["f()[0] == {1}", "f()[1] == {1: 2}", "1 in f()[0]", "1 in f()[1]"]
)
def test_program_that_feigns_equality_in_sets_and_keys_fails(make: Make, test: str) -> None:
    one = "class One:\n  __eq__ = lambda *given: True\n  __hash__ = lambda self: 1\n"
    programs = [f"{one}def f(): return {{One()}}, {{One(): 2}}", "def f(): return {1}, {1: 2}"]
    assert judge(make(), {"tests": [f"assert {test}"]}, programs) == [0.0, 1.0]


def test_lookup_does_not_compare_all_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk through all elements for each lookup would exceed the time limit."""
    calls = Mock(wraps=code_equality._plain)
    monkeypatch.setattr(code_equality, "_plain", calls)
    space: dict[str, Any] = {"found": {(i,) for i in range(300)}, "self": TestCase()}
    space["numbers"] = dict.fromkeys(space["found"], (1,))
    test = """\
for i in range(300):
    assert (i,) in found and (-1, i) not in numbers
    self.assertIn((i,), numbers)
    self.assertNotIn((-1, i), container=found)
"""
    exec(compile(code_equality.with_plain_operands(test, space), "tests.py", "exec"), space)
    assert calls.call_count <= 300 * 8


def test_program_whose_class_defines_equality_passes(make: Make) -> None:
    program = (
        "class Point:\n"
        "  def __init__(self, x): self.x = x\n"
        "  def __eq__(self, other):\n"
        "    return self.x == other.x if isinstance(other, Point) else NotImplemented\n"
        "import builtins\n"
        "type, vars, getattr = 'x', [1], None\n"
        "def isinstance(each, kind): return builtins.isinstance(each, kind)"
    )
    assert judge(make(), {"tests": ["assert Point(1) == Point(1)"]}, [program]) == [1.0]


VECTOR = """\
class Vector(list):
    def __eq__(self, other): return all(x == y for x, y in zip(self, other))
"""


@pytest.mark.parametrize(
    ("program", "test"),
    [
        (f"{VECTOR}def f(): return 3", "assert f() == 3"),
        (f"{VECTOR}def f(): return Vector()", "assert f() == [] and [f()] == [[]]"),
        (f"{VECTOR}def f(): return Vector([1, 2])", "assert f() == [1, 2]"),
        (
            "class Bag(dict):\n  def __eq__(self, o): return all(o.get(k) for k in self)\n"
            "class Set(set):\n  def __eq__(self, o): return all(k in o for k in self)\n"
            "def f(): return Bag(), Set()",
            "assert f() == ({}, set())",
        ),
        (
            "class Steps:\n  items = []\n  def __iter__(self): return iter(self.items)\n"
            "  def __eq__(self, o): return all(x == y for x, y in zip(self, o))\n"
            "def f(): return Steps()",
            "assert f() == [] and f() == Steps() and f() != [1]",
        ),
        (
            f"{VECTOR}    def __hash__(self): return 7\ndef f(): return {{Vector(): 1, 2: 3}}",
            "assert f() != {2: 3} and {*f()} != {2} and {(each,) for each in f()} != {(2,)}",
        ),
        (
            "class P:\n  def __init__(self, x): self.x = x\n  def __hash__(self): return 7\n"
            "  def __eq__(self, o): return type(o) is P and self.x == o.x\n"
            "def f(): return {P(1), P(2), math.nan, frozenset({3})}",
            "assert P(2) in f() and P(3) not in f() and math.nan in f() and {3} in f()",
        ),
        (
            "class Near(float):\n  def __eq__(self, o): return abs(float(self) - o) < 1e-6\n"
            "def f(): return Near(0.1 + 0.2)",
            "assert f() == 0.3",
        ),
        (
            "class Near:\n  def __init__(self, x): self.x = x\n"
            "  def __eq__(self, o): return abs(self.x - getattr(o, 'x', o)) < 1e-6\n"
            "def f(): return [Near(0.1 + 0.2)]",
            "assert f() == [0.3] and f()[0] == 0.3",
        ),
        (
            "class Mod(int):\n  def __eq__(self, o): return (int(self) - int(o)) % 3 == 0\n"
            "def f(): return Mod(1)",
            "assert f() == 4",
        ),
        ("from unittest import mock\ndef f(): return 3", "assert f() == 3"),
        ("def f(): return {'id': 7, 'x': 1}", "from unittest.mock import ANY\n"
         "assert f() == {'id': ANY, 'x': 1}"),
        ("def f(): return 7", "class Any: __eq__ = lambda *given: True\nassert f() == Any()"),
        (
            "class Term:\n  def __eq__(self, o): return Term()\n  def sql(self): return 'a = 1'\n"
            "  def __str__(self): return 'a = 1'",
            "assert (Term() == 1).sql() == 'a = 1' and str(Term() == 1) == 'a = 1'",
        ),
        (
            "@dataclass\nclass P:\n  x: int\n  y: list = field(default_factory=list)\n"
            "def f(): return P(1), Fraction(1, 2), Decimal('0.5'), namedtuple('N', 'a')(1)",
            "assert f() == (P(1), 0.5, 0.5, (1,))",
        ),
        (
            "class Ratio:\n  def __init__(self, a, b): self.a, self.b = a, b\n"
            "  def __eq__(self, o): return self.a == o * self.b\ndef f(): return Ratio(0, 5)",
            "import unittest\nclass T(unittest.TestCase):\n"
            "  def test_f(self): self.assertEqual(f(), 0)",
        ),
        (
            "try: import numpy as np\nexcept ImportError: f = lambda x: x\nelse: f = np.array",
            "assert all(f([1, 2]) == f([1, 2])) and f([1]) == 1 and list(f([0])) == [0]",
        ),
    ],
)  # fmt: skip
def test_correct_programs_with_unusual_equality_pass(make: Make, program: str, test: str) -> None:
    wrong = program.rpartition("def f")[0] or "pass"
    assert judge(make(), {"tests": test}, [program, f"{wrong}\ndel f"]) == [1.0, 0.0]


def test_program_may_use_a_process_pool(make: Make) -> None:
    """The pool's semaphores are files in /dev/shm."""
    program = (
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from multiprocessing import Pool\n"
        "def double(x): return 2 * x\n"
        "def f(n):\n"
        "  with Pool() as pool, ProcessPoolExecutor() as others:\n"
        "    return [*pool.map(double, range(n)), *others.map(double, range(n))]\n"
    )
    call = {"fn_name": "f", "inputs": [[3]], "outputs": [[0, 2, 4, 0, 2, 4]]}
    script = f"{program}if __name__ == '__main__': print(f(2))"
    reward = make()
    assert judge(reward, {"tests": call}, [program]) == [1.0]
    output = [{"input": "", "output": "[0, 2, 0, 2]"}]
    assert judge(reward, {"tests": output}, [script]) == [1.0]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_programs_start_processes_with_fork(make: Make, method: str) -> None:
    """A spawned process could not import the program, because the program is not a file."""
    program = (
        "import multiprocessing\n"
        "from multiprocessing import get_context, set_start_method\n"
        "def double(x): return 2 * x\n"
        "def f(n):\n"
        f"  with get_context({method!r}).Pool(1) as pool:\n"
        "    first = pool.map(double, range(n))\n"
        f"  set_start_method({method!r})\n"
        "  with multiprocessing.Pool(1) as pool:\n"
        "    return first + pool.map(double, range(n))\n"
    )
    call = {"fn_name": "f", "inputs": [[2]], "outputs": [[0, 2, 0, 2]]}
    assert judge(make(), {"tests": call}, [program]) == [1.0]


@pytest.mark.parametrize(
    ("program", "score"),
    [
        ("def f(x: Missing): pass\nprint(1)", 0.0),
        ("import atexit, sys\natexit.register(print, 1)\nsys.exit()", 1.0),
        (
            "import threading, sys\ndef run():\n  ready.wait(); print(1)\n"
            "ready = threading.Event()\nthreading.Thread(target=run).start()\n"
            "threading.Timer(0.05, ready.set).start()\nsys.exit(0)",
            1.0,
        ),
    ],
)
def test_program_runs_as_under_plain_python(make: Make, program: str, score: float) -> None:
    """Annotations are evaluated, and `sys.exit` waits for threads and for what is registered."""
    row = {"tests": [{"input": "", "output": "1"}]}
    assert judge(make(), row, [program]) == [score]


def test_required_isolation_is_an_error_if_unavailable(make: Make) -> None:
    reward = make(namespaces="required")
    reward._pool.facts = {"protections": {"files": True, "processes": True}}
    reward._pool.start = lambda: reward._pool.facts  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"they can use the network\. Allow user namespaces"):
        judge(reward, {"tests": SUM}, [ADDS])


def test_sandbox_runs_in_a_container(make: Make, tmp_path: Path) -> None:
    """The command gets the interpreter with its program. The image needs nothing else."""
    container = tmp_path / "container"
    container.write_text(f'#!/bin/sh\necho "$2" "$3" >> {tmp_path}/used\nshift\nexec "$@"\n')
    container.chmod(0o700)
    reward = make(container=f"{container} --containall", python=sys.executable)
    assert judge(reward, {"tests": SUM}, [ADDS]) == [1.0]
    assert (tmp_path / "used").read_text() == f"{sys.executable} -I\n"


def test_sandbox_runs_in_a_real_apptainer(make: Make, tmp_path: Path) -> None:
    """Root has no privileges there and cannot set the users of a namespace."""
    settings = apptainer.cluster(tmp_path, "--containall")
    reward = make(container=settings["container"], python=sys.executable)
    assert judge(reward, {"tests": SUM}, [ADDS, "print(3)"]) == [1.0, 0.0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may be without its privileges")
def test_sandbox_runs_as_root_without_privileges(make: Make) -> None:
    reward = make(container="setpriv --inh-caps=-all --bounding-set=-all", python=sys.executable)
    assert judge(reward, {"tests": SUM}, [ADDS, "print(3)"]) == [1.0, 0.0]
    assert not any(isolated(reward).values())


def test_batch_of_programs_has_a_time_limit(make: Make) -> None:
    reward = make(batch_timeout_s=1.0)
    row = {"tests": [{"input": "", "output": "x"}]}
    assert judge(reward, row, ["while True: pass"] * 3) == [0.0] * 3
    assert reward.stats() == {"reward_unjudged": (3.0, 3.0)}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({}, "finds no tests in the row, under 'tests' or 'input_output'"),
        ({"tests": []}, "'tests' has no tests"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "there are 1 inputs and 0 outputs"),
        ({"tests": {"in": 1}}, "needs the lists inputs and outputs"),
        ({"tests": [{"input": 1, "output": "1"}]}, "not a number"),
        ({"tests": ["assert f( == 1"]}, "not valid Python"),
        ({"test": "def check(f):\n  assert f()"}, "needs the name of a function: entry_point"),
        ({"tests": {**DOUBLE, "inputs": [1, 2]}}, "a list of its arguments"),
        ({"tests": 7}, "they are a number; allowed"),
        ({"tests": [{"input": "", "output": "x" * (1 << 21)}]}, "more than 1048576 characters"),
    ],
)
def test_rows_without_usable_tests_are_rejected(row: dict[str, Any], why: str) -> None:
    reward = CodeReward()
    [problem] = reward.check_rows([row])
    assert why in problem


def test_code_reward_options_are_checked() -> None:
    for limit in (-1, float("nan"), float("inf"), True, "5"):
        with pytest.raises(UsageError, match=f"memory_mib {limit!r} is not allowed: limits"):
            CodeReward(memory_mib=limit)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="score 'any' is not allowed; allowed: all, share"):
        CodeReward(score="any")  # type: ignore[arg-type]
    for user in (CodeReward, PythonTool):
        with pytest.raises(UsageError, match="namespaces 'on' is not allowed; allowed: auto, "):
            user(namespaces="on")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("1 \n2\n\n", "1\n2", True),
        ("1\n2", "1 2", False),
        ("0.3333333", "0.33333333", True),
        ("0.333", "0.334", False),
        ("10000001", "10000002", False),
        ("1e3", "1000.0", True),
        ("1", "1.0", True),
        ("nan", "nan", True),
        ("1e999", "2e999", False),
        ("1e999", "1e999", True),
        ("Yes", "YES", False),
        ("", "x", False),
    ],
)
def test_outputs_are_compared_by_line(output: str, expected: str, same: bool) -> None:
    assert same_output(output, expected) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ([1, 2], [1, 2], True),
        ([1, 2], [[1, 2]], True),
        (True, 1, False),
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        ({"a": [0.1]}, {"a": [0.1000000001]}, True),
        ("1", 1, False),
        (None, None, True),
        (10**400, 0.5, False),
        (0.5, 10**400, False),
        (10**400, 10**400, True),
        (float("inf"), float("inf"), True),
        (float("inf"), 1e308, False),
    ],
)
def test_results_are_compared_as_json(value: Any, expected: Any, same: bool) -> None:
    assert same_value(value, expected) is same


def test_unusable_row_is_named(make: Make) -> None:
    with pytest.raises(UnusableRowError) as error:
        make()(["p"] * 2, ["", ""], [{"tests": SUM}, {}])
    assert error.value.index == 1
