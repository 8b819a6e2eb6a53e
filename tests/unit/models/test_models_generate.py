from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.errors import UsageError
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.decoder import Decoder, build
from slurmrl.models.inference import packs
from slurmrl.rollouts.generation.base import GenerationOptions
from slurmrl.tensors.ops.native.loading import for_floats
from tests.support.generated import GenerationOutput, generate
from tests.unit.models.conftest import small_decoder

STOP = 3


def prompts(count: int, longest: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(4, 37, (n,), generator=generator) for n in lengths]


def cu_of(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def run(
    decoder: Decoder, sequences: list[Tensor], options: GenerationOptions, **changes: Any
) -> GenerationOutput:
    keys = changes.pop("keys", torch.arange(len(sequences)))
    cu = cu_of(torch.tensor([len(sequence) for sequence in sequences]))
    arguments = {"seed": 1, "step": 2, "keys": keys, **changes}
    return generate(decoder, torch.cat(sequences), cu, options, **arguments)


def rows(output: GenerationOutput) -> list[tuple[list[int], list[int]]]:
    """(prompt, new tokens) of every row."""
    parts = output.tokens.split(output.lengths.tolist())
    return [
        (part[:n].tolist(), part[n:].tolist())
        for part, n in zip(parts, output.prompt_lengths.tolist(), strict=True)
    ]


def test_samples_depend_on_seed_step_and_key() -> None:
    decoder, sequences = small_decoder(), [torch.tensor([7, 8, 9])] * 4
    options = GenerationOptions(max_new_tokens=8)
    keys = torch.tensor([5, 6, 5, 7])
    new = [tokens for _, tokens in rows(run(decoder, sequences, options, keys=keys))]
    assert new[0] == new[2]
    assert new[0] != new[1] != new[3]
    again = [tokens for _, tokens in rows(run(decoder, sequences, options, keys=keys, step=3))]
    assert new[0] != again[0]
    other = [tokens for _, tokens in rows(run(decoder, sequences, options, keys=keys, seed=9))]
    assert new[0] != other[0]


def test_stop_tokens_end_rows() -> None:
    options = GenerationOptions(max_new_tokens=15, min_new_tokens=4, stop_token_ids=(STOP, 4, 5))
    output = run(small_decoder(), prompts(60), options)
    ended = 0
    for (_, new), finished in zip(rows(output), output.finished.tolist(), strict=True):
        assert not set(new[:-1]) & {STOP, 4, 5}
        assert (new[-1] in (STOP, 4, 5)) == finished
        assert finished or len(new) == 15
        assert len(new) > 4
        ended += finished
    assert 0 < ended < 60


def test_sequences_longer_than_the_positions_are_rejected() -> None:
    for name in ("gpt2", "llama-dynamic-rope"):
        decoder = small_decoder(name)
        run(decoder, [torch.arange(4)], GenerationOptions(max_new_tokens=60))
        with pytest.raises(UsageError, match=r"of 65 tokens .* positions for 64"):
            run(decoder, [torch.arange(5)], GenerationOptions(max_new_tokens=60))
        with pytest.raises(UsageError, match="of 65 tokens"):
            decoder(torch.zeros(65, dtype=torch.int64), torch.tensor([0, 65]).int(), 65)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must"),
        ({"min_new_tokens": 9}, "min_new_tokens exceeds"),
        ({"temperature": 0.0}, "temperature must"),
        ({"top_p": 0.0}, "top_p must"),
        ({"top_k": 0}, "top_k must"),
    ],
)
def test_wrong_generation_options_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GenerationOptions(**{"max_new_tokens": 8, **changes})


@pytest.mark.skipif(for_floats(torch.zeros(1)) is None, reason="products are not compiled here")
@pytest.mark.parametrize(("layers", "copied"), [(30, True), (90, False)])
def test_weights_of_pretrained_models_are_copied_up_to_a_limit(layers: int, copied: bool) -> None:
    """The sizes equal the sizes of SmolLM2-135M. The memory is never touched."""
    sizes = {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": layers}
    config = {"model_type": "llama", "tie_word_embeddings": True, **sizes, **heads}
    with torch.device("meta"):
        decoder = build(ModelConfig.from_hf(config))
    assert packs(decoder.to_empty(device="cpu")) is copied
