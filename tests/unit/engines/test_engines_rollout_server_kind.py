"""Tests of the command and environment with which slurmrl starts a managed server."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest
import torch

from slurmrl.models.architecture import ModelConfig
from slurmrl.rollouts.generation import server_kinds
from slurmrl.rollouts.generation.process import ServerProgram
from slurmrl.rollouts.generation.server_instance import Patience
from slurmrl.rollouts.generation.server_kinds import ServerKind, Serving
from slurmrl.rollouts.generation.sglang import SglangServer
from slurmrl.rollouts.generation.vllm import VllmServer
from tests.unit.models.conftest import BASE, ODD


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (SglangServer, {"SGLANG_USE_PICKLE_IPC": "0", "SGLANG_ZMQ_ALLOWED_PEERS": "127.0.0.1"}),
        (
            VllmServer,
            {
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
                "VLLM_API_KEY": "",
                "PYTHONSAFEPATH": "1",
            },
        ),
    ],
)
def test_servers_unpickle_nothing_and_listen_in_a_private_directory(
    kind: type[ServerKind],
    wanted: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[tuple[ServerProgram, Patience]] = []
    monkeypatch.setattr(
        server_kinds,
        "Instances",
        lambda _, patience, program: kept.append((program, patience)),
    )
    for name, value in wanted.items():
        monkeypatch.setenv(name, "1" if value != "1" else "0")
    for name, value in {"PYTHONPATH": "/ours", "RANK": "3", "HTTPS_PROXY": "http://p"}.items():
        monkeypatch.setenv(name, value)
    serving = Serving(
        python="/server/python",
        arguments=("--last", "1"),
        tokenizer=None,
        patience=Patience(),
        log=tmp_path / "log",
    )
    config = ModelConfig.from_hf({**BASE, **ODD["qwen3"], "eos_token_id": 3})
    server = kind(config, "float32", serving, tensor_ranks=1, device=torch.device("cpu"))

    async def keep() -> None:
        server.keep(serving, tmp_path, name="server", visible="4,5")

    asyncio.run(keep())
    ((program, patience),) = kept
    assert patience == serving.patience
    own = {"CUDA_VISIBLE_DEVICES": "4,5", "TMPDIR": str(tmp_path / "tmp"), "HF_HUB_OFFLINE": "1"}
    assert program.environment.items() >= {**wanted, **own, "HTTPS_PROXY": "http://p"}.items()
    assert not {"PYTHONPATH", "RANK"} & set(program.environment)
    assert str(tmp_path / "server.sock") in program.command
    assert tuple(program.command[-2:]) == ("--last", "1")
    for name in ("model", "tmp"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700
    assert json.loads((tmp_path / "model/config.json").read_text())["eos_token_id"] is None
