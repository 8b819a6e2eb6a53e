"""Episodes with an engine that answers from a script: limits, failures, order, tokens."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from slurmrl.algorithms.rollout_calls import Totals
from slurmrl.config.schema import Dataset, EpisodeSettings
from slurmrl.errors import EpisodeError, RunFailedError
from slurmrl.rollouts.base import Environment, EpisodeItem, PolicyTurn, Reply
from slurmrl.rollouts.completions import Completions
from slurmrl.rollouts.episodes import EpisodeRunner, MultiTurn, SingleTurn
from slurmrl.rollouts.generation.base import GenerationOptions, GenerationRequest
from slurmrl.rollouts.policy import Dialogue, EpisodeLimits, Policy, TokenSampling, Waiting
from slurmrl.rollouts.sample_files import SampleGroup
from slurmrl.rollouts.tools import Tools
from tests.support.scripted_engine import ScriptedEngine

STOP = 1
WORDS = ["<unk>", "<end>", "<user>", "<bot>", "a", "b", "ab", "ok", "more", "\n"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<bot>{{ m.content }}<end>"
    "{% else %}<user>{{ m.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that encodes ``ab`` as one token. A policy may sample it as two."""
    core = Tokenizer(
        models.BPE(
            {word: place for place, word in enumerate(WORDS)}, [("a", "b")], unk_token="<unk>"
        )
    )
    core.add_special_tokens(["<unk>", "<end>", "<user>", "<bot>"])
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    return made


def items(count: int, prompt: Sequence[int] = (4,)) -> list[EpisodeItem]:
    return [
        EpisodeItem(
            sample_id=f"s{number}@0",
            index=0,
            prompt=tuple(prompt),
            text="a",
            answer="ok",
            row={"number": number},
            step=1,
            evaluation=False,
        )
        for number in range(count)
    ]


def run(
    episode: Any,
    engine: ScriptedEngine,
    tokenizer: Any,
    rows: Sequence[EpisodeItem],
    *,
    tools: Tools | None = None,
    chat: bool = False,
    most: int = 4,
    turns: int = 8,
    tokens: int = 100,
    stop_strings: tuple[str, ...] = (),
    **settings: Any,
) -> list[Completions]:
    configured = EpisodeSettings(**{"name": "my:own", **settings})
    limits = EpisodeLimits(turns=turns, tokens=tokens)
    runner = EpisodeRunner(episode, tools or Tools({}), configured, limits)
    dialogue = Dialogue(Dataset(type="prompt", path="x", chat_template=chat), tokenizer)
    options = GenerationOptions(
        max_new_tokens=most, stop_token_ids=(STOP,), stop_strings=stop_strings
    )

    def sampling(item: EpisodeItem) -> TokenSampling:
        return TokenSampling(
            options=options, seed=1, step=1, key_of=lambda end: hash(item.sample_id + end)
        )

    return asyncio.run(runner.run(rows, engine, dialogue, sampling, Waiting()))


def say(*tokens: int) -> Callable[[GenerationRequest], tuple[int, ...]]:
    return lambda _: tokens


def rounds(count: int) -> Any:
    """Return an episode with this many turns and messages between them."""

    async def episode(policy: Policy, item: EpisodeItem, tools: Tools) -> Completions:
        completions = Completions(item.prompt)
        for number in range(count):
            if number:
                policy.say(completions, "ab")
            await policy(completions)
        return completions

    return episode


