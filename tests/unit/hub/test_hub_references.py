"""Configurations that name repositories of the hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from slurmrl.config.load import dump
from slurmrl.env import user_name
from slurmrl.errors import ConfigError
from slurmrl.plan.build import make_plan
from slurmrl.plan.settings import Settings, load_settings
from slurmrl.run.paths import RunPaths
from tests.support.hub import Hub
from tests.support.trials import ADDITION, ARCHITECTURE

CONFIG = {
    "experiment": "sums",
    "total_steps": 1,
    "algorithm": {"name": "sft", "batch_size": 2},
    "actor": {"path": "org/model"},
    "dataset": {"type": "prompt_answer", "path": "org/sums", "split": "train"},
}
ROW = json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n"


class Site:
    """A folder with a configuration, whose model and data are on the hub."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.hub, self.folder, self.root = hub, folder, folder / "runs"
        self.config = folder / "sums.yaml"
        self.config.write_text(json.dumps(CONFIG))
        tokenizer = {path.name: path.read_bytes() for path in (ADDITION / "tokenizer").iterdir()}
        config = {"config.json": json.dumps(ARCHITECTURE)}
        self.model = hub.commit(
            "models/org/model", {**tokenizer, **config, "model.safetensors": "weights"}
        )
        self.rows = self.commit_rows(1)

    def commit_rows(self, count: int) -> str:
        return self.hub.commit("datasets/org/sums", {"train.jsonl": ROW * count})

    def load(self, *overrides: str, planning: bool = False, data: bool = False) -> Settings:
        return load_settings(self.config, overrides, root=self.root, planning=planning, data=data)


@pytest.fixture
def site(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.chdir(tmp_path)
    return Site(tmp_path, hub)


def test_plan_downloads_only_the_config_and_submit_downloads_all(site: Site) -> None:
    """After that, a plan needs no download."""
    planned = site.load(planning=True)
    assert [
        (problem.key, problem.message.partition(" is not")[0]) for problem in planned.missing
    ] == [
        ("dataset.path", "hf://org/sums@main"),
        ("actor.path", "hf://org/model@main"),
    ]
    assert planned.config.actor.architecture == ARCHITECTURE
    assert make_plan(planned, scheduler="local").models["actor"]
    assert not [line for line in site.hub.downloads if "safetensors" in line or "jsonl" in line]
    config = site.load().config
    assert (Path(str(config.actor.path)).name, Path(config.dataset.path).name) == (
        site.model,
        site.rows,
    )
    assert config.actor.tokenizer == config.actor.path
    assert site.load(planning=True).missing == ()


def test_trial_keeps_its_commits_and_new_trials_get_the_newest(site: Site) -> None:
    config = site.load().config
    paths = RunPaths.of(site.root, user_name(), "sums", "1")
    paths.history.mkdir(parents=True)
    paths.config.write_text(dump(config))
    newer = site.commit_rows(2)
    assert site.load().config.dataset.path == config.dataset.path
    assert Path(site.load("trial=2").config.dataset.path).name == newer
    other = site.hub.commit("datasets/org/sums", {"train.jsonl": ROW * 3}, branch="v2")
    assert Path(site.load("dataset.path=hf://org/sums@v2").config.dataset.path).name == other
    site.hub.repositories.clear()
    assert load_settings(paths.config, root=site.root).config == config, "resume needs no hub"


def test_resumed_trial_downloads_removed_commits_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial gets its earlier commits, although the branches have moved. If the hub cannot be
    reached, there is one message for each folder, and no job is queued.
    """
    config = site.load().config
    paths = RunPaths.of(site.root, user_name(), "sums", "1")
    paths.history.mkdir(parents=True)
    paths.config.write_text(dump(config))
    site.commit_rows(2)
    site.hub.commit("models/org/model", {"config.json": "{}", "model.safetensors": "other"})
    model, rows = Path(str(config.actor.path)), Path(config.dataset.path)
    (model / "model.safetensors").unlink()
    shutil.rmtree(rows)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError) as caught:
        load_settings(paths.config, root=site.root, resumed=True)
    messages = {problem.key: problem.message for problem in caught.value.problems}
    assert messages.keys() == {"actor.path", "dataset.path"}
    assert messages["actor.path"].startswith(
        f"{model} is incomplete: model.safetensors is missing or truncated, and cannot be fetched "
        f"again: {site.hub.url}/org/model cannot be reached from here"
    )
    assert messages["dataset.path"].startswith(f"{rows} is missing, and cannot be fetched again")
    planned = load_settings(paths.config, root=site.root, resumed=True, planning=True)
    assert [problem.key for problem in planned.missing] == ["dataset.path", "actor.path"]
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert load_settings(paths.config, root=site.root, resumed=True).config == config
    assert (model / "model.safetensors").read_text() == "weights"
    shutil.rmtree(model)
    assert site.load().config == config, "submit continues the trial with its commits"
    assert (model / "model.safetensors").read_text() == "weights"


def test_invalid_references_are_rejected_before_any_download(site: Site) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.batch_sizes"):
        site.load("algorithm.batch_sizes=3")
    with pytest.raises(ConfigError, match=r"rollout\.n: 4 is not allowed"):
        site.load("rollout.n=4")
    assert not [line for line in site.hub.downloads if "safetensors" in line or "jsonl" in line]
    with pytest.raises(ConfigError) as caught:
        site.load("dataset.path=orgs/sums")
    (problem,) = (each for each in caught.value.problems if each.key == "dataset.path")
    assert "datasets/orgs/sums does not exist, or is a private dataset" in problem.message
    assert f"there is also no file or folder {site.folder}/orgs/sums" in problem.message
    (site.folder / "rows.jsonl").write_text(ROW)
    with pytest.raises(
        ConfigError, match=r"dataset\.subset: 'easy' is not allowed: .*not a dataset"
    ):
        site.load("dataset.path=rows.jsonl", "dataset.split=null", "dataset.subset=easy")


def test_sources_and_evaluations_may_be_repositories(site: Site) -> None:
    sources = "dataset={type: prompt_answer, split: train, sources: {a: {path: hf://org/sums}}}"
    held_out = "evaluation={dataset: {type: prompt_answer, path: org/sums, split: train}}"
    config = site.load(sources, held_out, planning=True, data=True).config
    assert config.evaluation is not None
    folders = [config.dataset.sources["a"].path, config.evaluation.dataset.path]
    assert [Path(folder).name for folder in folders] == [site.rows] * 2
