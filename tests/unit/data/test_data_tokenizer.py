"""Tokenizers on disk."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from slurmrl.config.schema import Dataset
from slurmrl.data.tokenizer import END, PAD, decoding, load_tokenizer, save_tokenizer, train_bpe
from slurmrl.rollouts.generation.native.sequence import ends_with_stop
from slurmrl.rollouts.policy import Dialogue


def test_stop_string_is_found_with_the_last_byte_of_a_character(tmp_path: Path) -> None:
    """Tokens are parts of words, bytes of a character, or special tokens."""
    train_bpe(["</answer> </answer>"], 264, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    decode = decoding(tokenizer)
    for text, stop in [
        ("a </answer>", "</answer>"),
        ("a , b .", " , b"),
        ("aü€🙂b", "€🙂"),
        (f"a{END}b", END),
        ("a\n\nb", "\n\n"),
    ]:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert decode(ids) == text
        found = [
            count for count in range(len(ids)) if ends_with_stop(decode, ids[: count + 1], (stop,))
        ]
        behind = tokenizer(text.partition(stop)[2], add_special_tokens=False).input_ids
        assert found == [len(ids) - len(behind) - 1]


def test_decoded_text_keeps_its_spaces_if_the_tokenizer_would_correct_them(tmp_path: Path) -> None:
    """Rewards and episodes must get the exact text: ``x != y`` is not ``x!= y``."""
    words = {word: number for number, word in enumerate(["x", "!=", "y", "!", ".", END, PAD])}
    core = Tokenizer(models.WordLevel(words, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    save_tokenizer(core, tmp_path, end=END, pad=PAD)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"clean_up_tokenization_spaces": True}
    path.write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    ids = [words[word] for word in ["x", "!=", "y", "!", "."]]
    assert tokenizer.decode(ids) == "x != y ! ."
    dialogue = Dialogue(Dataset(type="prompt", path="x"), tokenizer)
    assert dialogue.decode(ids) == "x != y ! ."


def test_tokenizer_in_a_model_directory_splits_like_a_separate_tokenizer(tmp_path: Path) -> None:
    """AutoTokenizer of transformers 5 gives every qwen2 model the splitting rules of Qwen2."""
    words = ["x", "12", " ", "+", "\n", END, PAD]
    core = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d+|[\s\S]"), "isolated")
    save_tokenizer(core, tmp_path, end=END, pad=PAD)
    config = {"model_type": "qwen2", "vocab_size": len(words)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = "x + 12\n"
    assert load_tokenizer(tmp_path)(text).input_ids == core.encode(text).ids == [0, 2, 3, 2, 1, 4]
