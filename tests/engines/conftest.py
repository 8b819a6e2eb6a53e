"""A small model in two versions, for servers of any kind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

T = TypeVar("T")
VOCABULARY = 128
CONTEXT = 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # heads of 32: the least that vLLM has on CPUs
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
DEADLINE_S = 300.0


class Loop:
    """One asyncio loop for all tests of a server, whose clients belong to it."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(asyncio.wait_for(work, DEADLINE_S))

    def close(self) -> None:
        self._runner.close()


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of two versions of the model."""
    folder = tmp_path_factory.mktemp("versions")
    for seed, name in ((1, "1.1"), (2, "2.1")):
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                draw = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.3 * draw + (1.0 if parameter.dim() == 1 else 0.0))
        model.save_pretrained(folder / name)
        (folder / name / "generation_config.json").unlink()
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Its tokens are letters and pairs of letters, so most texts have several spellings."""
    letters = [chr(ord("a") + number) for number in range(26)]
    pairs = [(first, second) for first in letters[:10] for second in letters]
    pairs = pairs[: VOCABULARY - len(letters)]
    vocabulary = {text: number for number, text in enumerate([*letters, *map("".join, pairs)])}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=model)


@torch.no_grad()
def logprobs(folder: Path, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[T - 1, V] transformers' log-probabilities of what follows each token but the last."""
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(torch.tensor([tokens])).logits[0, :-1].float()
    return (logits / temperature).log_softmax(-1)
