"""Tests of a real SGLang server that computes with torch on a CPU: routes, scheduling, weight
updates, start and end. Shims replace torchvision's operators and the rotary embedding.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from slurmrl.errors import RunFailedError, UsageError
from slurmrl.rollouts.generation.base import GenerationOptions, GenerationRequest, WeightVersion
from slurmrl.rollouts.generation.sglang import SglangDialect, SglangServer, on_gpu
from slurmrl.rollouts.generation.weight_checks import WeightChecks
from tests.engines.conftest import DEADLINE_S, EXACT, PROMPT, VOCABULARY, Loop, logprobs, request
from tests.engines.served import Served, ServedContract, load_astray
from tests.support.rotation import SERVER_ENDS, in_turn
from tests.support.servers import load_once
from tests.unit.engines.test_engines_rollout_sglang import INFO, MODEL, ScriptedServer

PYTHON = os.environ.get("SGLANG_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="no SGLang: run scripts/test-engines")


@pytest.fixture(scope="module")
def server(
    loop: Loop, versions: dict[str, Path], tokenizer: PreTrainedTokenizerFast
) -> Iterator[Served]:
    with closing(Served(SglangServer, PYTHON, loop, versions, tokenizer)) as made:
        yield made


@pytest.fixture
def served(server: Served) -> Served:
    server.start_anew()
    return server


class TestContract(ServedContract):
    """The contract for SGLang's server. test_engines_slurm.py kills a server."""

    ended_by = signal.SIGSTOP

    @pytest.mark.long
    @in_turn(1, SERVER_ENDS)
    def test_requests_survive_a_server_restart(self, served: Served) -> None:
        self.requests_survive_a_server_restart(served)


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


def test_request_bodies_match_sglang_classes(versions: dict[str, Path]) -> None:
    """This version of SGLang knows the name and the value of every sent field. It ignores fields
    with unknown names.
    """

    async def work() -> list[tuple[str, Mapping[str, Any]]]:
        client = ScriptedServer({**INFO, "device": "cuda", "weight_version": "1.1"})
        client.asked.append({})  # the first request waits for a pause
        speaker = SglangDialect(client, model=replace(MODEL, dtype="float32"))
        await speaker.connect()
        for options in (
            {"top_k": 3, "stop_token_ids": (2,), "min_new_tokens": 1, "stop_strings": ("a", "b")},
            {"greedy": True},
            {"top_p": 0.5, "temperature": 0.3},
        ):
            settings = GenerationOptions(max_new_tokens=4, **options)  # type: ignore[arg-type]
            draw = GenerationRequest(
                request_id="n",
                prompt=(1, 2),
                keys=(7,),
                seed=2**63 - 1,
                step=1,
                options=settings,
                priority=-1,
            )
            await speaker.sample(draw)
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


def test_server_with_wrong_weights_is_detected(served: Served, tmp_path: Path) -> None:
    """The server reports a version but lacks a tensor or has a wrong one.

    The expected checksums come from the files.
    """
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
    for folder in (part, wrong):  # after 1.1, the part has a separate tensor
        served.loop.run(load_once(served.dialect(checks=checks), before))
        with pytest.raises(RunFailedError, match=rf"2\.1: 1 of 16 parameters .*\({name}\)"):
            served.loop.run(load_astray(served, checks, version, "model_path", folder))
    served.loop.run(load_once(served.dialect(checks=checks), before))


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


def test_gpu_checksums_equal_the_sglang_kernel() -> None:
    """Triton interprets SGLang's kernel on a CPU. Python's option -O removes the kernel's assertion
    that there is a GPU.
    """
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


def test_sampling_masks_equal_the_sampling_distribution(served: Served) -> None:
    """With masks, log-probabilities are relative to the mask; otherwise, to all tokens."""
    folder = served.versions["1.1"]
    for options in ({"top_k": 4}, {"top_p": 0.6}, {"top_k": 4, "masks": True}):
        (made,) = served.one(request(**options))
        values = logprobs(folder, [*PROMPT, *made.tokens])[len(PROMPT) - 1 :]
        masks = made.masks.cut([1] * len(made.tokens)) if made.masks else []
        assert len(masks) == (len(made.tokens) if "masks" in options else 0)
        for place, (row, token, logprob) in enumerate(
            zip(values, made.tokens, made.logprobs, strict=True)
        ):
            ordered, order = row.exp().sort(descending=True)
            if "top_k" in options:
                kept = torch.arange(VOCABULARY) < 4
            else:
                kept = ordered.cumsum(0) - ordered < 0.6
            assert token in order[kept]
            if masks:
                assert list(masks[place].ids) == sorted(order[kept].tolist())
            mass = ordered[kept].sum().log() if masks else 0.0
            assert abs(float(row[token] - mass) - logprob) < EXACT


def test_wrong_versions_and_models_are_named(served: Served, tmp_path: Path) -> None:
    """A folder without weights is rejected, and the server continues to serve."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises((RunFailedError, UsageError)):
        served.loop.run(served.engine.update_weights(WeightVersion(name="9.9", folder=tmp_path)))
    served.loop.run(served.engine.update_weights(served.version("1.1")))
    (made,) = served.one(request())
    assert set(made.versions) == {"1.1"}
