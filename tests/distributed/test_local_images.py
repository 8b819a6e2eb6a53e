"""Trials of models that read images and videos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from slurmrl.desk.report.report_data import read_samples
from tests.support.family_checks import TRIAL, finished, newest, of_generation
from tests.support.held import NO_LIMIT, Hold
from tests.support.picture_models import draw
from tests.support.picture_prompts import write_source
from tests.support.rotation import in_turn, rotating
from tests.support.trials import Site, kill_one


def config(source: Path, **changes: Any) -> dict[str, Any]:
    """Return the settings of two steps of GRPO on two ranks."""
    return {
        "experiment": "family",
        "total_steps": 2,
        "algorithm": {"name": "grpo", "batch_size": 4, "n_minibatches": 2, "kl": {"coef": 0.01}},
        "cluster": {"gpus_per_worker": 0},
        "actor": {
            "path": str(source),
            "implementation": "hf",
            "backend": "fsdp:d2",
            "optimizer": {"lr": 1e-2},
            **changes.pop("actor", {}),
        },
        "dataset": {"type": "prompt", "path": str(source / "rows.jsonl"), "images_key": "images"},
        "rollout": {"n": 2, "max_new_tokens": 6},
        "checkpoint": {"every_steps": 1},
        **changes,
    }


def source_in(folder: Path, family: str, *, videos: bool = False) -> Path:
    """Return a folder with a random model, its processor, and rows with up to two images."""
    source = folder / "source"
    source.mkdir()
    write_source(source, family, videos=videos)
    return source


def with_videos(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings whose rows have videos too."""
    more = {"videos_key": "videos", "video_frames": 4}
    return {**settings, "dataset": {**settings["dataset"], **more}}


TRIALS = 7
"""Number of trials with images. They take turns: each takes minutes."""


@pytest.mark.parametrize(
    ("family", "videos"),
    rotating(
        pytest.param("qwen3_vl", False),
        pytest.param("qwen2_5_vl", True),
        pytest.param("qwen3_vl", True),
        pytest.param("qwen3_5", False),
        shares=TRIALS,
    ),
)
def test_killed_trial_with_images_equals_undisturbed_one(
    tmp_path: Path, family: str, videos: bool
) -> None:
    """The image encoder keeps its weights, and transformers loads the export with it."""
    if videos:
        pytest.importorskip("av")
    source = source_in(tmp_path, family, videos=videos)
    settings = with_videos(config(source)) if videos else config(source)
    whole, killed = (Site(tmp_path / name) for name in ("whole", "killed"))
    for site in (whole, killed):
        site.folder.mkdir()
    Hold(whole).allow(NO_LIMIT)
    steps = finished(whole, Hold(whole).judged(settings))
    of_generation(steps)

    hold = Hold(killed)
    hold.allow(1)
    file = str(killed.write("family.yaml", hold.judged(settings)))
    killed.slurmrl("submit", file, "--scheduler", "local", "--detach")
    killed.wait_for_step(TRIAL, 1)
    kill_one(killed.paths(TRIAL).run, "worker")
    hold.allow(NO_LIMIT)
    assert killed.wait_for_end(TRIAL)["state"] == "COMPLETED"
    assert killed.outcome(TRIAL) == whole.outcome(TRIAL)

    export = newest(whole, "exports")
    before = AutoModelForImageTextToText.from_pretrained(source).state_dict()
    made, report = AutoModelForImageTextToText.from_pretrained(export, output_loading_info=True)
    assert not any(report.values())
    changed = [n for n, values in made.state_dict().items() if not values.equal(before[n])]
    assert changed
    assert not [name for name in changed if ".visual." in name]
    name = "preprocessor_config.json"
    assert (export / name).read_bytes() == (source / name).read_bytes()


