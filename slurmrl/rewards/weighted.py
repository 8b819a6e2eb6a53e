"""The configured reward: a weighted sum of functions, each of which scores certain rows.

A user's function may run in a pool of processes, where a failure affects only one completion.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from slurmrl import log
from slurmrl.config.schema import Reward, RewardPart, RewardPool
from slurmrl.config.schema.reward import ALONE
from slurmrl.data.types import ABSENT, value_at
from slurmrl.errors import RewardError
from slurmrl.rewards import make
from slurmrl.rewards.base import added, check_sum, metrics, shortened
from slurmrl.rewards.checked_reward import NO_EXTRAS, CheckedReward, Extras, Stats, of_completion
from slurmrl.rewards.process_pool import MOST_PROCESSES, PoolProgram, ProcessPool, Reply, Unanswered

MODULE = "slurmrl.rewards.reward_process"
MOST_REPLY_BYTES = 16 << 20
logger = log.get(__name__)
CLOSING_S = 5.0
"""Time limit of the ``close()`` method of a user's class in seconds."""
MOST_LOGGED = 5
"""Maximum number of failures of one call that are logged."""
MOST_SINGLE_FAILURES = 8
"""Number of failed calls in a row, each for one completion or prompt, until an error is raised."""
Row = Mapping[str, Any]


class WeightedPart(NamedTuple):
    settings: RewardPart
    scorer: CheckedReward | PooledReward


class WeightedReward:
    """The weighted sum of the scores of a reward's parts.

    :param parts: parts by name; the part `ALONE` of a reward that is not a sum has no metric.
    """

    def __init__(self, parts: Mapping[str, WeightedPart]) -> None:
        self._parts = dict(parts)
        self.given: list[dict[str, float]] = []
        """Unweighted scores of the latest call: for each completion, the score of each part by the
        part's name. The mappings are empty for a reward that is not a sum."""
        self._stats: Stats = {}

    @property
    def needs_answers(self) -> bool:
        """Whether a function needs the reference answer of each row."""
        return any(part.scorer.needs_answers for part in self._parts.values())

    @property
    def checks_rows(self) -> bool:
        """Whether a function can check rows. Raises as `score` does."""
        return any(part.scorer.checks_rows for part in self._parts.values())

    @property
    def has_stats(self) -> bool:
        """Whether a function may report additional metrics. Raises as `score` does."""
        return any(part.scorer.has_stats for part in self._parts.values())

    def wanted(self) -> set[str]:
        """Return the names of the additional arguments that functions request."""
        return {name for part in self._parts.values() for name in part.scorer.wanted()}

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Row],
        places: Sequence[str],
        extras: Extras = NO_EXTRAS,
    ) -> list[float | None]:
        """Return the weighted sum for each completion.

        The sum is None if a part with a weight could not score the completion.

        :raises RewardError: `CheckedReward.score` fails, no part scores a row, or a sum is too
            large.
        """
        self._stats = {}
        self.given = [{} for _ in completions]
        for row, place in zip(rows, places, strict=True):
            if problem := self._scored_by_none(row):
                raise RewardError(f"{place}: {problem}")
        totals = [0.0] * len(completions)
        unscored: set[int] = set()
        terms: list[list[str]] = [[] for _ in completions]
        for name, (settings, scorer) in self._parts.items():
            chosen = [index for index, row in enumerate(rows) if applies(settings, row)]
            if not chosen:
                continue
            copied = settings.pool is None and ":" in settings.name  # A user may change rows.
            own = scorer.score(
                [prompts[index] for index in chosen],
                [completions[index] for index in chosen],
                [deepcopy(rows[index]) if copied else rows[index] for index in chosen],
                [places[index] for index in chosen],
                of_completion(extras, chosen),
            )
            for index, score in zip(chosen, own, strict=True):
                if score is None:
                    unscored |= {index} if settings.weight else set()
                    continue
                totals[index] += settings.weight * score
                if name != ALONE:
                    self.given[index][name] = score
                terms[index].append(f"{settings.weight:g} * {score:g} ({name or settings.name})")
            self._stats = added([self._stats, scorer.stats()])
        for total, place, summands in zip(totals, places, terms, strict=True):
            check_sum(total, place, " + ".join(summands))
        return [None if index in unscored else total for index, total in enumerate(totals)]

    def stats(self) -> Stats:
        """Metrics of the latest call that the functions return in addition to their scores."""
        return dict(self._stats)

    def metrics(self) -> Stats:
        """Return all metrics of the latest call: `stats`, and the scores of the parts."""
        return metrics(self._stats, self.given)

    def check_rows(self, rows: Sequence[Row]) -> list[str]:
        """Return the reason why each row cannot be scored; "" if it can (see `RewardFunction`)."""
        problems = [self._scored_by_none(row) for row in rows]
        for settings, scorer in self._parts.values():
            chosen = [index for index, row in enumerate(rows) if applies(settings, row)]
            rejected = scorer.check_rows([rows[index] for index in chosen])
            for index, problem in zip(chosen, rejected, strict=True):
                problems[index] = problems[index] or problem
        return problems

    def close(self) -> None:
        for part in self._parts.values():
            part.scorer.close()

    def _scored_by_none(self, row: Row) -> str:
        """Return the reason why no part scores a row; "" if a part does."""
        settings = [part.settings for part in self._parts.values()]
        if any(applies(each, row) for each in settings):
            return ""
        fields = dict.fromkeys(key for each in settings for key in each.where)
        values = ", ".join(f"{key}: {_shown(value_at(row, key))}" for key in fields)
        return f"no part of the reward scores this row ({values}); see reward.parts.<name>.where"


