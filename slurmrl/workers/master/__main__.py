"""``python -m slurmrl.workers.master --run RUN --submission N --job JOB``"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slurmrl import env, log
from slurmrl.fsio import ownership
from slurmrl.workers.master.serve import serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="slurmrl.workers.master")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--submission", type=int, required=True)
    parser.add_argument("--job", required=True, help="the job that this incarnation runs in")
    options = parser.parse_args()
    ownership.make_umask_private()
    log.configure("master")
    return serve(options.run, options.submission, options.job, env.LINK.get())


if __name__ == "__main__":
    sys.exit(main())
