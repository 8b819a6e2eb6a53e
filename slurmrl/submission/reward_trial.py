"""Child process of ``slurmrl try-reward``: JSON request on stdin, JSON result on stdout.

Run as ``python -m slurmrl.submission.reward_trial`` by `slurmrl.submission.try_reward`. The
reward's own output goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurmrl.config.schema import Reward
from slurmrl.data.tokenizer import end_id, load_tokenizer, text_ids
from slurmrl.errors import SlurmrlError, UsageError
from slurmrl.rewards.weighted import make_reward

PR_SET_PDEATHSIG = 1


def main() -> int:
    """Return exit code 2 for a user error, which the result reports."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    request = json.load(sys.stdin)
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        result = _try(request)
    except SlurmrlError as error:
        json.dump({"error": str(error)}, results)
        results.flush()
        return 2
    json.dump(result, results)
    results.flush()
    return 0


def _try(request: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    reward = make_reward(Reward.model_validate(request["reward"]))
    try:
        extras = request["extras"]
        if "token_ids" in reward.wanted():
            extras["token_ids"] = _token_ids(request["tokenizer"], request["completions"])
        made = time.monotonic()
        scores = reward.score(
            request["prompts"],
            request["completions"],
            request["rows"],
            request["places"],
            extras,
        )
        scored = time.monotonic()
        return {
            "scores": scores,
            "stats": reward.stats(),
            "made_s": made - began,
            "scored_s": scored - made,
        }
    finally:
        reward.close()


def _token_ids(folder: str | None, completions: Sequence[str]) -> list[list[int]]:
    """The tokens of texts as if a model had written them, with the end-of-text token."""
    if folder is None:
        raise UsageError("the reward asks for token_ids, but the configuration has no tokenizer")
    tokenizer = load_tokenizer(Path(folder))
    end = end_id(tokenizer)
    return [[*ids, end] for ids in text_ids(tokenizer, completions, begin=False)]


if __name__ == "__main__":
    sys.exit(main())
