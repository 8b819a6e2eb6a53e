"""Trial run of a configuration's reward on rows of its data, without Slurm, models or torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmrl.config.schema import Reward
from slurmrl.errors import ConfigError, Problem, RunFailedError, UsageError, WaitTimeoutError
from slurmrl.fsio import variables
from slurmrl.plan.settings import Settings
from slurmrl.submission import own_code, reward_trial
from slurmrl.submission.checks.run import Code, empty, environment
from slurmrl.submission.found_rows import Selection


@dataclass(frozen=True)
class Judged:
    """One completion and its score."""

    line: int
    """Line of the row in the data file."""
    id: str
    completion: str
    answer: str
    score: float | None
    """None: the reward could not judge it."""


@dataclass(frozen=True)
class Tried:
    items: tuple[Judged, ...]
    stats: dict[str, float]
    """Means of the reward's other statistics."""
    made_s: float
    """Seconds to import and construct the reward."""
    scored_s: float
    """Seconds of its call, including the start of its processes."""


class RewardData:
    """The rows that a configuration's reward judges.

    :raises ConfigError: a configuration without a reward, or without prompts to judge.
    """

    def __init__(self, settings: Settings) -> None:
        config = settings.config
        if config.reward is None:
            raise ConfigError(
                (settings.source.problem(("reward",), "the configuration has no reward"),)
            )
        self.reward: Reward = config.reward
        judged = [own for own in config.evaluations.values() if own.reward == config.reward]
        sections = (config.dataset, *(own.held_out for own in judged))
        prompts = [data for data in sections if data.kind == "prompt"]
        if not prompts:
            message = "has no prompts for a reward to judge: type 'prompt' is required"
            raise ConfigError((settings.source.problem(("dataset",), message),))
        self.dataset = next(iter(prompts[0].parts.values()))
        self.tokenizer = config.actor.tokenizer
        file = config.cluster.variables_file
        self.variables = variables.read(Path(file)) if file else {}


def try_reward(
    data: RewardData, selection: Selection, code: own_code.OwnCode, timeout_s: float
) -> Tried:
    """Judge completions in one call, in a child process with the code and the environment that the
    run's would have. The child also reads the rows, whose type may be the user's code.

    :raises ConfigError: rows that cannot be used.
    :raises UsageError: the reward or its return value is wrong, or it needs a model.
    :raises RunFailedError: the reward raised something else; its traceback is on standard error.
    :raises WaitTimeoutError: the reward took longer than ``timeout_s``.
    """
    request = {
        "reward": data.reward.model_dump(mode="json"),
        "dataset": data.dataset.model_dump(mode="json"),
        "selection": asdict(selection),
        "tokenizer": data.tokenizer,
    }
    with tempfile.TemporaryDirectory(prefix="slurmrl-reward-") as folder:
        environ = environment(Path(folder), Code(paths=code.paths), data.variables)
        reply = _ask(data.reward.title, request, environ, empty(Path(folder)), timeout_s)
    return Tried(
        tuple(Judged(**item) for item in reply["items"]),
        {name: total / count for name, (total, count) in reply["stats"].items() if count},
        reply["made_s"],
        reply["scored_s"],
    )


def _ask(
    name: str, request: dict[str, Any], environ: dict[str, str], place: Path, timeout_s: float
) -> dict[str, Any]:
    """``name`` is the reward's, for messages; ``place``: the current directory of the child."""
    with (
        subprocess.Popen(
            [sys.executable, "-P", "-m", reward_trial.__name__],
            env=environ,
            cwd=place,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as process,
        _ending(process),
    ):
        try:
            output, _ = process.communicate(json.dumps(request).encode(), timeout_s)
        except subprocess.TimeoutExpired as error:
            raise WaitTimeoutError(
                f"reward '{name}' took longer than {timeout_s:g} s; raise the limit with --timeout"
            ) from error
    if process.returncode not in (0, 2) or not output:
        raise RunFailedError(f"reward '{name}' failed, see above (exit code {process.returncode})")
    reply: dict[str, Any] = json.loads(output)
    if "problems" in reply:
        raise ConfigError(tuple(Problem(*problem) for problem in reply["problems"]))
    if "error" in reply:
        raise UsageError(reply["error"])
    return reply


@contextlib.contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill the child together with everything that the user's code has started."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
