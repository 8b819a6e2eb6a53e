"""The process that runs a whole reward, separate from the process that requests scores.

The command is ``python -m slurmrl.rewards.reward_process``. A pool of a user's reward
(`PooledReward`) requests the score of one completion at a time. A rollout task requests the scores
of all completions of a prompt. Output of the user's code goes to standard error; requests and
replies use separate descriptors.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping
from typing import IO, Any

from slurmrl.config.schema import Reward
from slurmrl.errors import RewardError, SlurmrlError, UnreadableInputError
from slurmrl.registry import describe
from slurmrl.rewards.base import scores_problem
from slurmrl.rewards.process_pool import Reply, end_with_parent, send, take_pipes
from slurmrl.rewards.weighted import WeightedReward, make_reward

MOST_CHARACTERS = 1000
"""Maximum length of the description of an error."""


def main() -> None:
    end_with_parent()
    requests, replies = take_pipes()
    setup: dict[str, Any] = json.loads(requests.readline())
    if setup["memory_bytes"] is not None:
        _limit_memory(setup["memory_bytes"])
    reward = _made(setup, replies)
    if reward is None:
        return
    for line in requests:
        reply = _reply(reward, json.loads(line), of_groups=setup["of_groups"])
        send(replies, reply)
        if reply.get("retire"):
            return
    reward.close()


def _limit_memory(size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _made(setup: Mapping[str, Any], replies: IO[bytes]) -> WeightedReward | None:
    """Make the reward. Report success or the failure."""
    settings = Reward.model_validate(setup["reward"])
    try:
        reward = make_reward(settings, cores=setup["cores"], of_one_prompt=setup["of_groups"])
        facts: dict[str, Any] = {"wanted": sorted(reward.wanted()), "has_stats": reward.has_stats}
        facts["checks_rows"] = reward.checks_rows
    except SlurmrlError as error:
        unreadable = isinstance(error, UnreadableInputError)
        send(replies, {"failed": _short(error), "unreadable": unreadable})
        return None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        send(replies, {"failed": f"reward '{settings.title}': {_short(error)}"})
        return None
    send(replies, {"ready": True, **facts})
    return reward


def _reply(reward: WeightedReward, request: Mapping[str, Any], *, of_groups: bool) -> Reply:
    """Return the problem of a row, or the scores of completions, or the error as a string."""
    try:
        if "row" in request:
            return {"problem": str(reward.check_rows([request["row"]])[0])}
        scores = reward.score(**request)
        parts, stats = reward.given, reward.stats()
        count = len(request["completions"])
        if of_groups and (problem := scores_problem(scores, parts, stats, count)):
            raise RewardError(f"the reward {problem}")
        return {"judged": {"scores": scores, "parts": parts, "stats": stats}}
    except MemoryError as error:  # The process may never free its memory.
        return {"error": _short(error), "retire": True}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        return {"error": _short(error)}


def _short(error: BaseException) -> str:
    """Return the message of an error; for an error of the user's code, with its place."""
    text = str(error) if isinstance(error, SlurmrlError) else describe(error)
    return text[:MOST_CHARACTERS]


if __name__ == "__main__":
    main()
