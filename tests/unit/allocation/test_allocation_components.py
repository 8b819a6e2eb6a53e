from __future__ import annotations

import pytest

from slurmrl.config.allocation import Components, parse_components
from slurmrl.config.allocation.parser import format_gpus, parse_gpus
from slurmrl.errors import AllocationError, UnknownNameError


@pytest.mark.parametrize(
    ("text", "places", "world_size", "starts"),
    [
        ("fsdp:d4", [1], 4, [0]),
        ("sglang:d4t2 + fsdp:d4", [1, 1], 12, [0, 8]),
        ("fsdp:d4|fsdp[ref]:t4", [2], 4, [0]),
        ("sglang[rollout]:d2|fsdp[actor]:d2+megatron[critic]:p2", [2, 1], 4, [0, 2]),
        ("megatron[a]:(attn:d4|ffn:d2e2)|fsdp[b]:d4+vllm[c]:d2", [2, 1], 6, [0, 4]),
        ("megatron:attn:d4t2|ffn:d8+sglang:d2", [1, 1], 10, [0, 8]),
    ],
)
def test_allocation_bar_binds_tighter_than_plus(
    text: str, places: list[int], world_size: int, starts: list[int]
) -> None:
    components = parse_components(text)
    assert [len(place) for place in components.places] == places
    assert (components.world_size, components.starts()) == (world_size, starts)
    assert parse_components(str(components)) == components


@pytest.mark.parametrize(
    ("text", "position", "rule"),
    [
        ("sglang:d4+fsdp:d4+fsdp[x]:d1", 1, "components, each needs a [name]"),
        ("sglang[r]:d4+fsdp[r]:d4", 14, "two components are named 'r'"),
        ("sglang:d4|fsdp:d4", 11, "needs a [name]"),
        ("sglang:d4|fsdp[a]:d2", 11, "needs 2 ranks"),
        ("fsdp:d2+", 9, "expected a backend"),
        ("fsdp:d2||fsdp:d2", 9, "expected a backend"),
        ("+fsdp:d2", 1, "expected a backend"),
    ],
)
def test_error_points_at_component_that_does_not_fit(text: str, position: int, rule: str) -> None:
    with pytest.raises(AllocationError) as caught:
        parse_components(text)
    first = str(caught.value).splitlines()[0]
    assert f"at character {position} " in first
    assert rule in first


def test_components_are_found_by_name() -> None:
    components: Components = parse_components("sglang[rollout]:d4+fsdp[actor]:d2")
    assert components["actor"].world_size == 2
    assert len(components) == 2
    with pytest.raises(UnknownNameError, match="did you mean 'actor'"):
        components["acter"]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3", (0, 1, 2, 3)), ("5", (5,)), (" 0 , 2 - 3 ", (0, 2, 3)), ("0-0,9", (0, 9))],
)
def test_gpu_lists_parse_and_format(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_gpus(text) == numbers
    assert parse_gpus(format_gpus(numbers)) == numbers


@pytest.mark.parametrize(
    ("text", "position", "rule"),
    [
        ("", 1, "expected the number"),
        ("3-1", 1, "is descending"),
        ("0-3,3", 5, "comes after 3"),
        ("0,", 3, "expected the number"),
        ("0;1", 2, "expected ','"),
        ("all", 1, "expected the number"),
        ("99999999", 1, "expected the number"),
    ],
)
def test_wrong_gpu_lists_are_rejected(text: str, position: int, rule: str) -> None:
    with pytest.raises(AllocationError, match=rule) as caught:
        parse_gpus(text)
    assert f"at character {position} " in str(caught.value)
