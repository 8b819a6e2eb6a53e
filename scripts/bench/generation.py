"""Inputs of the rows of generate.py: a model with random weights, and prompts of mixed lengths."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from slurmrl.rollouts.generation.base import GenerationRequest

SIZES: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "medium": {
        "vocab_size": 4096,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
    "0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "1.5b": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}
PROMPTS = (8, 512)
MEAN = 128
LIMIT = 512


class Case(NamedTuple):
    """The case that one process measures."""

    engine: str
    model: str
    requests: int
    n: int
    seed: int
    python: str
    """The interpreter of the engine's environment."""


class Made(NamedTuple):
    """The result of an engine."""

    tokens: int
    read: int | None
    """Number of prompt tokens that the model has prefilled; None if unknown."""


Run = Callable[[Case], Made]
"""Function that generates the completions of a case with a model that is ready."""


def prompts(case: Case) -> list[list[int]]:
    draw = random.Random(case.seed)
    low, high = PROMPTS
    vocabulary = SIZES[case.model]["vocab_size"]
    lengths = [round(low * (high / low) ** draw.random()) for _ in range(case.requests)]
    return [[draw.randrange(MEAN, vocabulary) for _ in range(length)] for length in lengths]


def stops(case: Case) -> list[int]:
    return list(range(SIZES[case.model]["vocab_size"] // MEAN))


def config(case: Case) -> dict[str, Any]:
    return {"model_type": "qwen2", "max_position_embeddings": 2048, **SIZES[case.model]}


def own_decoder(case: Case) -> Any:
    from slurmrl.engines.role_weights import init_tensor
    from slurmrl.models.architecture import ModelConfig
    from slurmrl.models.decoder import build

    decoder = build(ModelConfig.from_hf(config(case)))
    state = {
        name: init_tensor(name, tuple(value.shape), decoder.config, case.seed)
        for name, value in decoder.state_dict().items()
    }
    decoder.load_state_dict(state)
    return decoder.requires_grad_(False)


def reference(case: Case) -> Any:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(case.seed)
    settings = transformers.AutoConfig.for_model(**config(case))
    model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def kv_bytes(case: Case, tokens: int) -> int:
    """Return the bytes of float32 keys and values of all prompts, once each, and of ``tokens``
    completed tokens.
    """
    size = SIZES[case.model]
    head = size["hidden_size"] // size["num_attention_heads"]
    cell = 2 * 4 * size["num_hidden_layers"] * size["num_key_value_heads"] * head
    return cell * (sum(map(len, prompts(case))) + tokens)


def requests(case: Case) -> list[GenerationRequest]:
    from slurmrl.rollouts.generation.base import GenerationOptions, GenerationRequest

    options = GenerationOptions(max_new_tokens=LIMIT, stop_token_ids=tuple(stops(case)))
    return [
        GenerationRequest(
            request_id=f"{case.requests}-{i}",
            prompt=tuple(prompt),
            keys=tuple(range(i * case.n, (i + 1) * case.n)),
            seed=case.seed,
            step=0,
            options=options,
        )
        for i, prompt in enumerate(prompts(case))
    ]
