"""A real server that computes on a CPU and is managed as in a trial, and tests that every kind of
server must pass.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from slurmrl.config.schema.rollout import Address
from slurmrl.errors import UsageError
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.hf import read_values
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import GenerationRequest, WeightVersion
from slurmrl.rollouts.generation.dialect import Dialect
from slurmrl.rollouts.generation.http import HttpClient
from slurmrl.rollouts.generation.instances import Instances
from slurmrl.rollouts.generation.process import HostFolder
from slurmrl.rollouts.generation.server_client import ServerClient
from slurmrl.rollouts.generation.server_kinds import SOCKET, ServerKind, Serving
from slurmrl.rollouts.generation.weight_checks import WeightChecks
from tests.engines.conftest import (
    CONTEXT,
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
)
from tests.support.servers import load_once


class Served(SharedServer):
    """The engine of a managed server, and its processes, which tests kill or stop."""

    engine: Instances

    def __init__(
        self,
        kind: type[ServerKind],
        python: str,
        loop: Loop,
        versions: dict[str, Path],
        tokenizer: PreTrainedTokenizerFast | None = None,
        **serving: Any,
    ) -> None:
        super().__init__(loop, versions)
        self.folder = HostFolder()
        self._own = tempfile.TemporaryDirectory()
        self.log = Path(self._own.name) / "server.log"
        if tokenizer is not None:
            tokenizer.save_pretrained(Path(self._own.name) / "tokenizer")
        self._serving = Serving(
            python=python,
            arguments=serving.pop("arguments", ()),
            tokenizer=None if tokenizer is None else Path(self._own.name) / "tokenizer",
            patience=PATIENCE,
            log=self.log,
            **serving,
        )
        config = ModelConfig.from_hf(read_values(versions["1.1"]))
        cpu = torch.device("cpu")
        self.kind = kind(config, "float32", self._serving, tensor_ranks=1, device=cpu)
        self.engine = loop.run(self._keep())

    async def _keep(self) -> Instances:
        return self.kind.keep(self._serving, self.folder.path, name="the server", visible="")

    @property
    def socket(self) -> Path:
        return self.folder.path / SOCKET

    def dialect(self, client: HttpClient | None = None, **changes: Any) -> Dialect:
        """Return another client of the server. The kind of server has these attributes for it."""
        kind = copy(self.kind)
        for name, value in changes.items():
            setattr(kind, name, value)
        return kind.dialect(client or HttpClient(Address(f"unix:{self.socket}")))

    def close(self) -> None:
        self.loop.run(self.engine.close())
        self.folder.close()
        self._own.cleanup()

    def one(self, asked: GenerationRequest) -> tuple[Completion, ...]:
        """Answer a request."""

        async def work() -> tuple[Completion, ...]:
            return await self.engine.submit(asked)

        return self.loop.run(work())

    def processes(self) -> dict[str, int]:
        """Return the pids of the server's processes by their commands. The main process has the
        name "main".
        """
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
            if str(self.socket) in line and "warden.py" not in line
        )
        found, stack = {"main": main}, [main]
        while stack:
            below = children.get(stack.pop(), [])
            stack += below
            found.update({words[child]: child for child in below})
        return found

    def process(self, word: str) -> int:
        """Return the pid of the process whose command contains this word."""
        return next(pid for words, pid in self.processes().items() if word in words)


def check(
    folder: Path,
    made: Completion,
    temperature: float = 1.0,
    *,
    prompt: tuple[int, ...] = PROMPT,
    version: str = "1.1",
) -> None:
    """Check that the log-probabilities of a version's tokens equal transformers'."""
    values = logprobs(folder, [*prompt, *made.tokens], temperature)[len(prompt) - 1 :]
    expected = values.gather(-1, torch.tensor(made.tokens)[:, None]).squeeze(-1)
    own = torch.tensor([each.endswith(version) for each in made.versions])
    assert own.any()
    assert (expected - torch.tensor(made.logprobs))[own].abs().max() < EXACT


async def load_astray(
    served: Served, checks: WeightChecks, version: WeightVersion, key: str, read: Path
) -> None:
    """Let the server load a version from the folder ``read`` instead of the folder that ``key``
    names.
    """

    class Astray(HttpClient):
        async def post(self, path: str, body: Any = None, **options: Any) -> object:
            if key in str(body):
                body = (
                    {**body, "kwargs": {key: str(read)}}
                    if "kwargs" in body
                    else {**body, key: str(read)}
                )
            return await super().post(path, body, **options)

    client = Astray(Address(f"unix:{served.socket}"))
    await load_once(served.dialect(client, checks=checks), version)


async def with_a_stale_cache(served: Served) -> list[Completion]:
    """Return what `over_an_update` returns of another client of the server."""
    engine = await ServerClient.connect(served.dialect(stale_cache=True))
    try:
        drawn = await over_an_update(engine, served.versions)
        await engine.update_weights(served.version("1.1"))  # as the other client expects
        return drawn
    finally:
        await engine.close()


class ServedContract:
    """Tests that every kind of server must pass. Subclasses need a fixture ``served``."""

    computes = "main"
    """A word of the process that tests hurt."""
    ended_by = signal.SIGKILL
    """The signal that ends or stops that process."""
    at_once = 4000
    """Requests in flight."""

    def test_server_with_another_vocabulary_is_rejected(self, served: Served) -> None:
        """Servers do not report the size of their vocabulary."""

        async def connect(vocabulary: int) -> None:
            model = replace(served.kind.model, vocabulary=vocabulary, shape=None)
            speaker = served.dialect(model=model)
            try:
                await speaker.connect()
            finally:
                await speaker.close()

        for size in (VOCABULARY - 1, VOCABULARY + 1):
            message = f"must have {size} token ids"
            with pytest.raises(UsageError, match=message):
                served.loop.run(connect(size))

    def test_logprobs_equal_transformers(
        self, served: Served, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        """Covers a temperature, and a version for each token.

        Token ids stay as sampled, even with other tokenizations.
        """
        completions = served.one(request(n=16, temperature=0.7))
        assert len({made.tokens for made in completions}) > 1
        texts = [tokenizer.decode(made.tokens) for made in completions]
        assert any(
            tokenizer.encode(text) != list(made.tokens)
            for text, made in zip(texts, completions, strict=True)
        )
        for made in completions:
            assert (len(made.tokens), made.finish, set(made.versions)) == (16, "length", {"1.1"})
            check(served.versions["1.1"], made, 0.7)

    def test_greedy_completions_end_at_stop_tokens_and_stop_strings(
        self, served: Served, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        """Tokens are the most likely ones. The token that completes a stop is kept as the last one.
        A stop token does not end a completion before the minimum length.
        """
        (free,) = served.one(request(greedy=True))
        values = logprobs(served.versions["1.1"], [*PROMPT, *free.tokens])[len(PROMPT) - 1 :]
        assert free.tokens == tuple(values.argmax(-1).tolist())
        texts = [tokenizer.decode([token]) for token in free.tokens]
        stop = texts[3][-1] + texts[4][0]
        end = next(k for k in range(1, 17) if stop in "".join(texts[:k]))
        (made,) = served.one(request(greedy=True, stop_strings=(stop,)))
        assert (made.tokens, made.finish) == (free.tokens[:end], "stop")
        assert made.logprobs == pytest.approx(free.logprobs[:end], abs=EXACT)
        token = free.tokens[2]
        (made,) = served.one(request(greedy=True, stop_token_ids=(token,)))
        assert made.finish == "stop"
        assert made.tokens == free.tokens[: free.tokens.index(token) + 1]
        (made,) = served.one(request(greedy=True, stop_token_ids=(token,), min_new_tokens=8))
        assert token not in made.tokens[:8]

    def test_requests_in_flight_continue_with_new_weights(self, served: Served) -> None:
        """Tokens before an update keep their version and log-probabilities. Tokens after it have
        the new version and log-probabilities.
        """

        async def attempt(delay_s: float) -> tuple[Completion, ...] | None:
            future = served.engine.submit(request(n=8, max_new_tokens=200))
            await asyncio.sleep(delay_s)
            await served.engine.update_weights(served.version("2.1"))
            assert served.engine.version == "2.1"
            drawn = await future
            (after,) = await served.engine.submit(request())
            assert set(after.versions) == {"2.1"}
            await served.engine.update_weights(served.version("1.1"))
            return drawn if all(len(set(made.versions)) == 2 for made in drawn) else None

        for made in served.loop.run(midway(attempt)):
            assert len(made.tokens) == 200
            assert list(made.versions) == sorted(made.versions)
            for name in ("1.1", "2.1"):
                check(served.versions[name], made, version=name)

    def test_stale_cache_requests_continue_with_keys_of_older_weights(self, served: Served) -> None:
        made, later = served.loop.run(with_a_stale_cache(served))
        check_stale_cache(served.versions, made, later)

    def test_paused_request_ends_like_an_unpaused_one(self, served: Served) -> None:
        """A request that arrives while the server is paused also waits."""

        async def attempt(delay_s: float) -> tuple[int, ...] | None:
            future = served.engine.submit(request(max_new_tokens=200, greedy=True))
            await asyncio.sleep(delay_s)
            await served.engine.pause()
            ended = future.done()
            late = served.engine.submit(request())
            await asyncio.sleep(0.5)
            assert future.done() == ended
            assert not late.done()
            await served.engine.resume()
            await late
            (made,) = await future
            return None if ended else made.tokens

        async def work() -> None:
            (whole,) = await served.engine.submit(request(max_new_tokens=200, greedy=True))
            assert await midway(attempt) == whole.tokens

        served.loop.run(work())

    def test_aborted_request_returns_its_sampled_tokens(self, served: Served) -> None:
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

    def test_request_that_can_never_be_served_is_rejected(
        self, served: Served, tmp_path: Path
    ) -> None:
        """Covers a prompt as long as the context, a token outside the vocabulary, and a version
        without weights, after which the server uses the previous version.
        """
        with pytest.raises(UsageError, match="leaves no room"):
            served.one(request((7,) * CONTEXT))
        with pytest.raises(UsageError, match="vocabulary"):
            served.one(request((VOCABULARY + 5,)))
        (made,) = served.one(request((7,) * (CONTEXT - 16), max_new_tokens=200))
        assert made.finish == "length"
        assert 0 < len(made.tokens) <= 16
        missing = WeightVersion(name="9.1", folder=tmp_path / "missing")
        with pytest.raises(UsageError, match=r"9\.1: .*missing is not a folder"):
            served.loop.run(served.engine.update_weights(missing))
        (made,) = served.one(request())
        assert set(made.versions) == {"1.1"}
        check(served.versions["1.1"], made)

    def test_thousands_of_requests_and_64_completions_per_prompt_are_served(
        self, served: Served
    ) -> None:
        """Every completion of a prompt has a separate random stream."""
        prompts = [(number % VOCABULARY, number // VOCABULARY, 3) for number in range(self.at_once)]

        async def work() -> list[tuple[Completion, ...]]:
            many = [request(each, max_new_tokens=1) for each in prompts]
            several = request(n=64, max_new_tokens=8)
            return await asyncio.gather(*map(served.engine.submit, (*many, several)))

        *many, several = served.loop.run(work())
        assert all(len(made.tokens) == 1 for (made,) in many)
        for number in (0, 123, self.at_once - 1):
            check(served.versions["1.1"], many[number][0], prompt=prompts[number])
        assert len(several) == 64
        assert len({made.tokens for made in several}) > 32

    def test_updates_every_100_ms_do_not_stop_requests(self, served: Served) -> None:
        """Each token has the log-probability under its version, for any number of versions in a
        completion. A completion with stop strings does not begin again.
        """

        async def work() -> list[Completion]:
            futures: list[asyncio.Future[tuple[Completion, ...]]] = []
            completions: list[Completion] = []
            updates = 0
            while not any(len(set(made.versions)) > 1 for made in completions) or futures:
                if not futures:
                    never = request(
                        n=16, max_new_tokens=200, stop_strings=("aaaaaaaaaaaaaaaa", "z")
                    )
                    futures.append(served.engine.submit(never))
                updates += 1
                source = "2.1" if updates % 2 else "1.1"
                version = WeightVersion(name=f"{updates}-{source}", folder=served.versions[source])
                await served.engine.update_weights(version)
                await asyncio.sleep(0.1)
                if futures[0].done():
                    completions += futures.pop().result()
            return completions

        for made in served.loop.run(work()):
            assert len(made.tokens) == 200
            order = [int(version.partition("-")[0]) for version in made.versions if "-" in version]
            assert order == sorted(order)
            for name in {version[-3:] for version in made.versions}:
                check(served.versions[name], made, version=name)

    def requests_survive_a_server_restart(self, served: Served) -> None:
        """Kill or stop a server under load. Check that it gets requests only after it has loaded
        the newest weights. Subclasses call this in turn, because a start takes a minute.
        """

        async def attempt(delay_s: float) -> Completion | None:
            future = served.engine.submit(request(max_new_tokens=200, greedy=True))
            await asyncio.sleep(delay_s)
            if future.done():
                return None
            os.kill(served.process(self.computes), self.ended_by)
            (made,) = await future
            return made

        async def work() -> Completion:
            await served.engine.update_weights(served.version("2.1"))
            return await midway(attempt)

        made = served.loop.run(work(), deadline_s=START_S)
        assert set(made.versions) == {"2.1"}
        check(served.versions["2.1"], made, version="2.1")

    def test_idle_server_sleeps_and_samples_with_the_next_weights(self, served: Served) -> None:
        """The batch of a cancelled request may still run when the server must sleep.

        The server answers probes while it sleeps, and drops its cache. (On CPUs it frees no
        memory.) The test sleeps twice, because the second sleep follows an update that woke the
        server.
        """

        async def work() -> list[Completion]:
            drawn: list[Completion] = []
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

        before = served.processes()
        for version, made in zip(("2.1", "1.1"), served.loop.run(work()), strict=True):
            check(served.versions[version], made, version=version)
        assert served.processes()["main"] == before["main"]