def make_reward(
    reward: Reward, *, cores: int | None = None, of_one_prompt: bool = False
) -> WeightedReward:
    """Make the configured reward.

    Raises as `make` does; if functions run in a pool, the first call raises these errors.

    :param of_one_prompt: each call has only the completions of one prompt.
    """
    cores = cores or len(os.sched_getaffinity(0))
    return WeightedReward(
        {
            name: WeightedPart(part, _scorer(part, cores, of_one_prompt))
            for name, part in reward.functions.items()
        }
    )


def reward_program(
    reward: Reward,
    cores: int,
    *,
    of_groups: bool = False,
    memory_bytes: int | None = None,
    closing_s: float = CLOSING_S,
) -> PoolProgram:
    """Return the program of a process that has the whole reward (`reward_process`).

    The process reports ``wanted`` (the arguments that the functions request), ``checks_rows`` and
    ``has_stats``.

    :param cores: number of CPU cores that the process may use.
    :param of_groups: each request has the completions of one prompt.
    :param memory_bytes: limit of the private memory of the process.
    :param closing_s: seconds that the functions may take to release their resources.
    """
    return PoolProgram(
        f"the reward '{reward.title}'",
        [sys.executable, "-P", "-m", MODULE],
        {
            "reward": reward.model_dump(),
            "cores": cores,
            "memory_bytes": memory_bytes,
            "of_groups": of_groups,
        },
        modules=[path for path in sys.path if path],
        most_reply_bytes=MOST_REPLY_BYTES,
        closing_s=closing_s,
    )


def _scorer(part: RewardPart, cores: int, of_one_prompt: bool) -> CheckedReward | PooledReward:
    if part.pool is not None:
        return PooledReward(part.name, part.options, part.pool, cores, of_one_prompt=of_one_prompt)
    return make(part.name, part.options, cores=cores)


def applies(settings: RewardPart, row: Row) -> bool:
    """Return whether a part scores a row."""
    return all(_same(value_at(row, key), wanted) for key, wanted in settings.where.items())


def _same(value: Any, wanted: Any) -> bool:
    """Return whether a JSON value equals a value or one of a tuple; true does not equal 1."""
    if isinstance(wanted, tuple):
        return any(_same(value, each) for each in wanted)
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def _shown(value: Any) -> str:
    return "absent" if value is ABSENT else repr(value)[:100]


