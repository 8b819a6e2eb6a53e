"""The checks of `family_checks` for families that read images. Every batch and row has images."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from slurmrl.config.schema import Model
from slurmrl.models.families import PICTURE_FAMILIES, picture_refusal
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_model import HFModel
from tests.support import family_checks
from tests.support.family_checks import CheckError, Family, near
from tests.support.picture_prompts import (
    Prompts,
    complete,
    prompts_of,
    trained_logprobs,
    transformers_logprobs,
    write_source,
)

ALL: Final = ("load", "logits", "generation", "sft", "export", "grpo", "resume", "lora")


def picture_families() -> list[str]:
    """Return every family of transformers whose models read images and text and write text."""
    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def columns_of(family: str) -> tuple[str, ...]:
    """Return the checks of a family; only the first one if slurmrl rejects its images."""
    return (*ALL, "sglang", "vllm") if family in PICTURE_FAMILIES else ALL[:1]


class PictureFamily(Family):
    """A tiny random model that reads images, in a folder for trials."""

    automatic: ClassVar[Any] = AutoModelForImageTextToText

    @cached_property
    def source(self) -> Path:
        """The model's folder, with its processor and rows with images."""
        if reason := picture_refusal({"model_type": self.name}):
            raise CheckError(reason)
        folder = self.folder / "source"
        folder.mkdir()
        write_source(folder, self.name)
        return folder

    @cached_property
    def model(self) -> HFModel:
        """slurmrl's model of the folder, with its image encoder."""
        config = HFConfig.from_hf(Model(vision=True).marked(self.values))
        return HFModel(config, "lm", source=self.source, seed=0, dtype=torch.float32)

    @cached_property
    def prompts(self) -> Prompts:
        """Prepared prompts with up to two images."""
        model, folder = self.model, self.folder / "prompts"
        folder.mkdir(exist_ok=True)
        return prompts_of(model, self.source, folder)

    def config(self, **changes: Any) -> dict[str, Any]:
        """Return the settings of two steps of SFT from images, on two ranks."""
        made = super().config(**changes)
        rows = {"path": str(self.source / "rows.jsonl"), "images_key": "images"}
        # Rows with images are longer than the rows of text.
        kept = {k: v for k, v in made["dataset"].items() if not k.startswith("max_")}
        return {
            **made,
            "algorithm": {**made["algorithm"], "batch_size": 4},
            "actor": {**made["actor"], "tokenizer": str(self.source)},
            "dataset": {**kept, **rows},
        }


@torch.no_grad()
def logits(family: PictureFamily) -> None:
    """A batch has the same log-probabilities as transformers for each single sequence."""
    more = [torch.tensor([7, 8, 9])] * len(family.prompts.ids)
    found = trained_logprobs(family.prompts, more)
    wanted = transformers_logprobs(family.reference, family.prompts, more)
    for one, other in zip(found, wanted, strict=True):
        near(one[1:], other, "log-probabilities of slurmrl and transformers")


@torch.no_grad()
def generation(family: PictureFamily) -> None:
    """Generated tokens have the log-probabilities of the training pass."""
    made = complete(family.prompts, 10_000)
    trained = trained_logprobs(family.prompts, [torch.tensor(each.tokens) for each in made])
    for found, each in zip(trained, made, strict=True):
        exact = torch.tensor(each.logprobs)
        near(found[-len(exact) :], exact, "log-probabilities of generation and training")


CHECKS: Final = {**family_checks.CHECKS, "logits": logits, "generation": generation}


def main(asked: Mapping[str, Any]) -> None:
    """Append the results of a family, see `family_checks.main`."""
    family_checks.main(asked, PictureFamily, CHECKS)
