"""Cases that take turns: each commit runs one case of each promise."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import rotation
from tests.support.rotation import in_turn, rotating, share
from tests.support.trials import REPOSITORY


def test_rotation_chooses_one_case_and_soak_has_the_others() -> None:
    cases = rotating("a", pytest.param("b", marks=pytest.mark.long), "c")
    assert [case.values for case in cases] == [("a",), ("b",), ("c",)]
    marks = [[mark.name for mark in case.marks] for case in cases]
    assert sum("soak" not in names for names in marks) == 1
    assert "long" in marks[1]
    marked = []
    for place in range(3):

        def one() -> None:
            pass

        marked.append(hasattr(in_turn(place, 3)(one), "pytestmark"))
    assert marked.count(False) == 1


@pytest.mark.parametrize("number", range(5))
def test_tests_that_share_places_have_one_case_per_commit(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "commit", lambda: f"{number:040x}")
    cases = [
        *rotating("a", "b", shares=5),
        *rotating("c", "d", first=2, shares=5),
        *rotating("e", first=4, shares=5),
    ]
    assert [case.values[0] for case in cases if not case.marks] == ["abcde"[number]]
    assert share(range(5), 5, f"{number:x}") == range(number, 5, 5)


def places(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the name of the number of places, the number, and the place of each case in a file."""
    source = path.read_text()
    if rotation.__name__ not in source:
        return
    tree = ast.parse(source)
    numbers: dict[str, object] = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or any(isinstance(a, ast.Starred) for a in call.args):
            continue
        given = {word.arg: word.value for word in call.keywords}
        name, cases = ast.unparse(call.func), len(call.args)
        first, shares = given.get("first", ast.Constant(0)), given.get("shares")
        if name == in_turn.__name__:
            (first, shares), cases = call.args, 1
        elif name != rotating.__name__ or shares is None:
            continue
        if isinstance(first, ast.Constant) and isinstance(first.value, int):
            text = ast.unparse(shares)
            own = numbers.get(text, text if text.isdigit() else None)
            number = int(str(getattr(rotation, text) if own is None else own))
            for place in range(first.value, first.value + cases):
                yield f"{text} of {'all files' if own is None else path}", number, place % number


def test_every_place_of_tests_that_take_turns_has_as_many_cases() -> None:
    """Without this, some commits would run no case of a promise."""
    files = (path for path in (REPOSITORY / "tests").rglob("test_*.py") if path != Path(__file__))
    found = Counter(each for path in files for each in places(path))
    numbers = {(name, number) for name, number, _ in found}
    assert len(numbers) > 15
    for name, number in numbers:
        cases = [found[name, number, place] for place in range(number)]
        assert min(cases) == max(cases), f"{name}: {cases}"
