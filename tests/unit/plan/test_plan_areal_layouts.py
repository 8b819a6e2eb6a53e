"""AReaL's layouts: each row of its table of engines, and its servers."""

from __future__ import annotations

import pytest

from slurmrl.config.allocation import parse
from slurmrl.errors import AllocationError
from slurmrl.plan.engine_rules import rules_of
from tests.unit.plan.conftest import EXPERTS, LARGE, Load

EXPERT_LAYOUTS = ("d2e2", "(attn:d2t2|ffn:d1t2e2)")


@pytest.mark.parametrize(
    ("layout", "runs_as"),
    [
        ("d4", "fsdp:d4"),
        ("d2t2", "fsdp:d2t2"),
        ("d2c2", "fsdp:d2c2"),
        ("d2p1e1", "fsdp:d2"),
        ("d2p2", "megatron:d2p2"),
        ("d2e2", "megatron:d2e2"),
        ("(attn:d2t2|ffn:d1t2e2)", "megatron:(attn:d2t2|ffn:t2e2)"),
    ],
)
def test_archon_layout_is_planned_with_a_note(plan_ppo: Load, layout: str, runs_as: str) -> None:
    architecture = EXPERTS if layout in EXPERT_LAYOUTS else LARGE
    settings = plan_ppo(
        f"actor.backend=archon:{layout}",
        "rollout.backend=native:d2",
        "algorithm.n_minibatches=1",
        architecture=architecture,
    )
    [note] = [note for note in settings.notes if "archon" in note]
    assert note.startswith(f"actor.backend: 'archon:{layout}' runs as {runs_as}")
    assert ("because of p, e or an expert layout" in note) == runs_as.startswith("megatron")
    assert [problem for problem in settings.missing if problem.key == "actor.backend"] == []


@pytest.mark.parametrize(("layout", "runs_as"), [("d4", "fsdp:d4"), ("d2p2", "megatron:d2p2")])
def test_allocation_string_with_archon_has_a_note(
    plan_ppo: Load, layout: str, runs_as: str
) -> None:
    mode = f"allocation_mode=sglang:d2+archon:{layout}"
    settings = plan_ppo('actor.backend=""', mode, "rollout.python=/bin/sh", architecture=LARGE)
    [note] = [note for note in settings.notes if "archon" in note]
    assert f"actor.backend: {runs_as}" in note
    assert "archon runs as megatron with p, e or expert layouts" in note


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("sglang:d1p2", "does not split 'p'; allowed: d, t"),
        ("vllm:d2t2p2", "does not split 'p'; allowed: d, t"),
    ],
)
def test_layout_unsupported_by_the_task_engine_is_rejected(layout: str, message: str) -> None:
    """The message names other engines only for the same task."""
    with pytest.raises(AllocationError) as caught:
        rules_of(parse(layout))
    assert message in str(caught.value)
    assert "megatron" not in str(caught.value)
