"""Settings and gradients account for the policy that sampled the tokens."""

from __future__ import annotations

from random import Random
from typing import Any, cast

import pytest
import torch

from slurmrl.algorithms.policy.presets import PRESETS
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.config.schema import Config, Model, Rollout
from tests.support.policy_batches import Batch
from tests.support.policy_updates import ActorStep
from tests.unit.algorithms.test_algorithms_schema import config
from tests.unit.algorithms.test_algorithms_whole_steps import LIMIT, LR, VOCABULARY, Case

STALE = {"tasks": {"max_staleness": 1}}
SERVER = {"backend": "sglang:d1", "gpus": "0", "python": "/bin/sh"}
BFLOAT16_SERVER = {**SERVER, "server_args": ["--dtype", "bfloat16"]}
OTHERS = {"backend": "sglang:d1", "servers": ["http://host:1"]}


def configured(dtype: str, rollout: dict[str, Any]) -> Config:
    update = {
        "actor": Model.model_validate({"dtype": dtype}),
        "rollout": Rollout.model_validate(rollout),
    }
    return config().model_copy(update=update)


def settled(dtype: str, rollout: dict[str, Any], **options: Any) -> tuple[bool | None, str | None]:
    algorithm = PolicyGradient(batch_size=8, **options).completed(configured(dtype, rollout))
    return algorithm.recompute_logprobs, algorithm.correction


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "ppo"])
def test_gradient_equals_the_paper_with_stale_completions(name: str) -> None:
    """Completions come from another policy; ratios and masks are relative to that policy."""
    options: dict[str, Any] = {"name": name, "kl": {"coef": 0.0}, "n_minibatches": 1}
    chosen = PolicyGradient(batch_size=8, **options).completed(configured("bfloat16", STALE))
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
    rollout = Rollout(max_new_tokens=LIMIT)
    batch = Batch.draw(chosen, Random(name), table, rollout.temperature, LIMIT)
    parts = [list(range(len(batch.prompts)))]
    case = Case(chosen, batch, rollout, {"actor": table}, {"kl_coef": 0.0}, parts, [1000])
    (result,) = case.run()
    reference = case.reference()
    reference.recomputes = False
    paper = ActorStep(reference, table.clone().requires_grad_(), LR, False)
    paper.run([batch.prompts])
    found, wanted = result.tables["actor"] - table, paper.table.detach() - table
    assert float(wanted.norm()) > 0
    cosine = torch.cosine_similarity(found.flatten(), wanted.flatten(), dim=0)
    assert float(cosine) == pytest.approx(1.0, abs=1e-9)
    assert result.stats["mismatch/kl"] > 0.01


@pytest.mark.parametrize(
    ("dtype", "rollout", "options", "expected"),
    [
        ("float32", {}, {}, (False, "none")),
        ("bfloat16", {}, {}, (True, "none")),
        ("bfloat16", {"tasks": {"max_staleness": 0}}, {}, (True, "none")),
        ("bfloat16", STALE, {}, (False, "none")),
        ("float32", STALE, {}, (False, "none")),
        ("bfloat16", STALE, {"correction": "none"}, (False, "none")),  # of an earlier release
        ("bfloat16", STALE, {"correction": "weight"}, (True, "weight")),
        ("bfloat16", STALE, {"recompute_logprobs": True}, (True, "truncate")),
        ("float32", {}, {"reject_by": "k3", "reject_upper": 1.0}, (True, "none")),
        ("bfloat16", STALE, {"reject_by": "k3", "reject_upper": 1.0}, (True, "truncate")),
        ("float32", BFLOAT16_SERVER, {}, (True, "truncate")),
        ("float32", BFLOAT16_SERVER, {"correction": "none"}, (False, "none")),
        ("bfloat16", BFLOAT16_SERVER, {}, (True, "none")),
        ("float32", {**BFLOAT16_SERVER, **STALE}, {}, (False, "none")),
        ("float32", OTHERS, {}, (True, "truncate")),
        ("float32", OTHERS, {"recompute_logprobs": False}, (False, "none")),
        (
            "bfloat16",
            STALE,
            {"recompute_logprobs": True, "correction": "none"},
            (True, "none"),
        ),
    ],
)
def test_recomputation_and_correction_follow_staleness_and_precision(
    dtype: str, rollout: dict[str, Any], options: dict[str, Any], expected: tuple[bool, str]
) -> None:
    assert settled(dtype, rollout, **options) == expected


def test_training_reads_generation_logprobs_only_if_used() -> None:
    kept, recomputed = (
        {call.name: call for call in PolicyGradient(batch_size=8).calls(configured(*each))}
        for each in [("bfloat16", STALE), ("float32", BFLOAT16_SERVER)]
    )
    assert "actor_inf" not in kept
    assert "logprobs" in kept["actor_train"].inputs
    assert {"old_logprobs", "logprobs"} <= set(recomputed["actor_train"].inputs)
    assert "correction_weight" in recomputed["actor_train"].metrics


@pytest.mark.parametrize(
    ("dtype", "rollout", "options", "parts"),
    [
        ("float32", {}, {}, ()),
        ("bfloat16", {}, {}, ()),
        (
            "bfloat16",
            STALE,
            {},
            ("recompute_logprobs false", "1 step old (rollout.tasks.max_staleness)"),
        ),
        (
            "float32",
            BFLOAT16_SERVER,
            {},
            ("correction truncate", "bfloat16 (rollout.server_args --dtype)", "actor.dtype"),
        ),
        (
            "float32",
            {"tasks": {"max_staleness": 4}},
            {"recompute_logprobs": True, "correction": "none"},
            ("wrong gradients", "4 steps old", "set algorithm.correction"),
        ),
    ],
)
def test_notes_name_chosen_settings_and_the_reason(
    dtype: str, rollout: dict[str, Any], options: dict[str, Any], parts: tuple[str, ...]
) -> None:
    algorithm = PolicyGradient(batch_size=8, **options)
    found = list(algorithm.notes(configured(dtype, rollout)))
    assert len(found) == bool(parts)
    assert all(part in note for note in found for part in parts)


def test_resumed_configuration_keeps_automatic_choices() -> None:
    algorithm = PolicyGradient(batch_size=8).completed(configured("bfloat16", STALE))
    values = cast(Any, algorithm).model_dump(mode="json")
    again = PolicyGradient.model_validate(values)
    assert again.completed(configured("bfloat16", {})) == again
