"""Steps and evaluations, which the ranks execute.

Without a filter, one batch passes through all calls. With a filter, rounds of candidates pass
through the calls up to the filter, and the accepted candidates pass through the other calls.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slurmrl import log
from slurmrl.backoff import retry
from slurmrl.config.schema import WHOLE
from slurmrl.data.ledger import StoredGroup
from slurmrl.errors import UsageError
from slurmrl.plan.dataflow import Refill
from slurmrl.plan.metric_names import EVALUATION_S, WAITED_S
from slurmrl.plan.model import CallPlan, Plan
from slurmrl.run.paths import evaluation_prefix, part_prefix
from slurmrl.workers.master import publish
from slurmrl.workers.master.progress import Progress
from slurmrl.workers.master.publish import Answered
from slurmrl.workers.master.results import EvaluationScores, ScoringCall
from slurmrl.workers.master.rollout_tasks import RolloutTasks
from slurmrl.workers.master.worker_channel import WorkerChannel
from slurmrl.workers.messages import LoadBatch, RunCall

logger = log.get(__name__)
Item = tuple[int, int]
"""(epoch, index)"""


@dataclass(frozen=True)
class Executed:
    """The ranks' reports on a step or an evaluation."""

    metrics: dict[str, Any]
    texts: list[Any]
    """Readable samples."""
    answered: Answered


