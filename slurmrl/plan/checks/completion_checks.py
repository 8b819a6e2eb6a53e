"""Checks of generation: sampling, records, episodes and votes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.schema import Config, Dataset, EpisodeSettings, evaluation_key
from slurmrl.config.schema.base import OWN_CODE
from slurmrl.config.source import KeyPath, dotted
from slurmrl.errors import Problem
from slurmrl.plan.checks import Draft
from slurmrl.plan.engine_rules import CAPABILITIES, HF
from slurmrl.plan.estimates.hardware import GIB
from slurmrl.plan.estimates.memory import PAGE_TOKENS, kv_bytes_per_token
from slurmrl.plan.estimates.shape import (
    TRAINING,
    bounded_parts,
    known_config,
    lengths_of,
    longest,
    shape_of,
)
from slurmrl.plan.metric_names import generates, makes_rewards
from slurmrl.plan.placement import ROLLOUTS, model_of
from slurmrl.registry import near, resolve

MOST_SUPPORT: Final = 1024
"""Maximum number of token ids in a recorded sampling mask: 4 KiB for each token."""
TABLES: Final = "slurmrl.rollouts"
"""Module with the tables of episodes, in a room that ``plan`` must not import."""
EPISODE: Final = ("rollout", "episode")
CACHE_REFUSAL: Final = "slurmrl.models.hf_config:cache_refusal"
GENERATION_LIMIT: Final = "slurmrl.models.hf_config:generation_limit"
TOOL_CALLS: Final = "tools"
"""Name of the environment that needs tools."""


def completions(draft: Draft) -> Iterator[Problem]:
    """Check that several completions of each prompt are set only where generation makes them."""
    config = draft.config
    if config.rollout.n > 1 and not generates(draft.algorithm.calls(config)):
        reason = f": {draft.algorithm.name} does not generate in training (see evaluation.n)"
        yield draft.reject((ROLLOUTS, "n"), reason, config.rollout.n)
    for suite, own in config.evaluations.items():
        n = own.evaluation.n if own.evaluation is not None else 1
        if n > 1 and not generates(draft.algorithm.evaluation_calls(own)):
            yield draft.reject(
                (*evaluation_key(suite), "n"), ": this evaluation does not generate", n
            )


def publication(draft: Draft) -> Iterator[Problem]:
    """Check that a trial that publishes weight versions trains the actor."""
    rollout = draft.config.rollout
    if rollout.publish is not None and rollout.tasks is None and "actor" not in draft.trained:
        reason = f": {draft.algorithm.name} does not train the actor, so its weights never change"
        yield draft.reject((ROLLOUTS, "publish"), reason)


def sampling(draft: Draft) -> Iterator[Problem]:
    """Check that sampling uses the distribution that the losses assume."""
    if not draft.algorithm.trains_on_samples:
        return
    rollout, name = draft.config.rollout, draft.algorithm.name
    recorded = draft.algorithm.replays
    if recorded:
        yield from _unrecorded(draft)
    restricted = {
        "top_k": rollout.top_k is not None and not recorded,
        "top_p": rollout.top_p < 1.0 and not recorded,
        "greedy": rollout.greedy,
        "min_new_tokens": rollout.min_new_tokens > 0,
    }
    for field in (field for field, restricts in restricted.items() if restricts):
        reason = (
            f" with {name}, whose losses assume that tokens are sampled from the whole vocabulary; "
            f"leave out {field}"
        )
        yield draft.reject((ROLLOUTS, field), reason, getattr(rollout, field))


def _unrecorded(draft: Draft) -> Iterator[Problem]:
    """Check that generation can record the restricted vocabulary of each token."""
    rollout, name = draft.config.rollout, draft.algorithm.name
    if rollout.top_k is None:
        if rollout.top_p < 1.0:
            reason = (
                f" without rollout.top_k, which bounds the recorded sampling mask of each token; "
                f"set rollout.top_k to {MOST_SUPPORT} or less"
            )
            yield draft.reject((ROLLOUTS, "top_p"), reason, rollout.top_p)
        return
    if rollout.top_k > MOST_SUPPORT:
        reason = (
            f" with {name}, which records this number of token ids for each token; allowed: at "
            f"most {MOST_SUPPORT}"
        )
        yield draft.reject((ROLLOUTS, "top_k"), reason, rollout.top_k)
    elif reason := draft.lacks(ROLLOUTS, "masks"):
        yield draft.reject((ROLLOUTS, "top_k"), f" with {name}: {reason}", rollout.top_k)


def experts(draft: Draft) -> Iterator[Problem]:
    """Check that the model has experts, and that the engine and the algorithm can record them."""
    if not draft.config.rollout.replay_experts:
        return
    name = ROLLOUTS if ROLLOUTS in draft.allocations() else "actor"
    shape = shape_of(draft.config.actor)
    reason = ""
    if not (draft.algorithm.trains_on_samples and draft.algorithm.replays):
        reason = f"{draft.algorithm.name} does not use recorded experts"
    elif shape is not None and not shape.experts:
        reason = "the actor has no experts"
    elif draft.config.actor.implementation == HF and served(draft):
        reason = (
            "servers do not report experts of models with implementation hf; leave out "
            f"{ROLLOUTS}.backend"
        )
    elif shape is not None:
        kind = f"experts of {known_config(draft.config.actor).get('model_type')}"
        reason = draft.lacks(name, kind if kind in CAPABILITIES else "experts")
    if reason:
        yield draft.reject((ROLLOUTS, "replay_experts"), f": {reason}", value=True)


def served(draft: Draft) -> bool:
    """Return whether servers generate the completions."""
    allocation = draft.allocations().get(ROLLOUTS)
    return allocation is not None and BACKENDS[allocation.backend].serves


def transformers_generation(draft: Draft) -> Iterator[Problem]:
    """Check that padding a batch does not change completions of models of transformers."""
    actor = draft.config.actor
    if actor.implementation != HF:
        return
    parts, values = list(_generated_by_cache(draft)), known_config(actor)
    if not values:
        return
    reason = resolve(CACHE_REFUSAL)(values) if parts else ""
    if reason:
        yield draft.reject(("actor", "implementation"), f": {reason}", HF)
        return
    limit = resolve(GENERATION_LIMIT)(values)
    for where, dataset, new_tokens in parts if limit else ():
        key, tokens = (*where, "max_prompt_tokens"), longest(dataset, new_tokens)
        if tokens is None:
            yield draft.problem(key, f"is required: {limit.reason}")
        elif tokens > limit.tokens:
            message = f"sequences of up to {tokens} tokens are not allowed: {limit.reason}"
            yield draft.problem(key, message)


def _generated_by_cache(draft: Draft) -> Iterator[tuple[KeyPath, Dataset, int]]:
    """Yield the parts of `bounded_parts` for which the actor's engine generates."""
    config, server = draft.config, served(draft)
    trains = generates(draft.algorithm.calls(config)) and not server
    evaluates = not (server and (config.rollout_evaluates or config.evaluation_trials_roll_out))
    for where, dataset, new_tokens in bounded_parts(config):
        if dataset.kind == "prompt" and (trains if where == TRAINING else evaluates):
            yield where, dataset, new_tokens


