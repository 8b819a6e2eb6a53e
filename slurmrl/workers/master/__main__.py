"""Run ``python -m slurmrl.workers.master`` with the options below.

``--run RUN --submission N --job JOB --pipe-fd FD --pulse-s S``
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slurmrl import env, log
from slurmrl.fsio import calls
from slurmrl.run.channel.pipe import Connection
from slurmrl.workers.child_process import (
    PIPE_FD_OPTION,
    PULSE_OPTION,
    STACKS_OPTION,
    Errand,
    allow_tracing,
    drop_failed_output,
    finish_stacks,
    stacks_wakeup,
    start_pulse,
    write_stacks_on_signal,
)
from slurmrl.workers.master.serve import serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="slurmrl.workers.master")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--submission", type=int, required=True)
    parser.add_argument("--job", required=True, help="the job that this incarnation runs in")
    parser.add_argument(PIPE_FD_OPTION, type=int, required=True)
    parser.add_argument(PULSE_OPTION, type=float, required=True, help="between signs of life")
    parser.add_argument(STACKS_OPTION, type=int, required=True)
    options = parser.parse_args()
    write_stacks_on_signal(options.stacks_fd)
    allow_tracing()
    calls.set_private_umask()
    drop_failed_output()
    log.configure("master")
    errand = Errand(stacks_wakeup(), lambda: finish_stacks(options.stacks_fd, ""))
    start_pulse(Connection.from_fd(options.pipe_fd), options.pulse_s, errand=errand)
    return serve(options.run, options.submission, options.job, env.LINK.get())


if __name__ == "__main__":
    sys.exit(main())
