"""A check of a user's reward: score one row before anything is queued."""

from __future__ import annotations

from collections.abc import Iterator

from slurmrl.config.schema import Reward
from slurmrl.data.rows import DatasetRows
from slurmrl.desk.trial_checks import Finding, Weight
from slurmrl.registry import describe
from slurmrl.rewards.weighted import WeightedReward


def score_first_row(
    reward: Reward, key: str, function: WeightedReward, rows: DatasetRows
) -> Iterator[Finding]:
    """Score the first row with its own answer as the completion.

    Only functions of the user are tried, and only if they need no tokens and no scores of models. A
    job has only the user's code, in another folder, and so does this process: a file that the code
    opens next to itself is missing in both.
    """
    if not any(":" in part.name for part in reward.functions.values()):
        return
    (answer,), (prompt,) = rows.answers([0]), rows.prompts([0])
    known = {
        "finished": [True],
        "sample_ids": ["0@0"],
        "indices": [0],
        "siblings": [[answer]],
        "step": 1,
        "evaluation": False,
    }
    wanted = function.wanted()
    if not wanted <= known.keys():
        return
    row, place = {**rows.records.rows[0], "answer": answer}, rows.records.where(0)
    extras = {name: known[name] for name in wanted}
    tried = f"reward '{reward.title}', tried on the first row with its answer as the completion"
    try:
        function.judge([prompt], [answer], [row], [place], extras)
    except FileNotFoundError as error:
        message = (
            f"{tried}: {describe(error)}; a job has only the code, in another folder: name the "
            "file by its absolute path"
        )
        yield Finding("reward", Weight.FAILED, message, key)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        yield Finding("reward", Weight.WARNING, f"{tried}: {describe(error)}", key)
