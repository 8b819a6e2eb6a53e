"""The processes of a trial's managed servers, and checks of their samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slurmrl.models.architecture import ModelConfig
from slurmrl.rollouts.generation.base import WeightVersion
from slurmrl.rollouts.generation.dialect import Dialect
from slurmrl.rollouts.generation.process import WARDEN
from slurmrl.rollouts.generation.server_instance import Patience
from slurmrl.rollouts.generation.server_kinds import SOCKET, ServerKind, Serving


@dataclass(frozen=True)
class ServerOfARun:
    pid: int
    folder: Path
    """Private folder of the server in host memory."""


def servers(run: Path) -> list[ServerOfARun]:
    """Return the main process of each server whose output goes to the logs of a run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_text().split("\0")
            output = (entry / "fd" / "1").readlink()
        except OSError:
            continue
        names = {Path(word).name: Path(word).parent for word in words}
        if "server.sock" in names and WARDEN.name not in names and run in output.parents:
            found.append(ServerOfARun(int(entry.name), names["server.sock"]))
    return sorted(found, key=lambda server: server.pid)


async def load_once(speaker: Dialect, version: WeightVersion) -> None:
    """Connect to a server, have it load a version, and close the connection."""
    try:
        await speaker.connect()
        await speaker.pause()
        await speaker.load(version)
    finally:
        await speaker.resume()
        await speaker.close()


def check_served(lines: Sequence[dict[str, Any]], steps: int) -> None:
    """Check that every step of a trial has changed the weights, and that servers sampled with the
    right weights: the server's log-probabilities equal the training engine's.
    """
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert min(line["actor_grad_norm"] for line in lines) > 0.0
    assert max(abs(line["mismatch/kl"]) for line in lines) < 1e-5
    assert max(line["mismatch/ratio_max"] for line in lines) < 1.001


def start_command(
    kind: type[ServerKind], python: str, architecture: Mapping[str, object], folder: Path
) -> Sequence[str]:
    """Return the command of a server on a CPU, with its model and socket in ``folder``."""
    serving = Serving(
        python=python, arguments=(), tokenizer=None, patience=Patience(), log=folder / "log"
    )
    config, cpu = ModelConfig.from_hf(architecture), torch.device("cpu")
    made = kind(config, "float32", serving, tensor_ranks=1, device=cpu)
    return made.command(serving, folder / "model", folder / SOCKET)