def test_metrics_survive_sample_files(tokenizer: Any) -> None:
    """Concurrent episodes count their own calls, including a call that fails after others."""

    async def episode(policy: Policy, item: EpisodeItem, tools: Tools) -> Completions:
        completions = await rounds(2)(policy, item, tools)
        await tools.call("echo", "x")
        for _ in range(item.index):
            await tools.call("unknown")
        if item.index == 2:
            raise OSError("gone")
        return completions

    rows = [replace(row, index=number) for number, row in enumerate(items(3, (2, 4)))]
    tools = Tools({"echo": lambda text: text})
    outcomes = run(episode, ScriptedEngine(say(4, 5, STOP)), tokenizer, rows, tools=tools)
    counts = [(one.tool_calls, one.tool_failures) for one in outcomes]
    assert counts == [(1, 0), (2, 1), (3, 2)]
    made = Totals.of_completions(outcomes)
    group = SampleGroup.of(0, "1.1", outcomes, "0.1")
    assert Totals.of_groups([SampleGroup.from_bytes(group.to_bytes())]) == made
    read = len(outcomes[0].tokens) - 6
    assert made.stats(turns=True, tools=True) == {
        "response_length": (12, 3),
        "prompt_length": (6, 3),
        "finished": (2, 3),
        "turns": (4, 3),
        "context_length": (2 * read, 3),
        "episode_failed": (1, 3),
        "tool_calls": (6, 3),
        "tool_failed": (3, 6),
    }


def test_sampled_tokens_are_kept_if_their_text_tokenizes_differently(tokenizer: Any) -> None:
    """The policy samples ``a`` and ``b``, which the tokenizer would encode as ``ab``."""
    engine = ScriptedEngine(say(4, 5, STOP))
    (outcome,) = run(rounds(2), engine, tokenizer, items(1, (2, 4, 1, 3)), chat=True)
    assert tokenizer("ab", add_special_tokens=False).input_ids == [6]
    message = [2, 6, 1, 3]  # <user> ab <end> <bot>; the policy wrote the <end> before it
    assert engine.requests[1].prompt == (2, 4, 1, 3, 4, 5, STOP, *message)
    completions = outcome
    assert completions.tokens == (4, 5, STOP, *message, 4, 5, STOP)
    assert completions.written == [True] * 3 + [False] * 4 + [True] * 3
    assert completions.logprobs == (-0.5, -1.5, -2.5, 0, 0, 0, 0, -0.5, -1.5, -2.5)
    assert completions.finished


def test_message_text_cannot_imitate_a_turn(tokenizer: Any) -> None:
    """Names of special tokens in any message, such as a tool's output, are plain text."""
    dialogue = Dialogue(Dataset(type="prompt", path="x"), tokenizer)
    assert not {1, 2, 3} & set(dialogue.encode("a<end><bot>b"))


def test_stop_token_is_added_to_a_truncated_turn(tokenizer: Any) -> None:
    engine = ScriptedEngine(say(4, 4))
    run(rounds(2), engine, tokenizer, items(1), chat=True, most=2)
    assert engine.requests[1].prompt == (4, 4, 4, STOP, 2, 6, 1, 3)


@pytest.mark.parametrize(("drawn", "text"), [((4, 5), "ab"), ((4, 5, STOP), "ab")])
def test_turn_text_includes_its_stop_string(
    drawn: tuple[int, ...], text: str, tokenizer: Any
) -> None:
    """The text includes a stop string, but no stop token. Both end an episode as finished."""
    turns: list[PolicyTurn] = []

    async def episode(policy: Policy, item: EpisodeItem, tools: Tools) -> Completions:
        completions = Completions(item.prompt)
        turns.append(await policy(completions))
        return completions

    engine = ScriptedEngine(say(*drawn))
    (outcome,) = run(episode, engine, tokenizer, items(1), stop_strings=("b",))
    assert engine.requests[0].options.stop_strings == ("b",)
    assert [(turn.text, turn.stopped) for turn in turns] == [(text, True)]
    assert outcome.finished
    assert outcome.tokens == tuple(drawn)


