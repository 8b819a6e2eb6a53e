"""Datasets through real tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from slurmrl.config.schema import Dataset
from slurmrl.data.dataset import make
from slurmrl.data.tokenizer import load_tokenizer, save_tokenizer, text_ids, train_bpe
from slurmrl.errors import ConfigError, UsageError

SYMBOLS = ["<pad>", "<eos>", "<bos>", *"0123456789+="]


def characters(folder: Path, *, begin: bool = False) -> Any:
    core = Tokenizer(models.WordLevel({s: i for i, s in enumerate(SYMBOLS)}, unk_token="<pad>"))
    core.add_special_tokens(SYMBOLS[:3])
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    if begin:
        core.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 2)]
        )
    save_tokenizer(core, folder, end="<eos>", pad="<pad>")
    if begin:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "bos_token": "<bos>"}))
    return load_tokenizer(folder)


def rows(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


SUM = {"id": "a", "prompt": "1+2=", "answer": "3"}
LONG = {"id": "b", "prompt": "11+22=", "answer": "33"}


def test_prompts_carry_their_rows(tmp_path: Path) -> None:
    config = Dataset(type="prompt", path=rows(tmp_path, SUM, LONG), answer_key="answer")
    sample = make(config, characters(tmp_path)).sample([1, 0], epoch=4)
    assert sample.ids == ("b@4", "a@4")
    assert sample.lengths == {"prompt_ids": [[6], [4]]}
    assert sample.tensor("prompt_ids").tolist() == [4, 4, 13, 5, 5, 14, 4, 13, 5, 14]
    assert sample.metadata["prompt"] == ["11+22=", "1+2="]
    assert sample.metadata["answer"] == ["33", "3"]
    assert sample.metadata["row"] == [LONG, SUM]


def test_answers_end_with_the_end_of_text_token(tmp_path: Path) -> None:
    config = Dataset(type="prompt_answer", path=rows(tmp_path, SUM))
    sample = make(config, characters(tmp_path)).sample([0], epoch=0)
    assert sample.tensor("input_ids").tolist() == [4, 13, 5, 14, 6, 1]
    assert sample.tensor("prompt_mask").tolist() == [True] * 4 + [False] * 2


def test_other_keys_and_templates(tmp_path: Path) -> None:
    path = rows(tmp_path, {"question": "1+2", "solution": "3"})
    config = Dataset(
        type="prompt_answer",
        path=path,
        prompt_key="question",
        answer_key="solution",
        prompt_template="{prompt}=",
        answer_template="{answer}{answer}",
    )
    sample = make(config, characters(tmp_path)).sample([0], epoch=0)
    assert sample.ids == ("1@0",)
    assert sample.tensor("input_ids").tolist() == [4, 13, 5, 14, 6, 6, 1]


@pytest.mark.parametrize(
    ("kind", "limits", "size"),
    [
        ("prompt", {"max_prompt_tokens": 4}, 1),
        ("prompt", {"max_prompt_tokens": 6}, 2),
        ("prompt_answer", {"max_tokens": 6}, 1),
        ("prompt_answer", {"max_tokens": 9}, 2),
        ("prompt_answer", {}, 2),
    ],
)
def test_rows_that_are_too_long_are_left_out(
    tmp_path: Path, kind: str, limits: dict[str, int], size: int
) -> None:
    config = Dataset(type=kind, path=rows(tmp_path, LONG, SUM), **limits)
    dataset = make(config, characters(tmp_path))
    assert dataset.size == size
    assert dataset.left_out == 2 - size
    assert dataset.sample([size - 1], epoch=0).ids == ("a@0",)


def test_a_limit_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    config = Dataset(type="prompt", path=rows(tmp_path, SUM), max_prompt_tokens=1)
    with pytest.raises(ConfigError, match="every row is longer"):
        make(config, characters(tmp_path))


def test_rows_without_their_keys_are_named(tmp_path: Path) -> None:
    path = rows(tmp_path, SUM, {"id": "c", "prompt": " ", "answer": "1"}, {"id": "d", "x": 1})
    with pytest.raises(ConfigError) as caught:
        make(Dataset(type="prompt_answer", path=path), characters(tmp_path))
    found = [(p.where.rpartition(":")[2], p.key) for p in caught.value.problems]
    assert found == [("2", "prompt"), ("3", "prompt"), ("3", "answer")]


def test_the_fingerprint_follows_settings(tmp_path: Path) -> None:
    tokenizer = characters(tmp_path)
    path = rows(tmp_path, SUM)
    plain = make(Dataset(type="prompt", path=path), tokenizer).fingerprint
    assert make(Dataset(type="prompt", path=path, shuffle=False), tokenizer).fingerprint == plain
    other = Dataset(type="prompt", path=path, prompt_template="{prompt}=")
    assert make(other, tokenizer).fingerprint != plain


def test_the_begin_token_comes_where_the_tokenizer_puts_it_and_only_once(tmp_path: Path) -> None:
    tokenizer = characters(tmp_path, begin=True)
    assert text_ids(tokenizer, ["1+2", "<bos>1"], begin=True) == [[2, 4, 13, 5], [2, 4]]
    assert text_ids(tokenizer, ["1+2"], begin=False) == [[4, 13, 5]]
    assert text_ids(characters(tmp_path / "plain"), ["1"], begin=True) == [[4]]
    assert text_ids(tokenizer, [], begin=True) == []


def test_a_folder_without_tokenizer_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tokenizer in"):
        load_tokenizer(tmp_path)


def test_a_trained_tokenizer_keeps_every_text_and_splits_numbers(tmp_path: Path) -> None:
    train_bpe(["Janet has 12 eggs and 34 hens."] * 3, 300, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = "naïve 1234 hens, “quoted”\n#### 7"
    ids = text_ids(tokenizer, [text], begin=True)[0]
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([i]) for i in text_ids(tokenizer, ["1234"], begin=False)[0]] == [
        *"1234"
    ]
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
