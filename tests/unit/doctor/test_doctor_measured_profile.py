"""The numbers of a hardware profile are fitted to measurements, and formulas with them give the
measured seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from slurmrl.config.allocation import parse
from slurmrl.desk.measured_profile import profile_text
from slurmrl.plan.estimates.hardware import HardwareFile, Machine, made
from slurmrl.plan.estimates.pass_seconds import (
    DecodeJob,
    LengthDistribution,
    PassJob,
    generation,
    inference,
)
from slurmrl.plan.estimates.shape import ModelShape, read
from slurmrl.workers.hardware_sizes import ON_CPUS

MODEL = ON_CPUS.model
TRUE = {
    "flops_per_s": 9e11,
    "float32_flops_per_s": 1.3e11,
    "products": 1.0,
    "half_side": 60.0,
    "bytes_per_s": 4e10,
    "stream": 0.9,
    "decoding": 0.6,
    "link": 2e9,
    "latency": 2e-4,
    "links": 1.0,
    "overlap": 0.25,
    "attention": 0.4,
    "traffic": 150.0,
    "launches": 1e-3,
    "gathers": 5e-4,
    "token": 2e-4,
    "row": 3e-5,
    "file_create_s": 2e-3,
    "file_read_s": 1e-4,
    "file_bytes_per_s": 1e9,
}


def shape() -> ModelShape:
    found = read(MODEL)
    assert found is not None
    return found


def machine(numbers: Mapping[str, float], gpus_per_host: int = 2) -> Machine:
    file = HardwareFile.model_validate({"hardware": "cpu", "measured": dict(numbers)})
    hardware = made(file, "test")
    return Machine(hardware.gpu, gpus_per_host, hardware.efficiency)


def forward(
    numbers: Mapping[str, float],
    tokens: int,
    length: int,
    layout: str = "fsdp:d1",
    gpus_per_host: int = 2,
) -> float:
    job = PassJob(
        shape=shape(),
        allocation=parse(layout),
        head="value",
        tokens=tokens,
        length=length,
        microbatch=tokens,
        width=4,
        sharded=layout != "fsdp:d1",
        small=True,
    )
    return sum(inference(job, machine(numbers, gpus_per_host)).values())


def generate(numbers: Mapping[str, float], rows: int, tokens: int) -> float:
    job = DecodeJob(
        shape=shape(),
        allocation=parse("native:d1"),
        sequences=rows,
        prompt=1,
        group=rows,
        lengths=LengthDistribution(tokens, tokens),
        cache_tokens=1e12,
        width=4,
    )
    return generation(job, machine(numbers))["decode"] / tokens


def points(numbers: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return measurements of hardware that follows the formulas exactly."""
    found: list[dict[str, Any]] = []
    for width, rate in ((2, numbers["flops_per_s"]), (4, numbers["float32_flops_per_s"])):
        for side in (32, 128, 512, 1024):
            share = side / (side + numbers["half_side"])
            seconds = 2 * side**3 / (rate * share)
            found.append({"what": "product", "width": width, "side": side, "seconds": seconds})
    for what, share in (("copy", 1.0), ("add", numbers["stream"]), ("row", numbers["decoding"])):
        seconds = 2**26 / (numbers["bytes_per_s"] * share)
        found.append({"what": what, "bytes": 2**26, "seconds": seconds})
    for what, times in (("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)):
        for size in (4096, 2**20, 2**23):
            seconds = numbers["latency"] + times * size / 2 / numbers["link"]
            place = {"place": "host", "ranks": 2, "bytes": size}
            found.append({"what": what, **place, "seconds": seconds})
    both = {"gather": 0.01, "product": 0.02, "seconds": 0.03 - 0.01 * numbers["overlap"]}
    found.append({"what": "overlap", **both})
    for tokens, length in ((1024, 1024), (1024, 32)):
        seconds = forward(numbers, tokens, length)
        found.append({"what": "forward", "tokens": tokens, "length": length, "seconds": seconds})
    reads = {**numbers, "half_side": 1e-3}  # the products of one token only read the weights
    one = {"what": "forward", "tokens": 1, "length": 1}
    found.append({**one, "seconds": forward(reads, 1, 1)})
    sharded = {"what": "sharded", "place": "host", "ranks": 2}
    found.append({**sharded, "seconds": forward(reads, 1, 1, "fsdp:d2")})
    for rows in (1, 16):
        seconds = generate(numbers, rows, 32)
        found.append({"what": "generate", "rows": rows, "tokens": 32, "seconds": seconds})
    found.append({"what": "file_create", "seconds": numbers["file_create_s"]})
    found.append({"what": "file_read", "seconds": numbers["file_read_s"]})
    seconds = 2**28 / numbers["file_bytes_per_s"]
    found.append({"what": "file_write", "bytes": 2**28, "seconds": seconds})
    return found


def measured(*ranks: list[dict[str, Any]], name: str = "cpu") -> dict[str, float]:
    text = profile_text(name, "by hand: a test, 2026", ranks, MODEL)
    values = YAML(typ="safe", pure=True).load(text)
    assert values["hardware"] == name
    found: dict[str, float] = values["measured"]
    return found


def test_profile_recovers_numbers_of_simulated_hardware() -> None:
    found = measured(points(TRUE), points(TRUE))
    assert found == pytest.approx(TRUE, rel=0.02)


def test_network_time_is_not_counted_as_gather_time() -> None:
    """With one rank per host, the sharded layers are measured over the network."""
    exact = {**TRUE, "network": 5e8, "network_latency": 1e-3}
    reads = {**exact, "half_side": 1e-3}
    among = points({**exact, "link": exact["network"], "latency": exact["network_latency"]})
    own = [one for one in points(exact) if "place" not in one]
    wire = [{**one, "place": "hosts"} for one in among if "place" in one]
    (sharded,) = (one for one in wire if one["what"] == "sharded")
    sharded["seconds"] = forward(reads, 1, 1, "fsdp:d2", gpus_per_host=1)
    found = measured(own + wire)
    assert found["network"] == pytest.approx(exact["network"], rel=0.02)
    assert found["gathers"] == pytest.approx(exact["gathers"], rel=0.05)


@settings(max_examples=30, deadline=None)
@given(
    half_side=st.floats(1, 500),
    link=st.floats(1e8, 1e11),
    latency=st.floats(1e-6, 1e-3),
    attention=st.floats(0.05, 1.0),
    traffic=st.floats(60, 500),
)
def test_profile_recovers_any_simulated_hardware(**numbers: float) -> None:
    found = measured(points({**TRUE, **numbers}))
    assert {name: found[name] for name in numbers} == pytest.approx(numbers, rel=0.05)


def test_profile_averages_over_ranks() -> None:
    slow = points({**TRUE, "bytes_per_s": 2e10})
    found = measured(points(TRUE), slow)
    assert found["bytes_per_s"] == pytest.approx(2 / (1 / 4e10 + 1 / 2e10), rel=0.01)


def test_known_gpu_keeps_the_vendors_peak() -> None:
    gpu = [{"what": "device", "name": "NVIDIA H100 80GB HBM3", "bytes": 80 * 2**30}]
    copied = [{"what": "host_copy", "bytes": 2**30, "seconds": 0.05}]
    found = measured([*points({**TRUE, "flops_per_s": 7e14}), *gpu, *copied], name="h100")
    assert found["flops_per_s"] == pytest.approx(989e12, rel=1e-3)
    assert found["products"] == pytest.approx(7e14 / 989e12, rel=0.02)
    assert found["memory_gib"] == 80
    assert found["host_link"] == pytest.approx(2**30 / 0.05, rel=1e-3)


def test_measured_profile_has_no_negative_numbers_despite_noise() -> None:
    """Long sequences are faster than short ones here, and many rows faster than few."""
    noisy = points(TRUE)
    for point in noisy:
        if point.get("length") == 1024 or point.get("rows") == 16:
            point["seconds"] /= 3
    found = measured(noisy)
    assert min(found.values()) >= 0
