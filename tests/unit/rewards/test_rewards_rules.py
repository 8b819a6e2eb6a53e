"""Exact match, the registry, and mathematical equality."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from slurmrl.errors import UnknownNameError, UnusableRowError, UsageError
from slurmrl.rewards import make
from slurmrl.rewards import process_pool as process_pool
from slurmrl.rewards.base import ExactMatch
from slurmrl.rewards.math import MathReward, tail
from slurmrl.rewards.math_answer import marked_answer
from slurmrl.rewards.math_excluded import with_unequal_signs
from slurmrl.rewards.process_pool import PoolProgram, Unanswered


@pytest.fixture(scope="module")
def judged() -> Iterator[MathReward]:
    reward = MathReward(timeout_s=60.0, processes=2)
    yield reward
    reward.close()


def test_exact_match_ignores_only_white_space() -> None:
    rows = [{"answer": "64"}, {"answer": "64 "}, {"answer": "64"}, {"answer": 64}]
    assert ExactMatch()(["p"] * 4, [" 64\n", "64", "6 4", "64"], rows) == [1.0, 1.0, 0.0, 1.0]


def test_reward_names_and_options_are_checked() -> None:
    for name in ("exact_match", "slurmrl.rewards.base:ExactMatch"):
        assert make(name, {}).score(["p"], ["64 "], [{"answer": "64"}], ["1"]) == [1.0]
    with pytest.raises(UnknownNameError, match="did you mean 'exact_match'"):
        make("exactmatch", {})
    with pytest.raises(UsageError, match=r"'nonsense'; allowed: timeout_s, .*, literal, brackets"):
        make("math", {"nonsense": 1})
    with pytest.raises(UsageError, match="'time_out_s'; did you mean 'timeout_s'"):
        make("code", {"time_out_s": 1})
    with pytest.raises(UsageError, match="'exact_match' has no option 'strip'; it has no options"):
        make("exact_match", {"strip": True})
    with pytest.raises(UsageError, match="positive"):
        make("math", {"timeout_s": 0})
    with pytest.raises(UsageError, match="batch_timeout_s 0 must be positive"):
        make("math", {"batch_timeout_s": 0})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("48/2 = 24\n#### 72", "72"),
        ("#### 1\nno, #### 2\nbye", "2"),
        ("72", None),
        ("####", ""),
        ("#### 1\n\\boxed{2}", None),
        ("\\boxed{2}\n#### Why is it 3?", None),
        ("\\boxed{2}\n#### 3", "3"),
        ("#### 2\n#### Explanation", "2"),
        ("#### 2\n" + "#### Explanation\n" * 5000, "2"),
        ("#### Final answer\n2", None),
    ],
)
def test_answer_follows_last_marker_or_is_boxed(text: str, answer: str | None) -> None:
    assert marked_answer(text, "####") == answer


class Pair(NamedTuple):
    """A line of ``math_pairs.txt``, with the right score."""

    kind: str
    score: float
    reference: str
    completion: str


def read_pairs() -> list[Pair]:
    """Read ``SCORE | REFERENCE | COMPLETION`` lines below ``# KIND``; ⏎ is the end of a line."""
    pairs, kind = [], ""
    for line in Path(__file__).with_name("math_pairs.txt").read_text().splitlines():
        if line.startswith("# "):
            kind = line[2:]
        elif line:
            score, reference, completion = line.split(" | ", 2)
            pairs.append(Pair(kind, float(score), reference, completion.replace("⏎", "\n")))
    return pairs


def wrong_verdicts(reward: MathReward, pairs: Sequence[Pair], *, finished: bool) -> list[Pair]:
    """Return the pairs whose score is wrong."""
    rows = [{"answer": pair.reference} for pair in pairs]
    completions = [pair.completion for pair in pairs]
    scores = reward(["p"] * len(pairs), completions, rows, finished=[finished] * len(pairs))
    return [pair for pair, score in zip(pairs, scores, strict=True) if score != pair.score]


def test_math_agrees_with_hand_made_scores(judged: MathReward) -> None:
    pairs = read_pairs()
    truncated = [pair for pair in pairs if pair.kind.startswith("truncated:")]
    literal = [pair for pair in pairs if pair.kind.startswith("literal:")]
    others = [pair for pair in pairs if pair not in (*truncated, *literal)]
    assert len(pairs) > 800
    wrong = wrong_verdicts(judged, truncated, finished=False)
    wrong += wrong_verdicts(judged, others, finished=True)
    with closing(MathReward(timeout_s=60.0, literal=True)) as strict:
        wrong += wrong_verdicts(strict, literal, finished=True)
    assert wrong == []


def test_inequality_sign_after_a_long_number_is_read() -> None:
    digits = "1" * 5000  # Python converts at most 4300 digits to an integer
    assert with_unequal_signs(f"{digits}!=1") == rf"{digits} \neq 1"
    began = time.process_time()
    with_unequal_signs(f"7{' ' * 100_000}8")
    assert time.process_time() - began < 2.0, "linear in the spaces"


