"""Tokenizers in Hugging Face form: read from a local folder, or trained on datasets.

Only transformers may import torch here.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmrl.data.sources import open_source
from slurmrl.errors import UnreadableInputError, UsageError
from slurmrl.fsio import inputs

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


END, PAD = "<|endoftext|>", "<|pad|>"
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names of the class that reads only ``tokenizer.json``, in transformers 4 and 5."""


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder; download nothing.

    :raises UsageError: the folder has no tokenizer, or it has no end-of-text token or no vocabulary
        (transformers makes an empty tokenizer if only ``config.json`` exists).
    :raises UnreadableInputError: the folder or its files cannot be read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind: Any = PreTrainedTokenizerFast if _is_generic(folder) else AutoTokenizer
    try:
        with inputs.reading(folder):
            tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
    except UnreadableInputError as error:
        raise UnreadableInputError(f"no tokenizer in {folder}: {error}", error.absent) from error
    except Exception as error:  # the package tokenizers raises plain exceptions
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"no tokenizer in {folder}: {reason}") from error
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise UsageError(f"no tokenizer in {folder}: no vocabulary file (tokenizer.json, …)")
    end_id(tokenizer)
    tokenizer.clean_up_tokenization_spaces = False  # Rewards must score unchanged text.
    return tokenizer


def _is_generic(folder: Path) -> bool:
    """Return whether ``tokenizer.json`` defines the tokenizer completely.

    AutoTokenizer of transformers 5 replaces the class of such a tokenizer by a class for the model
    in the same folder (qwen2), which splits strings at different places.
    """
    try:
        inputs.check_file(folder / "tokenizer.json")
        return inputs.read_json(folder / "tokenizer_config.json").get("tokenizer_class") in GENERIC
    except Exception:  # noqa: BLE001 - from_pretrained reports the problem
        return False


def vocabulary(folder: Path) -> dict[str, int] | None:
    """Return the ids of all tokens, without transformers, which takes seconds to import.

    Return None if only transformers can read the ids (no ``tokenizer.json``, or no end-of-text
    token in the files).
    """
    from tokenizers import Tokenizer

    try:
        settings = inputs.read_json(folder / "tokenizer_config.json")
        inputs.check_file(folder / "tokenizer.json")
        end = settings.get("eos_token")
        known = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    except Exception:  # noqa: BLE001 - tokenizers raises bare exceptions
        return None
    name = end.get("content") if isinstance(end, dict) else end
    return known if name in known else None


def end_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the end-of-text token, which ends answers and completions.

    Raises UsageError if the tokenizer lacks this token.
    """
    if tokenizer.eos_token_id is None:
        raise UsageError(f"tokenizer {tokenizer.name_or_path} has no end-of-text token (eos_token)")
    return int(tokenizer.eos_token_id)


def without_ends(text: str, ends: Sequence[str]) -> str:
    """Remove tokens ``ends``, and white space after them, from the end of a string."""
    while end := next((end for end in ends if text.rstrip().endswith(end)), ""):
        text = text.rstrip().removesuffix(end)
    return text


def decoding(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Return a function that turns token ids into the string that is searched for stop strings.

    The string includes special tokens, and its spaces are not corrected.
    """

    def decode(tokens: Sequence[int]) -> str:
        text = tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    return decode


def text_ids(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, begin: bool
) -> list[list[int]]:
    """Return the tokens of each text.

    With ``begin``, the tokens come first that the tokenizer puts before a text by default (llama:
    one, glm4: two), unless the text already begins with them (chat templates).
    """
    if not texts:
        return []
    tried = ["a", *texts]  # A text of ordinary tokens shows which tokens are added.
    encoded = tokenizer(tried, add_special_tokens=False, return_attention_mask=False)
    ids: list[list[int]] = encoded.input_ids
    if not begin:
        return ids[1:]
    place = next((place for place, row in enumerate(ids) if row), 0)
    row, marked = ids[place], list[int](tokenizer(tried[place]).input_ids)
    places = range(len(marked), -1, -1)
    start = next((marked[:at] for at in places if marked[at : at + len(row)] == row), [])
    return [row if row[: len(start)] == start else start + row for row in ids[1:]]


def save_tokenizer(core: Tokenizer, folder: Path, *, end: str, pad: str) -> None:
    """Write a tokenizer of the ``tokenizers`` library in Hugging Face form."""
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": pad,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def train_bpe(texts: Iterable[str], vocabulary: int, folder: Path) -> None:
    """Train a byte-level BPE tokenizer of ``vocabulary`` tokens, and save it.

    Each digit is a separate token, so that numbers of any length are tokenized in the same way.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    save_tokenizer(core, folder, end=END, pad=PAD)


def texts(files: Sequence[Path], keys: Sequence[str]) -> Iterator[str]:
    """Yield the strings under ``keys`` of all rows. Raises UsageError for a missing key."""
    for file in files:
        source = open_source(file)
        for number, _, row, problem in source.rows():
            if row is None:
                raise UsageError(f"{source.where(number)}: {problem}")
            for key in keys:
                text = row.get(key)
                if not isinstance(text, str):
                    what = "has no such key" if key not in row else "is not a string"
                    there = ", ".join(sorted(row))
                    raise UsageError(f"{source.where(number)}: {key}: {what}; keys: {there}")
                yield text


def make_tokenizer(
    files: Sequence[Path], keys: Sequence[str], vocabulary: int, output: Path
) -> None:
    """Train a byte-level BPE tokenizer of at most ``vocabulary`` tokens.

    Save the tokenizer in the new folder ``output``, which appears only when it is complete. Raises
    UsageError and EnvironmentFailure.
    """
    if output.exists() and not (output.is_dir() and not os.listdir(output)):
        raise UsageError(f"{output} exists: choose another folder with --output")
    made = output.parent / f".{output.name}.{uuid.uuid4().hex}"
    try:
        train_bpe(texts(files, keys), vocabulary, made)
        os.rename(made, output)
    finally:
        shutil.rmtree(made, ignore_errors=True)