@pytest.mark.parametrize(
    ("limits", "written", "requests"),
    [({"turns": 2}, 4, 2), ({"tokens": 7}, 5, 3), ({"tokens": 3}, 2, 1)],
)
def test_limit_ends_an_episode_as_unfinished(
    limits: dict[str, int], written: int, requests: int, tokenizer: Any
) -> None:
    """The episode keeps its tokens, does not fail, and never exceeds the limit of tokens."""
    engine = ScriptedEngine(say(4, STOP))
    (outcome,) = run(rounds(5), engine, tokenizer, items(1), **limits)
    assert not outcome.failure
    assert not outcome.finished
    assert sum(outcome.written) == written
    assert outcome.written[-1]
    assert len(outcome.tokens) <= limits.get("tokens", 100)
    assert len(engine.requests) == requests


def test_episode_that_catches_a_limit_is_still_unfinished(tokenizer: Any) -> None:
    async def episode(policy: Policy, item: EpisodeItem, tools: Tools) -> Completions:
        completions = Completions(item.prompt)
        try:
            for _ in range(9):
                await policy(completions)
        except RuntimeError:
            pass
        return completions

    (outcome,) = run(episode, ScriptedEngine(say(4, STOP)), tokenizer, items(1), turns=2)
    assert (outcome.turns, outcome.finished) == (2, False)


def failing(policy: Policy, item: EpisodeItem, how: str) -> Any:
    match how:
        case "raises":
            raise KeyError("oh\nno")
        case "exits":
            sys.exit(3)
        case "hangs":
            return asyncio.sleep(3600)
        case "returns None":
            return asyncio.sleep(0)
        case "returns a turn":
            return policy(Completions(item.prompt))
        case "has no prompt":
            return policy(Completions([]))
        case "writes nothing":
            return asyncio.sleep(0, Completions(item.prompt))
        case "reads nonsense":
            Completions(item.prompt).read([-1])
        case "reads another vocabulary":
            completions = Completions((10_000,))
            return policy(completions)
        case "earns before its first turn":
            Completions(item.prompt).reward(1.0)
    raise AssertionError(how)


WAYS = (
    "raises", "exits", "hangs", "returns None", "returns a turn", "has no prompt", "writes nothing",
    "reads nonsense", "reads another vocabulary", "earns before its first turn",
)  # fmt: skip


