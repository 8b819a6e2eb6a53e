from __future__ import annotations

from xml.etree import ElementTree

from slurmrl.display import svg, terminal
from slurmrl.display.terminal import Flow, Legend
from slurmrl.plan.dataflow import Call, Method, document, values
from slurmrl.plan.model import CallPlan, Offloading, Reallocation

GENERATE = Call("gen", "actor", Method.GENERATE, "m:C", ("prompt_ids",), ("ids", "extra"))
JUDGE = Call("judge", None, Method.INFERENCE, "m:C", ("ids",), ("rewards",))
TRAIN = Call("train", "actor", Method.TRAIN_STEP, "m:C", ("ids", "rewards"))

MODELS = {"actor": "fsdp:d2", "critic": "fsdp:d2", "rollout": "native:d2"}


def planned(call: Call, **changes: object) -> CallPlan:
    values = {
        "name": call.name, "role": call.role, "method": call.method, "interface": call.interface,
        "inputs": call.inputs, "outputs": call.outputs, "ranks": (0,),
    }  # fmt: skip
    return CallPlan.model_validate(values | changes)


def test_each_call_is_one_level_after_its_last_dependency() -> None:
    graph = values([planned(GENERATE), planned(JUDGE), planned(TRAIN)], ["prompt_ids"], MODELS)
    assert graph["edges"] == [
        {"from": "dataset", "to": "gen", "keys": ["prompt_ids"]},
        {"from": "gen", "to": "judge", "keys": ["ids"]},
        {"from": "gen", "to": "train", "keys": ["ids"]},
        {"from": "judge", "to": "train", "keys": ["rewards"]},
    ]
    legend, flow = document("graph", graph).blocks
    assert legend == Legend(MODELS), "the order of the plan decides about colors"
    assert isinstance(flow, Flow)
    levels = {node.name: node.level for node in flow.nodes}
    assert levels == {"dataset": 0, "gen": 1, "judge": 2, "train": 3}


def test_text_and_svg_show_calls_models_keys_and_hooks() -> None:
    hook = Reallocation(source="<actor>", target="rollout")
    gen = planned(
        GENERATE, layout="rollout", pre_hooks=(hook,), post_hooks=(Offloading(model="rollout"),)
    )
    calls = [gen, planned(JUDGE), planned(TRAIN)]
    shown = document("a & b", values(calls, ["prompt_ids"], MODELS))
    drawn = {one.text for one in ElementTree.fromstring(svg.render(shown)).iter() if one.text}
    assert {
        "a & b",
        "gen",
        "generate of rollout",
        "before: reallocate <actor> -> rollout",
        "after: offload rollout",
        "inference, no model",
        "← rewards",
        "→ extra",
    } <= drawn
    printed = terminal.as_text(shown)
    assert (
        "gen: generate of rollout\n"
        "  before: reallocate <actor> -> rollout\n"
        "  <- prompt_ids (dataset)\n"
    ) in printed
    assert "  after: offload rollout\n" in printed
    assert "judge: inference, no model" in printed
