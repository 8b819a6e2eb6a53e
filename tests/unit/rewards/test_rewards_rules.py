"""Exact match, the registry, and mathematical equality."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmrl.errors import UnknownNameError, UnusableRowError, UsageError
from slurmrl.rewards import judges as judges_module
from slurmrl.rewards import make
from slurmrl.rewards.exact_match import ExactMatch
from slurmrl.rewards.judge import JudgeProgram
from slurmrl.rewards.judges import Unjudged
from slurmrl.rewards.math import MathReward, final_answer, tail


@pytest.fixture(scope="module")
def judged() -> Iterator[MathReward]:
    reward = MathReward(timeout_s=60.0)
    yield reward
    reward.close()


def test_exact_match_ignores_white_space_only() -> None:
    rows = [{"answer": "64"}, {"answer": "64 "}, {"answer": "64"}, {"answer": 64}]
    assert ExactMatch()(["p"] * 4, [" 64\n", "64", "6 4", "64"], rows) == [1.0, 1.0, 0.0, 1.0]


def test_names_and_options_are_checked() -> None:
    for name in ("exact_match", "slurmrl.rewards.exact_match:ExactMatch"):
        assert make(name, {}).score(["p"], ["64 "], [{"answer": "64"}], ["1"]) == [1.0]
    with pytest.raises(UnknownNameError, match="did you mean 'exact_match'"):
        make("exactmatch", {})
    with pytest.raises(UsageError, match="nonsense"):
        make("math", {"nonsense": 1})
    with pytest.raises(UsageError, match="positive"):
        make("math", {"timeout_s": 0})
    with pytest.raises(UsageError, match="batch_timeout_s 0 must be positive"):
        make("math", {"batch_timeout_s": 0})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("48/2 = 24\n#### 72", "72"),
        ("#### 1\nno, #### 2\nbye", "2"),
        ("72", "72"),
        ("####", ""),
    ],
)
def test_the_final_answer_follows_the_last_marker(text: str, answer: str) -> None:
    assert final_answer(text, "####") == answer


CASES = [
    ("so 48+24\n#### 72", "She has 3.\n#### 72", 1.0),
    ("#### 1,000", "#### $1000", 1.0),
    ("#### 72", "#### 27", 0.0),
    ("#### 72", "I do not know", 0.0),
    ("#### 72", "", 0.0),
    ("#### 72", "72 apples, or 71\n####", 0.0),
    ("0.5", r"\boxed{\frac{1}{2}}", 1.0),
    ("#### 18", "#### 18.00", 1.0),
    ("#### -3", "#### 3", 0.0),
    ("3 pi", r"\boxed{3\pi}", 1.0),
    ("2√13", r"\boxed{2\sqrt{13}}", 1.0),
    ("90°", "90", 1.0),
    ("2½", "2.5", 1.0),
    ("[0,∞)", r"\boxed{[0,\infty)}", 1.0),
    (r"0.\overline{3}", r"\boxed{\frac13}", 1.0),
    (r"-\frac76", r"\boxed{-1.1\bar6}", 1.0),
    (r"33.\overline{3}\%", r"\boxed{\frac{100}{3}\%}", 1.0),
    ("2", r"since $x \equiv 17 \pmod 5$, \boxed{2 \pmod 5}", 1.0),
    (r"x \equiv 2 \pmod{5}", r"$17 \equiv 2 \pmod 5$, so \boxed{2}", 1.0),
    ("7 (mod 5)", r"\boxed{x ≡ 2 \pmod{5}}", 1.0),
    ("2", r"\boxed{x\equiv2\pmod5}", 1.0),
    (r"(2,\infty)", r"\boxed{x>2}", 1.0),
    ("x < 2", r"\boxed{(-\infty,2)}", 1.0),
    ("[2,5)", r"\boxed{2 \le x < 5}", 1.0),
    ("2516_8", r"\boxed{2516_{8}}", 1.0),
    (r"2516_{\text{eight}}", "#### (2516)_8", 1.0),
    ("The answer is 2516_8.", "The answer is $2516_8$.", 1.0),
    ("1A3_{16}", r"\boxed{1a3_{16}}", 1.0),
    ("15", r"\boxed{15_{10}}", 1.0),
    ("3a_{16}", r"\boxed{3 a_{16}}", 1.0),
]


REFERENCES = [
    r"\sqrt{51}",
    r"3\pi",
    "[-2,7]",
    r"\frac12",
    "1{,}000",
    r"1\,000",
    "1,000,000",
    r"\$32{,}348",
    "$1000",
    "50 dollars",
    "72 clips",
    r"16\%",
    "10 percent",
    "2 1/2",
    r"2\frac12",
    "1/2 cup",
    "-3",
    r"-\frac{1}{2}",
    ".5",
    "1e-5",
    "10!",
    "x = 5",
    "1, 2",
    "x=1 or x=2",
    r"\{1,2\}",
    r"(-\infty, 3) \cup (5, \infty)",
    r"\left(3, \frac{\pi}{2}\right)",
    "3+4i",
    r"5\text{ cm}^2",
    r"90^\circ",
    r"\text{(A)}",
    r"\text{Tuesday}",
    "Tuesday",
    "no",
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
    r"2\sqrt{3}",
    r"0.\overline{3}",
    r"\dfrac{\sqrt{3}}{2}",
    "$5$",
    r"\[x^2\]",
    r"The answer is $\frac{1}{2}$.",
    r"The answer is \frac{1}{2}.",
    "The answer is 42.",
    r"\boxed{7}",
]
"""References as in MATH, GSM8K and the like."""


def test_each_reference_agrees_with_its_own_box(judged: MathReward) -> None:
    rows = [{"answer": reference} for reference in REFERENCES]
    assert judged.check_rows(rows) == [""] * len(rows)
    for form in (r"So it is \boxed{%s}.", r"Thus $\boxed{%s}$", "\\[ \\boxed{%s} \\]"):
        completions = [form % reference for reference in REFERENCES]
        scores = judged(["p"] * len(rows), completions, rows)
        assert [r for r, score in zip(REFERENCES, scores, strict=True) if score != 1.0] == []


WRONG = [
    (r"2\sqrt{3}", r"\boxed{2}"),
    ("2", r"#### 2\sqrt{3}"),
    ("2", r"The answer is 2\sqrt{3}."),
    (r"3\pi", "3"),
    ("[-2,7]", "7"),
    ("[-2,7]", r"\boxed{(-2,7)}"),
    ("1{,}000", r"\boxed{1}"),
    ("0", r"\boxed{1\,000}"),
    ("10!", "10"),
    ("no", r"\boxed{on}"),
    ("1,2,3", r"\boxed{1.2}"),
    ("2 1/2", r"\boxed{1}"),
    (r"0.\overline{3}", r"\boxed{0}"),
    (r"0.\overline{3}", r"\boxed{0.3}"),
    ("2516_8", r"\boxed{2516}"),
    ("2516", "#### 2516_8"),
    ("2516_8", "The answer is 2516."),
    ("2516_8", r"\boxed{2516_7}"),
    ("2516_8", r"\boxed{-2516_8}"),
    ("1A3_{16}", r"\boxed{1A3}"),
    ("FF_{16}", r"\boxed{FF}"),
    (r"$4.5_6$", r"\boxed{4.5}"),
    (r"2 \pmod 5", r"\boxed{2 \pmod 7}"),
    (r"2 \pmod 5", r"\boxed{7}"),
    ("5", r"\boxed{2 \pmod 5}"),
    (r"(2,\infty)", r"\boxed{x \ge 2}"),
    ("5", r"2 + 3 = 5, so \boxed{\frac{}}"),
    ("3", r"\boxed{2} or \boxed{3}"),
]


def test_a_part_of_an_answer_is_not_the_answer(judged: MathReward) -> None:
    references, completions = zip(*WRONG, strict=True)
    rows = [{"answer": reference} for reference in references]
    scores = judged(["p"] * len(WRONG), completions, rows)
    assert [pair for pair, score in zip(WRONG, scores, strict=True) if score] == []


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("", "no number"),
        ("72 apples\n####", "no number"),
        ("neither odd nor even", "no number"),
        ("???", "cannot read"),
        (r"\frac{1}{", "cannot read"),
        ("3 hours 20 minutes", "several numbers: 3, 20"),
        ("x+" * 200 + "1", "more than 300 characters"),
    ],
)
def test_references_without_an_answer_are_refused(
    judged: MathReward, reference: str, why: str
) -> None:
    rows = [{"answer": "7"}, {"answer": reference}]
    problems = judged.check_rows(rows)
    assert problems[0] == ""
    assert why in problems[1]
    with pytest.raises(UnusableRowError, match=why) as refused:
        judged(["p"] * 2, ["7", "7"], rows)
    assert refused.value.index == 1


def test_long_completions_are_judged_by_their_end(
    judged: MathReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    completions = ["12 " * 10_000, "1+" * 4_000, "12 " * 10_000 + "\nso it is \\boxed{7}."]
    rows = [{"answer": "7"}] * 3
    assert judged(["p"] * 3, completions, rows) == [0.0, 0.0, 1.0]
    asked: list[dict[str, str]] = []

    def judge(requests: list[dict[str, str]], **limits: float) -> list[Unjudged]:
        asked.extend(requests)
        return [Unjudged("it took too long")] * len(requests)

    monkeypatch.setattr(judged._pool, "judge", judge)
    assert judged(["p"] * 3, completions, rows) == [0.0] * 3
    assert judged.stats()["reward_unjudged"] == (3.0, 3.0)
    assert max(len(request["completion"]) for request in asked) == 2000


def test_a_tail_begins_with_a_line_where_that_costs_little() -> None:
    assert tail("short", 10) == "short"
    assert tail("x" * 50 + "\n" + "y" * 8, 10) == "y" * 8
    assert tail("x" * 50 + "\ny", 10) == "x" * 8 + "\ny"


def test_answers_are_compared_as_numbers(judged: MathReward) -> None:
    references, completions, wanted = zip(*CASES, strict=True)
    rows = [{"answer": reference} for reference in references]
    assert judged(["p"] * len(CASES), completions, rows) == list(wanted)
    assert judged.stats() == {"reward_unjudged": (0.0, float(len(CASES)))}


@pytest.mark.parametrize(
    ("cores", "options", "judges"), [(3, {}, 3), (64, {}, 8), (64, {"processes": 9}, 9)]
)
def test_cores_decide_how_many_judges_there_are(
    cores: int,
    options: dict[str, int],
    judges: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[JudgeProgram] = []
    accepting = tmp_path / "agree.py"
    reply = '{"refused": "", "correct": true}'
    accepting.write_text(
        f"import sys\nprint('{{}}', flush=True)\n"
        f"for line in sys.stdin:\n    print('{reply}', flush=True)\n"
    )

    class Judge(judges_module.Judge):
        """Accepts every completion."""

        def __init__(self, program: JudgeProgram) -> None:
            started.append(program)
            super().__init__(JudgeProgram("agree.py", [sys.executable, str(accepting)]))

    monkeypatch.setattr(judges_module, "Judge", Judge)
    reward = make("math", options, cores=cores)
    rows = [{"answer": "1"}] * 20
    assert reward.score(["p"] * 20, ["1"] * 20, rows, ["1"] * 20) == [1.0] * 20
    reward.close()
    assert len(started) == judges


def test_no_completions_are_judged_at_once(judged: MathReward) -> None:
    assert judged([], [], []) == []
