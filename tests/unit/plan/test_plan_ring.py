"""Estimates of ring attention, against the schedule of its ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest

from slurmrl.plan.estimates.hardware import Machine
from slurmrl.plan.estimates.memory import estimate
from slurmrl.plan.estimates.pass_seconds import inference, training
from slurmrl.tensors.ops.ring_attention import schedule
from tests.unit.plan import test_plan_estimates, test_plan_seconds
from tests.unit.plan.test_plan_seconds import H100, LLAMA_8B

EXPOSED = Machine(H100.gpu, 8, replace(H100.efficiency, overlap=0.0))
TOKENS, RANKS = 9216, 3
PAIR = 2 * LLAMA_8B["num_key_value_heads"] * 128
"""Elements of a token's keys and values in a layer."""


def sent_tokens(length: int) -> float:
    """Return the mean number of keys that a rank receives for sequences of this length."""
    bounds = tuple(accumulate([length] * (TOKENS // length), initial=0))
    part = -(-bounds[-1] // RANKS)
    plans = [schedule(bounds, part, RANKS, rank, None) for rank in range(RANKS)]
    return sum(hop.received for plan in plans for hop in plan.hops) / RANKS


def communication(length: int, layout: str = "fsdp:c3", machine: Machine = EXPOSED) -> float:
    options = {"tokens": TOKENS, "microbatch": TOKENS, "length": length}
    return inference(test_plan_seconds.job(layout, **options), machine)["communication"]


@pytest.mark.parametrize("length", [9216, 4608, 1100, 97])
def test_predicted_transfers_are_an_upper_bound_of_the_schedule(length: int) -> None:
    """The prediction is exact for one sequence. Boundaries of chunks may cut other sequences
    anywhere.
    """
    moved = sent_tokens(length) * PAIR * 2 * LLAMA_8B["num_hidden_layers"]
    sent = moved / EXPOSED.exchange(RANKS, 1)
    predicted = communication(length)
    assert sent * 0.999 <= predicted <= sent * (1.001 if length == 9216 else 2.5)


def test_attention_of_long_sequences_hides_transfers() -> None:
    whole = Machine(H100.gpu, 8, replace(H100.efficiency, overlap=1.0))
    assert communication(9216, machine=whole) == 0.0
    assert communication(9216, "fsdp:c4") != communication(9216, "fsdp:c3")


def test_backward_pass_returns_gradients_in_float32() -> None:
    """The forward pass sends 2 bytes per element.

    The backward pass sends 2 bytes, and 4 bytes of gradients.
    """
    job = test_plan_seconds.job("fsdp:c3", tokens=TOKENS, microbatch=TOKENS, length=9216)
    forward = inference(job, EXPOSED)["communication"]
    assert training(job, EXPOSED)["communication"] == pytest.approx(4 * forward)


def test_ring_needs_extra_memory_if_feed_forward_blocks_are_narrow() -> None:
    narrow = {**LLAMA_8B, "intermediate_size": 256}
    ring, heads = (
        estimate(test_plan_estimates.job(narrow, f"fsdp:c{c}")).activations * c for c in (3, 2)
    )
    assert ring > 1.02 * heads
