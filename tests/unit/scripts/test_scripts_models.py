"""The table of model families: the checks that run, and the page with their results."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from slurmrl.models import hf_pictures
from slurmrl.models.families import PICTURE_FAMILIES, picture_refusal
from slurmrl.models.hf_model import HFModel
from tests.support import family_checks, picture_checks
from tests.support.families import families, tiny
from tests.support.family_table import (
    COLUMNS,
    TENTHS,
    all_families,
    asked_of,
    differences,
    kept,
)
from tests.support.picture_checks import PictureFamily, picture_families
from tests.support.rotation import share
from tests.support.trials import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))
import models_table


def test_tenths_of_the_model_table_together_cover_all_families() -> None:
    shares = [share(all_families(), TENTHS, f"{number:040x}") for number in range(TENTHS)]
    assert sorted(family for share in shares for family in share) == sorted(all_families())
    assert len(families()) >= 40


def test_kept_results_belong_to_the_installed_versions() -> None:
    """After an upgrade, run scripts/models again."""
    found = kept()
    assert found["versions"]["transformers"] == version("transformers")
    assert sorted(found["families"]) == families()
    assert sorted(found["images"]) == picture_families()
    supported = {name for name, results in found["images"].items() if not results["load"]}
    assert supported == PICTURE_FAMILIES


def test_better_and_worse_results_are_reported() -> None:
    before = {"llama": {"load": "", "lora": "no adapters"}}
    assert not differences({"llama": {"load": "", "lora": "other words"}}, before)
    assert differences({"llama": {"load": "broken"}}, before) == [
        "llama load: broken; kept: yes",
    ]
    assert differences({"llama": {"lora": ""}}, before) == ["llama lora: yes; kept: no adapters"]


def reasons(folder: Path, family: str, *columns: str) -> dict[str, str]:
    """Run checks in this process."""
    images = family in picture_families()
    kind = PictureFamily if images else family_checks.Family
    checks = picture_checks.CHECKS if images else family_checks.CHECKS
    one, found = kind(family, folder, {}), {}
    for column in columns:
        try:
            checks[column](one)
            found[column] = ""
        except family_checks.CheckError as error:
            found[column] = str(error)
    return found


@pytest.mark.parametrize("family", ["gemma2", "internvl"])
def test_model_checks_fail_for_wrong_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    columns = ("load", "logits", "generation")
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.mkdir()
    wrong.mkdir()
    assert reasons(right, family, *columns) == dict.fromkeys(columns, "")
    whole = HFModel.forward

    def forward(self: HFModel, ids: torch.Tensor, *rest: object) -> object:
        found = whole(self, ids, *rest)  # type: ignore[arg-type]
        return found if len(rest) > 2 else found.roll(1, -1)  # generation is right, training is not

    monkeypatch.setattr(HFModel, "forward", forward)
    found = reasons(wrong, family, *columns)
    assert not found["load"]
    assert "slurmrl and transformers differ by" in found["logits"]
    assert "generation and training differ by" in found["generation"]


def test_checks_of_images_fail_for_rows_without_their_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = hf_pictures.PictureReader.load
    monkeypatch.setattr(
        hf_pictures.PictureReader,
        "load",
        lambda self, paths, device: nothing(self, [""] * len(paths), device),
    )
    assert "slurmrl and transformers differ by" in reasons(tmp_path, "internvl", "logits")["logits"]


def test_family_without_images_is_rejected_with_the_reason_of_plan(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert asked_of("mllama", COLUMNS) == ["load"]
    assert "t2" not in asked_of("qwen3_vl", COLUMNS)
    assert asked_of("qwen3", COLUMNS) == list(COLUMNS)
    found = reasons(tmp_path / "other", "mllama", "load")
    assert found["load"] == picture_refusal({"model_type": "mllama"}) != ""


def test_tiny_model_has_each_kind_of_layer() -> None:
    made = tiny("qwen3_next")
    assert made["layer_types"] == ["linear_attention", "full_attention"]
    assert made["num_hidden_layers"] == 2


def test_page_shows_reason_once_and_dash_for_missing_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "models.json"
    monkeypatch.setattr(models_table, "KEPT", file)
    checks = [check for needed in models_table.SHOWN.values() for check in needed]
    one = {**dict.fromkeys(checks, ""), "lora": "'one' has none"}
    two = {**one, "lora": "'two' has none", "export": "lost a weight"}
    del two["vllm"]
    third = {"load": "images are not possible for third models; allowed families: one"}
    state = {"versions": {"torch": "2"}, "date": "2026-01-01"}
    state |= {"families": {"one": one, "two": two}, "images": {"one": one, "third": third}}
    file.write_text(json.dumps(state))
    text = "Top\n"
    for begin, end in models_table.PLACES.values():
        text += f"{begin}\nold\n{end}\nEnd\n"
    lines = models_table.page(text).split("\n")
    assert "| `one` | yes | yes | yes | yes | yes | no 1 | yes | yes | yes | yes | yes |" in lines
    assert "| `two` | yes | yes | no 2 | yes | yes | no 1 | yes | yes | yes | – | yes |" in lines
    assert "| `one` | yes | yes | yes | yes | yes | no 1 |" in lines
    assert "| `third` |" + " no 2 |" * 6 in lines
    assert [line for line in lines if line[:2] in ("1.", "2.", "3.")] == [
        *("1. `… has none`", "2. `images are not possible for … models`"),
        *("1. `… has none`", "2. `lost a weight`"),
    ]
    assert (lines[0], lines[-2], "old" in lines) == ("Top", "End", False)
