#!/usr/bin/env python3
"""Compare the plan's predicted seconds with published measurements (published_steps.yaml).

Prints each row with its ratio, and the median errors of the odd rows, to which the efficiencies
were fitted, and of the even rows. Needs neither torch nor a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from ruamel.yaml import YAML

from slurmrl.config.allocation import parse
from slurmrl.plan.estimates.hardware import Gpu, Machine, shipped
from slurmrl.plan.estimates.memory import kv_bytes_per_token, whole_weights
from slurmrl.plan.estimates.pass_seconds import (
    REPEATED,
    DecodeJob,
    LengthDistribution,
    PassJob,
    generation,
    inference,
    training,
)
from slurmrl.plan.estimates.shape import ModelShape, read

ROWS = Path(__file__).with_name("published_steps.yaml")
HARDWARE = shipped("h100")
H100, EAGER, FUSED = HARDWARE.gpu, HARDWARE.efficiency, HARDWARE.fused
FLOAT8 = 1.6
"""Rate of float8 products divided by the rate of bfloat16 products in the runs."""
OPTIMIZER_STEP = 512
"""Number of completions per optimizer step in the RL rows."""
PROMPT, GROUP = 150, 32


@dataclass(frozen=True)
class Compared:
    """A row's measured and predicted value, in its own unit."""

    kind: str
    name: str
    model: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def compare() -> Iterator[Compared]:
    """Yield all rows in their order."""
    rows = YAML(typ="safe").load(ROWS)
    models = {name: read(values) for name, values in rows["models"].items()}
    for row in rows["training"]:
        name = f"{row['layout']} {row['software']}" + (" float8" if row.get("float8") else "")
        predicted = tokens_per_second(row, models[row["model"]])
        yield Compared("training", name, row["model"], row["measured"], predicted)
    for row in rows["rl"]:
        name = f"{row['training']} {'beside' if row.get('apart') else 'and'} {row['generation']}"
        predicted = step_seconds(row, models[row["model"]])
        yield Compared("rl", name, row["model"], row["measured"], predicted)


def tokens_per_second(row: Mapping[str, Any], shape: ModelShape) -> float:
    """Return the trained tokens per second and GPU."""
    layout = parse(row["layout"])
    gpu = replace(H100, bytes_per_s=float(row.get("memory", H100.bytes_per_s)))
    rates = FUSED if row["software"] == "fused" else EAGER
    if row["software"] == "compiled":
        rates = replace(rates, traffic=FUSED.traffic)
    if row.get("float8"):
        gpu = replace(gpu, flops_per_s=FLOAT8 * gpu.flops_per_s)
        rates = replace(rates, attention=rates.attention / FLOAT8)
    job = PassJob(
        shape=shape,
        allocation=layout,
        head="lm",
        tokens=row["sequences"] * row["length"],
        length=row["length"],
        microbatch=row["microbatch"] * row["length"],
        sharded=row.get("sharded", layout.backend == "fsdp"),
        sequence_parallel=layout.sizes["tp"] > 1,
        virtual=row.get("virtual", 1),
        repeated=REPEATED[row.get("checkpointing", "off")],
    )
    seconds = sum(training(job, Machine(gpu, 8, rates)).values())
    return job.tokens * layout.sizes["dp"] / layout.world_size / seconds


def step_seconds(row: Mapping[str, Any], shape: ModelShape) -> float:
    """Return the seconds of a step: generation, inferences of actor and reference, and training."""
    machine, layout = Machine(H100, 8, FUSED), parse(row["training"])
    tokens = row["rollouts"] * row["mean"] / layout.sizes["dp"]
    steps = max(1, row["rollouts"] // OPTIMIZER_STEP)
    job = PassJob(
        shape=shape,
        allocation=layout,
        head="lm",
        tokens=tokens,
        length=row["mean"],
        microbatch=row["most"],
        sharded=False,
        sequence_parallel=layout.sizes["tp"] > 1,
        repeated=REPEATED[row.get("checkpointing", "off")],
    )
    trains = steps * sum(training(replace(job, tokens=tokens / steps), machine).values())
    trains += 2 * sum(inference(job, machine).values())
    generates = sum(generation(decode_job(row, shape, H100), machine).values())
    total = max(trains, generates) if row.get("apart") else trains + generates
    return total * (1 + machine.efficiency.rest)


def decode_job(row: Mapping[str, Any], shape: ModelShape, gpu: Gpu) -> DecodeJob:
    layout = parse(row["generation"])
    left = 0.75 * (gpu.memory_bytes or 0) - whole_weights(shape, layout, "bfloat16")
    return DecodeJob(
        shape=shape,
        allocation=layout,
        sequences=row["rollouts"] / layout.sizes["dp"],
        prompt=PROMPT,
        group=GROUP,
        lengths=LengthDistribution(row["mean"] - PROMPT, row["most"] - PROMPT),
        cache_tokens=max(left, 10e9) / kv_bytes_per_token(shape, layout, "bfloat16"),
    )


def median_error(rows: Sequence[Compared], first: int) -> float:
    """Return the median of |predicted / measured - 1| over every second row, starting with
    ``first``.
    """
    return median(abs(row.ratio - 1) for row in rows[first::2])


class Predicted(Protocol):
    """A measured and a predicted value."""

    @property
    def measured(self) -> float: ...
    @property
    def predicted(self) -> float: ...


def ordered_pairs(rows: Sequence[Predicted], apart: float = 1.2) -> tuple[int, int]:
    """Return how many pairs are predicted in the right order, and the number of pairs.

    Only pairs whose measured values differ by more than the factor ``apart`` count.
    """
    pairs = [
        (one, other)
        for one, other in combinations(rows, 2)
        if max(one.measured, other.measured) > apart * min(one.measured, other.measured)
    ]
    right = sum(
        (one.measured < other.measured) == (one.predicted < other.predicted) for one, other in pairs
    )
    return right, len(pairs)


def main() -> None:
    rows = list(compare())
    for kind, unit in (("training", "tokens/s/GPU"), ("rl", "seconds of a step")):
        chosen = [row for row in rows if row.kind == kind]
        print(f"{kind}: {unit}")
        for number, row in enumerate(chosen, 1):
            print(
                f"{number:3} {row.model:16} {row.name:34} measured {row.measured:8.5g}  "
                f"predicted {row.predicted:8.4g}  ratio {row.ratio:.2f}"
            )
        fitted, checked = (median_error(chosen, first) for first in (0, 1))
        right, pairs = ordered_pairs(chosen)
        print(f"    median error: {fitted:.1%} of the odd rows, {checked:.1%} of the even rows")
        print(f"    order of pairs that differ by more than 20 %: {right} of {pairs} right")


if __name__ == "__main__":
    main()
