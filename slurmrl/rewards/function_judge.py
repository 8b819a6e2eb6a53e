"""A judge that runs a user's reward, one completion a request (see `slurmrl.rewards.pooled`).

Run as ``python -m slurmrl.rewards.function_judge``. What the user's code prints goes to standard
error; requests and replies use descriptors of their own.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping
from typing import IO, Any

from slurmrl.errors import SlurmrlError, UnreadableInputError
from slurmrl.registry import describe
from slurmrl.rewards import make
from slurmrl.rewards.judge_process import end_with_parent, take_pipes
from slurmrl.rewards.reward import CheckedReward

MOST_CHARACTERS = 1000
"""Longest description of an error."""
Message = dict[str, Any]


def main() -> None:
    end_with_parent()
    requests, replies = take_pipes()
    setup: Message = json.loads(requests.readline())
    _limit_memory(setup["memory_bytes"])
    reward = _made(setup, replies)
    if reward is None:
        return
    for line in requests:
        reply = _reply(reward, json.loads(line))
        send(replies, reply)
        if reply.get("retire"):
            return
    reward.close()


def _limit_memory(size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _made(setup: Mapping[str, Any], replies: IO[bytes]) -> CheckedReward | None:
    """Make the reward and report that, or why not."""
    name = setup["name"]
    try:
        reward = make(name, setup["options"], cores=1)
    except SlurmrlError as error:
        unreadable = isinstance(error, UnreadableInputError)
        send(replies, {"failed": str(error), "unreadable": unreadable})
        return None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        send(replies, {"failed": f"reward '{name}': {short(error)}"})
        return None
    facts = {"extras": list(reward.wanted()), "checks_rows": reward.checks_rows}
    send(replies, {"ready": True, **facts})
    return reward


def _reply(reward: CheckedReward, request: Mapping[str, Any]) -> Message:
    try:
        if "completion" not in request:
            return {"problem": str(reward.check_rows([request["row"]])[0])}
        prompt, completion = [request["prompt"]], [request["completion"]]
        row, place = [request["row"]], [request["place"]]
        [score] = reward.score(prompt, completion, row, place, request["extras"])
        return {"score": score, "stats": reward.stats()}
    except MemoryError as error:  # what it has allocated may be lost for good
        return {"error": short(error), "retire": True}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        return {"error": short(error)}


def short(error: BaseException) -> str:
    """What an error says; of the user's code, with its place there."""
    text = str(error) if isinstance(error, SlurmrlError) else describe(error)
    return text[:MOST_CHARACTERS]


def send(replies: IO[bytes], message: Message) -> None:
    """Write one line."""
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main()
