"""Real servers that sample from images on a CPU, with the pixels that training reads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from slurmrl.config.schema import Dataset
from slurmrl.data.sample import pictures_of
from slurmrl.data.tokenizer import load_tokenizer
from slurmrl.models.families import STRAY
from slurmrl.models.hf import read_values
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_files import complete
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import GenerationRequest, WeightVersion
from slurmrl.rollouts.generation.instances import Instances
from slurmrl.rollouts.generation.process import HostFolder
from slurmrl.rollouts.generation.server_kinds import ServerKind, Serving
from slurmrl.rollouts.generation.sglang import SglangServer
from slurmrl.rollouts.generation.vllm import VllmServer
from slurmrl.tensors.pictures import read
from tests.engines.conftest import (
    CONTEXT,
    EXACT,
    NUMBERS,
    PATIENCE,
    Loop,
    midway,
    request,
    save_versions,
)
from tests.support.datasets import prepared, write_rows
from tests.support.picture_models import draw, write_served_processor
from tests.support.servers import check_served
from tests.support.trials import Site, sft_config

KINDS: dict[str, type[ServerKind]] = {"sglang": SglangServer, "vllm": VllmServer}
ROWS = (
    {"prompt": "How many <image>?", "images": ["3.png"]},
    {"prompt": "<image> or <image>, which?", "images": ["4.png", "1.png"]},
    {"prompt": "How many are none?", "images": []},
)
STEPS = 2
ROUNDING = 10 * EXACT
"""Largest difference in float32. One token in hundreds differs by 2e-4, even in a prompt of text;
half of the tokens differ by less than a tenth of `EXACT`."""
REWARD = """
def different(prompts, completions, rows):
    return [float(len(set(text))) for text in completions]
"""


def python_of(server: str) -> str:
    """Return the Python of a server's environment; skip the test if there is none."""
    python = os.environ.get(f"{server.upper()}_PYTHON", "")
    if not python:
        pytest.skip(f"no {server}: run scripts/test-engines")
    return python


def draw_all(folder: Path) -> None:
    for dots in range(1, 5):
        draw(folder / f"{dots}.png", dots, (16 + 8 * dots, 16))


@dataclass
class Prompt:
    """A prompt in the form of training."""

    tokens: tuple[int, ...]
    pictures: str


class ImageServer:
    """A server with two weight versions of a random model, and prompts with images for it."""

    def __init__(self, server: str, family: str, loop: Loop, folder: Path) -> None:
        self.loop, self.family = loop, family
        values = write_served_processor(folder, family)
        tied = {"tie_word_embeddings": family == "qwen2_5_vl"}
        values |= {**tied, "text_config": {**values["text_config"], **tied}}
        config = AutoConfig.for_model(**values)
        self.versions = save_versions(
            folder / "versions", lambda: AutoModelForImageTextToText.from_config(config)
        )
        self.token = int(config.image_token_id)
        draw_all(folder)
        self.prompts = self._prepared(folder)
        self.folder = HostFolder()
        serving = Serving(
            python=python_of(server),
            arguments=(),
            tokenizer=None,
            processor=folder,
            patience=PATIENCE,
            log=folder / "server.log",
            context=CONTEXT // 2,
        )
        known = complete(HFConfig.from_hf(read_values(self.versions["1.1"])))
        cpu = torch.device("cpu")
        kind = KINDS[server](known, "float32", serving, tensor_ranks=1, device=cpu)

        async def keep() -> Instances:
            return kind.keep(serving, self.folder.path, name="the server", visible="")

        self.engine = loop.run(keep())

    @staticmethod
    def _prepared(folder: Path) -> list[Prompt]:
        source = Dataset(
            type="prompt", path=write_rows(folder, *ROWS), images_key="images", chat_template=True
        )
        data = prepared(source, load_tokenizer(folder), folder / "data")
        sample = data.sample([(0, number) for number in range(len(ROWS))])
        lengths = [length for row in sample.lengths["prompt_ids"] for length in row]
        tokens = sample.tensor("prompt_ids").split(lengths)
        found = zip(tokens, pictures_of(sample), strict=True)
        return [Prompt(tuple(each.tolist()), pictures) for each, pictures in found]

    def version(self, name: str) -> WeightVersion:
        """Return a version with a name that the run has not used."""
        return WeightVersion(name=f"{next(NUMBERS)}-{name}", folder=self.versions[name])

    def requests(self, **options: Any) -> list[GenerationRequest]:
        return [
            request(prompt.tokens, n=2, pictures=prompt.pictures, **options)
            for prompt in self.prompts
        ]

    async def sample(self, **options: Any) -> list[tuple[Completion, ...]]:
        return [await self.engine.submit(each) for each in self.requests(**options)]

    @torch.no_grad()
    def logprobs(
        self, name: str, prompt: Prompt, tokens: Sequence[int], factor: float = 1.0
    ) -> torch.Tensor:
        """Return transformers' log-probabilities of the tokens after a prompt.

        ``factor`` changes the stored pixels.
        """
        folder = self.versions[name]
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        read_tokens = [STRAY if token == self.token else token for token in tokens]
        ids = torch.tensor([[*prompt.tokens, *read_tokens]])
        given: dict[str, Any] = {}
        if prompt.pictures:
            inputs = read(Path(prompt.pictures))
            given = {key: torch.from_numpy(np.array(v)) for key, v in inputs.arguments.items()}
            given["pixel_values"] = factor * given["pixel_values"]
            given["mm_token_type_ids"] = (ids == self.token).long()
        logits = model(input_ids=ids, **given).logits[0, len(prompt.tokens) - 1 : -1]
        chosen = torch.tensor(tokens)[:, None]
        return logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)

    def close(self) -> None:
        self.loop.run(self.engine.close())
        self.folder.close()


