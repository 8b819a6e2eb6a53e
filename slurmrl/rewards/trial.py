"""Child process of ``slurmrl try-reward``: JSON request on stdin, JSON result on stdout.

Run as ``python -m slurmrl.rewards.trial`` by `slurmrl.submission.try_reward`. The reward's own
output goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

from slurmrl.config.schema import Reward
from slurmrl.errors import SlurmrlError
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
    made = time.monotonic()
    arguments = (request[key] for key in ("prompts", "completions", "rows", "places"))
    try:
        scores = reward.score(*arguments)
        scored = time.monotonic()
        return {
            "scores": scores,
            "stats": reward.stats(),
            "made_s": made - began,
            "scored_s": scored - made,
        }
    finally:
        reward.close()


if __name__ == "__main__":
    sys.exit(main())
