"""Run ``python -m slurmrl.workers.agent --run RUN --submission N --group G [--task T]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slurmrl import env, log
from slurmrl.fsio import calls
from slurmrl.workers.agent.agent import serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="slurmrl.workers.agent")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--submission", type=int, required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--task", type=int, help="number of a rollout task in the trainers' job")
    options = parser.parse_args()
    calls.set_private_umask()
    log.configure(f"agent {options.group}/{env.NODE_ID.get()}")
    return serve(options.run, options.submission, options.group, options.task)


if __name__ == "__main__":
    sys.exit(main())
