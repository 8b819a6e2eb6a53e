"""The tools that come with slurmrl: a calculator, and Python in a sandbox.

The calculator does not use Python's `eval`. Programs run in sandboxes, as in the reward `code`.
"""

from __future__ import annotations

import ast
import operator
import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from queue import SimpleQueue
from typing import Final

from slurmrl.errors import UsageError
from slurmrl.rewards.code import GRACE_S, Namespaces, check_isolation, check_limits, sandbox_program
from slurmrl.rewards.process_pool import ProcessPool, Unanswered
from slurmrl.rollouts.tools import Job

Number = int | float
MOST_CHARACTERS: Final = 200
MOST_BITS: Final = 512
"""Maximum number of bits of an integer, including intermediate results."""
OPERATORS: Final[dict[type[ast.operator], Callable[[Number, Number], Number]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
SIGNS: Final[dict[type[ast.unaryop], Callable[[Number], Number]]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Calculator:
    """Tool that computes ``+ - * / // % **`` and parentheses on integers and decimal numbers."""

    async def __call__(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: Numbers with + - * / // % ** and parentheses.

        Raises:
            UsageError: anything but such an expression, or a result that is too large.
        """  # `ToolSchemas` describes the tool with this docstring
        if not isinstance(expression, str) or len(expression) > MOST_CHARACTERS:
            raise UsageError(f"an expression is a string of up to {MOST_CHARACTERS} characters")
        try:
            tree = ast.parse(expression.strip(), mode="eval")
            value = _value(tree.body)
        except ZeroDivisionError as error:
            raise UsageError("division by zero") from error
        except (OverflowError, RecursionError, MemoryError) as error:
            raise UsageError("the result is too large") from error
        except (SyntaxError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{expression!r} is not an expression") from error
        return _text(value)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            base, second = _value(left), _value(right)
            if isinstance(op, ast.Pow) and abs(second) * int(base).bit_length() > MOST_BITS:
                raise UsageError("the result is too large")
            return _bounded(OPERATORS[type(op)](base, second))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in SIGNS:
            return SIGNS[type(sign)](_value(operand))
    raise UsageError(f"{ast.unparse(node)[:50]!r} is not arithmetic on numbers")


def _bounded(value: Number) -> Number:
    if isinstance(value, complex) or (isinstance(value, float) and not isfinite(value)):
        raise UsageError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise UsageError("the result is too large")
    return value


def _text(value: Number) -> str:
    """Format a number with up to 12 significant digits, and as an integer if it is whole."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value) if isinstance(value, int) else f"{value:.12g}"


MOST_OUTPUT_BYTES: Final = 64 << 10
CLOSING_S: Final = 5.0


class PythonTool:
    """Tool that runs a program and returns its output. Not a security boundary (docs/rewards.md).

    :param timeout_s: time limit of a program in seconds. :param memory_mib: MiB of address space of
    each process of a program. :param files_mib: MiB of a program's private folder, and of each of
    its files. :param max_processes: maximum number of processes and threads of a program. :param
    processes: number of sandboxes of a rank, each of which runs one program at a time. :param
    container: command that runs the sandbox in a container. :param python: interpreter of the
    programs. Default: this interpreter; ``python3`` in a container. :param namespaces: isolate
    programs by Linux namespaces: ``auto`` where possible, ``required``
        or ``off``.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 10.0,
        memory_mib: int = 1024,
        files_mib: int = 64,
        max_processes: int = 64,
        processes: int = 2,
        container: str | Sequence[str] = "",
        python: str = "",
        namespaces: Namespaces = "auto",
    ) -> None:
        check_limits(timeout_s=timeout_s, processes=processes)
        self._timeout_s, self._required = timeout_s, namespaces == "required"
        self._program = sandbox_program(
            container=container,
            python=python,
            memory_mib=memory_mib,
            files_mib=files_mib,
            max_processes=max_processes,
            namespaces=namespaces,
        )
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._size = processes
        self._threads: list[threading.Thread] = []

    async def __call__(self, code: str) -> str:
        """Run a Python program and return its output.

        Args:
            code: The program.

        Raises:
            UsageError: the program failed; the message is the last line of its errors.
        """  # `ToolSchemas` describes the tool with this docstring
        if not isinstance(code, str):
            raise UsageError("code must be a string")
        while len(self._threads) < self._size:
            thread = threading.Thread(target=self._serve, daemon=True)
            self._threads.append(thread)
            thread.start()
        job = Job(partial(self._run, code))
        self._jobs.put(job)
        return str(await job.future)

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(CLOSING_S)
        self._threads.clear()

    def _serve(self) -> None:
        """Run jobs with one sandbox, which the kernel kills when this thread ends."""
        pool = ProcessPool(self._program, self._timeout_s + GRACE_S, 1)
        while (job := self._jobs.get()) is not None:
            job.run(pool)
        pool.close()

    def _run(self, code: str, pool: ProcessPool) -> str:
        if not pool.pids:
            check_isolation("tool 'python'", pool.start(), required=self._required)
        request = {
            "program": code,
            "cases": [{"kind": "script", "stdin": "", "most_bytes": MOST_OUTPUT_BYTES}],
            "all": True,
            "test_timeout_s": self._timeout_s,
            "timeout_s": self._timeout_s,
        }
        (verdict,) = pool.ask([request])
        if isinstance(verdict, Unanswered):
            raise UsageError(verdict.why)
        (result,) = verdict["results"]
        if "failed" in result:
            raise UsageError(result["failed"])
        return str(result["output"]).rstrip("\n")
