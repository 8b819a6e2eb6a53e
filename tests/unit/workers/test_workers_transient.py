"""Files that exist at submission and are temporarily unreadable never end a trial permanently."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from slurmrl import backoff, rewards
from slurmrl.backoff import retry
from slurmrl.config.load import load_resolved
from slurmrl.config.schema import Model
from slurmrl.data.records import read_records
from slurmrl.data.tokenizer import load_tokenizer, train_bpe
from slurmrl.errors import UnreadableInputError, UsageError
from slurmrl.fsio import inputs
from slurmrl.fsio.calls import REAL
from slurmrl.models.hf import read_values
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_model import HFModel
from slurmrl.models.model_tensors import open_folder
from slurmrl.plan.estimates.shape import config_values, generation_values
from slurmrl.run.reports import RankId
from slurmrl.tensors.checkpoint.export import TokenizerFiles
from slurmrl.tensors.layout import Box
from slurmrl.workers.failure import failure_of
from slurmrl.workers.master.exporting import _source_dtypes
from slurmrl.workers.worker import orders as serve_module

RANK = RankId("trainer", 3)
CONFIG = {"model_type": "gpt2", "vocab_size": 300, "eos_token_id": 0}
MODULE = "a_reward_that_comes_and_goes"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    train_bpe(["1 + 2"], 300, folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    save_file({"w": np.ones((2, 2), np.float32)}, folder / "model.safetensors")
    (folder / "rows.jsonl").write_text('{"prompt": "1"}\n')
    (folder / f"{MODULE}.py").write_text("def score(prompts, completions, rows):\n    return []\n")
    (folder / "config.yaml").write_text("seed: 1\n")
    return folder


def model(folder: Path) -> Model:
    return Model(path=str(folder))


def make_reward(folder: Path) -> None:
    sys.modules.pop(MODULE, None)
    rewards.make(f"{MODULE}:score", {})


def export_tokenizer(folder: Path) -> None:
    target = folder.parent / "exported"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    TokenizerFiles(folder).copy(target, REAL)


def hf_model(folder: Path) -> None:
    config = HFConfig.from_hf(CONFIG)
    HFModel(config, "lm", source=folder, seed=1, dtype=torch.float32)


READERS: dict[str, Callable[[Path], Any]] = {
    "tokenizer": load_tokenizer,
    "config.json": read_values,
    "config.json without torch": lambda folder: config_values(model(folder)),
    "generation_config.json": lambda folder: generation_values(model(folder)),
    "weights": lambda folder: open_folder(folder).read("w", Box.whole((2, 2))),
    "weights by transformers": hf_model,
    "types of weights": _source_dtypes,
    "dataset": lambda folder: read_records(folder / "rows.jsonl", "id"),
    "reward": make_reward,
    "tokenizer of an export": export_tokenizer,
    "configuration": lambda folder: load_resolved(folder / "config.yaml"),
}
ERRORS = (errno.ESTALE, errno.EACCES, errno.ENOENT)
SLOW = ("tokenizer", "weights by transformers")
SLOW_READ = ("tokenizer_config.json", "model.safetensors")


@pytest.fixture
def folder(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "inputs"
    shutil.copytree(original, made)
    monkeypatch.syspath_prepend(str(made))
    return made


def assert_tried_again(error: Exception) -> None:
    """Check that the failure leads to another start, whether the master or a rank raised it."""
    found = failure_of(error, "master")
    assert (found.cause, found.final) == ("environment", False), found
    found = serve_module._failure_of(error, RANK, serve_module.START)
    assert (found.cause, found.final) == ("environment", False), found


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("empty", [False, True], ids=["gone", "unmounted"])
def test_temporarily_missing_directory_is_retried(reader: str, empty: bool, folder: Path) -> None:
    away = folder.rename(folder.with_name("away"))
    if empty:
        folder.mkdir()
    with pytest.raises((OSError, UsageError)) as caught:
        READERS[reader](folder)
    assert_tried_again(caught.value)
    if empty:
        folder.rmdir()
    away.rename(folder)
    if reader not in ("configuration", "weights by transformers"):  # (which are not whole here)
        READERS[reader](folder)


@pytest.mark.parametrize(
    ("reader", "number"),
    [(reader, number) for reader in READERS for number in ERRORS[: 1 if reader in SLOW else 3]],
)
def test_failed_read_is_retried(
    reader: str, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads of each file of the folder fail in turn. A file that no reader uses causes no error."""
    failed = 0
    names = SLOW_READ if reader in SLOW else sorted(path.name for path in folder.iterdir())
    for victim in names:
        with monkeypatch.context() as patched:
            break_reads(patched, folder / victim, number)
            try:
                READERS[reader](folder)
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not be final
                if reader == "configuration" and victim != "config.yaml":
                    continue  # it lacks settings
                if reader == "weights by transformers" and not isinstance(
                    error, UnreadableInputError
                ):
                    continue  # they lack tensors
                assert_tried_again(error)
                failed += 1
    assert failed


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize(
    "reader", ["tokenizer", "config.json", "generation_config.json", "weights"]
)
def test_failed_listing_is_retried(
    reader: str, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(path: Any = ".") -> list[str]:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "listdir", reject)
    with pytest.raises((OSError, UsageError)) as caught:
        READERS[reader](folder)
    assert_tried_again(caught.value)


def break_reads(patched: pytest.MonkeyPatch, victim: Path, number: int) -> None:
    """Fail each way in which Python opens a file."""

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def open_or_fail(path: Any, *arguments: Any, **keywords: Any) -> Any:
            if not isinstance(path, int) and Path(os.fsdecode(path)) == victim:
                raise OSError(number, os.strerror(number), str(path))
            return original(path, *arguments, **keywords)

        return open_or_fail

    broken = failing(open)
    patched.setattr(builtins, "open", broken)
    patched.setattr(io, "open", broken)
    patched.setattr(os, "open", failing(os.open))
    loader = sys.modules["_frozen_importlib_external"]
    calls = SimpleNamespace(open_code=failing(io.open_code), FileIO=io.FileIO)
    patched.setattr(loader, "_io", calls)


def test_missing_input_is_read_again_until_it_exists() -> None:
    tries = iter((UnreadableInputError("gone"), UnreadableInputError("gone"), None))

    def look() -> str:
        if (error := next(tries)) is not None:
            raise error
        return "there"

    assert retry("read", look, lambda _: None, timeout_s=60) == "there"
    with pytest.raises(UnreadableInputError):
        retry("read", lambda: READERS["config.json"](Path("/nowhere")), timeout_s=0)


def test_definitely_missing_input_is_reported_soon(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a deleted file, there is no wait of a minute, and the failure names it for the next
    start. If a mount may be missing, the reader waits for a minute.
    """
    clock = [0.0]
    monkeypatch.setattr(backoff.time, "monotonic", lambda: clock[0])

    def pause(seconds: float) -> None:
        clock[0] += seconds

    def waited_s() -> float:
        before = clock[0]
        with pytest.raises(UnreadableInputError) as caught:
            retry("read", lambda: inputs.require([folder / "rows.jsonl"]), pause, timeout_s=60)
        absent = failure_of(caught.value, "master").absent
        said = serve_module._failure_of(caught.value, RANK, serve_module.START)
        assert said.absent == absent == caught.value.absent
        assert bool(absent) == folder.exists()
        return clock[0] - before

    (folder / "rows.jsonl").unlink()
    assert waited_s() < 30
    folder.rename(folder.with_name("away"))
    assert waited_s() >= 60
