"""Checks that no single schema can make: across sections, files and the algorithm's needs.

Each check yields problems and never raises, so that one run reports all of them. To add a check,
write a function that takes a ``Draft`` and add it to CHECKS or SUBMISSION.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from slurmrl.errors import Problem
from slurmrl.plan.checks import completion_checks, generators, layouts, model_sources, sections
from slurmrl.plan.checks.draft import Draft
from slurmrl.plan.checks.fit import hardware, memory

Check: TypeAlias = Callable[[Draft], Iterable[Problem]]

CHECKS: Final[tuple[Check, ...]] = (
    layouts.backends,
    layouts.gpus,
    layouts.batches,
    layouts.hosts,
    layouts.rollout_instances,
    layouts.architectures,
    hardware,
    generators.tasks,
    model_sources.implementations,
    sections.engine_options,
    sections.optimizers,
    sections.averages,
    completion_checks.completions,
    completion_checks.votes,
    model_sources.adapters,
    model_sources.base_reference,
    sections.dataset_types,
    sections.dataset_chats,
    sections.conflicts,
    sections.reward,
    sections.suite_rewards,
    generators.evaluation_tasks,
    completion_checks.episodes,
    completion_checks.sampling,
    completion_checks.experts,
    completion_checks.publication,
    sections.length_of_run,
    sections.untrained_steps,
    sections.stop_when,
    sections.something_to_do,
    sections.graphs,
)
"""Checks of every plan."""
SUBMISSION: Final[tuple[Check, ...]] = (
    memory,
    layouts.runnable,
    layouts.generation,
    generators.servers,
    sections.folder_of_runs,
    model_sources.weights,
    model_sources.lengths,
    completion_checks.transformers_generation,
    model_sources.tokenizer,
    model_sources.stop_tokens,
    sections.dataset_files,
)
"""Additional checks of a submission: memory, existing files and engines. (A layout that no
engine runs in this version can still be planned.)"""


def check(draft: Draft) -> list[Problem]:
    """The problems that prevent planning."""
    return [problem for find_problems in CHECKS for problem in find_problems(draft)]


def check_submission(draft: Draft) -> list[Problem]:
    """The problems that prevent the submission of a valid plan."""
    return [problem for find_problems in SUBMISSION for problem in find_problems(draft)]
