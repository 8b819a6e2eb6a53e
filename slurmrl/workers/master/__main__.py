"""Run ``python -m slurmrl.workers.master`` with the options below.

``--run RUN --submission N --job JOB --pipe-fd FD --pulse-s S``
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slurmrl import env, log
from slurmrl.fsio import umask
from slurmrl.run.channel.pipe import Connection
from slurmrl.workers import child_process, pulse, stacks
from slurmrl.workers.child_process import PIPE_FD_OPTION, PULSE_OPTION, allow_tracing
from slurmrl.workers.master.serve import serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="slurmrl.workers.master")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--submission", type=int, required=True)
    parser.add_argument("--job", required=True, help="the job that this incarnation runs in")
    parser.add_argument(PIPE_FD_OPTION, type=int, required=True)
    parser.add_argument(PULSE_OPTION, type=float, required=True, help="between signs of life")
    parser.add_argument(stacks.OPTION, type=int, required=True)
    options = parser.parse_args()
    stacks.answer(options.stacks_fd)
    allow_tracing()
    umask.make_private()
    child_process.drop_failed_output()
    log.configure("master")
    errand = pulse.Errand(stacks.wakeup(), lambda: stacks.finish(options.stacks_fd, ""))
    pulse.start(Connection.from_fd(options.pipe_fd), options.pulse_s, errand=errand)
    return serve(options.run, options.submission, options.job, env.LINK.get())


if __name__ == "__main__":
    sys.exit(main())