class PooledReward:
    """A user's reward that is called in separate processes with one completion at a time.

    If the reward raises, takes too long, returns no score or kills its process, the completion gets
    ``pool.unjudged_score``, or no score if this setting is not set.
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
        """Prepare the pool of processes that call the reward.

        :param of_one_prompt: each call has only the completions of one prompt. Such a call may have
            no completion that can be scored.
        """
        self.name = name
        self._of_one_prompt = of_one_prompt
        self._settings = pool
        self._cores = cores
        own = Reward(name=name, options=dict(options))
        program = reward_program(own, 1, memory_bytes=pool.memory_mib << 20)
        self._pool = ProcessPool(program, pool.timeout_s, pool.processes)
        self._stats: Stats = {}
        self._failed_calls = self._failures_in_a_row = 0

    @property
    def needs_answers(self) -> bool:
        """False: a user's function checks the required fields of a row itself."""
        return False

    def wanted(self) -> Sequence[str]:
        """Return the names of the additional arguments that the reward requests."""
        return list(self._pool.start()["wanted"])

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        places: Sequence[str],
        extras: Extras = NO_EXTRAS,
    ) -> list[float | None]:
        """Return one finite score, or None, per completion; see `CheckedReward.score`.

        :raises RewardError: no completion could be scored.
        """
        self._stats = {}
        if not completions:
            return []
        wanted = {name: extras[name] for name in self.wanted() if name in extras}
        each = zip(prompts, completions, rows, places, strict=True)
        requests = [
            {
                "prompts": [prompt],
                "completions": [completion],
                "rows": [row],
                "places": [place],
                "extras": of_completion(wanted, [index]),
            }
            for index, (prompt, completion, row, place) in enumerate(each)
        ]
        replies = self._pool.ask(
            requests, most=min(self._cores, MOST_PROCESSES), within_s=self._settings.batch_timeout_s
        )
        errors = [_why(reply) for reply in replies]
        self._report(errors, completions, places)
        scored = [
            reply["judged"]["stats"]
            for reply in replies
            if not isinstance(reply, Unanswered) and "judged" in reply
        ]
        unscored_counts = {"reward_unjudged": (float(sum(map(bool, errors))), float(len(errors)))}
        self._stats = added([*scored, unscored_counts])
        return [self._score(reply) for reply in replies]

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the reason why each row cannot be scored; "" if it can (see `RewardFunction`).

        Without rows, check only that the reward can be made.

        :raises UsageError: see `slurmrl.rewards.make`.
        """
        if not self.checks_rows:
            return [""] * len(rows)
        replies = self._pool.ask([{"row": row} for row in rows], most=self._cores)
        return [_problem(reply) for reply in replies]

    @property
    def checks_rows(self) -> bool:
        """Whether the reward can check rows."""
        return bool(self._pool.start()["checks_rows"])

    @property
    def has_stats(self) -> bool:
        """Whether the reward may report metrics in addition to its scores."""
        return bool(self._pool.start()["has_stats"])

    def stats(self) -> Stats:
        """Return the metrics of the latest call: the reward's own, and ``reward_unjudged``."""
        return dict(self._stats)

    def close(self) -> None:
        self._pool.close()

    def _score(self, reply: Reply | Unanswered) -> float | None:
        if isinstance(reply, Unanswered) or "error" in reply:
            return self._settings.unjudged_score
        return float(reply["judged"]["scores"][0])

    def _report(
        self, errors: Sequence[str], completions: Sequence[str], places: Sequence[str]
    ) -> None:
        """Log the failures of a call.

        :raises RewardError: all completions failed.
        """
        failed = [index for index, error in enumerate(errors) if error]
        given = self._settings.unjudged_score
        score = "no score" if given is None else f"the score {given:g}"
        for index in failed[:MOST_LOGGED]:
            logger.warning(
                "reward %s cannot score %s, completion %s: %s; the completion gets %s",
                self.name,
                places[index],
                shortened(completions[index]),
                errors[index],
                score,
            )
        if len(failed) > MOST_LOGGED:
            logger.warning(
                "reward %s: %d of %d completions could not be scored and get %s",
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
                f"reward {self.name} could not score any of {self._failures_in_a_row} completions "
                f"in a row, the last one for {places[failed[-1]]}: {errors[failed[-1]]}"
            )


def _why(reply: Reply | Unanswered) -> str:
    """Return why there is no score; "" if there is one."""
    return reply.why if isinstance(reply, Unanswered) else str(reply.get("error", ""))


def _problem(reply: Reply | Unanswered) -> str:
    """Return the problem of a row from the reply of a process."""
    if isinstance(reply, Unanswered) or "error" in reply:
        return f"check_rows failed: {_why(reply)}"
    return str(reply["problem"])
