"""The entry point of a host's fork server. Forked children continue here as workers of ranks.

``python -m slurmrl.workers.worker --run RUN --world W --pipe-fd FD --pulse-s S --stacks-fd FD``
"""

from __future__ import annotations

import argparse
import gc
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slurmrl import log
from slurmrl.fsio import calls
from slurmrl.run.channel.pipe import Connection
from slurmrl.run.hang import COMPILING, PendingCollective, RankProgress
from slurmrl.run.reports import RankId, group_of
from slurmrl.tensors.ops.native import libraries
from slurmrl.workers.child_process import (
    PIPE_FD_OPTION,
    PULSE_OPTION,
    STACKS_OPTION,
    Errand,
    allow_tracing,
    drop_failed_output,
    finish_stacks,
    ignore_signals,
    stacks_wakeup,
    start_pulse,
    write_stacks_on_signal,
)
from slurmrl.workers.messages import FROM_FORK_SERVER, ImportFailed, Pulse

if TYPE_CHECKING:
    from slurmrl.tensors.parallel.groups import Activity


def main() -> int:
    ignore_signals()
    parser = argparse.ArgumentParser(prog="slurmrl.workers.worker")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--world", required=True, help="see slurmrl.run.reports")
    parser.add_argument(PIPE_FD_OPTION, type=int, required=True)
    parser.add_argument(PULSE_OPTION, type=float, required=True, help="seconds between pulses")
    parser.add_argument(STACKS_OPTION, type=int, required=True)
    options = parser.parse_args()
    write_stacks_on_signal(options.stacks_fd)
    calls.set_private_umask()
    drop_failed_output()
    log.configure(f"fork server of {options.world}")
    agent = Connection.from_fd(options.pipe_fd)
    gc.disable()  # Garbage collections would take a tenth of the import time.
    try:
        import numpy.random

        from slurmrl.workers.distributed import Collectives
        from slurmrl.workers.worker import fork_server
        from slurmrl.workers.worker.orders import serve

        fork_server.preload(options.run, group_of(options.world))
    except ImportError as error:
        agent.send(FROM_FORK_SERVER.to_json(ImportFailed(_explained(error))))
        raise
    forked = fork_server.serve(agent, options.stacks_fd)
    if forked is None:
        return 0
    who = RankId(options.world, forked.rank)
    log.configure(str(who))
    allow_tracing()
    numpy.random.seed()  # Forks need different numbers; Python's own generator reseeds itself.
    activity = new_activity()
    collectives = Collectives()

    def describe() -> Pulse:
        doing, since_s = activity.current()
        collective = collectives.waiting()
        if collective is None and doing.awaited is not None:
            what, sender, since = doing.awaited
            age_s = activity.age(since)
            collective = PendingCollective(name=what, ranks=(sender,), since_s=age_s)
        progress = RankProgress(
            world=options.world,
            rank=who.rank,
            call=doing.call,
            step=doing.step,
            phase=doing.phase,
            part=doing.part,
            parts=doing.parts,
            since_s=since_s,
            collective=collective,
        )
        return Pulse(doing=progress)

    def tell_more() -> None:
        finish_stacks(options.stacks_fd, collectives.recorded())

    errand = Errand(stacks_wakeup(), tell_more)
    start_pulse(forked.pipe, options.pulse_s, describe, errand)
    return serve(options.run, who, forked.pipe, activity)


def new_activity() -> Activity:
    """Return the activity of this rank. It also shows when the rank compiles operators."""
    from slurmrl.tensors.parallel.groups import Activity

    activity = Activity()
    libraries.building.set(partial(activity.aside, COMPILING))
    return activity


def _explained(error: ImportError) -> str:
    """Return the text of an import error, with advice if a module is missing."""
    text = f"{type(error).__name__}: {error}"
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return text
    package = error.name.partition(".")[0]
    return f"{text}; install the package that provides {package} for {sys.executable}"


if __name__ == "__main__":
    sys.exit(main())
