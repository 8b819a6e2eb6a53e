"""Generation with models whose cache argument has another name, as in transformers 5.24."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_model import HFModel
from slurmrl.rollouts.generation.base import GenerationOptions
from tests.support.families import tiny
from tests.support.generated import generate


def test_generation_is_unchanged_if_the_cache_argument_is_renamed() -> None:
    config = HFConfig.from_hf(tiny("llama"))
    model = HFModel(config, "lm", source=None, seed=3, dtype=torch.float32)
    ids, ends = torch.arange(1, 9), torch.tensor([0, 3, 8], dtype=torch.int32)
    options = GenerationOptions(max_new_tokens=6, stop_token_ids=())
    asked: dict[str, Any] = {"seed": 1, "step": 2, "keys": torch.arange(2)}
    wanted = generate(model, ids, ends, options, **asked)
    whole, used = model.inner.forward, []

    def forward(**arguments: Any) -> Any:
        cache = arguments.pop("cache", None)
        used.append(cache is not None)
        return whole(past_key_values=cache, **arguments)

    names = inspect.signature(whole).parameters.values()
    renamed = [
        each.replace(name="cache") if each.name == "past_key_values" else each for each in names
    ]
    forward.__signature__ = inspect.Signature(renamed)  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.inner, "forward", forward)
        found = generate(model, ids, ends, options, **asked)
    assert all(used)
    assert torch.equal(found.tokens, wanted.tokens)
    assert torch.equal(found.logprobs, wanted.logprobs)
