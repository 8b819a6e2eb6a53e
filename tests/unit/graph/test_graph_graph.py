from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from slurmrl.errors import UsageError
from slurmrl.plan.dataflow import Call, Graph, Method, unread


def call(name: str, inputs: str = "", outputs: str = "") -> Call:
    return Call(
        name, "actor", Method.INFERENCE, "m:C", tuple(inputs.split()), tuple(outputs.split())
    )


PPO = (
    call("generate", "prompts", "ids logp"),
    call("reward", "ids", "rewards"),
    call("reference", "ids", "ref_logp"),
    call("values", "ids", "values"),
    call("actor_train", "ids logp rewards ref_logp values"),
    call("critic_train", "ids rewards values"),
)


def names(calls: tuple[Call, ...]) -> list[str]:
    return [call.name for call in calls]


def test_graph_edges_follow_from_keys() -> None:
    graph = Graph(PPO, ["prompts"])
    assert names(graph.order) == names(PPO)
    assert graph.producers["values"].name == "values"
    assert "prompts" not in graph.producers
    assert names(graph.children(PPO[0])) == names(PPO[1:])
    assert names(graph.parents(PPO[5])) == ["generate", "reward", "values"]


def test_calls_are_sorted_after_their_parents_from_any_order() -> None:
    for shuffled in itertools.permutations(PPO):
        graph = Graph(shuffled, ["prompts"])
        place = {one.name: index for index, one in enumerate(graph.order)}
        assert sorted(place) == sorted(names(PPO))
        for one in graph.order:
            assert all(place[p.name] < place[one.name] for p in graph.parents(one))
        independent = [name for name in names(shuffled) if name in ("reward", "reference")]
        assert [name for name in names(graph.order) if name in independent] == independent


@pytest.mark.parametrize(
    ("calls", "messages"),
    [
        ([call("a"), call("a")], ["two calls are named 'a'"]),
        (
            [call("a", "", "x"), call("b", "", "x")],
            ["key 'x' has 2 producers: call 'a', call 'b'"],
        ),
        ([call("a", "", "data")], ["key 'data' has 2 producers: the dataset, call 'a'"]),
        (
            [call("a", "dta", "x")],
            ["call 'a' reads key 'dta', which nothing produces; did you mean 'data'?"],
        ),
        ([call("a", "x", "x")], ["the calls form a cycle: a -> a"]),
        (
            [call("z", "", "q"), call("a", "y q", "x"), call("b", "x", "y"), call("c", "y")],
            ["the calls form a cycle: a -> b -> a"],
        ),
        (
            [call("a", "no", "x"), call("a", "nor", "x")],
            ["two calls", "key 'x' has 2 producers", "reads key 'no'", "reads key 'nor'"],
        ),
    ],
)
def test_all_invalid_calls_are_reported_at_once_by_name(
    calls: list[Call], messages: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        Graph(calls, ["data"])
    lines = str(caught.value).splitlines()
    assert len(lines) == len(messages)
    for line, message in zip(lines, messages, strict=True):
        assert message in line


GENERATE = Call("gen", "actor", Method.GENERATE, "m:C", ("prompt_ids",), ("ids", "extra"))
JUDGE = Call("judge", None, Method.INFERENCE, "m:C", ("ids",), ("rewards",))
TRAIN = Call("train", "actor", Method.TRAIN_STEP, "m:C", ("ids", "rewards"))


def test_unread_keys_are_reported_with_their_makers() -> None:
    assert unread((GENERATE, JUDGE, TRAIN), "prompt") == ["'extra' of call 'gen' is never read"]
    assert unread((GENERATE, JUDGE), "prompt") == [
        "'extra' of call 'gen' is never read",
        "'rewards' of call 'judge' is never read",
    ]
    assert unread((TRAIN,), "prompt") == ["'prompt_ids' of the dataset is never read"]


def test_built_in_call_may_produce_unread_keys() -> None:
    """The user cannot change this, so there is no warning. An unused call causes a warning."""
    ours = replace(GENERATE, interface="slurmrl.algorithms.rollout_calls:RolloutInterface")
    assert unread((ours, JUDGE, TRAIN), "prompt") == []
    assert unread((ours, JUDGE, TRAIN), "prompt", evaluation=True) == []
    reader = replace(TRAIN, inputs=("prompt_ids",))
    assert unread((ours, reader), "prompt") == [
        "'ids' of call 'gen' is never read",
        "'extra' of call 'gen' is never read",
    ]


def test_evaluation_results_may_stay_unread() -> None:
    assert unread((GENERATE, JUDGE), "prompt", evaluation=True) == [
        "'extra' of call 'gen' is never read"
    ]