BRACKETED = (
    Pair("brackets", 1, "90", "First I tried [60], but it is [ 90 ]."),
    Pair("brackets", 0, "60", "First I tried [60], but it is [90]."),
    Pair("brackets", 1, "90", "The answer is 90 degrees."),
    Pair("brackets", 1, "0.5", "The ratio is [1/2]."),
    Pair("brackets", 1, "5", r"[$\sqrt{3^2 + 4^2}$]"),
    Pair("brackets", 1, "2", r"The side is [$\sqrt[3]{8}$]."),
    Pair("brackets", 1, "5", r"\[ 2x = 10 \] So x = [5 cm]"),
    Pair("brackets", 1, "7", "It is in (2, 9], so [7]."),
    Pair("brackets", 1, "7", r"As [1] says, \boxed{7}."),
    Pair("brackets", 1, "7", "As [1] says,\n#### 7"),
    Pair("brackets", 0, "7", "7, see [8]"),
    Pair("brackets", 1, "2", r"The answer is $\sqrt[3]{8} = 2$."),
    Pair("brackets", 0, "3", r"The answer is $\sqrt[3]{8}$."),
)


def test_math_option_takes_the_answer_from_the_last_brackets() -> None:
    with closing(MathReward(timeout_s=60.0, processes=1, brackets=True)) as reward:
        assert wrong_verdicts(reward, BRACKETED, finished=True) == []
        assert wrong_verdicts(reward, BRACKETED[:2], finished=False) == []


@pytest.mark.parametrize("blank", [" ", "\n", " \n"])
def test_answer_is_found_among_much_white_space(judged: MathReward, blank: str) -> None:
    flood = blank * 3000
    forms = ["42%s", "#### 42%s", r"\boxed{42}%s", r"\boxed{%s42}", "%s42", "The answer is%s42."]
    pairs = [Pair("", 1.0, "42", form % flood) for form in forms]
    assert wrong_verdicts(judged, pairs, finished=True) == []


def test_each_reference_equals_itself_in_a_box(judged: MathReward) -> None:
    references = list(dict.fromkeys(pair.reference for pair in read_pairs()))
    rows = [{"answer": reference} for reference in references]
    assert judged.check_rows(rows) == [""] * len(rows)
    for form in (r"Thus $\boxed{%s}$", "\\[ \\boxed{%s} \\]"):
        pairs = [Pair("", 1.0, reference, form % reference) for reference in references]
        assert wrong_verdicts(judged, pairs, finished=True) == []


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
def test_references_without_an_answer_are_rejected(
    judged: MathReward, reference: str, why: str
) -> None:
    rows = [{"answer": "7"}, {"answer": reference}]
    problems = judged.check_rows(rows)
    assert problems[0] == ""
    assert why in problems[1]
    with pytest.raises(UnusableRowError, match=why) as refused:
        judged(["p"] * 2, ["7", "7"], rows, finished=[True] * 2)
    assert refused.value.index == 1


def test_long_completions_are_scored_by_their_end(
    judged: MathReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    completions = ["12 " * 10_000, "1+" * 4_000, "12 " * 10_000 + "\nso it is \\boxed{7}."]
    rows = [{"answer": "7"}] * 3
    finished = [True] * 3
    assert judged(["p"] * 3, completions, rows, finished=finished) == [0.0, 0.0, 1.0]
    asked: list[dict[str, str]] = []

    def judge(requests: list[dict[str, str]], **limits: float) -> list[Unanswered]:
        asked.extend(requests)
        return [Unanswered("it took too long")] * len(requests)

    monkeypatch.setattr(judged._pool, "ask", judge)
    assert judged(["p"] * 3, completions, rows, finished=finished) == [0.0] * 3
    assert judged.stats()["reward_unjudged"] == (3.0, 3.0)
    assert max(len(request["completion"]) for request in asked) == 2000


def test_box_is_found_anywhere_in_a_long_completion(judged: MathReward) -> None:
    rest = "which confirms the result. " * 100
    completions = {
        f"\\boxed{{7}}, {rest}": 1.0,
        f"\\boxed{{7}}, {rest}The final answer is $8$.": 0.0,
        f"\\boxed{{7}}, {rest}\\boxed{{8}}": 0.0,
        "\\boxed{" * 20_000 + "\\boxed{7}": 1.0,
    }
    scores = judged(["p"] * 4, list(completions), [{"answer": "7"}] * 4, finished=[True] * 4)
    assert scores == list(completions.values())


def test_text_tail_begins_at_a_line_if_few_characters_are_lost() -> None:
    assert tail("short", 10) == "short"
    assert tail("x" * 50 + "\n" + "y" * 8, 10) == "y" * 8
    assert tail("x" * 50 + "\ny", 10) == "x" * 8 + "\ny"


@pytest.mark.parametrize(
    ("cores", "options", "judges"), [(3, {}, 3), (64, {}, 8), (64, {"processes": 9}, 9)]
)
def test_number_of_scoring_processes_follows_the_cores(
    cores: int,
    options: dict[str, int],
    judges: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[PoolProgram] = []
    accepting = tmp_path / "agree.py"
    reply = '{"rejected": "", "correct": true}'
    accepting.write_text(
        f"import sys\nprint('{{}}', flush=True)\n"
        f"for line in sys.stdin:\n    print('{reply}', flush=True)\n"
    )

    class Judge(process_pool.PoolProcess):
        """Accepts every completion."""

        def __init__(self, program: PoolProgram) -> None:
            started.append(program)
            super().__init__(PoolProgram("agree.py", [sys.executable, str(accepting)]))

    monkeypatch.setattr(process_pool, "PoolProcess", Judge)
    reward = make("math", options, cores=cores)
    rows = [{"answer": "1"}] * 20
    extras = {"finished": [True] * 20}
    assert reward.score(["p"] * 20, ["1"] * 20, rows, ["1"] * 20, extras) == [1.0] * 20
    reward.close()
    assert len(started) == judges


def test_empty_batch_is_scored_without_a_process(judged: MathReward) -> None:
    assert judged([], [], [], finished=[]) == []