@in_turn(4, TRIALS)
def test_videos_train_adapters_like_one_rank(tmp_path: Path) -> None:
    """With two ranks, each rank has other media of a batch, or none. Adapters are in the language
    model only.
    """
    pytest.importorskip("av")
    source = source_in(tmp_path, "qwen3_vl", videos=True)
    del (base := with_videos(config(source)))["rollout"]
    base["dataset"] |= {"type": "prompt_answer", "shuffle": False}
    base |= {"algorithm": {"name": "sft", "batch_size": 4}}
    losses = {}
    for layout in ("fsdp:d1", "fsdp:d2"):
        site = Site(tmp_path / layout.replace(":", "-"))
        site.folder.mkdir()
        actor = {**base["actor"], "backend": layout, "lora": {"rank": 2}}
        losses[layout] = [step["loss"] for step in finished(site, {**base, "actor": actor})]
    torch.testing.assert_close(*(torch.tensor(each) for each in losses.values()))
    assert losses["fsdp:d1"][-1] < losses["fsdp:d1"][0]
    before = AutoModelForImageTextToText.from_pretrained(source).state_dict()
    after = AutoModelForImageTextToText.from_pretrained(newest(site, "exports")).state_dict()
    changed = [name for name in after if not after[name].equal(before[name])]
    assert changed
    assert all("language_model" in name for name in changed)


@in_turn(5, TRIALS)
def test_conversations_with_images_train_the_image_encoder(tmp_path: Path) -> None:
    """A rank without images has the same update."""
    source = source_in(tmp_path, "gemma3")
    sft = {
        "algorithm": {"name": "sft", "batch_size": 2},  # with d2, one rank has no image
        "dataset": {
            "type": "prompt_answer",
            "path": str(source / "rows.jsonl"),
            "images_key": "images",
            "shuffle": False,
        },
    }
    del (base := config(source))["rollout"]
    losses = {}
    for layout in ("fsdp:d1", "fsdp:d2"):
        site = Site(tmp_path / layout.replace(":", "-"))
        site.folder.mkdir()
        actor = {**base["actor"], "backend": layout, "train_vision": True}
        losses[layout] = [step["loss"] for step in finished(site, {**base, **sft, "actor": actor})]
    torch.testing.assert_close(*(torch.tensor(each) for each in losses.values()))
    _rejects_changed_image(site, source, {**base, **sft, "actor": actor})
    before = AutoModelForImageTextToText.from_pretrained(source).state_dict()
    after = AutoModelForImageTextToText.from_pretrained(newest(site, "exports")).state_dict()
    assert any("vision_tower" in n and not after[n].equal(before[n]) for n in after)


def _rejects_changed_image(site: Site, source: Path, settings: dict[str, Any]) -> None:
    """Require that neither a submission nor a job continues a trial with a changed image."""
    draw(source / "4.png", 3, (48, 16))
    file = str(site.write("longer.yaml", {**settings, "total_steps": 3}))
    said = site.slurmrl("submit", file, "--scheduler", "local", "--wait", code=None)
    assert said.returncode != 0
    assert f"image 4.png of {source / 'rows.jsonl'} has changed since step 2" in said.stderr


@in_turn(6, TRIALS)
def test_episodes_in_tasks_read_the_same_images_as_in_trainers(tmp_path: Path) -> None:
    """A rollout task samples what the trainers sample. A task runs single turns as episodes too."""
    source = source_in(tmp_path, "qwen3_vl")
    guess = {"name": "multi_turn", "environment": {"name": "guess_number"}, "max_turns": 2}
    texts = {}
    for name, more in (("alone", {}), ("tasks", {"tasks": {"max": 1, "max_staleness": 0}})):
        site = Site(tmp_path / name)
        site.folder.mkdir()
        Hold(site).allow(NO_LIMIT)
        rollout = {"n": 2, "max_new_tokens": 6, "episode": guess, **more}
        settings = config(source, actor={"backend": "fsdp:d1"}, rollout=rollout)
        of_generation(finished(site, Hold(site).judged(settings)))
        rows = read_samples(site.paths(TRIAL).samples).rows
        texts[name] = sorted((row["step"], row["prompt"], row["completion"]) for row in rows)
    assert texts["alone"] == texts["tasks"]
    assert len(texts["alone"]) == 8
