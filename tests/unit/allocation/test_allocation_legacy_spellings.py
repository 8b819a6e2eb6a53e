from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmrl.config.allocation import parse
from slurmrl.config.allocation.legacy_spellings import HostShape, Mesh, mesh, parse_legacy, spelled
from slurmrl.config.allocation.parser import Scanner
from slurmrl.errors import AllocationError

SHAPE = HostShape(hosts=2, gpus_per_host=8)


@pytest.mark.parametrize(
    ("text", "now"),
    [
        ("sglang.d2t2p1+d1t4p1", ["rollout.backend: sglang:d2t2", "actor.backend: fsdp:t4"]),
        ("sglang:d2t2p1 + d1t4p1", ["rollout.backend: sglang:d2t2", "actor.backend: fsdp:t4"]),
        ("d4p2+sglang:d2", ["actor.backend: megatron:d4p2", "rollout.backend: sglang:d2"]),
        ("vllm.d2m1p1+d2m2p1", ["rollout.backend: vllm:d2", "actor.backend: fsdp:d2t2"]),
        ("sglang.d2+d2+eval", ["rollout.backend: sglang:d2", "actor.backend: fsdp:d2"]),
        (
            "sglang.d4|d2t2",
            ["rollout.backend: sglang:d4", "rollout.gpus: 0-3", "actor.backend: fsdp:d2t2"],
        ),
        ("d2m2p2", ["actor.backend: megatron:d2t2p2"]),
        ("p1d4m2", ["actor.backend: fsdp:d4t2"]),
        ("d2p2t4e2c4", ["actor.backend: megatron:d2t4p2c4e2"]),
        ("attn:d4t2|ffn:d2t2e2", ["actor.backend: megatron:(attn:d4t2|ffn:d2t2e2)"]),
        (
            "sglang.d2+attn:d4|ffn:d2e2",
            ["rollout.backend: sglang:d2", "actor.backend: megatron:d4e2"],
        ),
        (
            "actor_gen:d4m2p1,*:d2m2p2",
            ["actor.backend: megatron:d2t2p2", "rollout.backend: native:d4t2"],
        ),
        ("actor_gen:d2m1p1,*:d2m1p1", ["actor.backend: fsdp:d2"]),
        (
            "vllm.d2m1p1+actor_train:d2m1p1,*:d1m1p2",
            [
                "critic.backend: megatron:p2",
                "ref.backend: megatron:p2",
                "rollout.backend: vllm:d2",
                "actor.backend: fsdp:d2",
            ],
        ),
        ("vllm.d2t2p2+d4", ["rollout.backend: vllm:d2t4", "actor.backend: fsdp:d4"]),
        (
            "sglang.d4|*:d2t2",
            ["actor.backend: fsdp:d2t2", "rollout.backend: sglang:d4", "rollout.gpus: 0-3"],
        ),
        ("pipe_model", ["actor.backend: megatron:t8p2"]),
        ("pipe_data", ["actor.backend: megatron:d8p2"]),
        (" heuristic ", ["actor.backend: fsdp:d2t8"]),
        (
            "actor:node[01-02]:d4m2p2,ref:node02:0,1:d1m2p1",
            [
                "actor.backend: megatron:d4t2p2",
                "actor.gpus: 0-15",
                "ref.backend: fsdp:t2",
                "ref.gpus: 8-9",
            ],
        ),
    ],
)  # fmt: skip
def test_older_spelling_is_reported_with_the_new_spelling(text: str, now: list[str]) -> None:
    assert list(spelled(parse_legacy(text, SHAPE))) == now


@pytest.mark.parametrize(
    ("text", "position", "rule"),
    [
        ("manual", 1, "write the layout of each role"),
        ("search", 1, "slurmrl search finds layouts before a submission; allowed here: pipe_model"),
        ("sglang.d2", 10, "no part trains the actor"),
        ("mock.d1+d1", 1, "unknown engine 'mock'"),
        ("sglang.d4|d2", 1, "need 4 and 2 ranks"),
        ("d2|d2", 1, "'|' must join generation and the actor"),
        ("sglang.d2+d2t2t2", 15, "dimension 't' is repeated"),
        ("d2m2p2,", 7, "expected '+', '|' or the end"),
        ("foo_train:d2", 1, "unknown call 'foo_train'"),
        ("actor_train:d2,actor_inf:d4", 16, "only one is allowed"),
        ("actor:node01:0,1:d4m1p1", 1, "the mesh has 2 GPUs, the dimensions need 4"),
        ("", 1, "or one of pipe_model"),
        ("sglang.d2 at character 90 (x): y", 11, "expected a dimension of sglang"),
    ],
)
def test_error_points_into_a_wrong_older_spelling(text: str, position: int, rule: str) -> None:
    with pytest.raises(AllocationError) as caught:
        parse_legacy(text, SHAPE)
    assert caught.value.position == position - 1
    assert str(caught.value).startswith(f"{text!r}: at character {position} ")
    assert rule in str(caught.value)


@pytest.mark.parametrize("text", ["sglang.d2t2p1+d1t4p1", "d2m2p2", "pipe_model", "actor:d2"])
def test_older_spellings_are_not_mistaken_for_a_role(text: str) -> None:
    with pytest.raises(AllocationError):
        parse(text)


@pytest.mark.parametrize(
    ("text", "hosts", "gpus"),
    [
        ("node01", ("node01",), ()),
        ("node[01-02]", ("node01", "node02"), ()),
        ("NODE01:0,1,2,3", ("NODE01",), (0, 1, 2, 3)),
        ("NODE[01-02,03,07],COM08", ("NODE01", "NODE02", "NODE03", "NODE07", "COM08"), ()),
        ("node01:4", ("node01",), (4,)),
    ],
)
def test_mesh_names_hosts_and_gpus(
    text: str, hosts: tuple[str, ...], gpus: tuple[int, ...]
) -> None:
    assert mesh(Scanner(text), 8) == Mesh(hosts, gpus)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "expected a host"),
        ("node[02-01]", "must ascend"),
        ("node01,node01", "twice"),
        ("node01:0,2", "consecutive"),
        ("node01:0,1,2", "consecutive"),
        ("node01:7,8", "GPUs 0 to 7"),
        ("node[01-02]:0,1", "listed for a single host only"),
        ("node[01", "expected"),
        ("node", "number of a host"),
    ],
)
def test_wrong_meshes_are_rejected(text: str, rule: str) -> None:
    with pytest.raises(AllocationError, match=rule):
        mesh(Scanner(text), 8)


def test_mesh_numbers_gpus_across_all_hosts() -> None:
    hosts = ("a1", "a2", "a3")
    assert Mesh(("a3",), (2, 3)).numbers(hosts, 4) == (10, 11)
    assert Mesh(("a1", "a3")).numbers(hosts, 2) == (0, 1, 4, 5)


@given(st.text("sglangvm.:d2t4p1e|+*,_()nodeactr[]-0 ", max_size=24))
def test_any_legacy_string_is_converted_or_rejected(text: str) -> None:
    try:
        placed = parse_legacy(text, SHAPE)
    except AllocationError:
        return
    assert "actor" in placed
    for one in placed.values():
        assert str(parse(one.backend)) == one.backend
