"""AReaL's probe cases (reference, section 5.4), run through an adapter with its names."""

from __future__ import annotations

import pytest

from tests.support.upstream_allocation import (
    AllocationValidationError,
    InvalidAllocationModeError,
    ModelAllocation,
)

# string: world size, dp, tp, pp, cp, ep, etp, edp
ACCEPTED = {
    "fsdp:d4": (4, 4, 1, 1, 1, 1, 1, 4),
    "fsdp: d4 t2": (8, 4, 2, 1, 1, 1, 1, 4),
    "fsdp:t2": (2, 1, 2, 1, 1, 1, 1, 1),
    "fsdp:d4e1": (4, 4, 1, 1, 1, 1, 1, 4),
    "fsdp:d8c1t1p1e1": (8, 8, 1, 1, 1, 1, 1, 8),
    "fsdp:d2c2": (4, 2, 1, 1, 2, 1, 1, 2),
    "megatron:d2p2t4": (16, 2, 4, 2, 1, 1, 1, 2),
    "megatron:d2p2t4e4": (16, 2, 4, 2, 1, 4, 1, 2),
    "megatron:d4t4e8": (16, 4, 4, 1, 1, 8, 1, 2),
    "megatron:d2p2t4c2e2": (32, 2, 4, 2, 2, 2, 1, 8),
    "archon:d2p2t2c2e2": (16, 2, 2, 2, 2, 2, 1, 4),
    "sglang:d4t2p2": (16, 4, 2, 2, 1, 1, 1, 4),
    "sglang:d2t4": (8, 2, 4, 1, 1, 1, 1, 2),
    "vllm:d2t4p2": (16, 2, 4, 2, 1, 1, 1, 2),
    "megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)": (32, 4, 2, 2, 2, 2, 4, 2),
    "megatron:(attn:d4p2t2c2|ffn:t4e2)": (32, 4, 2, 2, 2, 2, 4, 2),
    "megatron:(attn:d4p2t2c2|ffn:e8)": (32, 4, 2, 2, 2, 8, 1, 2),
    "megatron:attn:d4|ffn:d2e2": (4, 4, 1, 1, 1, 2, 1, 2),
    "archon:(attn:d4|ffn:d2e2)": (4, 4, 1, 1, 1, 2, 1, 2),
    "fsdp:(attn:d4t2|ffn:d8)": (8, 4, 2, 1, 1, 1, 1, 8),
    "megatron:(attn:d1p12t4|ffn:d1p12e4)": (48, 1, 4, 12, 1, 4, 1, 1),
    # warts there, right here: named halves
    "megatron[actor]:(attn:d4|ffn:d2e2)": (4, 4, 1, 1, 1, 2, 1, 2),
}
REJECTED = {
    **dict.fromkeys(("fsdp:d0", "fsdp:d04", "fsdp:", "fsdp", "", "fsdp(actor):d4"), ValueError),
    **dict.fromkeys(("sglang.d2t2p1", "[actor]:d4", "fsdp:d4+fsdp:d4"), ValueError),
    **dict.fromkeys(("FSDP:d4", "deepspeed:d4", "d4t2"), AllocationValidationError),
    **dict.fromkeys(("sglang:d4c2", "sglang:d4e2"), AllocationValidationError),
    **dict.fromkeys(("fsdp:d2p2", "fsdp:d2e2"), AllocationValidationError),
    "megatron:d2p2t4e3": AllocationValidationError,
    "megatron:d2e4": AllocationValidationError,
    "megatron:(ffn:d4|attn:d4)": ValueError,
    "megatron:(attn:d4e2|ffn:d4)": AllocationValidationError,
    "megatron:(attn:d4|ffn:d2c2)": AllocationValidationError,
    "megatron:(attn:d4p2|ffn:d4p4)": AllocationValidationError,
    "megatron:(attn:d4|ffn:e3)": AllocationValidationError,
    "megatron:(attn:d4|ffn:d4e2)": InvalidAllocationModeError,
    "sglang:(attn:d4|ffn:d4)": ValueError,
    # warts there: a repeated dimension and parentheses that do not match
    "fsdp:d4d2": ValueError,
    "megatron:(attn:d4|ffn:d2e2": ValueError,
    "megatron:attn:d4|ffn:d2e2)": ValueError,
}  # fmt: skip


@pytest.mark.parametrize("text", ACCEPTED)
def test_accepted_there_and_here(text: str) -> None:
    found = ModelAllocation.from_str(text)
    sizes = found.parallel
    assert (
        sizes.world_size,
        sizes.data_parallel_size,
        sizes.tensor_parallel_size,
        sizes.pipeline_parallel_size,
        sizes.context_parallel_size,
        sizes.expert_parallel_size,
        sizes.expert_tensor_parallel_size,
        sizes.expert_data_parallel_size,
    ) == ACCEPTED[text]


@pytest.mark.parametrize("text", REJECTED)
def test_rejected(text: str) -> None:
    with pytest.raises(REJECTED[text]):
        ModelAllocation.from_str(text)


def test_a_name_is_given_or_read() -> None:
    assert ModelAllocation.from_str("fsdp[actor]:d4").name == "actor"
    assert ModelAllocation.from_str("fsdp:d4").name is None
    assert ModelAllocation.from_str("fsdp[actor]:d4", name="ref").name == "ref"
