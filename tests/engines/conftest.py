"""A small model in two versions, requests, and waits, for tests of all kinds of servers."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import (
    GenerationOptions,
    GenerationRequest,
    RolloutEngine,
    WeightVersion,
)
from slurmrl.rollouts.generation.server_instance import Patience

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
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
DEADLINE_S = 300.0
"""For one test, the start of a server not included."""
START_S = 600.0
"""For a server to start beside other tests: it takes a minute of CPU time, in which it compiles."""
ENVIRONMENT_S = 1000.0
"""For an environment that is not cached to be made, mostly by loading gigabytes."""
PROVIDE = Path(__file__).parents[2] / "scripts" / "test-engines"
PATIENCE = Patience(start_s=START_S, silence_s=20.0, probe_s=1.0, stable_s=0.01)
"""The silence suits a machine on which four test processes share two cores. However often tests end
a server, it is not given up, unless it does not start."""
PROMPT = (5, 6, 7, 8, 9)
EXACT = 1e-4
NUMBERS = itertools.count()


class Loop:
    """One asyncio loop for all tests of a server, whose clients belong to it."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, T], deadline_s: float = DEADLINE_S) -> T:
        return self._runner.run(asyncio.wait_for(work, deadline_s))

    def close(self) -> None:
        self._runner.close()


class SharedServer(ABC):
    """A server and its engine, which the tests of a file share."""

    engine: RolloutEngine

    def __init__(self, loop: Loop, versions: dict[str, Path]) -> None:
        self.loop, self.versions = loop, versions
        self._usable = True

    def version(self, name: str) -> WeightVersion:
        return WeightVersion(name=name, folder=self.versions[name])

    def start_anew(self) -> None:
        """Serve the first version, regardless of the previous test. If this has failed once, later
        tests fail immediately.
        """
        usable, self._usable = self._usable, False
        assert usable, "the server was lost in an earlier test"
        self.loop.run(self._reset(), deadline_s=START_S)
        self._usable = True

    async def _reset(self) -> None:
        await self.engine.resume()
        await self.engine.update_weights(self.version("1.1"))

    @abstractmethod
    def close(self) -> None:
        """End the server in any state."""


async def until(what: str, check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 0.9 * START_S
    while not check():
        assert time.monotonic() < deadline, f"waited {0.9 * START_S:.0f} s for {what}"
        await asyncio.sleep(0.05)


async def midway(attempt: Callable[[float], Awaitable[T | None]]) -> T:
    """Repeat ``attempt`` with other delays (in seconds) until it acts during a request. Return its
    result.
    """
    for delay_s in 4 * (0.1, 0.3, 0.03, 1.0, 0.01):
        result = await attempt(delay_s)
        if result is not None:
            return result
    raise AssertionError("no attempt came in the middle of a request")


def request(
    prompt: Sequence[int] = PROMPT,
    n: int = 1,
    max_new_tokens: int = 16,
    pictures: str = "",
    **options: Any,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"r{next(NUMBERS)}",
        prompt=tuple(prompt),
        keys=tuple(range(n)),
        seed=3,
        step=1,
        options=GenerationOptions(max_new_tokens=max_new_tokens, **options),
        pictures=pictures,
    )


@pytest.fixture(scope="session", autouse=True)
def environments() -> None:
    """Make the missing environments that scripts/test-engines --variables names, in parallel.
    Meanwhile other files are tested, because loading packages takes minutes.
    """
    missing = {
        name: python
        for name in ("SGLANG_PYTHON", "VLLM_PYTHON")
        if (python := os.environ.get(name)) and not Path(python).is_file()
    }
    environ = {name: value for name, value in os.environ.items() if name not in missing}
    makers = [
        subprocess.Popen(
            [str(PROVIDE), "--python", name.partition("_")[0].lower(), "--version"],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in missing
    ]
    for maker, (name, python) in zip(makers, missing.items(), strict=True):
        said, _ = maker.communicate(timeout=ENVIRONMENT_S)
        assert maker.returncode == 0, said
        assert Path(python).is_file(), f"{name}: there is no {python}"


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def save_versions(folder: Path, make: Callable[[], PreTrainedModel]) -> dict[str, Path]:
    """Checkpoints of two versions of a model, whose weights are random."""
    for seed, name in ((1, "1.1"), (2, "2.1")):
        model = make()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                draw = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.3 * draw + (1.0 if parameter.dim() == 1 else 0.0))
        model.save_pretrained(folder / name)
        (folder / name / "generation_config.json").unlink()
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of two versions of the model."""
    folder = tmp_path_factory.mktemp("versions")
    return save_versions(folder, lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of letters and nearly all pairs of letters, so most strings have several
    tokenizations.
    """
    letters = [chr(ord("a") + number) for number in range(11)]
    pairs = list(itertools.product(letters, repeat=2))[: VOCABULARY - len(letters)]
    vocabulary = {text: number for number, text in enumerate([*letters, *map("".join, pairs)])}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=model)


