"""Custom rewards: the accepted forms, and one clear message for everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmrl.errors import RewardError, UsageError
from slurmrl.registry import describe, import_own
from slurmrl.rewards import make
from slurmrl.rewards.checked_reward import CheckedReward
from tests.support.users_rewards import Looks

MODULE = "tests.support.users_rewards"
PLACES = ["rows.jsonl:1 (sample 1@0)", "rows.jsonl:2 (sample 2@0)", "rows.jsonl:3 (sample 3@0)"]


def score(name: str, **options: Any) -> list[float]:
    reward = make(f"{MODULE}:{name}", options)
    try:
        return reward.score(["p"] * 3, ["a", "bb", "ccc"], [{"answer": "x"}] * 3, PLACES)
    finally:
        reward.close()


@pytest.mark.parametrize(
    "form",
    ["list", "ints", "tuple", "generator", "tensor", "array", "list of tensors", "list of numpy"],
)
def test_numbers_of_any_type_are_scores(form: str) -> None:
    scores = score("returning", what=form)
    assert scores == [0.0, 1.0, 2.0]
    assert {type(one) for one in scores} == {float}


def test_boolean_scores_are_accepted() -> None:
    assert score("returning", what="bools") == [0.0, 1.0, 1.0]


def test_functions_may_be_async_and_take_options() -> None:
    assert score("asynchronous", by=0.5) == [1.5, 2.5, 3.5]
    assert score("of_any", by=0.5) == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("name", ["counted", "Counting", "Wrapping"])
def test_stats_of_functions_and_classes_are_found(name: str) -> None:
    """A submission rejects a metric of ``stop_when`` that no ``stats`` may record."""
    assert not make(f"{MODULE}:returning", {}).has_stats
    reward = make(f"{MODULE}:{name}", {})
    assert reward.has_stats
    assert not reward.checks_rows
    assert reward.stats() == {"seen": (1.0, 1.0)}


def test_rewards_need_no_base_class() -> None:
    reward = make(f"{MODULE}:Looks", {"scale": 2})
    assert reward.score(["p"], ["a"], [{}], PLACES[:1]) == [2.0]
    assert reward.score(["p"], ["a"], [{}], PLACES[:1]) == [2.0], "in the same event loop"
    assert reward.stats() == {"scaled": (1.0, 2.0)}
    assert reward.check_rows([{}]) == [""]
    reward.close()
    assert isinstance(reward._object, Looks)
    assert reward._object.closed


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("one", "returned 1 scores for 3 completions"),
        ("nothing", "returned None; it must return a list of 3 numbers"),
        ("number", "returned a float; it must"),
        ("dict", "returned a dict; it must"),
        ("text", "returned a str; it must"),
        ("column", r"returned a Tensor of shape \[3, 1\]; it must"),
        ("texts", r"returned '1' for rows.jsonl:1 \(sample 1@0\), completion 'a'; a score must be"),
        ("nones", "returned None for rows.jsonl:1"),
        ("infinite", "returned inf for rows.jsonl:1"),
        ("more than float32", r"returned 1e\+39 for rows.jsonl:1"),
        ("huge", "returned 1000+ for rows.jsonl:1"),
        ("unprintable", "returned int of thousands of digits for rows.jsonl:1"),
    ],
)
def test_invalid_score_is_named(form: str, message: str) -> None:
    with pytest.raises(RewardError, match=f"reward {MODULE}:returning {message}"):
        score("returning", what=form)


def test_completions_are_shortened_in_messages() -> None:
    reward = make(f"{MODULE}:nan_for_the_second", {})
    with pytest.raises(RewardError, match="returned nan") as error:
        reward.score(["p"] * 2, ["a", "b" * 10_000], [{}] * 2, PLACES[:2])
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (f"{MODULE}:single_argument", {}, r"accepts \(completion\), but is called with \(prompts,"),
        (f"{MODULE}:in_another_order", {}, "'completions' would get the prompts"),
        (f"{MODULE}:returning", {"whta": 1}, "has no option 'whta'"),
        (f"{MODULE}:Looks", {"scael": 1}, "no option 'scael'; did you mean 'scale'"),
        (f"{MODULE}:Silent", {}, "it has no __call__"),
        (f"{MODULE}:CONSTANT", {}, "is a int; it must be a function or a class"),
        (f"{MODULE}:retruning", {}, "has no 'retruning'; did you mean 'returning'"),
        (f"{MODULE}:xyzzy", {}, r"has no 'xyzzy'; allowed: (?!.*\bMapping\b)"),
        ("errno:xyzzy", {}, r"allowed: (\w+, ){59}\w+ and \d+ more$"),
        ("no_such_module.of_mine:f", {}, "there is no module 'no_such_module'"),
        (f"{MODULE}.further:f", {}, "there is no module"),
    ],
)
def test_object_that_is_not_a_reward_is_rejected(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make(name, options)


def test_modules_that_cannot_be_imported_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_here\n")
    (tmp_path / "not_python.py").write_text("def f(:\n")
    with pytest.raises(UsageError, match="needs_more: No module named 'a_package_that_is_not"):
        make("needs_more:f", {})
    with pytest.raises(UsageError, match=r"not_python.py, line 1"):
        make("not_python:f", {})


@pytest.mark.parametrize("name", ["WrongStats", "HugeStats"])
def test_missing_stats_are_accepted(name: str) -> None:
    reward = make(f"{MODULE}:{name}", {})
    with pytest.raises(RewardError, match=r"stats\(\) returned .* name to \(sum, count\)"):
        reward.stats()


@pytest.mark.parametrize("folder", ["slurmrl", "slurmrl/code/slurmrl", "importlib"])
def test_errors_name_the_line_in_the_users_file(tmp_path: Path, folder: str) -> None:
    file = tmp_path / folder / "my_rewards.py"
    space: dict[str, Any] = {}
    exec(compile("def score(*_):\n    raise KeyError('x')", str(file), "exec"), space)
    with pytest.raises(KeyError) as caught:
        CheckedReward("my", space["score"], {}, cores=1).score(["p"], ["c"], [{}], PLACES[:1])
    assert describe(caught.value) == "KeyError: 'x' (my_rewards.py:2)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = wrong\n", "NameError: name 'wrong' is not defined (faulty_code.py:2)"),
        ("import torchh\n", "faulty_code: No module named 'torchh' (faulty_code.py:1)"),
        (
            "import json\njson.loads('')\n",
            "Expecting value: line 1 column 1 (char 0) (faulty_code.py:2)",
        ),
        (
            "from slurmrl.rewards import nothing\n",
            "cannot import name 'nothing' from 'slurmrl.rewards' (faulty_code.py:1)",
        ),
        ("def f(:\n", "invalid syntax (faulty_code.py, line 1)"),
    ],
)
def test_faulty_module_is_rejected_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    (tmp_path / "faulty_code.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError) as caught:
        import_own("dataset type", "faulty_code:Mine")
    assert str(caught.value).startswith("dataset type 'faulty_code:Mine': ")
    assert str(caught.value).endswith(message)