@pytest.mark.soak
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_server_reads_the_images_that_training_reads(
    loop: Loop, tmp_path: Path, server: str, family: str
) -> None:
    """Log-probabilities equal transformers' for the stored pixels and each weight version. The
    versions also differ in the image encoder. An update may come during a completion.
    """

    def check(versions: set[str], made: list[tuple[Completion, ...]]) -> None:
        found = set()
        for prompt, completions in zip(served.prompts, made, strict=True):
            for each in completions:
                assert served.token not in each.tokens[:-1]
                names = [version.partition("-")[2] for version in each.versions]
                for name in set(names):
                    own = torch.tensor([version == name for version in names])
                    differences = served.logprobs(name, prompt, each.tokens) - torch.tensor(
                        each.logprobs
                    )
                    assert differences[own].abs().max() < ROUNDING
                    assert differences[own].abs().median() < EXACT / 10
                found |= set(names)
        assert found == versions

    async def over_an_update(delay_s: float) -> list[tuple[Completion, ...]] | None:
        await served.engine.update_weights(served.version("1.1"))
        futures = [served.engine.submit(each) for each in served.requests(max_new_tokens=100)]
        await asyncio.sleep(delay_s)
        await served.engine.update_weights(served.version("2.1"))
        made = [await each for each in futures]
        with_images = (*made[0], *made[1])
        return made if any(len(set(each.versions)) > 1 for each in with_images) else None

    with closing(ImageServer(server, family, loop, tmp_path)) as served:

        async def both() -> list[list[tuple[Completion, ...]]]:
            found = []
            for name in ("1.1", "2.1"):
                await served.engine.update_weights(served.version(name))
                found.append(await served.sample(max_new_tokens=8))
            return [*found, await midway(over_an_update)]

        first, second, mixed = served.loop.run(both(), deadline_s=600.0)
        check({"1.1"}, first)
        check({"2.1"}, second)
        check({"1.1", "2.1"}, mixed)
        made, prompt = first[0][0], served.prompts[0]
        inverted = served.logprobs("1.1", prompt, made.tokens, factor=-1.0)
        assert (inverted - torch.tensor(made.logprobs)).abs().max() > 100 * EXACT


@pytest.mark.soak
@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_server_completes_images_of_a_trial(tmp_path: Path, server: str) -> None:
    """Log-probabilities equal the trainers', even after an update."""
    python = python_of(server)
    (tmp_path / "reward_of_mine.py").write_text(REWARD)
    source = tmp_path / "source"
    source.mkdir()
    config = AutoConfig.for_model(**write_served_processor(source, "qwen3_vl"))
    config.text_config.initializer_range = 0.2
    AutoModelForImageTextToText.from_config(config).save_pretrained(source)
    draw_all(source)
    write_rows(source, *ROWS, {"prompt": "How many?", "images": ["2.png"]})
    site = Site(tmp_path)
    settings = sft_config(
        experiment="grpo",
        total_steps=STEPS,
        algorithm={"name": "grpo", "batch_size": 4, "n_minibatches": 1},
        dataset={"type": "prompt", "path": str(source / "rows.jsonl"), "images_key": "images"},
        rollout={
            "backend": f"{server}:d1",
            "gpus": "1",
            "python": python,
            "n": 4,
            "max_new_tokens": 8,
        },
        reward={"name": "reward_of_mine:different"},
        actor={
            "path": str(source),
            "implementation": "hf",
            "backend": "fsdp:d1",
            "optimizer": {"lr": 1e-2},
        },
    )
    path = site.write("grpo.yaml", settings)
    site.slurmrl("submit", str(path), "--scheduler", "local", "--detach")
    assert site.wait_for_end("grpo/1", timeout_s=500.0)["state"] == "COMPLETED"
    check_served(site.metrics("grpo/1"), STEPS)
