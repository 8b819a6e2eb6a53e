"""A real vLLM server that computes on a CPU: routes, scheduling, updates of weights, life and
death."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
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
from slurmrl.rollouts.generation import vllm
from slurmrl.rollouts.generation.base import Completion, GenerationRequest, WeightVersion
from slurmrl.rollouts.generation.dialect import Draw
from slurmrl.rollouts.generation.fitness import ServedModel
from slurmrl.rollouts.generation.http import HttpClient
from slurmrl.rollouts.generation.instances import InstanceLimits, Instances
from slurmrl.rollouts.generation.process import ServerProgram
from slurmrl.rollouts.generation.served import ServedEngine
from slurmrl.rollouts.generation.server import KeptServer
from slurmrl.rollouts.generation.vllm import VllmDialect, request_body
from slurmrl.rollouts.generation.weight_checks import WeightChecks
from tests.engines.conftest import (
    CONTEXT,
    DEADLINE_S,
    EXACT,
    PATIENCE,
    PROMPT,
    START_S,
    VOCABULARY,
    Loop,
    SharedServer,
    check_stale_cache,
    logprobs,
    midway,
    over_an_update,
    request,
    until,
)
from tests.support.servers import load_once

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="no vLLM: run scripts/test-engines")
LIMITS = InstanceLimits(probe_every_s=1.0, silence_s=20.0, control_s=60.0)
MODEL = ServedModel(architecture="Qwen2ForCausalLM", vocabulary=VOCABULARY)


class VllmServer:
    """One server that is kept running."""

    def __init__(self, name: str, folder: Path, model: Path, tokenizer: Path) -> None:
        self._folder = tempfile.TemporaryDirectory()  # a short path, with mode 0700
        socket = Path(self._folder.name) / "server.sock"
        self._address = Address(f"unix:{socket}")
        self.program = ServerProgram(
            name=name,
            command=vllm.command(
                PYTHON,
                model,
                socket,
                tokenizer=tokenizer,
                options=(*vllm.CPU_FLAGS, "--dtype", "float32"),
            ),
            environment={
                **os.environ,
                "VLLM_API_KEY": "that of another server",
                **vllm.ENVIRONMENT,
                **vllm.CPU_ENVIRONMENT,
            },
            log=folder / f"{name}.log",
        )
        self._probing = VllmDialect(HttpClient(self._address, patience_s=0.0), model=MODEL)
        self._kept: KeptServer | None = None

    async def connect(self) -> ServedEngine:
        if self._kept is None:
            self._kept = KeptServer(
                self.program, probe=self._probing.health, prepare=self._prepare, patience=PATIENCE
            )
        await self._kept.up()
        return await self.another_client()

    async def another_client(self, *, stale_cache: bool = False) -> ServedEngine:
        client = HttpClient(self._address)
        dialect = VllmDialect(client, model=MODEL, health_s=10.0, stale_cache=stale_cache)
        return await ServedEngine.connect(dialect)

    async def _prepare(self) -> None:
        """Draw the first token: what the server compiles for it counts as part of the start."""
        await (await self.another_client()).close()

    async def close(self) -> None:
        if self._kept is not None:
            await self._kept.close()
        await self._probing.close()
        self._folder.cleanup()

    def processes(self) -> dict[str, int]:
        """The server's processes by the word in their titles: APIServer, EngineCore, Worker."""
        children: dict[int, list[int]] = {}
        words: dict[int, str] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                words[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            children.setdefault(int(stat[1]), []).append(int(entry.name))
        (main,) = (
            pid
            for pid, line in words.items()
            if self._address.text.removeprefix("unix:") in line and "warden" not in line
        )
        found, stack = {"APIServer": main}, [main]
        while stack:
            for child in children.get(stack.pop(), []):
                stack.append(child)
                for title in ("EngineCore", "Worker"):
                    if title in words[child]:
                        found[title] = child
        return found


class Served(SharedServer):
    """One server, and a second one where a test wants it, behind one engine."""

    def __init__(
        self, loop: Loop, versions: dict[str, Path], tokenizer: PreTrainedTokenizerFast, logs: Path
    ) -> None:
        tokenizer.save_pretrained(logs / "tokenizer")
        super().__init__(loop, versions)
        self.servers = [
            VllmServer(f"vllm-{number}", logs, versions["1.1"], logs / "tokenizer")
            for number in range(2)
        ]
        self.engine = loop.run(self._make(self.servers[:1]))

    async def _make(self, servers: Sequence[VllmServer]) -> Instances:
        return Instances({each.program.name: each.connect for each in servers}, limits=LIMITS)

    async def start_first(self) -> None:
        await self._serve(self.servers[:1])

    async def start_both(self) -> None:
        await self._serve(self.servers)

    async def _serve(self, servers: Sequence[VllmServer]) -> None:
        await self.engine.close()
        self.engine = await self._make(servers)
        await self._reset()

    async def _reset(self) -> None:
        await until("all servers", self._all_up)
        await super()._reset()

    def _all_up(self) -> bool:
        return all(instance.engine is not None for instance in self.engine._instances)

    async def _close(self) -> None:
        await self.engine.close()
        for server in self.servers:
            await server.close()

    def close(self) -> None:
        self.loop.run(self._close())


@pytest.fixture(scope="module")
def server(
    loop: Loop,
    versions: dict[str, Path],
    tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    with closing(Served(loop, versions, tokenizer, tmp_path_factory.mktemp("logs"))) as made:
        yield made


@pytest.fixture
def served(server: Served) -> Served:
    server.start_anew()
    return server


async def _one(served: Served, asked: GenerationRequest) -> tuple[Completion, ...]:
    return await served.engine.submit(asked)


def check(
    folder: Path,
    made: Completion,
    options: GenerationOptions,
    *,
    prompt: tuple[int, ...] = PROMPT,
    version: str = "1.1",
) -> None:
    """The log-probabilities of the tokens of a version are those of transformers."""
    values = logprobs(folder, [*prompt, *made.tokens], options.temperature)[len(prompt) - 1 :]
    if options.top_k is not None:
        least = values.topk(options.top_k, dim=-1).values[:, -1:]
        values = values.masked_fill(values < least, float("-inf")).log_softmax(-1)
    expected = values.gather(-1, torch.tensor(made.tokens)[:, None]).squeeze(-1)
    own = torch.tensor([each == version for each in made.versions])
    assert own.any()
    assert (expected - torch.tensor(made.logprobs))[own].abs().max() < EXACT


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"top_k": 5}])
def test_log_probabilities_are_those_of_transformers(
    served: Served, tokenizer: PreTrainedTokenizerFast, options: dict[str, object]
) -> None:
    """Under the distribution that was drawn from, with a version for each token. Token ids are kept
    as they were sampled, also where their text has another spelling."""
    asked = request(n=16, **options)
    completions = served.loop.run(_one(served, asked))
    assert len({made.tokens for made in completions}) > 1
    texts = [tokenizer.decode(made.tokens) for made in completions]
    assert any(
        tokenizer.encode(text) != list(made.tokens)
        for text, made in zip(texts, completions, strict=True)
    )
    for made in completions:
        assert (len(made.tokens), made.finish, set(made.versions)) == (16, "length", {"1.1"})
        check(served.versions["1.1"], made, asked.options)


