"""Rewards in a rollout task, in real processes, compared with the trainers' call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from slurmrl.algorithms.base import CallContext, CallResult
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.algorithms.rollout_calls import as_sample
from slurmrl.algorithms.rule_reward import RuleRewardInterface
from slurmrl.algorithms.supervised_schema import Distill
from slurmrl.config.schema import Config, Dataset, Model, Reward, Rollout
from slurmrl.data.sample import SequenceSample
from slurmrl.data.tokenizer import load_tokenizer
from slurmrl.errors import EnvironmentFailure, RewardError
from slurmrl.plan.settings import Settings
from slurmrl.rollouts.sample_files import SampleGroup
from slurmrl.workers.rollout.session import Row
from slurmrl.workers.rollout.task_generation import Scoring, TaskRows, scoring_of
from tests.unit.algorithms.conftest import ARCHITECTURE

TOKENIZER = Path(__file__).parents[3] / "examples" / "addition" / "tokenizer"
REWARDS = """
import os
import time
from pathlib import Path


class Lengths:
    def __init__(self):
        self.judged = 0

    def __call__(self, prompts, completions, rows, *, token_ids, siblings, evaluation):
        assert not evaluation
        self.judged = len(completions)
        assert all(completion in group for completion, group in zip(completions, siblings))
        return [0.1 * len(tokens) + len(prompt) for tokens, prompt in zip(token_ids, prompts)]

    def stats(self):
        return {"judged_here": (float(self.judged), 1.0)}


def digits(prompts, completions, rows):
    return [sum(map(str.isdigit, completion)) / 3 for completion in completions]


def by_row(prompts, completions, rows):
    if rows[0]["id"] == "0":
        time.sleep(60)
    if rows[0]["id"] == "1":
        os._exit(3)
    if rows[0]["id"] == "2":
        raise KeyError("x")
    return [float("nan") if rows[0]["id"] == "3" else 1.0 for _ in rows]


def late(prompts, completions, rows, *, step):
    return [step for _ in rows]


class Dies:
    def __init__(self):
        os._exit(5)

    def __call__(self, prompts, completions, rows): ...


def hanging(prompts, completions, rows, *, folder):
    if rows[0]["id"] == "0":
        (Path(folder) / str(os.getpid())).touch()
        time.sleep(3600)
    return [1.0 for _ in rows]


def waiting(prompts, completions, rows, *, folder):
    place = Path(folder)
    (place / rows[0]["id"]).touch()
    while not (place / "go").exists():
        time.sleep(0.01)
    return [1.0 for _ in rows]
