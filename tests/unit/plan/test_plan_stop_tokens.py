"""The tokens that end a completion, from model folders like those of published models."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from slurmrl.config.schema import Model
from slurmrl.data.tokenizer import end_id, load_tokenizer, save_tokenizer
from slurmrl.errors import ConfigError, UnreadableInputError
from slurmrl.plan.estimates.shape import config_values, stop_tokens
from tests.unit.plan.conftest import ARCHITECTURE, Load


def write(folder: Path, tokens: list[str], eos: str, config: Any, generation: Any) -> None:
    """Write a model folder whose token ids are the positions in ``tokens``."""
    core = Tokenizer(models.WordLevel({one: at for at, one in enumerate(tokens)}, tokens[0]))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens([one for one in tokens if one.startswith("<")])
    save_tokenizer(core, folder, end=eos, pad=tokens[0])
    (folder / "config.json").write_text(json.dumps({**ARCHITECTURE, **config}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))


GEMMA = ["<pad>", "<eos>", "<bos>", "a", "<end_of_turn>"]
PHI3 = ["<unk>", "<s>", "<|endoftext|>", "a", "<|assistant|>", "<|end|>"]
CHATML = ["<|endoftext|>", "a", "<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("tokens", "eos", "config", "generation", "ends"),
    [
        (
            GEMMA,
            "<eos>",
            {"eos_token_id": 1},
            {"eos_token_id": [1, 4]},
            ["<eos>", "<end_of_turn>"],
        ),
        (
            PHI3,
            "<|endoftext|>",
            {"eos_token_id": 2},
            {"eos_token_id": [2, 4, 5]},
            ["<|endoftext|>", "<|assistant|>", "<|end|>"],
        ),
        # of a base model with a chat template: only the tokenizer has it
        (CHATML, "<|im_end|>", {"eos_token_id": 0}, None, ["<|endoftext|>", "<|im_end|>"]),
        # the other way round
        (
            CHATML,
            "<|endoftext|>",
            {"eos_token_id": None},
            {"eos_token_id": 3},
            ["<|im_end|>", "<|endoftext|>"],
        ),
        (GEMMA, "<eos>", {"eos_token_id": [4]}, None, ["<end_of_turn>", "<eos>"]),
        (
            GEMMA,
            "<eos>",
            {"text_config": {"eos_token_id": [4], "vocab_size": 5}},
            None,
            ["<end_of_turn>", "<eos>"],
        ),
        # ids that no token has, as in configs that were never adapted
        (GEMMA, "<eos>", {"eos_token_id": 50256}, {"eos_token_id": [-1]}, ["<eos>"]),
    ],
)
def test_stop_tokens_come_from_all_files(
    load_ppo: Load,
    folder: Path,
    tokens: list[str],
    eos: str,
    config: Any,
    generation: Any,
    ends: list[str],
) -> None:
    write(folder / "model", tokens, eos, config, generation)
    tokenizer = load_tokenizer(folder / "model")
    settings = load_ppo()
    found = stop_tokens(settings.config, [end_id(tokenizer)])
    assert tokenizer.convert_ids_to_tokens(list(found)) == ends
    more = load_ppo("rollout.stop_token_ids=[3]")
    assert stop_tokens(more.config, [end_id(tokenizer)]) == tuple(dict.fromkeys((*found, 3)))


@pytest.mark.parametrize(
    ("file", "overrides", "key", "message"),
    [
        ({"eos_token_id": "</s>"}, [], "actor.path", "eos_token_id is '</s>', must be a token id"),
        ([], [], "actor.path", "generation_config.json does not hold a JSON object"),
    ],
)
def test_stop_tokens_are_checked_at_submission(
    load_ppo: Load, folder: Path, file: Any, overrides: list[str], key: str, message: str
) -> None:
    (folder / "model" / "generation_config.json").write_text(json.dumps(file))
    with pytest.raises(ConfigError) as caught:
        load_ppo(*overrides)
    [problem] = caught.value.problems
    assert problem.key == key
    assert message in problem.message


def test_unreachable_file_is_no_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> int:
        raise OSError(errno.EIO, "no answer")

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(UnreadableInputError, match=r"config\.json cannot be read: no answer"):
        config_values(Model(path=str(tmp_path)))