def beyond_positions(draft: Draft) -> dict[str, int]:
    """Return the maximum new tokens by dataset whose completions may pass the model's positions.

    Trainers generate for these datasets. Servers, rollout tasks and episodes end a sequence at the
    model's positions.
    """
    config = draft.config
    if config.rollout.episode.has_turns:
        return {}
    in_tasks = config.rollout.tasks is not None
    return {
        dotted(where): new_tokens
        for where, dataset, new_tokens in _generated_by_cache(draft)
        if dataset.max_prompt_tokens is None
        and not (in_tasks and (where == TRAINING or config.rollout_evaluates))
    }


def episodes(draft: Draft) -> Iterator[Problem]:
    """Check the names of episodes, environments and tools, and the settings that they need."""
    settings = draft.config.rollout.episode
    if not settings.has_turns:
        return
    yield from _unknown_names(draft, settings)
    yield from _cache(draft, settings)
    environment = settings.environment.name if settings.environment is not None else ""
    if environment == TOOL_CALLS and not settings.tools:
        known = sorted(resolve(f"{TABLES}:TOOLS"))
        message = f"is required with environment '{TOOL_CALLS}': {{{known[0]}: {{}}}}; allowed: "
        yield draft.problem((*EPISODE, "tools"), f"{message}{', '.join(known)}, or module:name")
    unscored = draft.config.reward is None and environment in resolve(f"{TABLES}:WITHOUT_REWARD")
    if unscored and makes_rewards(draft.algorithm.calls(draft.config)):
        message = f"is required: environment '{environment}' gives no rewards"
        yield draft.problem(("reward",), message)