"""
GROUPS = [[[5, 6, 1], [7], []], [[8, 9], [10, 1], [11, 12, 13]]]
"""The tokens of the completions of each item; 1 is the stop token. An episode has failed."""
GONE = 9
"""An item whose row cannot be read."""


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "scoring_of_mine.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    return "scoring_of_mine:"


def call_with(reward: dict[str, Any], *, cores: int = 2) -> CallContext:
    config = Config(
        experiment="test",
        total_steps=4,
        algorithm={"name": "grpo"},
        actor=Model(architecture={**ARCHITECTURE, "vocab_size": 64}),
        rollout=Rollout(n=3, max_new_tokens=12),
        reward=Reward.model_validate(reward),
        dataset=Dataset(type="prompt", path="data.jsonl"),
    )
    settings = Settings(config, PolicyGradient(batch_size=2), cast(Any, None))
    return CallContext(3, 1, {}, cast(Any, load_tokenizer(TOKENIZER)), settings, (1,), (), cores)


def row_of(item: int) -> SequenceSample:
    row = {"id": str(item), "prompt": f"{item}+{item}=", "answer": "1"}
    facts = {"prompt": row["prompt"], "answer": row["answer"], "row": row, "line": item + 1}
    return SequenceSample.from_default(
        [2],
        (f"{item}@0",),
        {"prompt_ids": torch.tensor([3, 4])},
        {name: [value] for name, value in facts.items()},
    )


class Rows:
    def sample(self, row: Row) -> SequenceSample:
        if row[1] == GONE:
            raise EnvironmentFailure("the dataset cannot be read")
        return row_of(row[1])


def scoring(call: CallContext, **changes: Any) -> Scoring:
    made = scoring_of(call, cast(TaskRows, Rows()), 2)
    assert made is not None
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def group_of(item: int, tokens: Sequence[Sequence[int]] = GROUPS[1]) -> SampleGroup:
    lengths = [2 + len(each) for each in tokens]
    total, count = sum(lengths), len(tokens)
    return SampleGroup(
        item=item,
        lease="1.0",
        versions=("0.1",),
        lengths=np.array(lengths, np.int32),
        prompt_lengths=np.full(count, 2, np.int32),
        finished=np.array([each[-1:] == [1] for each in tokens]),
        failed=np.array([not each for each in tokens]),
        turns=np.ones(count, np.int32),
        tool_calls=np.zeros(count, np.int32),
        tool_failures=np.zeros(count, np.int32),
        input_ids=np.array([token for each in tokens for token in (3, 4, *each)], np.int32),
        drawn_by=np.array([by for each in tokens for by in (-1, -1, *[0] * len(each))], np.int32),
        logprobs=np.zeros(total, np.float32),
        turn_rewards=np.zeros(total, np.float32),
    )


def asked(item: int) -> Row:
    return 0, item


def test_task_without_training_reward_scores_nothing() -> None:
    """Distillation learns from a teacher, and only its evaluations use the reward."""
    call = call_with({"name": "exact_match"})
    settings = replace(call.settings, algorithm=Distill(batch_size=2))
    assert scoring_of(call, cast(TaskRows, Rows()), 2) is not None
    assert scoring_of(replace(call, settings=settings), cast(TaskRows, Rows()), 2) is None


def all_scored(made: Scoring, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
    async def judge() -> list[SampleGroup]:
        async with asyncio.timeout(120):
            return await asyncio.gather(*(made.scored(asked(one.item), one) for one in groups))

    try:
        return asyncio.run(judge())
    finally:
        made.close()


def trained(call: CallContext, groups: Sequence[SampleGroup]) -> CallResult:
    """Return the result of the trainers' reward call for groups."""
    rows = [row_of(group.item) for group in groups]
    joined = SequenceSample.gather(rows)
    sample = as_sample(joined.ids, groups, turns=False, metadata=joined.metadata)
    stored = dict(zip(joined.ids, groups, strict=True))
    interface = RuleRewardInterface()
    try:
        return interface.inference(None, sample, replace(call, stored=stored.__getitem__))
    finally:
        interface.close()


def test_trainers_use_task_scores_like_their_own(rewards: str) -> None:
    """Scores, scores of parts and metrics have the same bits. Covers an item that is left to the
    trainers.
    """
    parts = {
        "lengths": {"name": rewards + "Lengths", "weight": 0.3},
        "digits": {"name": rewards + "digits", "where": {"id": "1"}, "pool": {}},
    }
    call = call_with({"parts": parts})
    groups = [group_of(item, tokens) for item, tokens in enumerate(GROUPS)]
    expected = trained(call, groups)
    assert expected.stats.pop("rollout/judged") == (0.0, 6.0)
    found = all_scored(scoring(call), groups)
    assert all(group.scores and group.submission == 2 for group in found)
    for stored in (found, [found[0], groups[1]], [groups[0], found[1]]):
        result = trained(call, [SampleGroup.from_bytes(one.to_bytes()) for one in stored])
        assert result.sample is not None
        assert expected.sample is not None
        assert torch.equal(result.sample.tensor("rewards"), expected.sample.tensor("rewards"))
        assert result.texts == expected.texts
        given = sum(len(group.lengths) for group in stored if group.scores is not None)
        assert result.stats.pop("rollout/judged") == (given, 6.0)
        assert result.stats == {**expected.stats, "judged_here": result.stats["judged_here"]}
        assert result.stats["judged_here"][0] == 5.0
    assert expected.texts[0]["parts"]
    assert expected.stats["reward/digits"][1] == 3.0


