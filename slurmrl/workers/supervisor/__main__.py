"""``python -m slurmrl.workers.supervisor --run RUN --submission N --group G --launcher L`` is the
last line of the batch script, so signals that Slurm sends to the batch process arrive here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slurmrl import env, log
from slurmrl.fsio import ownership
from slurmrl.paths import RunPaths
from slurmrl.workers.supervisor.allocation import Allocation
from slurmrl.workers.supervisor.link import cancel_links_after_this, reason_to_leave
from slurmrl.workers.supervisor.rounds import Rounds

logger = log.get(__name__)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slurmrl.workers.supervisor", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run directory")
    parser.add_argument("--submission", type=int, required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--launcher", choices=("srun", "direct"), default="direct")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    ownership.make_umask_private()
    log.configure(f"supervisor {options.group}")
    paths = RunPaths(options.run)
    reason = reason_to_leave(paths, options.submission)
    if reason is not None:
        logger.info("nothing to do: %s", reason)
        return 0
    logger.info("link %d, job %s", env.LINK.get(), env.JOB_ID.get())
    code = Rounds(options, paths, Allocation.of_this_job(options, paths)).run()
    if options.launcher == "srun" and reason_to_leave(paths, options.submission) is not None:
        cancel_links_after_this(options.group)
    return code


if __name__ == "__main__":
    sys.exit(main())