@torch.no_grad()
def logprobs(folder: Path, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return transformers' log-probabilities [T - 1, V] of the token after each token except the
    last.
    """
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(torch.tensor([tokens])).logits[0, :-1].float()
    return (logits / temperature).log_softmax(-1)


@torch.no_grad()
def stale_logprobs(before: Path, after: Path, tokens: list[int], cached: int) -> torch.Tensor:
    """Like `logprobs` of ``after``, with keys and values of the first ``cached`` tokens from
    ``before``.
    """
    old, new = (
        Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (before, after)
    )
    past = old(torch.tensor([tokens[:cached]]), use_cache=True).past_key_values
    logits = new(torch.tensor([tokens[cached:]]), past_key_values=past).logits[0, :-1].float()
    return logits.log_softmax(-1)


async def over_an_update(engine: RolloutEngine, versions: dict[str, Path]) -> list[Completion]:
    """Return a completion that versions 1.1 and 2.1 have sampled, and a completion by 2.1 whose
    prompt is the beginning of the first.
    """

    async def attempt(delay_s: float) -> Completion | None:
        number = next(NUMBERS)  # each version of a run has another name
        first, second = (
            WeightVersion(name=f"{number}-{name}", folder=versions[name]) for name in ("1.1", "2.1")
        )
        await engine.update_weights(first)
        future = engine.submit(request(max_new_tokens=200, greedy=True))
        await asyncio.sleep(delay_s)
        await engine.update_weights(second)
        (made,) = await future
        return made if len(set(made.versions)) == 2 else None

    made = await midway(attempt)
    prompt = [*PROMPT, *made.tokens[:150]]
    (later,) = await engine.submit(request(prompt, greedy=True))
    return [
        replace(each, versions=tuple(name.partition("-")[2] for name in each.versions))
        for each in (made, later)
    ]


def check_stale_cache(versions: dict[str, Path], made: Completion, later: Completion) -> None:
    """Check that tokens after the update come from new weights with old keys and values, and that
    later requests do not reuse these.
    """
    tokens, drawn = [*PROMPT, *made.tokens], torch.tensor(made.logprobs)
    switch = made.versions.index("2.1")
    assert made.versions == ("1.1",) * switch + ("2.1",) * (len(made.tokens) - switch)
    last = len(PROMPT) + switch - 1  # the newest token is read with the next one
    old, new = (logprobs(versions[name], tokens) for name in ("1.1", "2.1"))
    mixed = stale_logprobs(versions["1.1"], versions["2.1"], tokens, last)
    expected = torch.cat([old[len(PROMPT) - 1 : last], mixed]).max(-1)
    assert expected.indices.tolist() == list(made.tokens)
    assert (expected.values - drawn).abs().max() < EXACT
    anew = new[last:].gather(-1, torch.tensor(made.tokens)[switch:, None]).squeeze(-1)
    assert (anew - drawn[switch:]).abs().max() > 100 * EXACT
    prompt = [*PROMPT, *made.tokens[:150]]
    values = logprobs(versions["2.1"], [*prompt, *later.tokens])[len(prompt) - 1 :].max(-1)
    assert set(later.versions) == {"2.1"}
    assert values.indices.tolist() == list(later.tokens)
    assert (values.values - torch.tensor(later.logprobs)).abs().max() < EXACT