def test_a_sample_does_not_depend_on_what_it_was_batched_with(served: Served) -> None:
    """Also if its prompt arrives with more tokens than the server reads in one step."""

    async def main() -> None:
        alone = await served.engine.submit(request(n=3))
        long = 2 * tuple(range(100))
        others = [served.engine.submit(request((number, *long), n=2)) for number in range(40)]
        crowded = await served.engine.submit(request(n=3))
        assert [made.tokens for made in alone] == [made.tokens for made in crowded]
        await asyncio.gather(*others)

    served.loop.run(main())


def test_stop_tokens_and_stop_strings_across_tokens(
    served: Served, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The token that completes a stop is the last one, and is kept."""
    (free,) = served.loop.run(_one(served, request(greedy=True)))
    texts = [tokenizer.decode([token]) for token in free.tokens]
    stop = texts[3][-1] + texts[4][0]
    end = next(k for k in range(1, 17) if stop in "".join(texts[:k]))
    (made,) = served.loop.run(_one(served, request(greedy=True, stop_strings=(stop,))))
    assert (made.tokens, made.finish) == (free.tokens[:end], "stop")
    assert made.logprobs == pytest.approx(free.logprobs[:end], abs=EXACT)
    stopped = request(greedy=True, stop_token_ids=(free.tokens[2],))
    (made,) = served.loop.run(_one(served, stopped))
    assert made.finish == "stop"
    assert made.tokens == free.tokens[: free.tokens.index(free.tokens[2]) + 1]


def test_an_update_in_flight_continues_with_the_new_weights(served: Served) -> None:
    """Behind the tokens that the old weights have drawn, with the log-probabilities of the new ones
    for all that comes after."""

    async def attempt(delay_s: float) -> tuple[Completion, ...] | None:
        asked = request(n=8, max_new_tokens=240)
        future = served.engine.submit(asked)
        await asyncio.sleep(delay_s)
        await served.engine.update_weights(served.version("2.1"))
        completions = await future
        (after,) = await served.engine.submit(request())
        assert set(after.versions) == {"2.1"}
        check(served.versions["2.1"], after, asked.options, version="2.1")
        await served.engine.update_weights(served.version("1.1"))
        return completions if all(len(set(made.versions)) == 2 for made in completions) else None

    options = request(n=8, max_new_tokens=240).options
    for made in served.loop.run(midway(attempt)):
        assert len(made.tokens) == 240
        assert list(made.versions) == sorted(made.versions)
        for name in ("1.1", "2.1"):
            check(served.versions[name], made, options, version=name)


def test_with_a_stale_cache_requests_go_on_with_what_older_weights_have_computed(
    served: Served,
) -> None:
    async def work() -> list[Completion]:
        await served.engine.close()  # it would have the server load its own version again
        engine = await served.servers[0].another_client(stale_cache=True)
        try:
            return await over_an_update(engine, served.versions)
        finally:
            await engine.close()
            await served.start_first()

    made, later = served.loop.run(work())
    check_stale_cache(served.versions, made, later)


def test_a_paused_request_waits_and_ends_as_if_it_had_not(served: Served) -> None:
    """A request that comes while the server is paused waits as well."""

    async def attempt(delay_s: float) -> list[tuple[int, ...]] | None:
        future = served.engine.submit(request(n=8, max_new_tokens=200))
        await asyncio.sleep(delay_s)
        await served.engine.pause()
        ended = future.done()
        late = served.engine.submit(request())
        await asyncio.sleep(0.5)
        assert future.done() == ended
        assert not late.done()
        await served.engine.resume()
        await late
        tokens = [made.tokens for made in await future]
        return None if ended else tokens

    async def main() -> None:
        whole = await served.engine.submit(request(n=8, max_new_tokens=200))
        assert await midway(attempt) == [made.tokens for made in whole]

    served.loop.run(main())


def test_aborted_requests_return_what_was_drawn(served: Served) -> None:
    async def attempt(delay_s: float) -> tuple[Completion, ...] | None:
        asked = request(n=8, max_new_tokens=200)
        future = served.engine.submit(asked)
        await asyncio.sleep(delay_s)
        served.engine.abort(asked.request_id)
        served.engine.abort("unknown")
        completions = await future
        aborted = all(made.finish == "aborted" and made.tokens for made in completions)
        return completions if aborted else None

    async def main() -> None:
        whole = await served.engine.submit(request(n=8, max_new_tokens=200))
        for made, again in zip(await midway(attempt), whole, strict=True):
            assert len(made.tokens) < 200
            assert made.tokens == again.tokens[: len(made.tokens)]

    served.loop.run(main())


def test_what_can_never_be_served_is_refused_at_once(served: Served, tmp_path: Path) -> None:
    """A prompt as long as the context, a token outside the vocabulary, and weights of another
    model; the version before is served again."""

    async def main() -> None:
        with pytest.raises(UsageError, match=f"prompt of {CONTEXT} tokens.*{CONTEXT} tokens"):
            await served.engine.submit(request((1,) * CONTEXT))
        with pytest.raises(UsageError, match="out of vocabulary"):
            await served.engine.submit(request((VOCABULARY + 5,)))
        (made,) = await served.engine.submit(request((1,) * (CONTEXT - 4)))
        assert (len(made.tokens), made.finish) == (4, "length")
        missing = WeightVersion(name="9.1", folder=tmp_path / "missing")
        with pytest.raises(UsageError, match=r"9\.1: .*missing is not a folder"):
            await served.engine.update_weights(missing)
        (made,) = await served.engine.submit(request())
        assert set(made.versions) == {"1.1"}
        check(served.versions["1.1"], made, request().options)

    served.loop.run(main())


def test_a_server_with_another_vocabulary_is_refused(served: Served) -> None:
    """vLLM reports no size; a prompt with an unknown token could end the server."""

    async def main(vocabulary: int) -> None:
        client = HttpClient(served.servers[0]._address)
        model = ServedModel(architecture="Qwen2ForCausalLM", vocabulary=vocabulary)
        try:
            await VllmDialect(client, model=model).connect()
        finally:
            await client.close()

    for size in (VOCABULARY - 1, VOCABULARY + 1):
        with pytest.raises(UsageError, match=f"does not have a vocabulary of {size} token ids"):
            served.loop.run(main(size))


def test_a_server_whose_weights_are_not_those_of_its_version_is_found(
    served: Served, tmp_path: Path
) -> None:
    """It reports a version and has read other files, of which a norm differs. The checksums of the
    weights that it ought to have are those of their files."""
    version = served.version("2.1")
    assert version.folder is not None
    shutil.copytree(version.folder, tmp_path / "wrong")
    tensors = load_file(version.folder / "model.safetensors")
    name = "model.layers.1.input_layernorm.weight"
    tensors[name] = tensors[name].roll(1)
    save_file(tensors, tmp_path / "wrong/model.safetensors", {"format": "pt"})

    checks = WeightChecks()

    async def main(read: Path) -> None:
        client = HttpClient(served.servers[0]._address)
        post = client.post

        async def astray(path: str, body: Any = None, **options: Any) -> object:
            if body and body.get("method") == "reload_weights":
                body = {**body, "kwargs": {"weights_path": str(read)}}
            return await post(path, body, **options)

        client.post = astray  # type: ignore[method-assign]
        await load_once(VllmDialect(client, model=MODEL, checks=checks), version)

    served.loop.run(main(version.folder))
    with pytest.raises(RunFailedError, match=rf"2\.1: 1 of 8 parameters .*\({name}\)"):
        served.loop.run(main(tmp_path / "wrong"))


def test_four_thousand_requests_at_once_and_64_completions_of_a_prompt(served: Served) -> None:
    async def main() -> None:
        prompts = [(number % VOCABULARY, number // VOCABULARY, 3) for number in range(4000)]
        futures = [served.engine.submit(request(each, max_new_tokens=1)) for each in prompts]
        many = served.engine.submit(request(n=64, max_new_tokens=8))
        answers = await asyncio.gather(*futures)
        assert all(len(made.tokens) == 1 for (made,) in answers)
        for number in (0, 1234, 3999):
            options = request(max_new_tokens=1).options
            check(served.versions["1.1"], answers[number][0], options, prompt=prompts[number])
        assert len({made.tokens for made in await many}) > 32

    served.loop.run(main())


def test_updates_every_100_ms_do_not_stop_requests(served: Served) -> None:
    async def main() -> None:
        futures: list[asyncio.Future[tuple[Completion, ...]]] = []
        names: list[str] = []
        while len(names) < 5 or not all(future.done() for future in futures):
            if all(future.done() for future in futures):
                futures += [served.engine.submit(request(n=4, max_new_tokens=80)) for _ in range(4)]
            name = f"{len(names) + 3}.1"
            names.append(name)
            source = served.versions["1.1" if len(names) % 2 else "2.1"]
            await served.engine.update_weights(WeightVersion(name=name, folder=source))
            await asyncio.sleep(0.1)
        for future in futures:
            for made in await future:
                assert len(made.tokens) == 80
                order = [["1.1", *names].index(version) for version in made.versions]
                assert order == sorted(order)

    served.loop.run(main())


CHECKER = """
import inspect, json, sys
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.config.load import LoadConfig
for body in json.load(sys.stdin):
    unknown = set(body) - set(GenerateRequest.model_fields)
    unknown |= set(body["sampling_params"]) - set(SamplingParams.__struct_fields__)
    assert not unknown, unknown
    read = GenerateRequest.model_validate(body)
    for name, value in body["sampling_params"].items():
        assert getattr(read.sampling_params, name) == value, (name, value)
inspect.signature(Worker.update_config).bind(None, overrides={})
for runner in (GPUModelRunner, SecondModelRunner):  # on CPUs, and where Triton compiles
    inspect.signature(runner.reload_weights).bind(None, weights_path="")
assert "load_format" in LoadConfig.__dataclass_fields__
"""


def test_bodies_are_those_of_vllms_own_classes() -> None:
    """The server ignores unknown keys, so a misspelt one would change samples silently."""
    requests = (
        request(temperature=0.5, top_p=0.9, top_k=7, min_new_tokens=2),
        request(stop_token_ids=(3, 4), stop_strings=("ab", "c")),
    )
    draws = (
        Draw(name="r", prompt=PROMPT, seed=2**63 - 1, options=asked.options, priority=-1)
        for asked in requests
    )
    subprocess.run(
        [PYTHON, "-W", "ignore", "-c", CHECKER],
        input=json.dumps([request_body(draw, cache="1.1") for draw in draws]).encode(),
        check=True,
        timeout=DEADLINE_S,
        env={**os.environ, **vllm.ENVIRONMENT},
    )


def test_a_server_sleeps_and_draws_with_the_next_weights(served: Served) -> None:
    """It answers probes while it sleeps, and what it has cached before is forgotten. (On CPUs it
    frees no memory.)"""

    async def work() -> list[Completion]:
        await served.engine.close()  # its probes would find versions of another client
        engine = await served.servers[0].connect()
        drawn = []
        for version in ("2.1", "1.1"):
            await engine.sleep()
            assert engine.version is None
            await engine.health()
            await engine.update_weights(served.version(version))
            drawn += await engine.submit(request(greedy=True))
        await engine.close()
        served.engine = await served._make(served.servers[:1])
        return drawn

    before = served.servers[0].processes()
    for version, made in zip(("2.1", "1.1"), served.loop.run(work()), strict=True):
        check(served.versions[version], made, request(greedy=True).options, version=version)
    assert served.servers[0].processes() == before


async def disturbed(served: Served, pid: int, number: signal.Signals) -> None:
    """While a process gets a signal, each request is answered as if nothing had happened."""

    def load() -> list[asyncio.Future[tuple[Completion, ...]]]:
        prompts = [(number, 1, 2) for number in range(60)]
        return [served.engine.submit(request(each, max_new_tokens=60)) for each in prompts]

    async def attempt(delay_s: float) -> list[tuple[int, ...]] | None:
        futures = load()
        await asyncio.sleep(delay_s)
        late = any(future.done() for future in futures)
        if not late:
            os.kill(pid, number)
        tokens = [made.tokens for (made,) in await asyncio.gather(*futures)]
        return None if late else tokens

    expected = [made.tokens for (made,) in await asyncio.gather(*load())]
    assert await midway(attempt) == expected


def test_a_killed_server_costs_its_own_requests(served: Served) -> None:
    served.loop.run(served.start_both(), deadline_s=START_S)
    killed = served.servers[0].processes()["EngineCore"]
    served.loop.run(disturbed(served, killed, signal.SIGKILL))


@pytest.mark.soak
def test_a_hung_server_costs_its_own_requests_once_the_killed_one_is_back(served: Served) -> None:
    hung = served.servers[1].processes()["EngineCore"]
    served.loop.run(disturbed(served, hung, signal.SIGSTOP))
