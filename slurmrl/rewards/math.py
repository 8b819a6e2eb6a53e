"""The reward that is 1 if the final answer equals the reference mathematically, else 0."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, ClassVar

from slurmrl import log
from slurmrl.errors import UnusableRowError, UsageError
from slurmrl.rewards.base import RewardFunction
from slurmrl.rewards.math_answer import BOX, boxed, marked_answer
from slurmrl.rewards.process_pool import MOST_PROCESSES, PoolProgram, ProcessPool, Reply, Unanswered

logger = log.get(__name__)

SPACES = re.compile(r"[^\S\n]+|(?<=\n)\s+(?=\n)")
"""Pattern of white space that counts as one space."""

PROGRAM = PoolProgram(
    "math-verify",
    [sys.executable, "-P", "-m", "slurmrl.rewards.math_process"],
    modules=[path for path in sys.path if path],
    hint=": is math-verify installed?",
)
PLAIN_NUMBER = re.compile(r"-?\$?\d+(,\d{3})*(\.\d+)?%?")
"""Pattern of a plain number. A plain number is always a valid reference."""
BRACKETS = re.compile(r"(?<!\\)(?<!\\sqrt)(?<!\\left)\[((?:[^\[\]]|\[[^\[\]]*\])+)\]")
"""Pattern of square brackets, with a pair inside as in ``[\\sqrt[3]{8}]``, but not ``\\[…\\]``."""


class MathReward(RewardFunction):
    """Reward that compares answers by math-verify in separate processes.

    :param timeout_s: seconds after which a completion scores 0 and counts as
        ``reward_unjudged``, as does a completion that crashes its process twice.
    :param batch_timeout_s: seconds after which all remaining completions of a call score 0 and
        count as ``reward_unjudged``.
    :param processes: parallel processes. Default: one per CPU core of the rank, at most 8.
    :param marker: string before the final answer (GSM8K's ``#### 72``). The answer ends with the
        line. A completion without the marker is searched as a whole.
    :param tail_characters: number of characters at the end of a completion that are searched.
    :param literal: whether a box or the line after the marker must state a plain number if the
        reference is one: ``21 + 33`` is then no answer for 54.
    :param brackets: whether the last square brackets (Geometry3K's ``[72]``) of a completion
        without box and marker contain the final answer.
    """

    needs_answers: ClassVar[bool] = True

    def __init__(
        self,
        *,
        timeout_s: float = 5.0,
        batch_timeout_s: float = 300.0,
        processes: int | None = None,
        marker: str = "####",
        tail_characters: int = 2000,
        literal: bool = False,
        brackets: bool = False,
    ) -> None:
        if tail_characters < 1:
            raise UsageError(f"tail_characters {tail_characters} must be positive")
        if not marker:
            raise UsageError("marker must not be empty")
        self._marker = marker
        self._tail = tail_characters
        self._literal = literal
        self._brackets = brackets
        if not batch_timeout_s > 0:
            raise UsageError(f"batch_timeout_s {batch_timeout_s} must be positive")
        self._batch_timeout_s = batch_timeout_s
        self._pool = ProcessPool(PROGRAM, timeout_s, processes)
        self._unscored = 0
        self._scored = 0

    def __call__(  # type: ignore[override]
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        *,
        finished: Sequence[bool],
    ) -> list[float]:
        """Return 1 for each completion with a correct answer, 0 for any other.

        :param finished: whether each completion is finished. An unfinished completion has an answer
            only in a box or after the marker.
        :raises UnusableRowError: completions cannot be compared with a reference.
        """
        asked = zip(completions, rows, finished, strict=True)
        replies = self._score([self._request(*each) for each in asked], self._batch_timeout_s)
        for index, reply in enumerate(replies):
            if not isinstance(reply, Unanswered) and reply["rejected"]:
                raise UnusableRowError(_rejected(rows[index], reply["rejected"]), index)
        self._scored = len(replies)
        self._unscored = sum(isinstance(reply, Unanswered) for reply in replies)
        if self._unscored:
            logger.warning(
                "%d of %d completions took too long to score and get 0",
                self._unscored,
                self._scored,
            )
        return [
            0.0 if isinstance(reply, Unanswered) else float(reply["correct"]) for reply in replies
        ]

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return why each reference is unusable: no mathematics to compare, or slow to parse."""
        references = [self._answer(row["answer"])[0] for row in rows]
        unclear = [i for i, text in enumerate(references) if not PLAIN_NUMBER.fullmatch(text)]
        replies = self._score([{"reference": references[index]} for index in unclear], inf)
        problems = [""] * len(rows)
        for index, reply in zip(unclear, replies, strict=True):
            if isinstance(reply, Unanswered):
                problems[index] = _rejected(rows[index], "math-verify takes too long to parse it")
            elif reply["rejected"]:
                problems[index] = _rejected(rows[index], reply["rejected"])
        return problems

    def stats(self) -> dict[str, tuple[float, float]]:
        return {"reward_unjudged": (float(self._unscored), float(self._scored))}

    def close(self) -> None:
        self._pool.close()

    def _score(self, requests: list[dict[str, Any]], within_s: float) -> list[Reply | Unanswered]:
        return self._pool.ask(requests, most=min(self.cores, MOST_PROCESSES), within_s=within_s)

    def _request(
        self, completion: str, row: Mapping[str, Any], finished: bool
    ) -> dict[str, str | bool]:
        answer, marked = self._answer(completion)
        if self._brackets and not marked and not BOX.search(answer):
            found = BRACKETS.findall(answer)
            answer, marked = (found[-1].strip(), True) if found else (answer, False)
        return {
            "reference": self._answer(row["answer"])[0],
            "completion": answer,
            "marked": marked,
            "finished": finished,
            "literal": self._literal,
        }

    def _answer(self, text: Any) -> tuple[str, bool]:
        """Return the string to score, and whether the string is the answer after the marker."""
        text = SPACES.sub(" ", str(text)).strip()
        answer = marked_answer(text, self._marker)
        if answer is None and len(text) > self._tail and (box := boxed(text)):
            text = rf"\boxed{{{box}}}"  # the box may be before the searched tail
        return tail(text if answer is None else answer, self._tail), answer is not None


def tail(text: str, characters: int) -> str:
    """Return the end of a long string.

    The result begins with a whole line if a line begins in its first half, so that no formula is
    cut.
    """
    end = text[-characters:]
    return end if end == text else end[end.find("\n", 0, characters // 2) + 1 :]


def _rejected(row: Mapping[str, Any], why: str) -> str:
    text = str(row["answer"])
    shown = text if len(text) <= 100 else f"…{text[-100:]}"
    return f"reward 'math' cannot use the reference {shown!r}: {why}"