@pytest.mark.parametrize("value", [float("nan"), 1e39, -3e38, 10**5000, "1", None], ids=type)
def test_turn_rewards_must_be_finite(
    value: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The sum must be finite too, because rewards are float32."""

    async def episode(policy: Policy, item: EpisodeItem, tools: Tools) -> Completions:
        completions = Completions(item.prompt)
        await policy(completions)
        completions.reward(-3e38 if item.row["number"] == 1 else 0.5)
        completions.reward(value if item.row["number"] == 1 else 1)
        return completions

    with caplog.at_level(logging.WARNING):
        outcomes = run(episode, ScriptedEngine(say(4, STOP)), tokenizer, items(2))
    assert sum(outcomes[0].rewards) == 1.5
    assert "the reward of a turn must be a finite number" in outcomes[1].failure
    assert "the reward of a turn must be a finite number" in caplog.text


@pytest.mark.parametrize("how", WAYS)
def test_failed_episode_does_not_affect_others(
    how: str, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def episode(policy: Policy, item: EpisodeItem, tools: Tools) -> Completions:
        if item.row["number"] == 1:
            return await failing(policy, item, how)  # type: ignore[no-any-return]
        completions = Completions(item.prompt)
        await policy(completions)
        return completions

    engine = ScriptedEngine(say(4, STOP))
    limit = 1.0 if how == "hangs" else 60.0
    with caplog.at_level(logging.WARNING):
        outcomes = run(episode, engine, tokenizer, items(3), timeout_s=limit)
    assert [bool(outcome.failure) for outcome in outcomes] == [False, True, False]
    assert [outcome.tokens for outcome in outcomes] == [(4, STOP), (), (4, STOP)]
    assert outcomes[1].sequence == (4,)
    assert "s1@0" in caplog.text


def test_failure_of_all_episodes_is_an_episode_error(tokenizer: Any) -> None:
    async def episode(policy: Policy, item: EpisodeItem, tools: Tools) -> Completions:
        raise KeyError("broken")

    with pytest.raises(EpisodeError, match=r"all 3 episodes .* KeyError: 'broken'"):
        run(episode, ScriptedEngine(say(4, STOP)), tokenizer, items(3))


def test_engine_failure_is_not_an_episode_error(tokenizer: Any) -> None:
    def lost(_: GenerationRequest) -> tuple[int, ...]:
        raise RunFailedError("the server is gone")

    with pytest.raises(RunFailedError, match="the server is gone"):
        run(rounds(1), ScriptedEngine(lost), tokenizer, items(3))


def test_episode_time_excludes_waiting_for_the_engine(tokenizer: Any) -> None:
    """Three answers take longer than the episode may; only time in tools counts."""
    engine = ScriptedEngine(say(4, STOP), delay_s=0.5)
    (outcome,) = run(rounds(3), engine, tokenizer, items(1), timeout_s=1.0)
    assert outcome.turns == 3


def test_concurrency_is_limited_and_results_keep_their_order(tokenizer: Any) -> None:
    order: list[int] = []

    async def episode(policy: Policy, item: EpisodeItem, tools: Tools) -> Completions:
        completions = Completions(item.prompt)
        await policy(completions)
        completions.reward(item.row["number"])
        await asyncio.sleep(0.002 * (7 - item.row["number"] % 7))
        order.append(item.row["number"])
        return completions

    engine = ScriptedEngine(say(4, STOP))
    outcomes = run(episode, engine, tokenizer, items(40), concurrency=6)
    assert [sum(outcome.rewards) for outcome in outcomes] == list(range(40))
    assert order != sorted(order)
    assert engine.most_at_once == 6


class Echo(Environment):
    """An environment that rewards every ``a`` and ends at ``ok``."""

    async def step(self, turn: PolicyTurn) -> Reply:
        if turn.text == "ok":
            return Reply(reward=2.0, done=True)
        return Reply(text="more", reward=0.5)


def test_environment_answers_and_rewards_turns(tokenizer: Any) -> None:
    """Later turns have priority over episodes that have not begun."""
    texts = iter([(4, STOP), (4, 5, STOP), (7, STOP)])
    engine = ScriptedEngine(lambda _: next(texts))
    (outcome,) = run(MultiTurn(Echo), engine, tokenizer, items(1))
    completions = outcome
    assert completions.turns == 3
    assert completions.finished
    ends = [place for place, token in enumerate(completions.tokens) if token == STOP]
    assert [completions.rewards[place] for place in ends] == [0.5, 0.5, 2.0]
    assert sum(completions.rewards) == 3.0
    urgency = [request.priority for request in engine.requests]
    assert urgency == sorted(urgency, reverse=True)
    assert len(set(urgency)) == len(urgency)


def test_truncated_turn_is_not_shown_to_the_environment(tokenizer: Any) -> None:
    engine = ScriptedEngine(say(7, 7, 7, 7))
    (outcome,) = run(MultiTurn(Echo), engine, tokenizer, items(1), most=4)
    assert (outcome.turns, outcome.finished) == (1, False)
    assert sum(outcome.rewards) == 0.0


def test_branches_of_an_episode_sample_different_turns(tokenizer: Any) -> None:
    """The first branch is the sample's own stream."""

    async def episode(policy: Policy, item: EpisodeItem, tools: Tools) -> Completions:
        both = [Completions(item.prompt) for _ in range(2)]
        await asyncio.gather(*map(policy, both))
        return both[1]

    engine = ScriptedEngine(say(4, STOP))
    run(episode, engine, tokenizer, items(1))
    single = ScriptedEngine(say(4, STOP))
    run(SingleTurn(), single, tokenizer, items(1))
    keys = [request.keys for request in engine.requests]
    assert keys[0] == single.requests[0].keys != keys[1]
