"""Tests of a real vLLM server that computes on a CPU: routes, scheduling, weight updates, start and
end.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from slurmrl.errors import RunFailedError
from slurmrl.rollouts.generation import vllm
from slurmrl.rollouts.generation.vllm import VllmServer, request_body
from slurmrl.rollouts.generation.weight_checks import WeightChecks
from tests.engines.conftest import DEADLINE_S, EXACT, PROMPT, Loop, logprobs, request
from tests.engines.served import Served, ServedContract, load_astray
from tests.support.rotation import SERVER_ENDS, in_turn
from tests.support.servers import load_once

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="no vLLM: run scripts/test-engines")


@pytest.fixture(scope="module")
def server(
    loop: Loop, versions: dict[str, Path], tokenizer: PreTrainedTokenizerFast
) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", "that of another server")
        with closing(Served(VllmServer, PYTHON, loop, versions, tokenizer)) as made:
            yield made


@pytest.fixture
def served(server: Served) -> Served:
    server.start_anew()
    return server


class TestContract(ServedContract):
    """The contract for vLLM's server."""

    computes = "EngineCore"
    at_once = 1000

    @pytest.mark.long
    @in_turn(0, SERVER_ENDS)
    def test_requests_survive_a_server_restart(self, served: Served) -> None:
        self.requests_survive_a_server_restart(served)


def test_logprobs_belong_to_the_sampling_distribution(served: Served) -> None:
    """With top-k, log-probabilities are relative to the restricted distribution."""
    for made in served.one(request(n=16, top_k=5)):
        values = logprobs(served.versions["1.1"], [*PROMPT, *made.tokens])[len(PROMPT) - 1 :]
        best = values.topk(5)
        expected = (values - best.values.logsumexp(-1, keepdim=True)).gather(
            -1, torch.tensor(made.tokens)[:, None]
        )
        assert (expected.squeeze(-1) - torch.tensor(made.logprobs)).abs().max() < EXACT


def test_sample_does_not_depend_on_its_batch(served: Served) -> None:
    """The prompt may arrive with more tokens than the server prefills in one step."""

    async def main() -> None:
        alone = await served.engine.submit(request(n=3))
        long = 2 * tuple(range(100))
        others = [served.engine.submit(request((number, *long), n=2)) for number in range(40)]
        crowded = await served.engine.submit(request(n=3))
        assert [made.tokens for made in alone] == [made.tokens for made in crowded]
        await asyncio.gather(*others)

    served.loop.run(main())


def test_server_with_wrong_weights_is_detected(served: Served, tmp_path: Path) -> None:
    """The server reports a version but has read other files, in which a norm differs."""
    version = served.version("2.1")
    assert version.folder is not None
    shutil.copytree(version.folder, tmp_path / "wrong")
    tensors = load_file(version.folder / "model.safetensors")
    name = "model.layers.1.input_layernorm.weight"
    tensors[name] = tensors[name].roll(1)
    save_file(tensors, tmp_path / "wrong/model.safetensors", {"format": "pt"})
    checks = WeightChecks()
    served.loop.run(load_once(served.dialect(checks=checks), version))
    wrong = load_astray(served, checks, version, "weights_path", tmp_path / "wrong")
    with pytest.raises(RunFailedError, match=rf"2\.1: 1 of 8 parameters .*\({name}\)"):
        served.loop.run(wrong)
    served.loop.run(load_once(served.dialect(), served.version("1.1")))


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


def test_request_bodies_match_vllm_classes() -> None:
    """The server ignores unknown keys, so a misspelt one would change samples silently."""
    requests = (
        request(temperature=0.5, top_p=0.9, top_k=7, min_new_tokens=2),
        request(stop_token_ids=(3, 4), stop_strings=("ab", "c")),
    )
    draws = (
        replace(asked, request_id="r", prompt=PROMPT, keys=(7,), seed=2**63 - 1, priority=-1)
        for asked in requests
    )
    subprocess.run(
        [PYTHON, "-W", "ignore", "-c", CHECKER],
        input=json.dumps([request_body(draw, cache="1.1") for draw in draws]).encode(),
        check=True,
        timeout=DEADLINE_S,
        env={**os.environ, **vllm.ENVIRONMENT},
    )
