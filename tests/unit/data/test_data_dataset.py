"""Datasets through real tokenizers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from slurmrl.config.schema import Dataset
from slurmrl.data.dataset import SampleRows
from slurmrl.data.tokenizer import load_tokenizer, save_tokenizer, text_ids, train_bpe
from slurmrl.errors import ConfigError, UsageError
from tests.support.datasets import prepared, write_rows

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


def make(config: Dataset, tokenizer: Any) -> SampleRows:
    return prepared(config, tokenizer, Path(config.path).parent / "data")


SUM = {"id": "a", "prompt": "1+2=", "answer": "3"}
LONG = {"id": "b", "prompt": "11+22=", "answer": "33"}


def test_prompts_keep_their_rows_as_metadata(tmp_path: Path) -> None:
    config = Dataset(type="prompt", path=write_rows(tmp_path, SUM, LONG), answer_key="answer")
    sample = make(config, characters(tmp_path)).sample([(4, 1), (4, 0)])
    assert sample.ids == ("b@4", "a@4")
    assert sample.lengths == {"prompt_ids": [[6], [4]]}
    assert sample.tensor("prompt_ids").tolist() == [4, 4, 13, 5, 5, 14, 4, 13, 5, 14]
    assert sample.metadata["prompt"] == ["11+22=", "1+2="]
    assert sample.metadata["answer"] == ["33", "3"]
    assert sample.metadata["row"] == [LONG, SUM]


def test_answers_end_with_the_end_of_text_token(tmp_path: Path) -> None:
    config = Dataset(type="prompt_answer", path=write_rows(tmp_path, SUM))
    sample = make(config, characters(tmp_path)).sample([(0, 0)])
    assert sample.tensor("input_ids").tolist() == [4, 13, 5, 14, 6, 1]
    assert sample.tensor("prompt_mask").tolist() == [True] * 4 + [False] * 2


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
def test_too_long_rows_are_left_out(
    tmp_path: Path, kind: str, limits: dict[str, int], size: int
) -> None:
    config = Dataset(type=kind, path=write_rows(tmp_path, LONG, SUM), **limits)
    made = make(config, characters(tmp_path))
    assert made.size == size
    assert made.left_out == 2 - size
    assert made.sample([(0, size - 1)]).ids == ("a@0",)


def test_length_limit_that_leaves_no_row_is_rejected(tmp_path: Path) -> None:
    config = Dataset(type="prompt", path=write_rows(tmp_path, SUM), max_prompt_tokens=1)
    with pytest.raises(ConfigError, match="every row is longer"):
        make(config, characters(tmp_path))


def test_rows_without_their_keys_are_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path, SUM, {"id": "c", "prompt": " ", "answer": "1"}, {"id": "d", "x": 1})
    with pytest.raises(ConfigError) as caught:
        make(Dataset(type="prompt_answer", path=path), characters(tmp_path))
    found = [(p.where.rpartition(":")[2], p.key) for p in caught.value.problems]
    assert found == [("2", "prompt"), ("3", "prompt"), ("3", "answer")]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, "must be a string, but is null"),
        (42, 'must be a string, but is a number (42): write "42"'),
        (0.1, 'must be a string, but is a number (0.1): write "0.1"'),
        (True, "must be a string, but is a boolean (true)"),
        (["a"], 'must be a string, but is a list (["a"])'),
        ({"a": 1}, 'must be a string, but is an object ({"a": 1})'),
        ([{"role": "user", "content": "1+2="}], "must be a string, but is a list of messages: "),
        ("1\ud800", "is not valid text: \\ud800 at character 2 is a lone surrogate"),
    ],
)
@pytest.mark.parametrize(("kind", "key"), [("prompt", "prompt"), ("prompt_answer", "answer")])
def test_non_string_value_is_rejected_with_line_and_key(
    tmp_path: Path, kind: str, key: str, value: Any, found: str
) -> None:
    config = Dataset(type=kind, path=write_rows(tmp_path, LONG, {**SUM, key: value}))
    with pytest.raises(ConfigError) as caught:
        make(config, characters(tmp_path))
    (problem,) = caught.value.problems
    assert (problem.where, problem.key) == (f"{config.path}:2", key)
    assert problem.message.startswith(found)


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        ({"prompt_template": "{prmpt}"}, "prompt_template", "'prmpt' is not a key .* 'prompt'?"),
        ({"answer_template": "{anwser}"}, "answer_template", "'anwser' is not a key .* 'answer'?"),
        (
            {"prompt_key": "promt"},
            "prompt_key",
            "{prompt} inserts 'promt', .* 'prompt'?",
        ),
        (
            {"answer_key": "Answer"},
            "answer_key",
            "{answer} inserts 'Answer', .* 'answer'?",
        ),
    ],
)
def test_key_missing_in_all_rows_is_a_problem_of_the_setting(
    tmp_path: Path, settings: dict[str, str], key: str, message: str
) -> None:
    config = Dataset(type="prompt_answer", path=write_rows(tmp_path, SUM, LONG), **settings)
    with pytest.raises(ConfigError) as caught:
        make(config, characters(tmp_path))
    (problem,) = caught.value.problems
    assert problem.key == key
    assert re.match(message.replace("?", r"\?"), problem.message)


def test_message_about_missing_default_keys_lists_existing_keys(tmp_path: Path) -> None:
    path = write_rows(tmp_path, {"question": "1+2", "solution": "3"})
    with pytest.raises(ConfigError) as caught:
        make(Dataset(type="prompt_answer", path=path), characters(tmp_path))
    assert [(one.key, one.message.partition(path)[2]) for one in caught.value.problems] == [
        ("prompt_key", "; allowed: question, solution"),
        ("answer_key", "; allowed: question, solution"),
    ]


def test_answer_key_rejected_if_only_some_prompts_have_it(tmp_path: Path) -> None:
    without = {"prompt": "1+2="}
    tokenizer = characters(tmp_path)
    none = make(Dataset(type="prompt", path=write_rows(tmp_path, without)), tokenizer)
    assert none.sample([(0, 0)]).metadata["answer"] == [""]
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: answer: is missing"):
        make(
            Dataset(type="prompt", path=write_rows(tmp_path, SUM, {**without, "id": "c"})),
            tokenizer,
        )
    config = Dataset(type="prompt", path=write_rows(tmp_path, SUM), answer_key="solution")
    with pytest.raises(ConfigError, match=r"answer_key: .*'solution', which is not a key"):
        make(config, tokenizer)


def test_id_key_missing_in_all_rows_is_rejected(tmp_path: Path) -> None:
    """A misspelled key would silently lose the ids."""
    path = write_rows(tmp_path, {"prompt": "1+2=", "meta": {"uid": "a"}})
    config = Dataset(type="prompt", path=path, id_key="meta.uid")
    assert make(config, characters(tmp_path)).sample([(0, 0)]).ids == ("a@0",)
    config = Dataset(type="prompt", path=path, id_key="meta.uuid")
    with pytest.raises(ConfigError, match=r"id_key: 'meta.uuid' is not .* you mean 'meta.uid'\?"):
        make(config, characters(tmp_path))


def test_a_row_may_be_nested_deeply(tmp_path: Path) -> None:
    """A key at any depth works. Messages list the keys of the first levels."""
    levels = 500
    deep = '{"a": ' * levels + '"1+2="' + "}" * levels
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"answer": "3", "x": {deep}}}\n')
    settings: dict[str, Any] = {"type": "prompt_answer", "path": str(path)}
    config = Dataset(**settings, prompt_key=".".join(["x", *"a" * levels]))
    assert make(config, characters(tmp_path)).sample([(0, 0)]).bs == 1
    with pytest.raises(ConfigError, match=r"allowed: answer, x, x\.a, .* x(\.a){7}$"):
        make(Dataset(**settings, prompt_key="question"), characters(tmp_path))


def test_template_fields_may_be_empty_but_not_all(tmp_path: Path) -> None:
    path = write_rows(tmp_path, {"a": "1", "b": ""}, {"a": "", "b": " "})
    config = Dataset(type="prompt", path=path, prompt_template="{a}{b}")
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: a, b: must not all be empty$"):
        make(config, characters(tmp_path))


def test_a_prompt_without_tokens_is_named(tmp_path: Path) -> None:
    tokenizer = characters(tmp_path)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("=", "")
    config = Dataset(
        type="prompt", path=write_rows(tmp_path, SUM, {"id": "e", "prompt": "=", "answer": "1"})
    )
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: .* produces no token for this prompt"):
        make(config, tokenizer).sample([(0, 1)])


def test_begin_token_comes_once_at_the_place_of_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = characters(tmp_path, begin=True)
    assert text_ids(tokenizer, ["1+2", "<bos>1"], begin=True) == [[2, 4, 13, 5], [2, 4]]
    assert text_ids(tokenizer, ["1+2"], begin=False) == [[4, 13, 5]]
    assert text_ids(characters(tmp_path / "plain"), ["1"], begin=True) == [[4]]
    assert text_ids(tokenizer, [], begin=True) == []


@pytest.mark.parametrize(
    ("single", "before"), [("<bos> $A", [2]), ("<eos> <bos> $A", [1, 2]), ("$A <eos>", [])]
)
def test_text_begins_with_the_tokens_that_the_tokenizer_puts_before_it(
    tmp_path: Path, single: str, before: list[int]
) -> None:
    """A begin token may be unset (glm4), or equal to an end token that the tokenizer appends."""
    tokenizer = characters(tmp_path, begin=True)
    tokenizer.bos_token = "<eos>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<eos>", 1), ("<bos>", 2)]
    )
    rows = text_ids(tokenizer, ["", "1+2"], begin=True)
    assert rows == [before, [*before, *text_ids(tokenizer, ["1+2"], begin=False)[0]]]
    assert text_ids(tokenizer, [""], begin=True) == [before]
    assert text_ids(tokenizer, ["<eos>", "1"], begin=True)[1][:-1] == before


def test_directory_without_tokenizer_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tokenizer in"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma", "llama"])
def test_model_without_tokenizer_files_has_no_tokenizer(tmp_path: Path, family: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "vocab_size": 99999}))
    with pytest.raises(UsageError, match="no tokenizer in"):
        load_tokenizer(tmp_path)


def test_damaged_tokenizer_file_is_a_usage_error(tmp_path: Path) -> None:
    characters(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(UsageError, match="no tokenizer in"):
        load_tokenizer(tmp_path)


def test_own_code_of_a_tokenizer_is_rejected_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    characters(tmp_path)
    path, own = tmp_path / "tokenizer_config.json", dict[str, Any](tokenizer_class="Own")
    own["auto_map"] = {"AutoTokenizer": ["own.Own", None]}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    monkeypatch.setattr("builtins.input", lambda _: "y")
    with pytest.raises(UsageError, match=r"no tokenizer in .* custom code"):
        load_tokenizer(tmp_path)


def test_trained_tokenizer_round_trips_any_text_and_splits_numbers(tmp_path: Path) -> None:
    train_bpe(["Janet has 12 eggs and 34 hens."] * 3, 300, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = "naïve 1234 hens, “quoted”\n#### 7"
    ids = text_ids(tokenizer, [text], begin=True)[0]
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([i]) for i in text_ids(tokenizer, ["1234"], begin=False)[0]] == [
        *"1234"
    ]
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
