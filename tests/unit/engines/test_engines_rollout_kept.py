"""The engine of a server that is started again, in front of a program that is no server."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from slurmrl.config.servers import Address
from slurmrl.engines.rollout.base import WeightVersion
from slurmrl.engines.rollout.http import HttpClient
from slurmrl.engines.rollout.kept import KeptEngine
from slurmrl.engines.rollout.process import ServerProgram
from slurmrl.engines.rollout.server import Patience
from slurmrl.errors import RunFailedError, UsageError
from tests.unit.engines.test_engines_rollout_served import ScriptedDialect, completion, request

DEADLINE_S = 60.0


class PickyDialect(ScriptedDialect):
    """Refuses the versions in ``refused`` once it is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: set[str] = set()

    async def load(self, version: WeightVersion) -> None:
        await super().load(version)
        if version.name in self.refused:
            raise UsageError(f"{version.name}: the shapes do not match")


def within(folder: Path, test: Callable[[KeptEngine, PickyDialect], Awaitable[None]]) -> None:
    """``test`` gets the engine of a server with version 1.1, and how that server is spoken to."""

    async def main() -> None:
        dialect = PickyDialect()
        program = ServerProgram(
            name="server 0",
            command=[sys.executable, "-c", "import time; time.sleep(600)"],
            environment=os.environ,
            log=folder / "server.log",
        )

        def speak(client: HttpClient) -> PickyDialect:
            return dialect

        address = Address(f"unix:{folder / 'none.sock'}")
        engine = KeptEngine(program, address, speak, patience=Patience())
        await engine.update_weights(WeightVersion(name="1.1"))
        try:
            await test(engine, dialect)
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_a_refused_version_leaves_the_one_before_in_service(tmp_path: Path) -> None:
    """The refused load may have replaced some tensors, so the earlier version is loaded again
    before the server resumes and requests are answered."""

    async def test(engine: KeptEngine, dialect: PickyDialect) -> None:
        dialect.refused = {"2.1"}
        dialect.calls.clear()
        with pytest.raises(UsageError, match="shapes do not match"):
            await engine.update_weights(WeightVersion(name="2.1"))
        assert engine.version == "1.1"
        calls = [call for call in dialect.calls if call != "health"]
        assert calls == ["pause", "load 2.1", "pause", "load 1.1", "resume"]
        answer = engine.submit(request())
        while "r-0" not in dialect.draws:
            await asyncio.sleep(0.01)
        dialect.draws["r-0"].set_result(completion())
        assert await answer == (completion(),)

    within(tmp_path, test)


def test_a_start_that_does_not_take_the_weights_is_not_the_last(tmp_path: Path) -> None:
    """Servers answer status 400 also for a full disk or memory, so a start that fails to load what
    an earlier one has held counts as one failed start."""

    async def test(engine: KeptEngine, dialect: PickyDialect) -> None:
        dialect.refused = {"1.1"}
        with pytest.raises(RunFailedError, match="the shapes do not match"):
            await engine._prepare()

    within(tmp_path, test)


def test_a_server_that_refuses_its_earlier_version_is_closed(tmp_path: Path) -> None:
    """Requests fail instead of waiting without end for weights that never come."""

    async def test(engine: KeptEngine, dialect: PickyDialect) -> None:
        dialect.refused = {"1.1", "2.1"}
        with pytest.raises(UsageError, match=r"1\.1: the shapes do not match"):
            await engine.update_weights(WeightVersion(name="2.1"))
        with pytest.raises(RuntimeError, match="server 0 was closed"):
            await engine.submit(request())

    within(tmp_path, test)
