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
from contextlib import closing
from pathlib import Path
from typing import Any

from slurmrl.config.schema import Dataset, Reward
from slurmrl.data.encoder import Continuations
from slurmrl.data.tokenizer import end_id, load_tokenizer
from slurmrl.errors import ConfigError, SlurmrlError, UsageError
from slurmrl.registry import describe
from slurmrl.rewards.reward import MODEL_SCORES
from slurmrl.rewards.weighted import WeightedReward, make_reward
from slurmrl.submission.found_rows import FoundRows, Item, Selection, find_items

PR_SET_PDEATHSIG = 1
NO_MODELS = (
    "the reward needs the scores of reward_model, and try-reward loads no models: try its other "
    "parts without the part named 'model', or judge completions of the actor by an evaluation "
    "(slurmrl submit CONFIG total_steps=0)"
)


def main() -> int:
    """Return exit code 2 for a user error, which the result reports."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    request = json.load(sys.stdin)
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        result = _try(request)
    except ConfigError as error:
        json.dump({"problems": [list(problem) for problem in error.problems]}, results)
        results.flush()
        return 2
    except (SlurmrlError, SystemExit) as error:
        ends = f"the reward ends the process: {describe(error)}"
        json.dump({"error": ends if isinstance(error, SystemExit) else str(error)}, results)
        results.flush()
        return 2
    json.dump(result, results)
    results.flush()
    return 0


def _try(request: dict[str, Any]) -> dict[str, Any]:
    rows = FoundRows(Dataset.model_validate(request["dataset"]))
    items = find_items(rows, Selection(**request["selection"]))
    began = time.monotonic()
    with closing(_made(Reward.model_validate(request["reward"]))) as reward:
        extras = _extras(items)
        if MODEL_SCORES in reward.wanted():
            raise UsageError(NO_MODELS)
        if "token_ids" in reward.wanted():
            completions = [item.completion for item in items]
            extras["token_ids"] = token_ids(request["tokenizer"], completions)
        made = time.monotonic()
        scores = _score(reward, rows, items, extras)
        scored = time.monotonic()
        judged = [
            {
                "line": item.row.number,
                "id": item.row.id,
                "completion": item.completion,
                "answer": rows.answer(item.row),
                "score": score,
            }
            for item, score in zip(items, scores, strict=True)
        ]
        times = {"made_s": made - began, "scored_s": scored - made}
        return {"items": judged, "stats": reward.stats(), **times}


def _made(settings: Reward) -> WeightedReward:
    """Raises UsageError, with the line, for whatever the user's module or class raises."""
    try:
        return make_reward(settings)
    except SlurmrlError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"reward '{settings.title}': {describe(error)}") from error


def _score(
    reward: WeightedReward, rows: FoundRows, items: Sequence[Item], extras: dict[str, Any]
) -> list[float | None]:
    return reward.score(
        [rows.prompt(item.row) for item in items],
        [item.completion for item in items],
        [{**item.row.values, "answer": rows.answer(item.row)} for item in items],
        [item.row.where for item in items],
        extras,
    )


def _extras(items: Sequence[Item]) -> dict[str, Any]:
    """What a reward may ask for besides texts and rows, as in the first step of a run. The
    completions of a row are a group."""
    groups: dict[int, list[str]] = {}
    indices = []
    for item in items:
        group = groups.setdefault(item.row.number, [])
        indices.append(len(group))
        group.append(item.completion)
    return {
        "finished": [item.finished for item in items],
        "sample_ids": [f"{item.row.id}@0" for item in items],
        "indices": indices,
        "siblings": [groups[item.row.number] for item in items],
        "step": 1,
        "evaluation": False,
    }


def token_ids(folder: str | None, completions: Sequence[str]) -> list[list[int]]:
    """The tokens of texts as if a model had written them, with the end-of-text token."""
    if folder is None:
        raise UsageError("the reward asks for token_ids, but the configuration has no tokenizer")
    tokenizer = load_tokenizer(Path(folder))
    end = end_id(tokenizer)
    rows = Continuations(tokenizer).ids(completions, [None] * len(completions))
    return [[*ids, end] for ids in rows]


if __name__ == "__main__":
    sys.exit(main())