class StepRunner:
    """Posts the orders of steps and collects the answers; ``progress`` tracks the items."""

    def __init__(
        self,
        channel: WorkerChannel,
        plan: Plan,
        progress: Progress,
        scores: EvaluationScores,
        timeout_s: float,
        incarnation: int,
        rollouts: RolloutTasks | None = None,
        while_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """With ``rollouts``, a step uses the items that rollout tasks have finished.

        Call ``while_idle`` often while a step waits for items and the ranks are idle.
        """
        self._rollouts, self._while_idle = rollouts, while_idle
        self._waited_s = 0.0
        self._scores = scores
        self._incarnation = incarnation
        self._channel = channel
        self._plan = plan
        self._progress = progress
        self._timeout_s = timeout_s

    def train(self, step: int) -> Executed | None:
        """Train on the next items.

        Return None if the job will end before rollout tasks finish enough items. Raises UsageError
        if the filter leaves too few items and the settings require a full batch.
        """
        began = time.monotonic()
        self._waited_s = 0.0
        counts: dict[str, int] = {}
        if self._plan.filtered:
            found = self._filtered(step, self._progress.refill)
            if found is None:
                return None
            answered, counts = found
        elif self._rollouts is None:
            answered = self._run(step, self._progress.take_batch(), self._plan.calls)
        else:
            samples = self._take_samples(self._rollouts, step, self._progress.batch_size)
            if samples is None:
                return None
            items = self._progress.items(sample.item for sample in samples)
            answered = self._run(step, items, self._plan.calls, samples=samples)
        metrics = publish.of_step(answered, time.monotonic() - began)
        if self._rollouts is not None:
            metrics |= {**self._rollouts.metrics(), WAITED_S: self._waited_s}
        return Executed({**metrics, **counts}, publish.texts(answered), answered)

    def _take_samples(
        self, rollouts: RolloutTasks, step: int, count: int, *, filtered: bool = False
    ) -> Sequence[StoredGroup] | None:
        """Wait for samples of the next items. Return None if the job will end during the wait."""

        def take() -> Sequence[StoredGroup] | None:
            self._while_idle()
            return rollouts.take(step, count, filtered=filtered)

        began = time.monotonic()
        samples = self._channel.wait_for(take, rollouts.waits_for)
        self._waited_s += time.monotonic() - began
        if samples is not None:
            self._progress.use(sample.item for sample in samples)
        return samples

    def evaluate(self, step: int) -> Executed:
        """Evaluate held-out items, one suite after another. The training state does not change."""
        metrics: dict[str, Any] = {}
        rows: list[Any] = []
        answered: Answered = []
        for suite in self._progress.config.evaluations:
            executed = self._evaluate(step, suite, len(answered))
            metrics |= executed.metrics
            rows += [{"suite": suite, **row} if suite else row for row in executed.texts]
            answered += executed.answered
        if EVALUATION_S not in metrics:
            metrics[EVALUATION_S] = sum(
                metrics[f"{EVALUATION_S}/{suite}"] for suite in self._progress.config.evaluations
            )
        return Executed(metrics, rows, answered)

    def _evaluate(self, step: int, suite: str, first: int) -> Executed:
        """Evaluate a suite.

        ``first`` is the number of the suite's first call among the calls of all suites. The part
        files of a call have this number in their names.
        """
        began = time.monotonic()
        items, calls = self._progress.evaluation_items(suite), self._plan.evaluation(suite)
        parts = [
            evaluation_prefix(step, self._incarnation, number)
            for number in range(first, first + len(calls))
        ]
        answered = self._run(step, items, calls, evaluation=True, suite=suite, parts=parts)
        metrics = publish.of_step(answered, time.monotonic() - began)
        scoring = []
        for (call, answers), prefix in zip(answered, parts, strict=True):
            if scored := [rank for rank in call.ranks if answers[rank].scored]:
                scoring.append(ScoringCall(call.name, prefix, scored))
        write = partial(self._scores.write, step, len(items), scoring, suite)
        estimates = retry("write the scores of the evaluation", write, self._channel.rest)
        measured = publish.of_evaluation({**metrics, **estimates}, suite)
        return Executed(measured, publish.texts(answered), answered)

    def _filtered(self, step: int, refill: Refill) -> tuple[Answered, dict[str, int]] | None:
        """Take candidates until the filter has accepted a full batch, then train on the batch.

        Take no more candidates after the allowed number of rounds. Queue surplus candidates again,
        or keep their groups for the next step.
        """
        progress, calls = self._progress, self._plan.calls
        before, after = calls[: self._plan.filtered], calls[self._plan.filtered :]
        answered: Answered = []
        accepted: list[int] = []
        groups: dict[int, StoredGroup] = {}
        reasons: Counter[str] = Counter()
        rounds = tried = 0
        of_round = progress.batch_size
        if self._rollouts is None and refill.candidates is not None:
            of_round = refill.candidates
        while tried < refill.rounds * of_round and len(accepted) < progress.batch_size:
            samples: Sequence[StoredGroup] = ()
            if self._rollouts is None:
                candidates = progress.take(of_round)
            else:
                missing = progress.batch_size - len(accepted)
                found = self._take_samples(self._rollouts, step, missing, filtered=True)
                if found is None:
                    return None
                samples, candidates = found, [sample.item for sample in found]
                groups.update(zip(candidates, samples, strict=True))
            answered += self._run(
                step, progress.items(candidates), before, candidates=True, samples=samples
            )
            rounds += 1
            tried += len(candidates)
            dropped = _dropped(*answered[-1], candidates)
            for number, reason in dropped.items():
                progress.drop([number], reason)
            reasons.update(dropped.values())
            accepted += [number for number in candidates if number not in dropped]
        batch, surplus = accepted[: progress.batch_size], accepted[progress.batch_size :]
        progress.give_back(surplus)
        if self._rollouts is not None:
            self._rollouts.returned(step, map(groups.__getitem__, surplus))
        if len(batch) < progress.batch_size:
            self._tell_short(step, len(batch), rounds, reasons)
        answered += self._run(step, progress.items(batch), after if batch else ())
        counts = {"rounds": rounds, "accepted": len(batch), "surplus": len(surplus)}
        return answered, {f"filter/{name}": count for name, count in counts.items()}

    def _tell_short(self, step: int, items: int, rounds: int, reasons: Counter[str]) -> None:
        """Report a batch that is not full. Raises UsageError if the settings forbid this."""
        dropped = ", ".join(f"{number} {reason}" for reason, number in sorted(reasons.items()))
        short = f"{items} of {self._progress.batch_size} items after {rounds} rounds ({dropped})"
        if self._progress.refill.complete:
            raise UsageError(
                f"the filter left step {step} only {short}. Allow more rounds or more candidates "
                "per round, or train on batches that are not full "
                "(docs/algorithms/policy-gradients.md)"
            )
        outcome = "training on these" if items else "nothing is trained"
        logger.warning("step %d has %s; %s", step, short, outcome)

    def _run(
        self,
        step: int,
        items: Sequence[Item],
        calls: Sequence[CallPlan],
        *,
        evaluation: bool = False,
        suite: str = WHOLE,
        parts: Sequence[str] = (),
        candidates: bool = False,
        samples: Sequence[StoredGroup] = (),
    ) -> Answered:
        """Post a batch and its calls together, in their fixed order; collect the answers.

        ``parts`` are the prefixes of the calls' part files; if empty, all calls share one prefix.
        """
        scalars = self._progress.scalars()
        load = LoadBatch(
            step=step,
            items=tuple(items),
            evaluation=evaluation,
            suite=suite,
            candidates=candidates,
            samples=tuple(samples),
        )
        runs = [
            RunCall(
                step=step,
                name=call.name,
                scalars=scalars,
                evaluation=evaluation,
                suite=suite,
                part=parts[number] if parts else part_prefix(step, self._incarnation),
            )
            for number, call in enumerate(calls)
        ]
        numbers = self._channel.post(load, *runs)
        self._channel.collect(numbers[0], f"loading the batch of step {step}", self._timeout_s)
        return [
            (call, self._channel.collect(number, f"{call.name} of step {step}", self._timeout_s))
            for call, number in zip(calls, numbers[1:], strict=True)
        ]


def _dropped(call: CallPlan, answers: publish.Answers, candidates: Sequence[int]) -> dict[int, str]:
    """Return the numbers of the items that a filter dropped on any rank, with the reasons."""
    return {
        candidates[place]: reason
        for rank in call.ranks
        for reason, places in answers[rank].dropped.items()
        for place in places
    }
