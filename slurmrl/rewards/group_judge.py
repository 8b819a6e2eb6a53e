"""A judge that runs the whole configured reward, for all completions of a prompt at a time, beside
a rollout task (see `slurmrl.workers.rollout.generation`).

Run as ``python -m slurmrl.rewards.group_judge``. What the user's code prints goes to standard
error; requests and replies use descriptors of their own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import IO, Any

from slurmrl.config.schema import Reward
from slurmrl.errors import RewardError, UnreadableInputError
from slurmrl.fsio import objects
from slurmrl.rewards.function_judge import Message, send, short
from slurmrl.rewards.judge import JudgeProgram
from slurmrl.rewards.judge_process import end_with_parent, take_pipes
from slurmrl.rewards.weighted import WeightedReward, make_reward

MODULE = "slurmrl.rewards.group_judge"
CLOSING_S = 10.0
"""How long the functions may take to release what they hold."""
MOST_REPLY_BYTES = 16 << 20


def group_program(reward: Reward, cores: int) -> JudgeProgram:
    """The program that judges groups with this reward and so many CPU cores. It reports ``wanted``,
    what its functions ask for."""
    setup = {"reward": reward.model_dump(mode="json"), "cores": cores}
    return JudgeProgram(
        f"the reward '{reward.title}'",
        [sys.executable, "-P", "-m", MODULE],
        setup,
        modules=[path for path in sys.path if path],
        most_reply_bytes=MOST_REPLY_BYTES,
        closing_s=CLOSING_S,
    )


def main() -> None:
    end_with_parent()
    requests, replies = take_pipes()
    setup: Message = json.loads(requests.readline())
    reward = _made(setup, replies)
    if reward is None:
        return
    for line in requests:
        send(replies, _reply(reward, json.loads(line)))
    reward.close()


def _made(setup: Mapping[str, Any], replies: IO[bytes]) -> WeightedReward | None:
    """Make the reward and report that, or why not."""
    try:
        reward = make_reward(
            Reward.model_validate(setup["reward"]), cores=setup["cores"], of_one_prompt=True
        )
        wanted = sorted(reward.wanted())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        unreadable = isinstance(error, UnreadableInputError)
        send(replies, {"failed": short(error), "unreadable": unreadable})
        return None
    send(replies, {"ready": True, "wanted": wanted})
    return reward


def _reply(reward: WeightedReward, request: Mapping[str, Any]) -> Message:
    try:
        judged = reward.judge(**request)
        if problem := judged.problem(len(request["completions"])):
            raise RewardError(f"the reward {problem}")
        return {"judged": objects.to_json(judged)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        return {"error": short(error)}


if __name__ == "__main__":
    main()
