#!/usr/bin/env python3
"""Measure a training step on one long sequence that is split over context ranks.

scripts/bench/long_sequences.py [--tokens 131072] [--ranks 4 2 1]

The model has one layer of 16 hidden units and two attention heads in float32, so more than two
ranks use ring attention. For each number of ranks, the script prints the loss and the maximum over
the ranks of wall time, CPU time and the increase of the peak of resident memory during the step.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.distributed.engines.test_engines_long import HERE, setup_of
from tests.pool import RankPool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 2, 1])
    options = parser.parse_args()
    lengths = (options.tokens,)
    for ranks in options.ranks:
        setup = setup_of(ranks, options.tokens, gradient_checkpointing="selective")
        with RankPool() as pool:
            results = pool(ranks, f"{HERE}:train_long", setup, lengths, deadline_s=7200.0)
        steps = [step for step, _ in results]
        wall = max(step.seconds[0] for step in steps)
        computed = max(step.cpu_seconds for step in steps)
        mib = max(step.peak_bytes - step.started_bytes for step in steps) >> 20
        loss = steps[0].stats[0]["loss"]
        print(
            f"{options.tokens} tokens, {ranks} ranks, load {os.getloadavg()[0]:.1f}: wall "
            f"{wall:.0f} s, CPU {computed:.0f} s, memory {mib} MiB, loss {loss:.6f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
