#!/usr/bin/env python3
"""Launches, host waits, bytes, memory and a roofline of training and generation on the null GPU.

    scripts/test-null-gpu --table [--only TEXT] [--save FILE] [--before FILE] [--operators]

Measures one of 8 data-parallel ranks in bfloat16, with Qwen2's sizes of 1.5 and 7 billion
parameters. Prints tables in Markdown. --save keeps the figures as JSON. --before shows such figures
next to the new figures. --only selects the cases whose name contains TEXT. --operators also prints
the time of each operator.

Traffic is the number of bytes that the dispatched operations read and write in the GPU's memory.
Roofline is the time of the traffic and the matrix products at the rates in
tests/null_gpu/roofline.py, without collectives. MFU is the time of the model's products
(slurmrl/models/architecture.py) at the H100's peak rate, divided by the roofline.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from slurmrl.data.sample import SequenceSample
from slurmrl.plan.estimates.call_costs import BACKWARD, forward_flops
from slurmrl.plan.estimates.shape import read
from slurmrl.rollouts.generation.base import GenerationOptions
from tests.null_gpu import cases, device
from tests.null_gpu.roofline import PEAK_FLOPS_PER_S, Roofline
from tests.null_gpu.values import SmallValues
from tests.support.generated import generated

RANKS = 8
GIB = 2**30
MODELS = {"1.5B": cases.QWEN_1_5B, "7B": cases.QWEN_7B}
LENGTH = 4096
PROMPT = {"prefill": 2048, "decode": 256}
FEW, MORE = 9, 25
"""New tokens of two generations. Their difference is a number of decoding steps."""
TITLES = {
    "launches": "launches",
    "waits": "host waits",
    "sent_gb": "sent GB",
    "allocated_gib": "allocated GiB",
    "reserved_gib": "reserved GiB",
    "traffic_gb": "traffic GB",
    "roofline_ms": "roofline ms",
    "mfu_percent": "MFU %",
}
Figures = dict[str, float]
Case = Callable[[], tuple[Figures, Roofline]]


def sequence_flops(architecture: dict[str, Any], length: int) -> int:
    """Return the operations of a forward pass over one sequence."""
    shape = read(architecture)
    assert shape is not None
    return forward_flops(shape, "lm", length)


def training(architecture: dict[str, Any], sequences: int, mode: str) -> tuple[Figures, Roofline]:
    tokens = sequences * LENGTH
    engine = cases.engine(
        architecture, gradient_checkpointing=mode, max_tokens_per_microbatch=tokens
    )
    sample = cases.batch([LENGTH] * sequences)
    step = partial(engine.train_batch, sample, cases.ppo_loss, float(tokens))
    step()
    found = measured(step)
    roofline = traced(step)
    work = (1 + BACKWARD) * sequences * sequence_flops(architecture, LENGTH)
    return found | timed(roofline, work), roofline


def prefill(architecture: dict[str, Any], rows: int) -> tuple[Figures, Roofline]:
    engine = cases.engine(architecture, trained=False)
    run = partial(generate, engine, rows, PROMPT["prefill"], 1)
    found = measured(run)
    roofline = traced(run)
    work = rows * sequence_flops(architecture, PROMPT["prefill"])
    return found | timed(roofline, work), roofline


def decode(architecture: dict[str, Any], rows: int) -> tuple[Figures, Roofline]:
    """Measure decoding of one token for all rows."""
    engine = cases.engine(architecture, trained=False)
    few, more = (partial(generate, engine, rows, PROMPT["decode"], new) for new in (FEW, MORE))
    few()
    counts = [measured(run) for run in (few, more)]
    rooflines = [traced(run) for run in (few, more)]
    steps = MORE - FEW
    found = {name: (counts[1][name] - counts[0][name]) / steps for name in ("launches", "waits")}
    found |= {name: counts[1][name] for name in ("allocated_gib", "reserved_gib")}
    totals = [roofline.total for roofline in rooflines]
    found["traffic_gb"] = (totals[1].bytes - totals[0].bytes) / steps / 1e9
    found["roofline_ms"] = 1e3 * (totals[1].seconds - totals[0].seconds) / steps
    return found, rooflines[1]


def generate(engine: Any, rows: int, prompt: int, new_tokens: int) -> None:
    names = [f"item{index}" for index in range(rows)]
    ids = torch.arange(rows * prompt) % 100
    sample = SequenceSample(
        tuple(names), {"prompt_ids": [[prompt]] * rows}, data={"prompt_ids": ids}
    )
    options = GenerationOptions(max_new_tokens=new_tokens, stop_token_ids=(151645,))
    generated(engine, sample, options, seed=1, step=1, keys=torch.arange(rows))


def measured(run: Callable[[], object]) -> Figures:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with device.counted() as counts:
        run()
    return {
        "launches": counts["launches"] + counts["products"],
        "waits": counts["waits"],
        "sent_gb": counts["collective_bytes"] / 1e9,
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }


def traced(run: Callable[[], object]) -> Roofline:
    with Roofline() as roofline:
        run()
    return roofline


def timed(roofline: Roofline, work: float) -> Figures:
    total = roofline.total
    return {
        "traffic_gb": total.bytes / 1e9,
        "roofline_ms": 1e3 * total.seconds,
        "mfu_percent": 100 * work / PEAK_FLOPS_PER_S / total.seconds,
    }


def all_cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name, architecture in MODELS.items():
        for sequences in (1, 4):
            for mode in ("off", "selective", "full"):
                tokens = sequences * LENGTH
                label = f"training {name}, {tokens:,} tokens, {mode}"
                found[label] = partial(training, architecture, sequences, mode)
        found[f"prefill {name}, 256 x 2,048"] = partial(prefill, architecture, 256)
        for rows in (1, 64, 256):
            found[f"decode {name}, {rows} sequences"] = partial(decode, architecture, rows)
    return found


@contextmanager
def clean() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()
    if left > GIB:
        raise SystemExit(f"{left / GIB:.1f} GiB are still allocated: peaks would be wrong")


def table(kind: str, rows: dict[str, Figures], before: dict[str, Figures]) -> list[str]:
    columns = [name for name in TITLES if name in next(iter(rows.values()))]
    lines = [f"| {kind} | " + " | ".join(TITLES[name] for name in columns) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for label, figures in rows.items():
        cells = [cell(name, figures, before.get(label)) for name in columns]
        lines.append(f"| {label.removeprefix(kind).strip()} | " + " | ".join(cells) + " |")
    return lines


def cell(name: str, figures: Figures, before: Figures | None) -> str:
    new = number(figures[name])
    old = number(before[name]) if before and name in before else new
    return new if old == new else f"{old} → {new}"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:.3g}"


def operators(roofline: Roofline) -> None:
    costs = sorted(roofline.costs.items(), key=lambda item: -item[1].seconds)
    for (kind, where), cost in costs[:25]:
        print(
            f"    {1e3 * cost.seconds:9.1f} ms {cost.calls:6d} calls {cost.bytes / 1e9:8.1f} GB "
            f"{cost.flops / 1e12:8.1f} TFLOP  {kind:9} {where}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--save", type=Path, metavar="FILE")
    parser.add_argument("--before", type=Path, metavar="FILE")
    parser.add_argument("--operators", action="store_true")
    options = parser.parse_args()
    if not device.present():
        parser.error("there is no null GPU in this process: run scripts/test-null-gpu --table")
    before = json.loads(options.before.read_text()) if options.before else {}
    found: dict[str, Figures] = {}
    with cases.first_of(RANKS), SmallValues():
        for label, case in all_cases().items():
            if options.only not in label:
                continue
            print(label, file=sys.stderr, flush=True)
            with clean():
                found[label], roofline = case()
            if options.operators:
                operators(roofline)
            del roofline
    for kind in ("training", "prefill", "decode"):
        rows = {label: figures for label, figures in found.items() if label.startswith(kind)}
        if rows:
            print(*table(kind, rows, before), "", sep="\n")
    if options.save:
        options.save.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