def _cache(draft: Draft, settings: EpisodeSettings) -> Iterator[Problem]:
    """Check that the engine has a cache limit and that the longest sequence fits."""
    placed = draft.placements()
    name = ROLLOUTS if ROLLOUTS in placed else "actor"
    if settings.cache_bytes is None or name not in placed:
        return
    where = (*EPISODE, "cache_gib")
    if reason := draft.lacks(name, "cache_limit"):
        yield draft.reject(where, f": {reason}")
        return
    model, allocation = model_of(draft.config, name), placed[name].allocation
    shape = shape_of(model)
    lengths = lengths_of(draft.config, draft.algorithm, shape)
    if shape is None or lengths is None or lengths.assumed:
        return
    tokens = -(-lengths.longest // PAGE_TOKENS) * PAGE_TOKENS
    needed = tokens * kv_bytes_per_token(shape, allocation, model.dtype)
    if settings.cache_bytes < needed:
        reason = f": the longest sequence ({lengths.longest} tokens) needs {needed / GIB:.3g} GiB"
        yield draft.reject(where, reason, settings.cache_gib)


def _unknown_names(draft: Draft, settings: EpisodeSettings) -> Iterator[Problem]:
    named: list[tuple[KeyPath, str, str]] = [((*EPISODE, "name"), settings.name, "EPISODES")]
    if settings.environment is not None:
        key = (*EPISODE, "environment", "name")
        named.append((key, settings.environment.name, "ENVIRONMENTS"))
    for name, tool in settings.tools.items():
        where = (*EPISODE, "tools", name, *(("name",) if tool.name else ()))
        named.append((where, tool.name or name, "TOOLS"))
    for where, name, table in named:
        known = sorted(resolve(f"{TABLES}:{table}"))
        if name not in known and not OWN_CODE.fullmatch(name):
            yield draft.reject(where, f"; {near(name, known)}, or your own module:name", name)


def votes(draft: Draft) -> Iterator[Problem]:
    """Check that the evaluation can detect correct votes."""
    for suite, own in draft.config.evaluations.items():
        evaluation, key = own.evaluation, evaluation_key(suite)
        if evaluation is None or evaluation.vote_pattern is None:
            continue
        if evaluation.n > 1 and evaluation.pass_score is None:
            message = useless_pattern(evaluation.vote_pattern, dotted((*key, "pass_score")))
            yield draft.problem((*key, "vote_pattern"), message)


def useless_pattern(pattern: str, key: str) -> str:
    """Return the message about a vote pattern that needs the setting ``key``."""
    return (
        f"'{pattern}' is not allowed without {key}: maj@k needs the minimum score of a correct "
        f"completion"
    )


def no_rates(config: Config, key: str) -> str:
    """Return the note that pass@k and maj@k are missing; the setting ``key`` adds them."""
    scorer = f"reward '{config.reward.title}'" if config.reward is not None else "the episode"
    return (
        f"no pass@k or maj@k: {scorer} can return scores other than 0 and 1; set {key} to the "
        f"minimum score of a correct completion"
    )
