from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.errors import RunFailedError, UsageError
from slurmrl.models.decoder import Decoder
from slurmrl.models.generate import GenerationOptions
from slurmrl.tensors.ops.logprobs import packed_logprobs_and_entropy
from tests.support.generated import GenerationOutput, generate

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


@pytest.mark.parametrize(
    "name",
    [
        "llama-one-kv-head",
        "qwen2-tied",
        "qwen2-windows",
        "qwen3-wide-heads",
        "qwen3-layer-types",
        "mistral",
        "mistral-window-of-one",
        "gemma",
        "mixtral-windows",
        "qwen3_moe",
        "gpt2",
    ],
)
def test_logprobs_are_those_of_the_training_forward(
    name: str, small_decoder: Callable[..., Decoder]
) -> None:
    decoder = small_decoder(name)
    options = GenerationOptions(max_new_tokens=45, temperature=0.8, stop_token_ids=(STOP, 11))
    output = run(decoder, prompts(40), options)
    cu = cu_of(output.lengths)
    hidden = decoder(output.tokens, cu, int(output.lengths.max()))
    logp, _ = packed_logprobs_and_entropy(
        hidden, decoder.head_weight(), output.tokens, cu, temperature=0.8
    )
    new = torch.cat(
        [
            torch.arange(length) >= prompt
            for length, prompt in zip(output.lengths, output.prompt_lengths, strict=True)
        ]
    )
    assert new.sum() > 200
    assert (logp - output.logprobs)[new].abs().max() < 1e-5
    assert torch.all(output.logprobs[~new] == 0)
    assert logp[new].std() > 0.3


@pytest.mark.parametrize(
    "name", ["llama", "qwen2-tied", "qwen3", "mistral", "gemma", "mixtral", "gpt2"]
)
def test_greedy_equals_transformers(name: str, pair: Callable[..., Any]) -> None:
    decoder, reference = pair(name)
    sequences = prompts(12)
    options = GenerationOptions(max_new_tokens=12, greedy=True, stop_token_ids=(STOP,))
    ours = rows(run(decoder, sequences, options))
    compared = 0
    for sequence, (prompt, new) in zip(sequences, ours, strict=True):
        assert prompt == sequence.tolist()
        result = reference.generate(
            sequence[None],
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=STOP,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        expected = result.sequences[0, len(prompt) :].tolist()
        for i, logits in enumerate(result.logits):
            top = logits[0].topk(2).values
            if top[0] - top[1] <= 1e-4:
                break
            assert new[i] == expected[i]
            compared += 1
        else:
            assert new == expected
    assert compared > 60


def test_a_row_does_not_depend_on_its_batch(small_decoder: Callable[..., Decoder]) -> None:
    decoder = small_decoder()
    sequences, options = prompts(30), GenerationOptions(max_new_tokens=20, stop_token_ids=(STOP,))
    together = rows(run(decoder, sequences, options))
    mixed = torch.randperm(30, generator=torch.Generator().manual_seed(0))[:7]
    apart = run(decoder, [sequences[i] for i in mixed], options, keys=mixed)
    assert rows(apart) == [together[i] for i in mixed]


def test_draws_follow_seed_step_and_key(small_decoder: Callable[..., Decoder]) -> None:
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


def test_a_prompt_with_several_keys_is_continued_once_for_each(
    small_decoder: Callable[..., Decoder],
) -> None:
    """The same completions as from copies of the prompt, which is read once."""
    decoder, sequences = small_decoder(), prompts(7)
    options = GenerationOptions(max_new_tokens=12, stop_token_ids=(STOP, 11))
    keys = torch.arange(21)
    copies = [sequence for sequence in sequences for _ in range(3)]
    wanted = run(decoder, copies, options, keys=keys)
    output = run(decoder, sequences, options, keys=keys)
    assert torch.equal(output.tokens, wanted.tokens)
    assert torch.equal(output.lengths, wanted.lengths)
    assert torch.equal(output.prompt_lengths, wanted.prompt_lengths)
    assert torch.equal(output.finished, wanted.finished)
    torch.testing.assert_close(output.logprobs, wanted.logprobs, rtol=1e-5, atol=1e-5)


def test_stop_tokens_end_rows(small_decoder: Callable[..., Decoder]) -> None:
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


def test_no_prompts_and_empty_prompts(small_decoder: Callable[..., Decoder]) -> None:
    decoder, options = small_decoder(), GenerationOptions(max_new_tokens=3)
    none = torch.zeros(0, dtype=torch.int64)
    cu = torch.zeros(1, dtype=torch.int32)
    output = generate(decoder, none, cu, options, seed=0, step=0, keys=none)
    assert output.tokens.shape == output.lengths.shape == (0,)
    with pytest.raises(UsageError, match="empty prompt"):
        run(decoder, [torch.tensor([4]), none], options)


def test_a_diverged_model_is_named(small_decoder: Callable[..., Decoder]) -> None:
    decoder = small_decoder()
    with torch.no_grad():
        decoder.head_weight().fill_(float("nan"))
    for tokens in (1, 3, 20):
        with pytest.raises(RunFailedError, match="not finite"):
            run(decoder, prompts(3), GenerationOptions(max_new_tokens=tokens))


def test_sequences_longer_than_the_positions_are_refused(
    small_decoder: Callable[..., Decoder],
) -> None:
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
        ({"min_new_tokens": 9}, "min_new_tokens must"),
        ({"temperature": 0.0}, "temperature must"),
        ({"top_p": 0.0}, "top_p must"),
        ({"top_k": 0}, "top_k must"),
    ],
)
def test_wrong_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GenerationOptions(**{"max_new_tokens": 8, **changes})
