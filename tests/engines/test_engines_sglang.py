"""A real SGLang server that computes with torch on a CPU, with shims for torchvision's operators
and for the rotary embedding: routes, scheduling, updates of weights, life and death."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from slurmrl.config.servers import Address
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.models.generate import GenerationOptions
from slurmrl.rollouts.generation.base import Completion, GenerationRequest, WeightVersion
from slurmrl.rollouts.generation.dialect import Draw
from slurmrl.rollouts.generation.fitness import ServedModel
from slurmrl.rollouts.generation.http import HttpClient
from slurmrl.rollouts.generation.sglang import SglangDialect
from slurmrl.rollouts.generation.sglang_checksums import on_gpu
from slurmrl.rollouts.generation.weight_checks import WeightChecks
from tests.engines.conftest import (
    CONTEXT,
    DEADLINE_S,
    EXACT,
    PROMPT,
    START_S,
    VOCABULARY,
    Loop,
    check_stale_cache,
    logprobs,
    midway,
    request,
)
from tests.engines.served_sglang import Served, check, dialect, with_a_stale_cache
from tests.support.servers import load_once

PYTHON = os.environ.get("SGLANG_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="no SGLang: run scripts/test-engines")


@pytest.fixture(scope="module")
def server(
    loop: Loop,
    versions: dict[str, Path],
    tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    logs = tmp_path_factory.mktemp("logs")
    with closing(Served(PYTHON, loop, versions, tokenizer, logs)) as made:
        yield made


@pytest.fixture
def served(server: Served) -> Served:
    server.start_anew()
    return server


def test_a_server_with_another_vocabulary_is_refused(served: Served) -> None:
    """The server says nowhere how large its vocabulary is."""

    async def connect(vocabulary: int) -> None:
        client = HttpClient(Address(f"unix:{served.socket}"))
        try:
            await dialect(client, vocabulary).connect()
        finally:
            await client.close()

    for size in (VOCABULARY - 1, VOCABULARY + 1):
        with pytest.raises(UsageError, match=f"does not have a vocabulary of {size} token ids"):
            served.loop.run(connect(size))


CHECK_BODIES = """
import json, sys
from pydantic import TypeAdapter
from sglang.srt.managers import io_struct
from sglang.srt.sampling.sampling_params import SamplingParams
classes = {
    "/generate": "GenerateReqInput",
    "/abort_request": "AbortReq",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/weights_checker": "CheckWeightsReqInput",
    "/flush_cache": "FlushCacheReqInput",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
for path, body in json.load(sys.stdin):
    path, _, query = path.partition("?")
    assert query in ("", "timeout=30"), query
    kind = getattr(io_struct, classes[path])
    known = getattr(kind, "__struct_fields__", None) or kind.__dataclass_fields__
    unknown = set(body) - set(known)
    TypeAdapter(kind).validate_python(body)
    if path == "/generate":
        unknown |= set(body["sampling_params"]) - set(SamplingParams.__struct_fields__)
        SamplingParams(**body["sampling_params"]).verify(128)
    assert not unknown, (path, unknown)
    print(path)
"""


class Recorder(HttpClient):
    """Answers what a dialect needs, and keeps what it asks."""

    def __init__(self) -> None:
        super().__init__(Address("unix:/nowhere"))
        self.bodies: list[tuple[str, object]] = []
        self.version = "1.0"

    async def get(self, path: str, *, timeout_s: float) -> object:
        return {
            "version": "0.5.20",
            "enable_custom_logit_processor": False,
            "device": "cuda",
            "max_req_input_len": 100,
            "weight_version": self.version,
            "architectures": ["Qwen2ForCausalLM"],
            "model_path": "/none",
        }

    async def post(self, path: str, body: object = None, **_: object) -> object:
        if "logit_bias" in str(body) and str(VOCABULARY) in str(body):
            raise UsageError("logit_bias")
        value: Any = body
        self.bodies.append((path, value))
        self.version = value.get("new_version") or value.get("weight_version") or self.version
        meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": []}
        meta["output_token_sampling_logprobs"] = []  # type: ignore[assignment]
        answer = {"output_ids": [], "text": "", "meta_info": meta}
        return {**answer, "success": True, "ranks": []}


def test_bodies_are_those_of_sglangs_own_classes(versions: dict[str, Path]) -> None:
    """Every field that is sent has a name and a value that this version of SGLang knows; it ignores
    fields with other names."""

    async def work() -> list[tuple[str, object]]:
        client = Recorder()
        speaker = dialect(client)
        await speaker.connect()
        for options in (
            {"top_k": 3, "stop_token_ids": (2,), "min_new_tokens": 1, "stop_strings": ("a", "b")},
            {"greedy": True},
            {"top_p": 0.5, "temperature": 0.3},
        ):
            settings = GenerationOptions(max_new_tokens=4, **options)  # type: ignore[arg-type]
            draw = Draw(name="n", prompt=(1, 2), seed=2**63 - 1, options=settings, priority=-1)
            await speaker.draw(draw)
        await speaker.abort("n")
        await speaker.pause()
        await speaker.load(WeightVersion(name="1.1", folder=versions["1.1"]))
        await speaker.resume()
        await speaker.sleep()
        await speaker.wake()
        return client.bodies

    bodies = asyncio.run(work())
    done = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", CHECK_BODIES],
        input=json.dumps(bodies),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(set(done.stdout.split())) == 9


def test_log_probabilities_are_those_of_transformers(
    served: Served, tokenizer: PreTrainedTokenizerFast
) -> None:
    """At a temperature, with a version for each token. Token ids are kept as they were sampled,
    also where their text has another spelling."""
    asked = request(n=3, temperature=0.7)
    completions = served.loop.run(_one(served, asked))
    assert len({made.tokens for made in completions}) > 1
    texts = [tokenizer.decode(made.tokens) for made in completions]
    assert any(
        tokenizer.encode(text) != list(made.tokens)
        for text, made in zip(texts, completions, strict=True)
    )
    for made in completions:
        assert len(made.tokens) == 16
        assert set(made.versions) == {"1.1"}
        assert made.finish == "length"
        check(served.versions["1.1"], PROMPT, made, 0.7)


async def _load_for(
    served: Served, checks: WeightChecks, read: Path, version: WeightVersion
) -> None:
    """Have the server read another folder than that of the version that it is to load."""
    client = HttpClient(Address(f"unix:{served.socket}"))
    post = client.post

    async def astray(path: str, body: Any = None, **options: Any) -> object:
        if path == "/update_weights_from_disk":
            body = {**body, "model_path": str(read)}
        return await post(path, body, **options)

    client.post = astray  # type: ignore[method-assign]
    model = ServedModel(architecture="Qwen2ForCausalLM", vocabulary=VOCABULARY)
    await load_once(SglangDialect(client, model=model, checks=checks), version)


def test_a_server_whose_weights_are_not_those_of_its_version_is_found(
    served: Served, tmp_path: Path
) -> None:
    """It reports the version of weights of which it has one other tensor, or does not have one. The
    checksums of the weights that it ought to have are those of their files."""
    wrong, part = tmp_path / "wrong", tmp_path / "part"
    version = served.version("2.1")
    assert version.folder is not None
    for folder in (wrong, part):
        shutil.copytree(version.folder, folder)
    tensors = load_file(version.folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    other = tensors.pop(name)
    save_file(tensors, part / "model.safetensors", {"format": "pt"})
    tensors[name] = other.roll(1)
    save_file(tensors, wrong / "model.safetensors", {"format": "pt"})
    checks = WeightChecks()
    before = served.version("1.1")
    for folder in (part, wrong):  # after 1.1 the part has its own tensor
        served.loop.run(_load_for(served, checks, served.versions["1.1"], before))
        with pytest.raises(RunFailedError, match=rf"2\.1: 1 of 17 parameters .*\({name}\)"):
            served.loop.run(_load_for(served, checks, folder, version))
    served.loop.run(_load_for(served, checks, served.versions["1.1"], before))


RUN_KERNEL = """
import importlib.util, json, sys
from pathlib import Path
import torch
found = importlib.util.find_spec("sglang")
path = Path(found.submodule_search_locations[0]) / "kernels/ops/memory/gpu_tensor_hash.py"
spec = importlib.util.spec_from_file_location("gpu_tensor_hash", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for words in json.load(sys.stdin):
    tensor = torch.tensor(words, dtype=torch.bfloat16)
    print(f"{module.gpu_tensor_hash(tensor, use_cg=False):016x}")
"""


def test_checksums_of_gpus_are_those_of_sglangs_kernel() -> None:
    """Triton interprets SGLang's kernel on a CPU; -O takes out that it asks for a GPU."""
    contents = [[0.5, -3.0, 7.0], [float(number % 251) for number in range(16_390)]]
    done = subprocess.run(
        [PYTHON, "-O", "-c", RUN_KERNEL],
        input=json.dumps(contents),
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    tensors = (torch.tensor(each, dtype=torch.bfloat16) for each in contents)
    assert done.stdout.split() == [on_gpu(tensor, torch.device("cpu")) for tensor in tensors]


async def _one(served: Served, asked: GenerationRequest) -> tuple[Completion, ...]:
    return await served.engine.submit(asked)


def test_restricted_draws_have_the_log_probabilities_of_what_they_were_drawn_from(
    served: Served,
) -> None:
    """With top-k or top-p they are those of the restricted distribution, which the completion has
    where it is asked for."""
    folder = served.versions["1.1"]
    for options in ({"top_k": 4}, {"top_p": 0.6}, {"top_k": 4, "support": True}):
        (made,) = served.loop.run(_one(served, request(**options)))
        values = logprobs(folder, [*PROMPT, *made.tokens])[len(PROMPT) - 1 :]
        supports = made.support.cut([1] * len(made.tokens)) if made.support else []
        assert len(supports) == (len(made.tokens) if "support" in options else 0)
        for place, (row, token, logprob) in enumerate(
            zip(values, made.tokens, made.logprobs, strict=True)
        ):
            ordered, order = row.exp().sort(descending=True)
            if "top_k" in options:
                kept = torch.arange(VOCABULARY) < 4
            else:
                kept = ordered.cumsum(0) - ordered < 0.6
            assert token in order[kept]
            if supports:
                assert list(supports[place].ids) == sorted(order[kept].tolist())
            expected = row[token] - ordered[kept].sum().log()
            assert abs(float(expected) - logprob) < EXACT


def test_greedy_and_stop_tokens(served: Served) -> None:
    """The most likely tokens; a stop token ends a completion and belongs to it, not before the
    minimum."""
    (greedy,) = served.loop.run(_one(served, request(greedy=True)))
    values = logprobs(served.versions["1.1"], [*PROMPT, *greedy.tokens])[len(PROMPT) - 1 :]
    assert greedy.tokens == tuple(values.argmax(-1).tolist())
    stop = greedy.tokens[2]
    (made,) = served.loop.run(_one(served, request(greedy=True, stop_token_ids=(stop,))))
    first = greedy.tokens.index(stop)
    assert made.tokens == greedy.tokens[: first + 1]
    assert made.finish == "stop"
    later = request(greedy=True, stop_token_ids=(stop,), min_new_tokens=8)
    (made,) = served.loop.run(_one(served, later))
    assert stop not in made.tokens[:8]


def test_stop_strings_end_a_completion_across_tokens(
    served: Served, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The token that completes the text is the last one."""
    (made,) = served.loop.run(_one(served, request(greedy=True)))
    words = [tokenizer.decode([token]) for token in made.tokens]
    stop = words[6][-1] + words[7][0]
    end = next(count for count in range(16) if stop in "".join(words[: count + 1]))
    (stopped,) = served.loop.run(_one(served, request(greedy=True, stop_strings=(stop,))))
    assert stopped.tokens == made.tokens[: end + 1]
    assert stopped.finish == "stop"


def test_an_update_in_flight_continues_with_the_new_weights(served: Served) -> None:
    """Tokens before an update keep their version and log-probabilities, those after it have the
    new ones."""

    async def attempt(delay_s: float) -> Completion | None:
        future = served.engine.submit(request(max_new_tokens=200, greedy=True))
        await asyncio.sleep(delay_s)
        await served.engine.update_weights(served.version("2.1"))
        assert served.engine.version == "2.1"
        (made,) = await future
        await served.engine.update_weights(served.version("1.1"))
        return made if len(set(made.versions)) == 2 else None

    made = served.loop.run(midway(attempt))
    assert len(made.tokens) == 200
    switch = made.versions.index("2.1")
    assert set(made.versions[:switch]) == {"1.1"}
    assert set(made.versions[switch:]) == {"2.1"}
    for version, part in (("1.1", slice(0, switch)), ("2.1", slice(switch, None))):
        values = logprobs(served.versions[version], [*PROMPT, *made.tokens])[len(PROMPT) - 1 :]
        expected = values.gather(-1, torch.tensor(made.tokens)[:, None]).squeeze(-1)
        assert (expected - torch.tensor(made.logprobs)).abs()[part].max() < EXACT
        assert values.argmax(-1).tolist()[part] == list(made.tokens[part])


def test_with_a_stale_cache_requests_go_on_with_what_older_weights_have_computed(
    served: Served,
) -> None:
    made, later = served.loop.run(with_a_stale_cache(served))
    check_stale_cache(served.versions, made, later)


def test_a_paused_request_waits_and_ends_as_if_it_had_not(served: Served) -> None:
    async def attempt(delay_s: float) -> Completion | None:
        future = served.engine.submit(request(max_new_tokens=200, greedy=True))
        await asyncio.sleep(delay_s)
        await served.engine.pause()
        ended = future.done()
        await asyncio.sleep(0.5)
        assert future.done() == ended
        await served.engine.resume()
        (made,) = await future
        return None if ended else made

    async def work() -> None:
        (whole,) = await served.engine.submit(request(max_new_tokens=200, greedy=True))
        assert (await midway(attempt)).tokens == whole.tokens

    served.loop.run(work())


def test_an_aborted_request_returns_what_was_drawn(served: Served) -> None:
    async def attempt(delay_s: float) -> Completion | None:
        asked = request(max_new_tokens=200, greedy=True)
        future = served.engine.submit(asked)
        await asyncio.sleep(delay_s)
        served.engine.abort(asked.request_id)
        served.engine.abort("unknown")
        (made,) = await future
        return made if made.finish == "aborted" and made.tokens else None

    async def work() -> None:
        (whole,) = await served.engine.submit(request(max_new_tokens=200, greedy=True))
        made = await midway(attempt)
        assert len(made.tokens) < 200
        assert made.tokens == whole.tokens[: len(made.tokens)]

    served.loop.run(work())


def test_prompts_longer_than_the_context_are_refused_and_completions_end_at_it(
    served: Served,
) -> None:
    with pytest.raises(UsageError, match="leaves no room"):
        served.loop.run(_one(served, request(prompt=(7,) * CONTEXT)))
    (made,) = served.loop.run(_one(served, request(prompt=(7,) * 240, max_new_tokens=200)))
    assert made.finish == "length"
    assert 0 < len(made.tokens) <= CONTEXT - 240


def test_four_thousand_requests_at_once_and_64_completions_of_a_prompt(served: Served) -> None:
    """All are answered; every completion of a prompt has a random stream of its own."""

    async def work() -> list[tuple[Completion, ...]]:
        many = [request((number % 100 + 1,), max_new_tokens=1) for number in range(4000)]
        several = request(n=64, max_new_tokens=4)
        return await asyncio.gather(*map(served.engine.submit, (*many, several)))

    *many, several = served.loop.run(work())
    assert all(len(made.tokens) == 1 for (made,) in many)
    assert len(several) == 64
    assert len({made.tokens for made in several}) > 32


def test_updates_every_100_ms_do_not_stop_requests(served: Served) -> None:
    """Each token has the log-probability of the weights that it names, however many versions have
    drawn a completion. That a stop string may end it does not make it begin again."""

    async def work() -> list[Completion]:
        futures: list[asyncio.Future[tuple[Completion, ...]]] = []
        completions: list[Completion] = []
        updates = 0
        while not any(len(set(made.versions)) > 1 for made in completions) or futures:
            if not futures:
                never = request(n=16, max_new_tokens=200, stop_strings=("aaaaaaaaaaaaaaaa", "z"))
                futures.append(served.engine.submit(never))
            updates += 1
            source = "2.1" if updates % 2 else "1.1"
            version = WeightVersion(name=f"{updates}-{source}", folder=served.versions[source])
            await served.engine.update_weights(version)
            await asyncio.sleep(0.1)
            if futures[0].done():
                completions += futures.pop().result()
        return completions

    completions = served.loop.run(work())
    for made in completions:
        assert len(made.tokens) == 200
        tokens, drawn = torch.tensor(made.tokens), torch.tensor(made.logprobs)
        for name in ("1.1", "2.1"):
            own = torch.tensor([version.endswith(name) for version in made.versions])
            values = logprobs(served.versions[name], [*PROMPT, *made.tokens])[len(PROMPT) - 1 :]
            expected = values.gather(-1, tokens[:, None]).squeeze(-1)
            assert (expected - drawn)[own].abs().lt(EXACT).all()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_survive_the_end_of_the_server(served: Served, number: signal.Signals) -> None:
    """A killed or stopped server is started again under load. It gets requests only once it holds
    the weights that were installed last."""

    async def attempt(delay_s: float) -> Completion | None:
        future = served.engine.submit(request(max_new_tokens=200, greedy=True))
        await asyncio.sleep(delay_s)
        if future.done():
            return None
        os.kill(served.main(), number)
        (made,) = await future
        return made

    async def work() -> Completion:
        await served.engine.update_weights(served.version("2.1"))
        return await midway(attempt)

    made = served.loop.run(work(), deadline_s=START_S)
    assert set(made.versions) == {"2.1"}
    check(served.versions["2.1"], PROMPT, made)


def test_a_server_sleeps_as_soon_as_it_is_idle_and_draws_with_the_next_weights(
    served: Served,
) -> None:
    """A batch whose request was cancelled may still run when the server is to sleep: SGLang's
    scheduler ends if it frees its memory then. (On CPUs it frees none.) Twice, because the second
    sleep follows an update that woke the server."""

    async def work() -> list[Completion]:
        drawn = []
        for version in ("2.1", "1.1"):
            cancelled = served.engine.submit(request(max_new_tokens=200))
            await asyncio.sleep(0.3)
            cancelled.cancel()
            await asyncio.sleep(0)
            await served.engine.sleep()
            assert served.engine.version is None
            await served.engine.health()
            await served.engine.update_weights(served.version(version))
            drawn += await served.engine.submit(request(greedy=True))
        return drawn

    before = served.main()
    for version, made in zip(("2.1", "1.1"), served.loop.run(work()), strict=True):
        assert set(made.versions) == {version}
        check(served.versions[version], PROMPT, made)
    assert served.main() == before


def test_wrong_versions_and_models_are_named(served: Served, tmp_path: Path) -> None:
    """A folder without weights is refused, and the server serves on."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises((RunFailedError, UsageError)):
        served.loop.run(served.engine.update_weights(WeightVersion(name="9.9", folder=tmp_path)))
    served.loop.run(served.engine.update_weights(served.version("1.1")))
    (made,) = served.loop.run(_one(served, request()))
    assert set(made.versions) == {"1.1"}
