"""Paths that are not model folders give one message, and no job is queued."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from slurmrl.data.tokenizer import load_tokenizer
from slurmrl.errors import ConfigError, UsageError
from slurmrl.fsio import inputs
from slurmrl.models.model_tensors import read_headers
from slurmrl.plan.settings import load_settings
from tests.support.trials import ADDITION, ARCHITECTURE, sft_config


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**30)


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a FIFO": (os.mkfifo, "is not a regular file"),
    "a device": (lambda p: p.symlink_to("/dev/zero"), "is not a regular file"),
    "a folder": (lambda p: p.mkdir(), "cannot be read: Is a directory"),
    "a list": (lambda p: p.write_text("[1]"), "does not hold a JSON object"),
    "deep": (lambda p: p.write_text(deep(100)), "is nested more than 64 levels deep"),
    "very deep": (lambda p: p.write_text(deep(10**5)), "is not JSON"),
    "a huge number": (
        lambda p: p.write_text(json.dumps({**ARCHITECTURE, "num_hidden_layers": 10**400})),
        "num_hidden_layers is 1000",
    ),
    "many layers": (
        lambda p: p.write_text(json.dumps({**ARCHITECTURE, "num_hidden_layers": 10**8})),
        "must be at most 100000",
    ),
    "a huge file": (sparse, "at most 67108864 are allowed"),
    "missing": (lambda p: None, "cannot be read: No such file"),
    "adapters": (
        lambda p: p.with_name("adapter_config.json").write_text("{}"),
        "has adapters of PEFT",
    ),
}


def problem(folder: Path, path: str) -> str:
    config = sft_config()
    config["actor"] = {"path": path, "tokenizer": str(ADDITION / "tokenizer")}
    file = folder / "sft.yaml"
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        load_settings(file, root=folder)
    (found,) = [each for each in caught.value.problems if each.key == "actor.path"]
    assert len(found.message) < 600
    return found.message


@pytest.mark.parametrize("kind", FILES)
def test_directory_with_an_invalid_config_file_is_rejected(tmp_path: Path, kind: str) -> None:
    make, message = FILES[kind]
    (tmp_path / "model").mkdir()
    make(tmp_path / "model" / "config.json")
    assert message in problem(tmp_path, "model")


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("s3://bucket/model", "copy it here first"),
        ("https://example.org/model", "hf://org/name is a repository"),
        ("file:///models/llama", "write only the path"),
    ],
)
def test_url_is_rejected_with_the_remedy(tmp_path: Path, path: str, remedy: str) -> None:
    found = problem(tmp_path, path)
    assert f"'{path}' is a URL" in found
    assert remedy in found


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n"),
            "is a pointer of Git LFS, not the file: run git lfs pull",
        ),
        (os.mkfifo, "is not a regular file"),
        (
            lambda p: p.symlink_to("/no/where"),
            "is missing, but a symbolic link points to /no/where",
        ),
        (lambda p: p.write_text("version"), "is damaged or truncated"),
        (lambda p: p.mkdir(), "is damaged or truncated"),
    ],
)
def test_weights_are_rejected_if_a_file_is_missing_or_damaged(
    tmp_path: Path, make: Callable[[Path], Any], message: str
) -> None:
    make(tmp_path / "model.safetensors")
    (wrong,) = read_headers(tmp_path)[1]
    assert message in wrong
    index = {"weight_map": {"w": "part.safetensors", "x": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"w": np.zeros(1)}, tmp_path / "part.safetensors")
    (wrong,) = read_headers(tmp_path)[1]
    assert message in wrong


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_git_lfs_pointer_is_named_for_other_files(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ADDITION / "tokenizer", folder)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    pointer = rf"{name} is a pointer of Git LFS, not the file: run"
    with pytest.raises(UsageError, match=pointer):
        inputs.read_json(folder / name)
    with pytest.raises(UsageError, match=pointer):
        load_tokenizer(folder)
