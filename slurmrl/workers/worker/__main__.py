"""``python -m slurmrl.workers.worker --run RUN --rank R --pipe-fd FD``"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slurmrl import log
from slurmrl.channel.pipe import Connection
from slurmrl.fsio import ownership
from slurmrl.workers.process import PIPE_FD_OPTION


def main() -> int:
    parser = argparse.ArgumentParser(prog="slurmrl.workers.worker")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument(PIPE_FD_OPTION, type=int, required=True)
    options = parser.parse_args()
    ownership.make_umask_private()
    log.configure(f"rank {options.rank}")
    from slurmrl.workers.worker.serve import serve

    return serve(options.run, options.rank, Connection.from_fd(options.pipe_fd))


if __name__ == "__main__":
    sys.exit(main())
