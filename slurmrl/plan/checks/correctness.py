"""Which completions are correct: what evaluations need it for, and what they leave out without."""

from __future__ import annotations

from collections.abc import Iterator

from slurmrl.config.schema import Config, evaluation_key
from slurmrl.config.source import dotted
from slurmrl.errors import Problem
from slurmrl.plan.algorithms import Algorithm
from slurmrl.plan.checks.draft import Draft


def votes(draft: Draft) -> Iterator[Problem]:
    """maj@k counts votes for correct answers."""
    for suite, own in draft.config.evaluations.items():
        evaluation, key = own.evaluation, evaluation_key(suite)
        if evaluation is None or evaluation.vote_pattern is None:
            continue
        if evaluation.n > 1 and evaluation.pass_score is None:
            message = useless_pattern(evaluation.vote_pattern, dotted((*key, "pass_score")))
            yield draft.problem((*key, "vote_pattern"), message)


def useless_pattern(pattern: str, key: str) -> str:
    """``key`` is the setting that the pattern needs."""
    return (
        f"'{pattern}' is not allowed without {key}: maj@k needs the score from which on a "
        "completion is correct"
    )


def notes(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """What the evaluations of a trial leave out, and how their prompts differ from training."""
    for place, dataset in config.datasets().items():
        if config.dataset.is_chat and not dataset.is_chat:
            yield (
                f"{dotted(place)}: its prompts are text, those of training get the chat template; "
                f"set {dotted((*place, 'chat_template'))}: true if they should, too"
            )
    for suite, own in config.evaluations.items():
        evaluation = own.evaluation
        if evaluation is not None and evaluation.n > 1 and evaluation.pass_score is None:
            calls = algorithm.evaluation_calls(own)
            judged = any("rewards" in call.outputs for call in calls)
            key = dotted((*evaluation_key(suite), "pass_score"))
            yield from [no_rates(own, key)] if judged else []
    yield from algorithm.notes(config)


def no_rates(config: Config, key: str) -> str:
    """``key`` is the setting that adds them."""
    judge = f"reward '{config.reward.title}'" if config.reward is not None else "the episode"
    return (
        f"no pass@k and maj@k: {judge} can give other scores than 1 and 0; set {key} to the score "
        "from which on a completion is correct"
    )
