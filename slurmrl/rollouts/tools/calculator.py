"""A calculator: arithmetic on numbers, evaluated without Python's `eval`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from math import isfinite
from typing import Final

from slurmrl.errors import UsageError

Number = int | float
MOST_CHARACTERS: Final = 200
MOST_BITS: Final = 512
"""Maximum size of an integer, intermediate results included."""
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
    """``+ - * / // % **`` and parentheses on integers and decimal numbers."""

    async def __call__(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: Numbers with + - * / // % ** and parentheses.

        Raises:
            UsageError: anything but such an expression, or a result that is too large.
        """  # `ToolSchemas` describes the tool with this text
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
    """Format a number: without a zero fraction, with up to 12 significant digits."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value) if isinstance(value, int) else f"{value:.12g}"
