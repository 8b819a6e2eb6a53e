"""``python -m slurmrl.workers.worker --run RUN --rank R --pipe-fd FD --pulse-s S``

The template of a rank's workers, and in its forked children a worker.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slurmrl import log
from slurmrl.channel.pipe import Connection
from slurmrl.fsio import ownership
from slurmrl.workers import pulse
from slurmrl.workers.process import PIPE_FD_OPTION, PULSE_OPTION, ignore_signals


def main() -> int:
    ignore_signals()
    parser = argparse.ArgumentParser(prog="slurmrl.workers.worker")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument(PIPE_FD_OPTION, type=int, required=True)
    parser.add_argument(PULSE_OPTION, type=float, required=True, help="between signs of life")
    options = parser.parse_args()
    ownership.make_umask_private()
    log.configure(f"rank {options.rank}")
    from slurmrl.workers.worker import template
    from slurmrl.workers.worker.serve import serve

    template.preload(options.run)
    pipe = template.serve(Connection.from_fd(options.pipe_fd), options.rank)
    if pipe is None:
        return 0
    pulse.start(pipe, options.pulse_s)
    return serve(options.run, options.rank, pipe)


if __name__ == "__main__":
    sys.exit(main())
