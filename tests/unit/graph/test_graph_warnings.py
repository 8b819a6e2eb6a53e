from __future__ import annotations

from xml.etree import ElementTree

from slurmrl.graph.call import Call, Method
from slurmrl.graph.picture import edges, levels, picture, text
from slurmrl.graph.warnings import unread
from slurmrl.plan.model import CallPlan

GENERATE = Call("gen", "actor", Method.GENERATE, "m:C", ("prompt_ids",), ("ids", "extra"))
JUDGE = Call("judge", None, Method.INFERENCE, "m:C", ("ids",), ("rewards",))
TRAIN = Call("train", "actor", Method.TRAIN_STEP, "m:C", ("ids", "rewards"))


def planned(call: Call, **changes: object) -> CallPlan:
    values = {
        "name": call.name, "role": call.role, "method": call.method, "interface": call.interface,
        "inputs": call.inputs, "outputs": call.outputs, "ranks": (0,),
    }  # fmt: skip
    return CallPlan.model_validate(values | changes)


def test_keys_that_nobody_reads_are_told_with_their_makers() -> None:
    assert unread((GENERATE, JUDGE, TRAIN), "prompt") == ["'extra' of call 'gen' is read by nobody"]
    assert unread((GENERATE, JUDGE), "prompt") == [
        "'extra' of call 'gen' is read by nobody",
        "'rewards' of call 'judge' is read by nobody",
    ]
    assert unread((TRAIN,), "prompt") == ["'prompt_ids' of the dataset is read by nobody"]


def test_results_of_an_evaluation_need_no_reader() -> None:
    assert unread((GENERATE, JUDGE), "prompt", evaluation=True) == [
        "'extra' of call 'gen' is read by nobody"
    ]


def test_each_call_stands_behind_what_it_needs() -> None:
    calls = [planned(GENERATE), planned(JUDGE), planned(TRAIN)]
    assert levels(calls, ["prompt_ids"]) == {"dataset": 0, "gen": 1, "judge": 2, "train": 3}
    assert edges(calls, ["prompt_ids"]) == [
        ("dataset", "gen", ["prompt_ids"]),
        ("gen", "judge", ["ids"]),
        ("gen", "train", ["ids"]),
        ("judge", "train", ["rewards"]),
    ]


def test_pictures_hold_calls_models_keys_and_hooks() -> None:
    gen = planned(GENERATE, layout="rollout", pre_hooks=("reallocate actor -> rollout",),
                  post_hooks=("offload <rollout>",))  # fmt: skip
    calls = [gen, planned(JUDGE), planned(TRAIN)]
    drawing = picture("a & b", calls, ["prompt_ids"])
    found = {one.text for one in ElementTree.fromstring(drawing).iter() if one.text}
    assert {
        "a & b",
        "gen",
        "rollout: generate",
        "before: reallocate actor -> rollout",
        "after: offload <rollout>",
        "no model: inference",
        "← rewards",
        "→ extra",
    } <= found
    told = text(calls, ["prompt_ids"])
    assert "gen: generate of rollout\n  reallocate actor -> rollout\n  <- prompt_ids" in told
    assert "  then offload <rollout>" in told
    assert "judge: inference of no model" in told
