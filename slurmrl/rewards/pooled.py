"""A user's reward in a pool of processes: what fails there costs one completion."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from slurmrl import log
from slurmrl.config.schema import RewardPool
from slurmrl.errors import RewardError
from slurmrl.rewards.judge import JudgeProgram, Verdict
from slurmrl.rewards.judges import MOST_JUDGES, JudgePool, Unjudged
from slurmrl.rewards.reward import NO_EXTRAS, Extras, Stats, of_completion
from slurmrl.rewards.scores import shortened

logger = log.get(__name__)

MODULE = "slurmrl.rewards.function_judge"
CLOSING_S = 5.0
"""How long the ``close()`` of a user's class may take."""
MOST_LOGGED = 5
"""Failures of one call that the log shows."""
MOST_SINGLE_FAILURES = 8
"""Calls in a row, of one completion or of one prompt each, that may fail."""


class PooledReward:
    """A user's reward that is called in processes of its own with one completion at a time.

    A completion for which it raises, takes too long, returns no score or kills its process gets
    ``pool.unjudged_score``, or no score without that.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        pool: RewardPool,
        cores: int,
        *,
        of_one_prompt: bool = False,
    ) -> None:
        """``of_one_prompt``: each call has the completions of one prompt alone, none of which may
        be judged now and then."""
        self.name = name
        self._of_one_prompt = of_one_prompt
        self._settings = pool
        self._cores = cores
        setup = {"name": name, "options": dict(options), "memory_bytes": pool.memory_mib << 20}
        modules = [path for path in sys.path if path]
        command = [sys.executable, "-P", "-m", MODULE]
        program = JudgeProgram(
            f"reward '{name}'", command, setup, modules=modules, closing_s=CLOSING_S
        )
        self._pool = JudgePool(program, pool.timeout_s, pool.processes)
        self._stats: Stats = {}
        self._failed_calls = self._failures_in_a_row = 0

    @property
    def needs_answers(self) -> bool:
        """A user's function decides itself what a row must have."""
        return False

    def wanted(self) -> Sequence[str]:
        """The names of the additional arguments that it asks for."""
        names: Sequence[str] = self._pool.start()["extras"]
        return names

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        places: Sequence[str],
        extras: Extras = NO_EXTRAS,
    ) -> list[float | None]:
        """One finite score per completion, or None; see `CheckedReward.score`.

        :raises RewardError: no completion could be judged.
        """
        self._stats = {}
        if not completions:
            return []
        wanted = {name: extras[name] for name in self.wanted() if name in extras}
        each = zip(prompts, completions, rows, places, strict=True)
        requests = [
            {
                "prompt": prompt,
                "completion": completion,
                "row": row,
                "place": place,
                "extras": of_completion(wanted, [index]),
            }
            for index, (prompt, completion, row, place) in enumerate(each)
        ]
        verdicts = self._pool.judge(
            requests,
            most=min(self._cores, MOST_JUDGES),
            within_s=self._settings.batch_timeout_s,
        )
        errors = [_why(verdict) for verdict in verdicts]
        self._report(errors, completions, places)
        for verdict in verdicts:
            self._add(verdict)
        self._stats["reward_unjudged"] = (float(sum(map(bool, errors))), float(len(errors)))
        return [self._score(verdict) for verdict in verdicts]

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """The reason why each row cannot be judged, "" if it can (see `RewardFunction`). Without
        rows it checks that the reward can be made.

        :raises UsageError: see `slurmrl.rewards.make`.
        """
        if not self._pool.start()["checks_rows"]:
            return [""] * len(rows)
        verdicts = self._pool.judge([{"row": row} for row in rows], most=self._cores)
        return [_problem(verdict) for verdict in verdicts]

    def stats(self) -> Stats:
        """Metrics of the latest call: the reward's own, and ``reward_unjudged``."""
        return dict(self._stats)

    def close(self) -> None:
        self._pool.close()

    def _score(self, verdict: Verdict | Unjudged) -> float | None:
        if isinstance(verdict, Unjudged) or "error" in verdict:
            return self._settings.unjudged_score
        return float(verdict["score"])

    def _add(self, verdict: Verdict | Unjudged) -> None:
        """Add the reward's own statistics of one completion."""
        stats = {} if isinstance(verdict, Unjudged) else verdict.get("stats", {})
        for name, (total, count) in stats.items():
            before = self._stats.get(name, (0.0, 0.0))
            self._stats[name] = (before[0] + total, before[1] + count)

    def _report(
        self, errors: Sequence[str], completions: Sequence[str], places: Sequence[str]
    ) -> None:
        """Log the failures.

        :raises RewardError: there is nothing else.
        """
        failed = [index for index, error in enumerate(errors) if error]
        given = self._settings.unjudged_score
        score = "no score" if given is None else f"the score {given:g}"
        for index in failed[:MOST_LOGGED]:
            logger.warning(
                "reward %s cannot judge %s, completion %s: %s; it gets %s",
                self.name,
                places[index],
                shortened(completions[index]),
                errors[index],
                score,
            )
        if len(failed) > MOST_LOGGED:
            logger.warning(
                "reward %s: %d of %d completions could not be judged and get %s",
                self.name,
                len(failed),
                len(errors),
                score,
            )
        all_failed = len(failed) == len(errors)
        self._failures_in_a_row = self._failures_in_a_row + len(failed) if all_failed else 0
        self._failed_calls = self._failed_calls + 1 if all_failed else 0
        single = self._of_one_prompt or len(errors) == 1
        if all_failed and (not single or self._failed_calls >= MOST_SINGLE_FAILURES):
            raise RewardError(
                f"reward {self.name} could not judge any of {self._failures_in_a_row} completions "
                f"in a row, the last one for {places[failed[-1]]}: {errors[failed[-1]]}"
            )


def _why(verdict: Verdict | Unjudged) -> str:
    """Why there is no score; "" if there is one."""
    return verdict.why if isinstance(verdict, Unjudged) else str(verdict.get("error", ""))


def _problem(verdict: Verdict | Unjudged) -> str:
    """What `check_rows` says about a row."""
    if isinstance(verdict, Unjudged) or "error" in verdict:
        return f"check_rows failed: {_why(verdict)}"
    return str(verdict["problem"])