def test_rewards_that_fail_in_tasks_are_left_to_the_trainers(
    rewards: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A reward that hangs, kills its process, raises an error, or gives no number affects nothing
    else. A reward in a pool handles such completions itself.
    """
    reward = {"name": rewards + "by_row"}
    groups = [group_of(item) for item in (0, 1, 2, 3, GONE, 4)]
    found = all_scored(scoring(call_with(reward, cores=1), _timeout_s=2.0), groups)
    assert [group.scores is not None for group in found] == [False] * 5 + [True]
    for reason in ("longer than 2 s", "exited with code 3", "KeyError: 'x'", "nan", "dataset"):
        assert reason in caplog.text
    with pytest.raises(RewardError, match="finite"):
        trained(call_with(reward), [found[3]])
    groups.pop(4)
    pool = call_with({**reward, "pool": {"timeout_s": 2, "unjudged_score": -1}}, cores=3)
    found = all_scored(scoring(pool), groups)
    scores = [group.scores for group in found]
    assert scores == [(-1.0,) * 3] * 4 + [(1.0,) * 3]
    assert found[1].stats == {"reward_unjudged": (3.0, 3.0)}


def test_completions_without_score_reach_the_trainers_as_nan(rewards: str) -> None:
    """The means cover only completions with a score."""
    call = call_with({"name": rewards + "by_row", "pool": {"timeout_s": 10}}, cores=3)
    groups = all_scored(scoring(call), [group_of(item) for item in (2, 4)])
    groups = [SampleGroup.from_bytes(group.to_bytes()) for group in groups]
    assert [group.scores for group in groups] == [(None,) * 3, (1.0,) * 3]
    result = trained(call, groups)
    assert result.sample is not None
    scores = result.sample.tensor("rewards")
    assert scores.isnan().tolist() == [True] * 3 + [False] * 3
    assert scores[3:].tolist() == [1.0] * 3
    assert result.stats["reward"] == (3.0, 3.0)
    assert result.stats["reward_unscored"] == (3.0, 6.0)
    assert [row["reward"] for row in result.texts] == [None] * 3 + [1.0] * 3


def test_reward_that_needs_trainers_is_left_to_them(
    rewards: str, caplog: pytest.LogCaptureFixture
) -> None:
    groups = [group_of(item) for item in range(3)]
    for name in ("late", "digits_", "Dies"):
        made = scoring(call_with({"name": rewards + name}))
        assert all_scored(made, groups[:1]) == groups[:1]
        assert made._left
        made._program = cast(Any, None)
        assert all_scored(made, groups[1:]) == groups[1:], "it is not asked again"
    assert "asks for step" in caplog.text
    assert "has no" in caplog.text
    assert "three times in a row" in caplog.text
    result = trained(call_with({"name": rewards + "late"}), groups)
    assert result.stats["reward"] == (27.0, 9.0)


def test_groups_are_scored_concurrently_and_calls_end_with_the_task(
    rewards: str, tmp_path: Path
) -> None:
    reward = {"name": rewards + "waiting", "options": {"folder": str(tmp_path)}}
    made = scoring(call_with(reward))

    async def judge() -> None:
        running = [asyncio.create_task(made.scored(asked(n), group_of(n))) for n in range(3)]
        async with asyncio.timeout(60):
            while len(begun := [n for n in range(3) if (tmp_path / str(n)).exists()]) < 2:
                await asyncio.sleep(0.01)
            assert len(begun) == 2, "there are two cores"
            given_up = running.pop(begun[0])
            given_up.cancel()
            (tmp_path / "go").touch()
            found = await asyncio.gather(*running)
        assert all(one.scores for one in found)
        with pytest.raises(asyncio.CancelledError):
            await given_up

    asyncio.run(judge())
    made.close()


def test_slow_reward_is_stopped_and_its_item_left_to_the_trainers(
    rewards: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise, items whose reward is too slow for the staleness would never be trained, and a
    hanging reward would block the process for other items without a message.
    """
    reward = {"name": rewards + "hanging", "options": {"folder": str(tmp_path)}}
    made = scoring(call_with(reward, cores=1))

    async def judge() -> None:
        for number in (1, 2):
            running = asyncio.create_task(made.scored(asked(0), group_of(0)))
            while len([one for one in tmp_path.iterdir() if one.name.isdigit()]) < number:
                await asyncio.sleep(0.01)
            running.cancel()
            assert (await made.scored(asked(1), group_of(1))).scores
        again = group_of(0)
        assert await made.scored(asked(0), again) is again

    asyncio.run(asyncio.wait_for(judge(), 60))
    made.close()
    assert caplog.text.count("the reward for data.jsonl:1 (sample 0@0, index 0) was stopped") == 2
    assert "the trainers will score item 0" in caplog.text
