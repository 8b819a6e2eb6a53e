"""Checks that no single schema can make: across sections, files and the algorithm's needs.

Each check yields problems and never raises, so that one run reports all of them. To add a check,
write a function that takes a ``Draft`` and add it to CHECKS or SUBMISSION.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from slurmrl.errors import Problem
from slurmrl.plan.checks.adapters import adapters, base_reference
from slurmrl.plan.checks.correctness import votes
from slurmrl.plan.checks.draft import Draft
from slurmrl.plan.checks.episodes import episodes
from slurmrl.plan.checks.evaluation_tasks import evaluation_tasks
from slurmrl.plan.checks.layouts import LAYOUT_CHECKS, SUBMISSION_CHECKS
from slurmrl.plan.checks.sections import (
    averages,
    completions,
    conflicts,
    dataset_chats,
    dataset_files,
    dataset_types,
    engine_options,
    experts,
    folder_of_runs,
    graphs,
    length_of_run,
    optimizers,
    publication,
    reward,
    sampling,
    something_to_do,
    stop_when,
    suite_rewards,
    untrained_steps,
)
from slurmrl.plan.checks.weights import (
    implementations,
    lengths,
    stop_strings,
    stop_tokens,
    tokenizer,
    weights,
)

Check: TypeAlias = Callable[[Draft], Iterable[Problem]]

CHECKS: Final[tuple[Check, ...]] = (
    *LAYOUT_CHECKS,
    implementations,
    stop_strings,
    engine_options,
    optimizers,
    averages,
    completions,
    votes,
    adapters,
    base_reference,
    dataset_types,
    dataset_chats,
    conflicts,
    reward,
    suite_rewards,
    evaluation_tasks,
    episodes,
    sampling,
    experts,
    publication,
    length_of_run,
    untrained_steps,
    stop_when,
    something_to_do,
    graphs,
)
"""What every plan must satisfy."""
SUBMISSION: Final[tuple[Check, ...]] = (
    *SUBMISSION_CHECKS,
    folder_of_runs,
    weights,
    lengths,
    tokenizer,
    stop_tokens,
    dataset_files,
)
"""What a submission must satisfy as well: existing files and engines."""


def check(draft: Draft) -> list[Problem]:
    """The problems that prevent planning."""
    return [problem for find_problems in CHECKS for problem in find_problems(draft)]


def check_submission(draft: Draft) -> list[Problem]:
    """The problems that prevent the submission of a valid plan."""
    return [problem for find_problems in SUBMISSION for problem in find_problems(draft)]
