"""Tokenizers on disk."""

from __future__ import annotations

from pathlib import Path

from slurmrl.data.tokenizer import END, decoding, load_tokenizer, train_bpe
from slurmrl.engines.rollout.native.stops import ends_with_stop


def test_stop_strings_are_found_as_the_last_part_of_a_character_comes(tmp_path: Path) -> None:
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
