"""Changes to workers whose actor generates in a separate layout."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmrl.engines.fsdp.engine import FSDPEngine
from slurmrl.rollouts.generation.native.split_batch import FollowerBatch, LeaderBatch
from slurmrl.tensors.transfer.execute import Mover
from tests.support.hooks import FOLDER
from tests.support.trials import wait_until


def reference_waits_for_critic() -> None:
    """Delay the end of each inference of the reference until the critic's inference of the step on
    rank 0 has ended.
    """
    forward = FSDPEngine.forward
    folder = Path(os.environ[FOLDER])

    def held(self: FSDPEngine, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        outputs = forward(self, *args, **kwargs)
        rank = self.context.ranks[self.context.rank]
        own = folder / f"{self.role}.{rank}"
        if self.role in ("ref", "critic"):
            with own.open("a") as file:
                file.write("inference\n")
        if self.role == "ref":
            count, critic = _lines(own), folder / "critic.0"
            wait_until(f"inference {count} of the critic", lambda: _lines(critic) >= count)
        return outputs

    FSDPEngine.forward = held  # type: ignore[method-assign, assignment]


def moves_are_counted() -> None:
    """Let each move add a line to a file of its rank."""
    run = Mover.run
    folder = Path(os.environ[FOLDER])

    def counted(self: Mover) -> None:
        with (folder / f"moves.{self._rank}").open("a") as file:
            file.write("move\n")
        run(self)

    Mover.run = counted  # type: ignore[method-assign]


def first_move_goes_wrong() -> None:
    """Let the trial's first move leave one wrong element in the target."""
    run = Mover.run
    marker = Path(os.environ[FOLDER]) / "went wrong"

    def faulty(self: Mover) -> None:
        run(self)
        if not marker.exists():
            marker.touch()
            next(iter(self._target._storages.values())).view(-1)[0].add_(1)

    Mover.run = faulty  # type: ignore[method-assign]


def ranks_die_while_they_serve() -> None:
    """Kill a follower rank during generation, and its leader after the restart."""
    for kind, method, calls in ((FollowerBatch, "_step", 50), (LeaderBatch, "step", 30)):
        setattr(kind, method, _deadly(getattr(kind, method), kind is LeaderBatch, calls))


def _deadly(method: Any, leads: bool, calls: int) -> Any:
    folder, made = Path(os.environ[FOLDER]), []

    def step(self: Any, *args: Any) -> Any:
        made.append(0)
        marker, other = (folder / f"killed {name}" for name in (leads, not leads))
        if len(made) == calls and not marker.exists() and (not leads or other.exists()):
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return method(self, *args)

    return step


def _lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0
