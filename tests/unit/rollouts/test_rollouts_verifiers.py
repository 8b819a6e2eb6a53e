"""Environments of the package verifiers as episodes. Skipped where it is not installed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from slurmrl.config.schema import EpisodeSettings
from slurmrl.errors import MissingDependencyError, UsageError
from slurmrl.rollouts.episodes import make_episode
from slurmrl.rollouts.tools import Tools
from tests.support.scripted_engine import ScriptedEngine
from tests.unit.rollouts.test_rollouts_runner import STOP, items, run, tokenizer

__all__ = ["tokenizer"]
SETTINGS = {"name": "verifiers", "options": {"environment": "words_env", "args": {"most": 3}}}


def test_missing_verifiers_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(MissingDependencyError, match="pip install 'verifiers"):
        make_episode(EpisodeSettings(**SETTINGS), Tools({}))


def test_unsupported_verifiers_version_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("verifiers")
    other.__version__ = "0.4.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", other)
    with pytest.raises(UsageError, match=r"verifiers 0\.4\.0 is not supported"):
        make_episode(EpisodeSettings(**SETTINGS), Tools({}))


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return an environment that says "ab" until the policy says "ok"."""
    vf = pytest.importorskip("verifiers", reason="verifiers is not installed here")
    if not hasattr(vf, "load_environment"):
        pytest.skip("this version of verifiers has no load_environment")

    class Words(vf.MultiTurnEnv):  # type: ignore[misc, name-defined]
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            if messages[-1]["content"] == "ok":
                state["final_env_response"] = [{"role": "user", "content": "done"}]
                return []
            return [{"role": "user", "content": "ab"}, {"role": "user", "content": "b"}]

    def load_environment(most: int) -> Any:
        def turns(state: Any) -> float:
            return float(len(state["trajectory"]))

        rows = [{"prompt": [{"role": "user", "content": "a"}], "answer": "ok"}]
        dataset = pytest.importorskip("datasets").Dataset.from_list(rows)
        return Words(dataset=dataset, rubric=vf.Rubric(funcs=[turns]), max_turns=most)

    module = ModuleType("words_env")
    module.load_environment = load_environment  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "words_env", module)
    return module


def test_verifiers_environment_runs_as_an_episode(environment: ModuleType, tokenizer: Any) -> None:
    """Its messages follow the sampled tokens, and its rubric gives the reward of the last turn."""
    texts = iter([(4, 5, STOP), (4, STOP), (7, STOP)])
    engine = ScriptedEngine(lambda _: next(texts))
    episode = make_episode(EpisodeSettings(**SETTINGS), Tools({}))
    (outcome,) = run(episode, engine, tokenizer, items(1, (2, 4, 1, 3)), chat=True, **SETTINGS)
    assert not outcome.failure
    messages = [2, 6, 1, 2, 5, 1, 3]  # <user> ab <end> <user> b <end> <bot>
    assert engine.requests[1].prompt == (2, 4, 1, 3, 4, 5, STOP, *messages)
    completions = outcome
    assert completions.tokens == (4, 5, STOP, *messages, 4, STOP, *messages, 7, STOP)
    assert completions.finished
    assert sum(completions.rewards) == completions.rewards[-1] == 3.0


def test_turn_limit_ends_a_verifiers_episode_with_a_reward(
    environment: ModuleType, tokenizer: Any
) -> None:
    engine = ScriptedEngine(lambda _: (4, STOP))
    episode = make_episode(EpisodeSettings(**SETTINGS), Tools({}))
    (outcome,) = run(
        episode, engine, tokenizer, items(1, (2, 4, 1, 3)), chat=True, turns=2, **SETTINGS
    )
    assert not outcome.failure
    assert not outcome.finished
    assert outcome.rewards[-1] == 2.0
